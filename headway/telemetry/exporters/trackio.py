"""Exporter to Trackio: local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set; TRACKIO_DIR is its folder."""

from __future__ import annotations

import importlib
import json
from typing import Any

from headway.telemetry.exporters.exporters import Exporter, Rows, Start, Status
from headway.telemetry.metrics import Histogram

trackio: Any = importlib.import_module("trackio")  # untyped, as where it isn't installed

_COLUMNS = ["step", "group", "member", "prompt", "response", "reward", "solved", "advantage", "ending"]


class Trackio(Exporter):
    """Exports to a Trackio run, identified by its name: a resumed run continues in the newest of that name. Tags are
    stored in its configuration: Trackio has none."""

    def __init__(self, start: Start) -> None:
        ledger = start.experiment.ledger
        self._run = trackio.init(
            project=ledger.project,
            name=start.run_id or start.run_name,
            config=json.loads(start.experiment.model_dump_json()) | {"tags": ", ".join(ledger.tags)},
            resume="must" if start.run_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.run_id = self._run.name
        self.place = f"project {ledger.project}, run {self._run.name}: trackio show --project {ledger.project}"

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        drawn = {
            name: trackio.Histogram(np_histogram=(histogram.counts, histogram.edges))
            for name, histogram in shapes.items()
        }
        self._run.log({**values, **drawn}, step=step)

    def table(self, step: int, rows: Rows) -> None:
        data = [[row[name] for name in _COLUMNS] for row in rows]
        self._run.log({"samples": trackio.Table(columns=_COLUMNS, data=data)}, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()
