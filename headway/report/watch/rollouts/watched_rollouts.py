"""Answers the queries of `headway watch` about a run's rollouts: search, single rollouts, tasks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headway.records.errors import ConfigurationError
from headway.records.rollout import ENDINGS
from headway.report.watch.cache import cache_folder
from headway.report.watch.rollouts import rollout_detail
from headway.report.watch.rollouts.columns import OPEN, RolloutColumns, RolloutTable
from headway.report.watch.rollouts.search import RolloutQuery, decode_truncated, ordered, query_from, select, snippet
from headway.report.watch.rollouts.tasks import tasks
from headway.report.watch.rollouts.text_index import COLUMNS, TextIndex, TokenTable, folded, texts_of
from headway.telemetry.rollouts.reader import RolloutRecord

_INDEX_WAIT_S = 0.2  # for the text of rollouts that have just arrived
_PROMPT_CHARACTERS, _PROMPT_TOKENS = 160, 200


class WatchedRollouts:
    """The rollouts of a live or ended run. ``search``, ``rollout`` and ``tasks`` return the answers of /api/rollouts,
    /api/rollout and /api/tasks. Only the cache is written. Not thread-safe; a separate thread indexes the text."""

    def __init__(self, path: Path, tokens: TokenTable | None) -> None:
        """Open the record. ``tokens``: of the run's tokenizer; None: it can't be read."""
        self._tokens = tokens
        self._record = RolloutRecord(path)
        cache = cache_folder(path)
        self._columns = RolloutColumns(self._record.folder, cache)
        self._index = None if tokens is None else TextIndex(self._record.folder, cache, tokens)
        self._prompts: dict[int, str] = {}  # by row, of those that `tasks` shows
        self._reading: threading.Thread | None = None  # of all columns, while the newest rollouts are shown

    def close(self) -> None:
        """End the threads in the background; a second call is a no-op."""
        if self._reading is not None:
            self._reading.join()
        if self._index is not None:
            self._index.close()

    def search(self, **filters: Any) -> dict[str, Any]:
        """Return a page of the rollouts that match the fields of `RolloutQuery`. Raises ConfigurationError for invalid
        ones."""
        query, problems = query_from(filters), list[str]()
        columns = self._newest(query) or self._all()
        table = columns.table()
        table_indices = select(table, query)
        total_count: int | None = len(table_indices) + table.first
        table_indices = ordered(table, table_indices, query)
        pattern = folded(query.text)
        recorded = len(table) + table.first
        if self._index is not None and columns is self._columns:
            self._index.extend(recorded, _INDEX_WAIT_S)
        if pattern:
            rows, problems = self._with_text(pattern, table_indices + table.first, query.limit + 1)
            total_count = len(rows) if len(rows) <= query.limit and not query.after else None
        else:
            rows = (table_indices[: query.limit + 1] + table.first).tolist()
        page_rows = rows[: query.limit]
        return {
            "rows": [self._summary(table, row, pattern) for row in page_rows],
            "after": str(page_rows[-1]) if len(rows) > query.limit else None,
            "total": total_count,
            "rollouts": recorded,
            "indexed_share": min(1.0, (self._index.rows if self._index else 0) / recorded) if recorded else 1.0,
            "problems": [*problems, *self._problems(columns)],
        }

    def table(self) -> RolloutTable:
        """Return all rollouts that can be read now."""
        table = self._all().table()
        while not self._columns.complete:
            table = self._columns.table()
        return table

    def summaries(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the rollouts in these rows in the form of `search`, on a single page."""
        table = self.table()
        return {
            "rows": [self._summary(table, row, b"") for row in rows],
            "after": None,
            "total": len(rows),
            "rollouts": len(table),
            "indexed_share": 1.0,
            "problems": self._problems(self._columns),
        }

    def rollout(self, row: int, *, sequence: int | None = None, offset: int = 0, limit: int = 4000) -> dict[str, Any]:
        """Return a whole rollout, with ``limit`` tokens from ``offset`` on of all sequences, or of ``sequence`` alone.
        Raises ConfigurationError when there is no such row."""
        table = self._all().table()
        index = row - table.first
        if not 0 <= index < len(table):
            valid_text = (
                f"valid: {table.first} to {table.first + len(table) - 1}" if len(table) else "no rollout is recorded"
            )
            raise ConfigurationError(f"row = {row}: {valid_text}")
        sibling_indices = np.flatnonzero((table["group"] == table["group"][index]) & (table["member"] >= 0))
        common: dict[str, Any] = {**_figures(table, index), "rollouts": len(table)}
        common["siblings"] = [_figures(table, sibling) for sibling in sibling_indices.tolist() if sibling != index]
        batch = self._row(row, None)
        if batch is None:
            raise ConfigurationError(f"row = {row} lies in a part of the record that can't be read")
        trained_sequences = []
        if common["ending"] == "trained" and common["step"] is not None:
            trained_by_key = self._record.trained(common["step"])
            numbers = range(1 + len(batch["branches"][0].values or ()))
            trained_sequences = [trained_by_key.get((common["group"], common["member"], number)) for number in numbers]
        sequences = rollout_detail.sequences(batch, self._tokens, trained_sequences, (sequence, offset, limit))
        removal_reason = batch["removal_reason"][0].as_py()
        return {
            **common,
            **rollout_detail.scalars(batch),
            "ending_reason": removal_reason or common["ending_reason"],
            "life": rollout_detail.life(batch, *self._columns.training(common["group"])),
            "sequences": sequences,
            "turns": rollout_detail.turns(sequences[0]["parts"], batch),
            "problems": self._problems(self._columns),
        }

    def newest_of_task(self, task: str) -> int | None:
        """Return the row of a task's newest rollout; None: the task has none."""
        table = self._all().table()
        if task not in table.names:
            return None
        indices = np.flatnonzero((table["task"] == table.names.index(task)) & (table["member"] >= 0))
        return int(indices[-1]) + table.first if len(indices) else None

    def tasks(self, bins: int = 24) -> dict[str, Any]:
        """Return the run's newest tasks over time, in ``bins`` of equally many rollouts."""
        answer = tasks(self._all().table(), bins)
        for task in answer["tasks"]:
            row = task.pop("row")
            if row not in self._prompts:
                self._prompts[row] = self._prompt(row, self._row(row, ["prompt_ids"]))
            task["prompt"] = self._prompts[row]
        self._prompts = dict(list(self._prompts.items())[-5000:])
        return answer | {"problems": self._problems(self._columns)}

    def _all(self) -> RolloutColumns:
        """Return the columns of all rollouts."""
        if self._reading is not None:
            self._reading.join()
        return self._columns

    def _newest(self, query: RolloutQuery) -> RolloutColumns | None:
        """Return the columns of the newest rollouts, where the query is a page of these and the others aren't read yet;
        a thread then begins to read the others. None: the query needs all columns."""
        if msgspec.structs.replace(query, limit=50, after="") != RolloutQuery():
            return None
        end_row = int(query.after) if query.after else self._record.count()
        newest = self._columns.newest(end_row - query.limit - 1)
        if newest is None or np.sum(newest.table()["member"][: end_row - newest.first] >= 0) <= query.limit:
            return None
        if self._reading is None or not self._reading.is_alive():
            self._reading = threading.Thread(target=self._read, daemon=True, name="watch-columns")
            self._reading.start()
        return newest

    def _read(self) -> None:
        """Read the columns of all rollouts, and then start to index their text."""
        table = self._columns.table()
        if self._index is not None:
            self._index.extend(len(table) + table.first, 0.0)

    def _with_text(self, pattern: bytes, rows: Any, limit: int) -> tuple[list[int], list[str]]:
        if self._index is None:
            return [], ["text is searched only where the run's tokenizer can be read"] if len(rows) else []
        matching_rows, problems = list[int](), [self._index.problem] if self._index.problem else []
        try:
            for row in self._index.matching(pattern, rows):
                matching_rows.append(row)
                if len(matching_rows) == limit:
                    break
        except OSError as error:
            problems.append(f"the index of texts can't be read, and is made again: {error.strerror}")
        return matching_rows, problems

    def _summary(self, table: RolloutTable, row: int, pattern: bytes) -> dict[str, Any]:
        summary: dict[str, Any] = {**_figures(table, row - table.first), "snippet": None, "failure": None}
        batch = self._row(row, [*COLUMNS, "removal_reason", "failure"])
        if batch is None:
            return summary | {"prompt": ""}
        failure = batch["failure"][0].as_py()
        if pattern and self._tokens is not None:
            summary["snippet"] = snippet(texts_of(batch, self._tokens)[0].tobytes(), pattern)
        return summary | {
            "prompt": self._prompt(row, batch),
            "ending_reason": batch["removal_reason"][0].as_py() or summary["ending_reason"],
            "failure": None if failure is None else rollout_detail.cause_of(failure),
        }

    def _prompt(self, row: int, batch: pa.RecordBatch | None) -> str:
        """Return the start of a prompt, without special tokens."""
        if batch is None or self._tokens is None:
            return ""
        ids = batch["prompt_ids"][0].values.to_numpy()[:_PROMPT_TOKENS]
        text = self._tokens.joined(ids[~np.isin(ids, self._tokens.special)])[0].tobytes()
        return decode_truncated(text)[:_PROMPT_CHARACTERS]

    def _row(self, row: int, columns: list[str] | None) -> pa.RecordBatch | None:
        return next((batch for _, batch in self._record.batches(columns, row, row + 1)), None)

    def _problems(self, columns: RolloutColumns) -> list[str]:
        return list(dict.fromkeys([*columns.problems, *self._record.problems.values()]))


def _figures(table: RolloutTable, index: int) -> dict[str, Any]:
    ending, step, reason = (int(table[name][index]) for name in ("ending", "step", "reason"))
    return {
        "row": index + table.first,
        "task_id": table.names[table["task"][index]],
        "ending": "open" if ending == OPEN else ENDINGS[ending],
        "ending_reason": table.names[reason] if reason >= 0 else "",
        "step": step if step >= 0 else None,
        **{name: table[name][index].item() for name in _FIGURES},
    }


_FIGURES = ("group", "member", "reward", "solved", "tokens", "turns", "first_version", "last_version", "finished_s")
