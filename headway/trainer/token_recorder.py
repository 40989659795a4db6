"""The trainer's part of the record of rollouts, ``RUN/rollouts/trained``: its values of each response token.

Legend: ``_n`` one value per token of this rank's samples, ``_r`` per response token, ``_s`` per sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from headway.algorithms.samples import FlatBatch, SampleArrays
from headway.config.schema import LedgerConfig
from headway.records.errors import StorageFailed
from headway.telemetry.rollouts.columns import TRAINED, is_recorded, list_array, recorded_share, trained_batch
from headway.telemetry.rollouts.segments import FOLDER, SegmentWriter
from headway.trainer.ranks import Ranks
from headway.trainer.step_statistics import Progress


class TokenRecorder:
    """Writes the values of every trained sequence, in one batch per rank of each step or part, on rank 0, which can
    write to the run's folder, since it writes checkpoints. No failure to record raises; ``take_error`` returns the
    reason why recording ended."""

    def __init__(self, run_dir: str | Path, settings: LedgerConfig, ranks: Ranks) -> None:
        """Nothing is recorded if rank 0's machine doesn't have the run's folder."""
        self._ranks = ranks
        self._share = recorded_share(settings)
        self._folder = Path(run_dir) / FOLDER / "trained"
        self._max_bytes = settings.rollouts_max_bytes
        self._writer: SegmentWriter | None = None
        self._error = ""
        self._recording = self._share > 0 and Path(run_dir).is_dir()

    def record(self, batch: FlatBatch, arrays: SampleArrays, progress: Progress) -> None:
        """Record a batch, or part: its values on this rank, with those of all others, which make the same call."""
        if not self._share or (self._ranks.size == 1 and not self._recording):
            return
        try:
            rows = _values(batch, arrays, progress, self._share) if self._ranks.is_first else None
        except Exception as error:  # the boundary to the record: its failure must not affect the step
            rows = error
        rows_by_rank = self._ranks.gather(rows)
        if not self._recording or not rows_by_rank:
            return
        try:
            if self._writer is None:  # not before the first step: some processes only publish or measure
                self._writer = SegmentWriter(self._folder, TRAINED, first=batch.step, max_bytes=self._max_bytes)
            for rows in filter(None, rows_by_rank):
                if isinstance(rows, Exception):
                    raise rows
                self._writer.append(rows, batch.step)
        except Exception as error:  # the same boundary
            self._recording = False
            reason = str(error) if isinstance(error, StorageFailed) else f"{type(error).__name__}: {error}"
            self._error = f"what is trained is recorded no further: {reason}"

    def take_error(self) -> str:
        """Return the reason why recording ended, once; "": it hasn't ended, or the reason was returned."""
        reason, self._error = self._error, ""
        return reason

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _values(batch: FlatBatch, arrays: SampleArrays, progress: Progress, share: float) -> pa.RecordBatch:
    prepared = progress.prepared
    assert prepared is not None, "the step has prepared it"
    taken_s = is_recorded(arrays.groups_s, share) & (arrays.groups_s >= 0)  # without demonstrations
    response_n = (arrays.versions_n >= 0) & np.repeat(taken_s, arrays.lengths_s)
    idx_r = np.flatnonzero(response_n)
    before_n = np.concatenate([[0], np.cumsum(response_n)])
    tokens_s = (before_n[arrays.starts_s + arrays.lengths_s] - before_n[arrays.starts_s])[taken_s]
    seen_r = progress.seen_n[idx_r] > 0

    def seen_values(values_r: np.ndarray) -> pa.ListArray:
        return list_array(np.where(seen_r, values_r, np.nan).astype(np.float32), tokens_s)

    branches_s = np.zeros(arrays.samples, np.int64) if arrays.branches_s is None else arrays.branches_s
    weights_s = np.ones(arrays.samples) if arrays.weights_s is None else arrays.weights_s
    return trained_batch(
        step=np.full(len(tokens_s), batch.step),
        group=arrays.groups_s[taken_s],
        member=batch.members_s[taken_s],
        sequence=branches_s[taken_s],
        weight=weights_s[taken_s],
        logprobs=seen_values(progress.logprobs_n[idx_r]),
        clipped=list_array(progress.clipped_n[idx_r] > 0, tokens_s),
        trained=list_array(seen_r & prepared.keep_n[idx_r], tokens_s),
        advantages=list_array(prepared.advantages_n[idx_r].astype(np.float32), tokens_s),
        values=None if prepared.values_n is None else seen_values(prepared.values_n[idx_r, 0]),
    )
