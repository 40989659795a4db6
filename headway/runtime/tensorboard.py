"""Ledger lines as TensorBoard scalars and histograms. Import it only when they are wanted: tensorboardX is slow."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.records.ledger import Distribution, EvaluationRecord, EventRecord, LedgerLine, StepRecord

if TYPE_CHECKING:
    from headway.runtime.clock import Clock

_FLUSH_EVERY_S = 10.0

# group -> fields of StepRecord shown as scalars under it
SCALARS: dict[str, tuple[str, ...]] = {
    "rates": (
        "consumption_per_s",
        "production_per_s",
        "effective_production_per_s",
        "generated_tokens_per_s",
        "trained_tokens_per_s",
        "flops_per_s",
        "mfu_step",
        "mfu_compute",
    ),
    "wait": ("trainer_wait_ratio", "generator_wait_ratio", "generator_lent_ratio", "trainer_wait_s"),
    "time": (
        "step_s",
        "trainer_compute_s",
        "publish_s",
        "apply_s",
        "apply_pause_s",
        "checkpoint_s",
        "orchestrator_cpu_s",
        "verify_s",
    ),
    "queue": (
        "open_groups",
        "running_groups",
        "parked_groups",
        "buffered_groups",
        "oldest_age_s",
        "kv_used_tokens",
        "running_rollouts",
        "waiting_rollouts",
    ),
    "reward": ("reward_mean", "reward_std", "solve_rate", "zero_variance_share"),
    "length": ("length_mean", "length_p50", "length_p99", "length_max", "truncated_share"),
    "length_bias": (
        "length_bias_ks",
        "length_bias_scheduling_ks",
        "length_bias_filter_ks",
        "length_bias_pruning_ks",
        "censored_share",
    ),
}


class TensorBoardExporter:
    """Writes event files under one folder. ``first_step``: what a resumed run records first; TensorBoard then hides
    older points from there on, so that a replayed step shows once."""

    def __init__(self, folder: Path, *, first_step: int, clock: Clock) -> None:
        # A full queue would block the orchestrator's event loop, so it is far larger than one step's points, and
        # the exporter flushes by the run's own clock.
        self._writer = _writer_class()(str(folder), purge_step=first_step or None, max_queue=10_000, flush_secs=120)
        self._clock = clock
        self._flushed_s = clock.now()

    def export(self, line: LedgerLine) -> None:
        for name, value in scalars(line):
            if math.isfinite(value):
                self._writer.add_scalar(name, value, line.step)
        if isinstance(line, EventRecord):
            self._writer.add_text("events", f"{line.event}: {line.detail}", line.step)
        elif isinstance(line, StepRecord):
            self._histogram("staleness/trajectory", line.trajectory_staleness, line.step)
            self._histogram("staleness/token", line.token_staleness, line.step)
        if self._clock.now() - self._flushed_s >= _FLUSH_EVERY_S:
            self._writer.flush()
            self._flushed_s = self._clock.now()

    def close(self) -> None:
        self._writer.close()

    def _histogram(self, name: str, distribution: Distribution, step: int) -> None:
        counts = {int(value): count for value, count in distribution.histogram.items() if count > 0}
        if not counts:
            return
        values = np.array(sorted(counts), dtype=np.float64)  # [N]
        weights = np.array([counts[int(value)] for value in values], dtype=np.float64)  # [N]
        self._writer.add_histogram_raw(
            name,
            min=float(values[0]),
            max=float(values[-1]),
            num=float(weights.sum()),
            sum=float((values * weights).sum()),
            sum_squares=float((values**2 * weights).sum()),
            bucket_limits=(values + 0.5).tolist(),
            bucket_counts=weights.tolist(),
            global_step=step,
        )


def _writer_class() -> Any:
    """tensorboardX's writer, imported without torch: it wants torch merely to know its tensors by type, and torch
    would cost the orchestrator seconds and hundreds of megabytes."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter


def scalars(line: LedgerLine) -> Iterator[tuple[str, float]]:
    """(tag, value) of every scalar of ``line``; tags are ``group/name``."""
    if isinstance(line, EvaluationRecord):
        if line.samples:  # else it measured nothing
            yield f"evaluation/{line.split}_solve_rate", line.solve_rate
            yield f"evaluation/{line.split}_reward_mean", line.reward_mean
            yield f"evaluation/{line.split}_length_mean", line.length_mean
            for label, score in line.by_source.items():
                yield f"evaluation_by_source/{line.split} {label}", score.solve_rate
    elif isinstance(line, StepRecord):
        for group, names in SCALARS.items():
            for name in names:
                yield f"{group}/{name}", float(getattr(line, name))
        for name, distribution in (("trajectory", line.trajectory_staleness), ("token", line.token_staleness)):
            yield f"staleness/{name}_mean", distribution.mean
            yield f"staleness/{name}_max", distribution.max
        for ending, count in line.endings.items():
            yield f"endings/{ending}", float(count)
        for label, score in line.by_source.items():
            if score.samples:
                yield f"solve_rate_by_source/{label}", score.solve_rate
                yield f"samples_by_source/{label}", float(score.samples)
        for boundary, count in line.failures.items():
            yield f"failures/{boundary}", float(count)
        for name, value in line.metrics.items():
            yield f"{_metric_group(name)}/{name}", value


def _metric_group(name: str) -> str:
    if name.startswith("ratio") or name.startswith("clip"):
        return "ratio"
    if name.startswith("mismatch"):
        return "mismatch"
    return "optimiser" if name in ("grad_norm", "learning_rate") else "loss"
