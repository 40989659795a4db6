"""Exporter to Trackio: local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set; TRACKIO_DIR is its folder."""

from __future__ import annotations

import importlib
import json
from typing import Any

from headway.telemetry.exporters.exporters import Exporter, ExporterContext, Rows, Status
from headway.telemetry.metrics import Histogram

trackio: Any = importlib.import_module("trackio")  # untyped, as where it isn't installed

_COLUMNS = ["step", "group", "member", "prompt", "response", "reward", "solved", "advantage", "ending"]


class Trackio(Exporter):
    """Exports to a Trackio run, identified by its name; a resumed run continues in the newest run of that name. Tags
    are stored in its configuration, since Trackio has no tags."""

    def __init__(self, context: ExporterContext) -> None:
        ledger = context.experiment.ledger
        self._run = trackio.init(
            project=ledger.project,
            name=context.run_id or context.run_name,
            config=json.loads(context.experiment.model_dump_json()) | {"tags": ", ".join(ledger.tags)},
            resume="must" if context.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.run_id = self._run.name
        self.destination = f"project {ledger.project}, run {self._run.name}: trackio show --project {ledger.project}"

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        histogram_by_name = {
            name: trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in shapes.items()
        }
        self._run.log({**values, **histogram_by_name}, step=step)

    def table(self, step: int, rows: Rows) -> None:
        table_rows = [[row[name] for name in _COLUMNS] for row in rows]
        self._run.log({"samples": trackio.Table(columns=_COLUMNS, data=table_rows)}, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()
