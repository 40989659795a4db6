"""Exporter to MLflow, at MLFLOW_TRACKING_URI; by default MLflow's own file, ``mlflow.db`` in the working directory."""

from __future__ import annotations

import logging
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from headway.config.load import flatten
from headway.records.ledger import EventRecord
from headway.telemetry.exporters.exporters import Exporter, ExporterContext, Rows, Status
from headway.telemetry.metrics import Histogram

_PARAMETERS_PER_CALL = 100  # MLflow's limit
_LONGEST_VALUE = 6000  # characters of a parameter, MLflow's limit
_STATES: dict[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Exporter):
    """Exports to a run of the experiment ``ledger.project``. MLflow has no histograms; tables are JSON artifacts."""

    def __init__(self, context: ExporterContext) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        ledger = context.experiment.ledger
        self._client = MlflowClient()
        if context.run_id is not None:
            self._run_id = self._client.get_run(context.run_id).info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            existing = self._client.get_experiment_by_name(ledger.project)
            experiment_id = existing.experiment_id if existing else self._client.create_experiment(ledger.project)
            tags = {tag: "true" for tag in ledger.tags}
            mlflow_run = self._client.create_run(experiment_id, run_name=context.run_name, tags=tags)
            self._run_id: str = mlflow_run.info.run_id
            self._describe(context)
        self.run_id = self._run_id
        self.destination = f"{self._client.tracking_uri}, run {self.run_id}"

    def _describe(self, context: ExporterContext) -> None:
        parameters = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flatten(context.experiment).items()]
        for start in range(0, len(parameters), _PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=parameters[start : start + _PARAMETERS_PER_CALL])

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(name, value, now_ms, step) for name, value in values.items()]
        )

    def event(self, event: EventRecord) -> None:
        self._client.log_batch(
            self._run_id, tags=[RunTag(f"event.{event.event}", f"version {event.step}: {event.detail}"[:5000])]
        )

    def table(self, step: int, rows: Rows) -> None:
        self._client.log_dict(self._run_id, {"rows": rows}, f"samples/step_{step:08d}.json")

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, status=_STATES[status])
