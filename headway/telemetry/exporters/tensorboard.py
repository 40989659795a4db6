"""Exporter to TensorBoard: event files in ``RUN/tensorboard``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.records.ledger import EventRecord
from headway.telemetry.exporters.exporters import Exporter, ExporterContext, Rows, Status

if TYPE_CHECKING:
    from headway.telemetry.metrics import Histogram

_FLUSH_EVERY_S = 10.0


class TensorBoard(Exporter):
    """Writes event files. A resumed run continues in a new file; TensorBoard hides older points from its first step on,
    so that a replayed step is displayed once."""

    def __init__(self, context: ExporterContext) -> None:
        self._folder = context.folder / "tensorboard"
        self.destination = str(self._folder)
        self._writer_class, self._messages = _tensorboardx()
        self._writer: Any = None
        self._flushed_s = time.monotonic()

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        summary = self._messages.Summary
        # One event for the complete line: tensorboardX's add_scalar makes one per number, at several times the cost.
        scalar_values = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        histograms = [summary.Value(tag=name, histo=self._histogram(histogram)) for name, histogram in shapes.items()]
        self._open(step).file_writer.add_summary(summary(value=scalar_values + histograms), step)
        self._flush_if_due()

    def event(self, event: EventRecord) -> None:
        self._open(event.step).add_text("events", f"{event.event}: {event.detail}", event.step)
        self._flush_if_due()

    def table(self, step: int, rows: Rows) -> None:
        head_text = "| step | solved | reward | prompt | response |\n| --- | --- | --- | --- | --- |\n"
        body_text = "\n".join(
            "| " + " | ".join(_cell(row[key]) for key in ("step", "solved", "reward", "prompt", "response")) + " |"
            for row in rows
        )
        self._open(step).add_text("samples", head_text + body_text, step)

    def finish(self, status: Status) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            self._writer = self._writer_class(
                str(self._folder), purge_step=step or None, max_queue=10_000, flush_secs=120
            )
        return self._writer

    def _flush_if_due(self) -> None:
        if time.monotonic() - self._flushed_s >= _FLUSH_EVERY_S:
            self._writer.flush()
            self._flushed_s = time.monotonic()

    def _histogram(self, histogram: Histogram) -> Any:
        """Convert a histogram to TensorBoard's message; a bucket's values count as its middle."""
        edges = np.array(histogram.edges)  # [N + 1]
        counts = np.array(histogram.counts, dtype=np.float64)  # [N]
        middles = (edges[1:] + edges[:-1]) / 2
        return self._messages.HistogramProto(
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float((middles * counts).sum()),
            sum_squares=float((middles**2 * counts).sum()),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )


def _cell(value: object) -> str:
    """Format a value as code inside a Markdown table."""
    text = str(value).replace("`", "'").replace("|", "\\|").replace("\n", " ⏎ ")
    return f"`{text}`" if text else ""


def _tensorboardx() -> tuple[Any, Any]:
    """Import tensorboardX's writer and messages without torch, which it needs only to recognise its tensors, and which
    would cost the orchestrator seconds and hundreds of megabytes."""
    hides_torch = "torch" not in sys.modules
    if hides_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` an ImportError
    try:
        from tensorboardX import SummaryWriter
        from tensorboardX.proto import summary_pb2
    finally:
        if hides_torch:
            del sys.modules["torch"]
    return SummaryWriter, summary_pb2
