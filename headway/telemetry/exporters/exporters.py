"""Exporters of a ledger's lines to trackers and `/metrics`, each in its own thread."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway.config.schema import Experiment
from headway.config.simulation import AnyExperiment, SimulatorExperiment
from headway.records.errors import ConfigurationError, HeadwayError, Interrupted
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.trace import QueueSnapshot
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger
from headway.telemetry.metrics import Histogram, histograms, scalars

PROMETHEUS = "prometheus"
LOGGING = "logging"
COMMAND, WEBHOOK = "alerts.command", "alerts.webhook_env"

# name -> (module and class of its exporter, package it needs, pip requirement)
EXPORTERS: dict[str, tuple[str, str, str]] = {
    "tensorboard": ("headway.telemetry.exporters.tensorboard:TensorBoard", "tensorboardX", "headway[tensorboard]"),
    "wandb": ("headway.telemetry.exporters.wandb:WeightsAndBiases", "wandb", "headway[wandb]"),
    "mlflow": ("headway.telemetry.exporters.mlflow:MLflow", "mlflow", "headway[mlflow]"),
    "trackio": ("headway.telemetry.exporters.trackio:Trackio", "trackio", "headway[trackio]"),
    PROMETHEUS: ("headway.telemetry.exporters.prometheus:Prometheus", "prometheus_client", "prometheus-client"),
    LOGGING: ("headway.telemetry.exporters.callback:CallbackExporter", "headway", "headway"),
    COMMAND: ("headway.telemetry.exporters.alerts:AlertCommand", "headway", "headway"),
    WEBHOOK: ("headway.telemetry.exporters.alerts:AlertWebhook", "headway", "headway"),
}

CAPACITY = 1000  # lines that may wait for one exporter; more are dropped
FINISH_S = 45.0  # time for all exporters together to write the rest at the end of a run
GIVE_UP_S = 10.0  # ... of a run that was stopped, or failed

EVENT_EXPORTING = "exporting"  # detail: the exporters and their destinations
EVENT_EXPORTER_FAILED = "exporter_failed"  # the first line an exporter lost
EVENT_EXPORTER_LOST = "exporter_lost"  # data: lines lost in all

Status = Literal["finished", "interrupted", "failed"]
Rows = list[dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class ExporterContext:
    """The argument that an exporter is constructed with: the experiment, the run's folder, name and id."""

    experiment: Any  # an `AnyExperiment`
    folder: Path  # the run's
    run_name: str
    run_id: str | None  # of the tracker's run to resume, as the exporter gave it before; None: a new run


class Exporter:
    """The base class of exporters, one for each destination. It is constructed in the main thread before the run
    starts; wrong settings raise ConfigurationError then. Every later call comes from the exporter's own thread, in the
    order of the ledger's lines. An error of a call loses that line and nothing else.

    Every method is a no-op by default; an exporter overrides those whose data its destination can display.

    ``run_id``: id of the tracker's run, so that a resumed run continues in it. ``destination``: its address for users.
    """

    run_id: str | None = None
    destination: str = ""
    wants_snapshots = False
    only_event = ""  # the exporter receives only events of this name; "": every line

    def log(self, step: int, values: dict[str, float], shapes: dict[str, Histogram]) -> None:
        """Export numbers of a step or of an evaluation; ``step``: version of the trainer."""

    def line(self, line: LedgerLine) -> None:
        """Export a recorded line unchanged; a call of `log` or `event` with its content follows."""

    def event(self, event: EventRecord) -> None:
        """Export an event of the ledger."""

    def table(self, step: int, rows: Rows) -> None:
        """Export kept rollouts: prompt, response, reward, ..."""

    def snapshot(self, snapshot: QueueSnapshot) -> None:
        """Export the present state of queue and workers; called only with ``wants_snapshots``."""

    def finish(self, status: Status) -> None:
        """Finish the tracker's run; no further call follows."""


class _ExportWorker:
    """The queue and the thread of an exporter."""

    def __init__(self, name: str, exporter: Exporter, capacity: int) -> None:
        self.name = name
        self.exporter = exporter
        self.lost = 0
        self.error = ""  # of the first lost line
        self._counting = threading.Lock()
        self._status: Status = "finished"
        self._capacity = capacity  # of jobs; the end mark is put into a full queue too
        self._queue: queue.SimpleQueue[Callable[[Exporter], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"export-{name}", daemon=True)
        self._thread.start()

    def offer(self, job: Callable[[Exporter], None]) -> None:
        """Queue a job without waiting; a full queue loses the job."""
        if self._queue.qsize() < self._capacity:
            self._queue.put(job)
        else:
            self._drop(f"{self._capacity} lines wait for it: it is too slow, or hangs")

    def _drop(self, reason: str, lines: int = 1) -> None:
        with self._counting:
            self.error = self.error or reason
            self.lost += lines

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            self._guarded(job)
        self._guarded(lambda exporter: exporter.finish(self._status))

    def _guarded(self, job: Callable[[Exporter], None]) -> None:
        try:
            job(self.exporter)
        except Exception as error:  # the boundary to a tracker: its failures must not reach the run
            self._drop(f"{type(error).__name__}: {error}")

    def end(self, status: Status) -> None:
        """Make the thread write the queued lines and finish; returns at once."""
        self._status = status
        self._queue.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait for the thread to finish, until ``deadline_s`` (monotonic); lines not written by then are lost."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():  # lost: its present line and those queued, without the end mark; or only its finish
            self._drop("not done in time at the end of the run", max(1, self._queue.qsize()))


class Exports:
    """The exporters of a run.

    Lifecycle: `start_exports` -> *open* (``on_line`` is a subscriber of the ledger) -> ``close``.

    Invariant: no call but ``close`` waits for an exporter, and ``close`` waits at most FINISH_S. A line that an
    exporter can't take is dropped and counted. The ledger gets an event at an exporter's first lost line, and an event
    with the number of lost lines at the end.
    """

    def __init__(self, exporters: dict[str, Exporter], ledger: Ledger, *, table_every_steps: int = 0,
                 capacity: int = CAPACITY, sources: Iterable[str] = ()) -> None:  # fmt: skip
        """``sources``: labels of all task sources of the run (see `scalars`)."""
        self._ledger = ledger
        self._sources = tuple(sources)
        self._workers = [_ExportWorker(name, exporter, capacity) for name, exporter in exporters.items()]
        self._reported: set[str] = set()
        self._newest: LedgerLine | None = None
        self._table_every_steps = table_every_steps
        self._rows: Rows = []
        self._table_step = 0

    def on_line(self, line: LedgerLine) -> None:
        """Queue a line of the ledger for every exporter."""
        self._newest = line
        event_name = line.event if isinstance(line, EventRecord) else ""
        for worker in self._workers:
            if worker.exporter.only_event in ("", event_name):
                worker.offer(lambda exporter: _export(exporter, line, self._sources))
            if worker.error and worker.name not in self._reported:
                self._reported.add(worker.name)
                self._record_event(EVENT_EXPORTER_FAILED, f"{worker.name}: {worker.error}")
        if isinstance(line, StepRecord) and self._rows and line.step >= self._table_step:
            self._offer_table(line.step)

    def sample(self, row: dict[str, object]) -> None:
        """Add a kept rollout to the next table."""
        if self._table_every_steps:
            self._rows.append(row)

    def snapshot(self, snapshot: QueueSnapshot) -> None:
        """Queue a snapshot for the exporters with ``wants_snapshots``."""
        for worker in self._workers:
            if worker.exporter.wants_snapshots:
                worker.offer(lambda exporter: exporter.snapshot(snapshot))

    @property
    def wants_snapshots(self) -> bool:
        return any(worker.exporter.wants_snapshots for worker in self._workers)

    def announce(self) -> None:
        """Record the exporters' destinations in the ledger."""
        if self._workers:
            self._record_event(EVENT_EXPORTING, "; ".join(f"{w.name}: {w.exporter.destination}" for w in self._workers))

    def close(self, status: Status = "finished") -> None:
        """Finish all exporters; a second call is a no-op."""
        workers, self._workers = self._workers, []
        deadline_s = time.monotonic() + (FINISH_S if status == "finished" else GIVE_UP_S)
        with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the command's result
            for worker in workers:  # before the first wait: an exporter that hangs must not keep others from finishing
                worker.end(status)
            for worker in workers:
                worker.join(deadline_s)
        for worker in workers:
            if worker.lost:
                detail = f"{worker.lost} lines of the ledger are missing there; first cause: {worker.error}"
                self._record_event(EVENT_EXPORTER_LOST, f"{worker.name}: {detail}", lines=worker.lost)

    def _record_event(self, event: str, detail: str, **data: float | int | str) -> None:
        """Record an event at the time and version of the ledger's newest line."""
        step, time_s = (0, 0.0) if self._newest is None else (self._newest.step, self._newest.time_s)
        self._ledger.record(EventRecord(event=event, detail=detail, step=step, time_s=time_s, data=data))

    def _offer_table(self, step: int) -> None:
        rows, self._rows = self._rows, []
        self._table_step = step + self._table_every_steps
        for worker in self._workers:
            worker.offer(lambda exporter: exporter.table(step, rows))

    def __enter__(self) -> Exports:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            is_failure = issubclass(kind, Exception) and not issubclass(kind, Interrupted)
            self.close("failed" if is_failure else "interrupted")


def _export(exporter: Exporter, line: LedgerLine, sources: tuple[str, ...]) -> None:
    exporter.line(line)
    if isinstance(line, EventRecord):
        exporter.event(line)
    elif values := scalars(line, sources):
        exporter.log(line.step, values, histograms(line))


# --- start -----------------------------------------------------------------------------------------------


def exporter_names(experiment: AnyExperiment) -> list[str]:
    """Names of the exporters that ``experiment`` configures; `/metrics` is first, because it fails fastest."""
    if isinstance(experiment, SimulatorExperiment):
        return [*([PROMETHEUS] if experiment.ledger.prometheus else []), *experiment.ledger.trackers]
    callbacks = [LOGGING] if experiment.hooks.logging != "none" else []
    alerts = [*([COMMAND] if experiment.alerts.command else []), *([WEBHOOK] if experiment.alerts.webhook_env else [])]
    return [*([PROMETHEUS] if experiment.ledger.prometheus else []), *callbacks, *alerts, *experiment.ledger.trackers]


def missing_packages(experiment: AnyExperiment) -> Iterator[str]:
    """Yield an error text for every exporter whose package isn't installed."""
    for name in exporter_names(experiment):
        _, package, install_name = EXPORTERS[name]
        if importlib.util.find_spec(package) is None:
            key = _key(name)
            yield f"{key}: {name!r} needs the package {package}: pip install '{install_name}'"


def start_exports(experiment: AnyExperiment, directory: RunDirectory, ledger: Ledger, *, resume: bool) -> Exports:
    """Start the exporters that ``experiment`` configures and subscribe them to ``ledger``. A resumed run continues in
    the trackers' runs that ``RUN/trackers.json`` names.

    Raises ConfigurationError if a package is missing or an exporter refuses its settings; no exporter stays open then.
    """
    if error_texts := list(missing_packages(experiment)):
        raise ConfigurationError("; ".join(error_texts))
    ids_path = directory.path / "trackers.json"
    run_ids = _stored_ids(ids_path) if resume else {}
    exporter_by_name: dict[str, Exporter] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for name in exporter_names(experiment):
                exporter_by_name[name] = _start(name, experiment, directory.path, run_ids.get(name))
        run_ids |= {name: exporter.run_id for name, exporter in exporter_by_name.items() if exporter.run_id is not None}
        if run_ids:
            directory.write_json(ids_path, run_ids)
    except BaseException:
        for exporter in exporter_by_name.values():
            with contextlib.suppress(Exception):  # the first error is the one to report
                exporter.finish("failed")
        raise
    every_steps = experiment.ledger.table_every_steps
    sources = _source_labels(experiment) if isinstance(experiment, Experiment) else ()
    exports = Exports(exporter_by_name, ledger, table_every_steps=every_steps, sources=sources)
    ledger.subscribe(exports.on_line)
    return exports


def _source_labels(experiment: Experiment) -> Iterator[str]:
    tasks = experiment.tasks
    for sources in (tasks.train, tasks.validation, tasks.test):
        yield from (source.display_name for source in sources or ())


def _start(name: str, experiment: AnyExperiment, folder: Path, run_id: str | None) -> Exporter:
    module_name, _, class_name = EXPORTERS[name][0].partition(":")
    run_name = experiment.ledger.name or folder.resolve().name
    context = ExporterContext(experiment=experiment, folder=folder, run_name=run_name, run_id=run_id)
    try:
        return getattr(importlib.import_module(module_name), class_name)(context)
    except HeadwayError:
        raise
    except Exception as error:  # the boundary to a tracker: no key, no network, a version that differs
        raise ConfigurationError(f"{_key(name)}: {name!r} can't be started: {type(error).__name__}: {error}") from error


def _key(exporter: str) -> str:
    """The key of the experiment file that configures an exporter."""
    config_key_by_exporter = {
        PROMETHEUS: "ledger.prometheus",
        LOGGING: "hooks.logging",
        COMMAND: COMMAND,
        WEBHOOK: WEBHOOK,
    }
    return config_key_by_exporter.get(exporter, "ledger.trackers")


def _stored_ids(path: Path) -> dict[str, Any]:
    try:
        run_ids = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigurationError(f"{path} is damaged: {error}; remove it to begin new runs in the trackers") from None
    return run_ids if isinstance(run_ids, dict) else {}
