"""Rollouts as one table, joined with their endings, the trainer's values of their tokens, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headway.telemetry.rollouts.columns import FINISHED, TRAINED
from headway.telemetry.rollouts.reader import RolloutRecord, TrainedSequence

Decode = Callable[[Sequence[int]], str]

_VALUES = ("logprobs", "ratios", "clipped", "trained", "advantages", "values")
_TRAINED = {
    "logprobs": TRAINED.field("logprobs").type,
    "ratios": TRAINED.field("logprobs").type,  # of the trained policy's probability to the engine's
    **{name: TRAINED.field(name).type for name in _VALUES[2:]},
}
JOINED = pa.schema(
    [
        *FINISHED,
        pa.field("ending", pa.string()),  # "open": it has none yet
        pa.field("ending_reason", pa.string()),
        pa.field("step", pa.int32()),  # that trained or skipped it
        pa.field("prompt", pa.string()),  # null: there is no tokenizer
        pa.field("response", pa.string()),
        *(pa.field(f"trainer_{name}", kind) for name, kind in _TRAINED.items()),  # null: not trained on
        pa.field("trainer_branches", pa.list_(pa.struct(_TRAINED))),  # pyright: ignore[reportArgumentType]
    ]
)


class JoinedRollouts:
    """The record of a run as rows of `JOINED`, in the order of arrival."""

    def __init__(self, run_dir: str | Path, decode: Decode | None = None) -> None:
        """``decode``: the tokenizer's method; None: the rows have no texts."""
        self.record = RolloutRecord(run_dir)
        self.endings = self.record.endings()
        self._decode = decode
        self._trained = lru_cache(maxsize=8)(self.record.trained)  # steps; groups of few are neighbours in the record

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rollouts ``start`` .. ``stop``."""
        for _, batch in self.record.batches(None, start, stop):
            rows = [self._row(row) for row in batch.select(_JOIN_COLUMNS).to_pylist()]
            added = [pa.array([row[field.name] for row in rows], field.type) for field in list(JOINED)[len(FINISHED) :]]
            yield pa.RecordBatch.from_arrays([*batch.columns, *added], schema=JOINED)

    def end_of(self, row: dict[str, Any]) -> tuple[str, str, int | None]:
        """(ending, reason, step) of a rollout: its own if it failed or left its group, else its group's."""
        if row["failure"] is not None:
            return "failed", "", None
        if row["removal"] is not None:
            return row["removal"], row["removal_reason"], None
        group_end = self.endings.get(row["group"])
        return ("open", "", None) if group_end is None else (group_end.ending, group_end.reason, group_end.step)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        ending, reason, step = self.end_of(row)
        trained = {} if step is None else self._trained(step)
        key = row["group"], row["member"]
        trunk_values = _values(trained.get((*key, 0)), row)
        branch_values = [
            _values(trained.get((*key, number)), branch) for number, branch in enumerate(row["branches"] or (), start=1)
        ]
        joined_row = {f"trainer_{name}": None if trunk_values is None else trunk_values[name] for name in _VALUES}
        joined_row |= {"trainer_branches": branch_values if any(branch_values) else None}
        joined_row |= {"ending": ending, "ending_reason": reason, "step": step}
        for name in ("prompt", "response"):
            joined_row[name] = None if self._decode is None else self._decode(row[f"{name}_ids"])
        return joined_row


_JOIN_COLUMNS = ["group", "member", "removal", "removal_reason", "failure", "prompt_ids", "response_ids",
           "response_logprobs", "branches"]  # fmt: skip


def _values(trained: TrainedSequence | None, sequence: dict[str, Any]) -> dict[str, np.ndarray | None] | None:
    if trained is None:
        return None
    log_ratio = trained.logprobs - np.array(sequence["response_logprobs"], np.float32)
    return {**trained._asdict(), "ratios": np.exp(log_ratio)}
