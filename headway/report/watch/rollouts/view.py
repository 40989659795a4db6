"""The rollouts of a run as `headway watch` shows them: search, one whole, tasks."""

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
from headway.report.watch.rollouts import detail
from headway.report.watch.rollouts.columns import OPEN, RolloutColumns, RolloutTable
from headway.report.watch.rollouts.search import RolloutQuery, beginning, ordered, query_of, select, snippet
from headway.report.watch.rollouts.tasks import tasks
from headway.report.watch.rollouts.texts import COLUMNS, TextIndex, TokenTable, folded, texts_of
from headway.telemetry.rollouts.reader import RolloutRecord

_INDEX_WAIT_S = 0.2  # for the text of what has just arrived
_PROMPT_CHARACTERS, _PROMPT_TOKENS = 160, 200


class WatchedRollouts:
    """A run's rollouts, live or dead: ``search``, ``rollout`` and ``tasks`` answer as /api/rollouts, /api/rollout and
    /api/tasks do. Nothing is written but the cache. Not thread-safe; the text is indexed by a thread of its own."""

    def __init__(self, path: Path, tokens: TokenTable | None) -> None:
        """``tokens``: of the run's tokenizer; None: it can't be read."""
        self._tokens = tokens
        self._record = RolloutRecord(path)
        cache = cache_folder(path)
        self._columns = RolloutColumns(self._record.folder, cache)
        self._index = None if tokens is None else TextIndex(self._record.folder, cache, tokens)
        self._prompts: dict[int, str] = {}  # by row, of those that `tasks` shows
        self._reading: threading.Thread | None = None  # of all columns, while the newest rollouts are shown

    def close(self) -> None:
        """End what runs in the background; a second call is a no-op."""
        if self._reading is not None:
            self._reading.join()
        if self._index is not None:
            self._index.close()

    def search(self, **filters: Any) -> dict[str, Any]:
        """The rollouts that the fields of `RolloutQuery` ask for, a page of them. Raises ConfigurationError."""
        query, problems = query_of(filters), list[str]()
        columns = self._newest(query) or self._all()
        table = columns.table()
        places = select(table, query)
        total: int | None = len(places) + table.first
        places = ordered(table, places, query)
        found = folded(query.text)
        recorded = len(table) + table.first
        if self._index is not None and columns is self._columns:
            self._index.extend(recorded, _INDEX_WAIT_S)
        if found:
            rows, problems = self._with_text(found, places + table.first, query.limit + 1)
            total = len(rows) if len(rows) <= query.limit and not query.after else None
        else:
            rows = (places[: query.limit + 1] + table.first).tolist()
        shown = rows[: query.limit]
        return {
            "rows": [self._summary(table, row, found) for row in shown],
            "after": str(shown[-1]) if len(rows) > query.limit else None,
            "total": total,
            "rollouts": recorded,
            "indexed_share": min(1.0, (self._index.rows if self._index else 0) / recorded) if recorded else 1.0,
            "problems": [*problems, *self._problems(columns)],
        }

    def table(self) -> RolloutTable:
        """All rollouts that can be read now."""
        table = self._all().table()
        while not self._columns.complete:
            table = self._columns.table()
        return table

    def summaries(self, rows: Sequence[int]) -> dict[str, Any]:
        """These rollouts as `search` would give them, on one page."""
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
        """A rollout whole; of its sequences, or the one that is asked for, ``limit`` tokens from ``offset`` on. Raises
        ConfigurationError when there is no such row."""
        table = self._all().table()
        at = row - table.first
        if not 0 <= at < len(table):
            valid = (
                f"valid: {table.first} to {table.first + len(table) - 1}" if len(table) else "no rollout is recorded"
            )
            raise ConfigurationError(f"row = {row}: {valid}")
        siblings = np.flatnonzero((table["group"] == table["group"][at]) & (table["member"] >= 0))
        common: dict[str, Any] = {**_figures(table, at), "rollouts": len(table)}
        common["siblings"] = [_figures(table, place) for place in siblings.tolist() if place != at]
        batch = self._row(row, None)
        if batch is None:
            raise ConfigurationError(f"row = {row} lies in a part of the record that can't be read")
        trained = []
        if common["ending"] == "trained" and common["step"] is not None:
            seen = self._record.trained(common["step"])
            numbers = range(1 + len(batch["branches"][0].values or ()))
            trained = [seen.get((common["group"], common["member"], number)) for number in numbers]
        sequences = detail.sequences(batch, self._tokens, trained, (sequence, offset, limit))
        left = batch["left_reason"][0].as_py()
        return {
            **common,
            **detail.scalars(batch),
            "ending_reason": left or common["ending_reason"],
            "life": detail.life(batch, *self._columns.training(common["group"])),
            "sequences": sequences,
            "turns": detail.turns(sequences[0]["parts"], batch),
            "problems": self._problems(self._columns),
        }

    def newest_of_task(self, task: str) -> int | None:
        """The row of a task's newest rollout; None: it has none."""
        table = self._all().table()
        if task not in table.names:
            return None
        found = np.flatnonzero((table["task"] == table.names.index(task)) & (table["member"] >= 0))
        return int(found[-1]) + table.first if len(found) else None

    def tasks(self, bins: int = 24) -> dict[str, Any]:
        """The run's newest tasks over time."""
        found = tasks(self._all().table(), bins)
        for task in found["tasks"]:
            row = task.pop("row")
            if row not in self._prompts:
                self._prompts[row] = self._prompt(row, self._row(row, ["prompt_ids"]))
            task["prompt"] = self._prompts[row]
        self._prompts = dict(list(self._prompts.items())[-5000:])
        return found | {"problems": self._problems(self._columns)}

    def _all(self) -> RolloutColumns:
        """The columns of all rollouts."""
        if self._reading is not None:
            self._reading.join()
        return self._columns

    def _newest(self, query: RolloutQuery) -> RolloutColumns | None:
        """The columns of the newest rollouts, where a page of those is asked for and the others aren't read: that
        begins then; None: the query needs all columns."""
        if msgspec.structs.replace(query, limit=50, after="") != RolloutQuery():
            return None
        behind = int(query.after) if query.after else self._record.count()
        newest = self._columns.newest(behind - query.limit - 1)
        if newest is None or np.sum(newest.table()["member"][: behind - newest.first] >= 0) <= query.limit:
            return None
        if self._reading is None or not self._reading.is_alive():
            self._reading = threading.Thread(target=self._read, daemon=True, name="watch-columns")
            self._reading.start()
        return newest

    def _read(self) -> None:
        """Read the columns of all rollouts; only then does the indexing of their text begin."""
        table = self._columns.table()
        if self._index is not None:
            self._index.extend(len(table) + table.first, 0.0)

    def _with_text(self, found: bytes, rows: Any, most: int) -> tuple[list[int], list[str]]:
        if self._index is None:
            return [], ["text is searched only where the run's tokenizer can be read"] if len(rows) else []
        matching, problems = list[int](), [self._index.problem] if self._index.problem else []
        try:
            for row in self._index.matching(found, rows):
                matching.append(row)
                if len(matching) == most:
                    break
        except OSError as error:
            problems.append(f"the index of texts can't be read, and is made again: {error.strerror}")
        return matching, problems

    def _summary(self, table: RolloutTable, row: int, found: bytes) -> dict[str, Any]:
        summary: dict[str, Any] = {**_figures(table, row - table.first), "snippet": None, "failure": None}
        batch = self._row(row, [*COLUMNS, "left_reason", "failure"])
        if batch is None:
            return summary | {"prompt": ""}
        failure = batch["failure"][0].as_py()
        if found and self._tokens is not None:
            summary["snippet"] = snippet(texts_of(batch, self._tokens)[0].tobytes(), found)
        return summary | {
            "prompt": self._prompt(row, batch),
            "ending_reason": batch["left_reason"][0].as_py() or summary["ending_reason"],
            "failure": None if failure is None else detail.cause_of(failure),
        }

    def _prompt(self, row: int, batch: pa.RecordBatch | None) -> str:
        """The beginning of a prompt, without special tokens."""
        if batch is None or self._tokens is None:
            return ""
        ids = batch["prompt_ids"][0].values.to_numpy()[:_PROMPT_TOKENS]
        text = self._tokens.joined(ids[~np.isin(ids, self._tokens.special)])[0].tobytes()
        return beginning(text)[:_PROMPT_CHARACTERS]

    def _row(self, row: int, columns: list[str] | None) -> pa.RecordBatch | None:
        return next((batch for _, batch in self._record.batches(columns, row, row + 1)), None)

    def _problems(self, columns: RolloutColumns) -> list[str]:
        return list(dict.fromkeys([*columns.problems, *self._record.problems.values()]))


def _figures(table: RolloutTable, at: int) -> dict[str, Any]:
    ending, step, reason = (int(table[name][at]) for name in ("ending", "step", "reason"))
    return {
        "row": at + table.first,
        "task_id": table.names[table["task"][at]],
        "ending": "open" if ending == OPEN else ENDINGS[ending],
        "ending_reason": table.names[reason] if reason >= 0 else "",
        "step": step if step >= 0 else None,
        **{name: table[name][at].item() for name in _FIGURES},
    }


_FIGURES = ("group", "member", "reward", "solved", "tokens", "turns", "first_version", "last_version", "finished_s")
