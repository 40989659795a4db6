"""Exporter to Weights & Biases, configured by its own environment variables: WANDB_MODE, WANDB_BASE_URL, ..."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.telemetry.exporters.exporters import Exporter, ExporterContext, Rows, Status
from headway.telemetry.metrics import Histogram

_FINISH_S = 30.0  # to upload the rest; later lines stay in RUN/wandb for `wandb sync`
_COLUMNS = ["step", "group", "member", "prompt", "response", "reward", "solved", "advantage", "staleness", "ending"]


class WeightsAndBiases(Exporter):
    """Exports to a W&B run whose x-axis is ``step``, the trainer's version, so that evaluations and replays fit in."""

    def __init__(self, context: ExporterContext) -> None:
        ledger = context.experiment.ledger
        mode = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            raise ConfigurationError(
                "ledger.trackers: 'wandb' has no API key: run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline and upload later with `wandb sync`"
            )
        self._run = wandb.init(
            project=ledger.project,
            name=context.run_name,
            tags=list(ledger.tags) or None,
            config=json.loads(context.experiment.model_dump_json()),
            dir=str(context.folder),
            id=context.run_id,
            resume="allow" if context.run_id else None,
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, finish_timeout=_FINISH_S, disable_git=True
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.run_id = self._run.id
        self.destination = f"{Path(self._run.dir).parent} ({mode})" if self._run.offline else str(self._run.url)

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        row: dict[str, object] = {"step": step, **values}
        for name, histogram in shapes.items():
            row[name] = wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))
        self._run.log(row)

    def event(self, event: EventRecord) -> None:
        self._run.summary[f"events/{event.event}"] = f"version {event.step}: {event.detail}"

    def table(self, step: int, rows: Rows) -> None:
        columns: list[Any] = [*_COLUMNS]
        table_rows: list[Any] = [[_column(row, name) for name in _COLUMNS] for row in rows]
        self._run.log({"step": step, "samples": wandb.Table(columns=columns, data=table_rows)})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _column(row: dict[str, object], name: str) -> object:
    if name != "staleness":
        return row[name]
    step, versions = row["step"], row["versions"]
    return step - versions[0][0] if isinstance(step, int) and isinstance(versions, list) and versions else None
