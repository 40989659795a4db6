"""Exporters: no line waits for one, what is lost is counted and told once, a resumed run goes on in the same run."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from simulated_run import experiment_of
from step_records import changed
from synthetic_run import evaluation, step_record
from test_ledger import ManualClock

from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.generation import EngineLoad, RouterStatistics
from headway.records.ledger import (
    AgentStatistics,
    Distribution,
    EpisodeStatistics,
    EventRecord,
    JudgeStatistics,
    LedgerLine,
    LengthBiasStatistics,
    LengthStatistics,
    PassAt,
    RewardStatistics,
    SourceScore,
    StepRecord,
    TeacherStatistics,
    TokenStatistics,
    WeightsStatistics,
)
from headway.records.trace import QueueSnapshot
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters import exporters
from headway.telemetry.exporters.exporters import EXPORTERS, Exporter, ExporterContext, Exports, start_exports
from headway.telemetry.ledger import Ledger, read_ledger
from headway.telemetry.metrics import STEP_METRICS, histograms, scalars


class Recorder(Exporter):
    """Keeps what it is given; ``gate`` holds it up, ``broken`` makes it raise."""

    wants_snapshots = True

    def __init__(self, broken: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.asked: list[str] = []  # broken or not
        self._called = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        self.broken = broken

    def _call(self, name: str, value: Any) -> None:
        self.gate.wait(10.0)
        with self._called:
            self.asked.append(name)
            if not self.broken:
                self.calls.append((name, value))
            self._called.notify_all()
        if self.broken:
            raise OSError("no route to host")

    def wait_for_logs(self, count: int) -> None:
        """Until it was given so many steps: its own thread does that."""
        with self._called:
            assert self._called.wait_for(lambda: self.asked.count("log") >= count, 10.0)

    def log(self, step: int, values: dict[str, float], shapes: Any) -> None:
        self._call("log", step)

    def event(self, event: EventRecord) -> None:
        self._call("event", event.event)

    def table(self, step: int, rows: Any) -> None:
        self._call("table", [row["member"] for row in rows])

    def snapshot(self, pulse: QueueSnapshot) -> None:
        self._call("pulse", pulse.version)

    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))


def exporting(ledger: Ledger, capacity: int = 100, table_every_steps: int = 0, **named: Exporter) -> Exports:
    exports = Exports(named, ledger, capacity=capacity, table_every_steps=table_every_steps)
    ledger.subscribe(exports.on_line)
    return exports


def events_of(folder: Path) -> list[EventRecord]:
    return [line for line in read_ledger(folder) if isinstance(line, EventRecord)]


def test_everyone_gets_every_line_in_order(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with Ledger(tmp_path, ManualClock()) as ledger, exporting(ledger, a=first, b=second) as exports:
        ledger.record(EventRecord(event="start"))
        for step in range(5):
            ledger.record(step_record(step))
        exports.snapshot(QueueSnapshot(time_s=0, version=5, applied_version=5, open_groups=0, running_groups=0,
                            parked_groups=0, buffered_groups=0, oldest_age_s=0))  # fmt: skip
        ledger.record(evaluation("after", 5, 0.5))
    expected = [("event", "start"), *(("log", step) for step in range(5)), ("pulse", 5), ("log", 5)]
    assert first.calls == second.calls == [*expected, ("finish", "finished")]


def test_a_failing_exporter_costs_its_lines_and_is_told_of_once(tmp_path: Path) -> None:
    good, bad = Recorder(), Recorder(broken=True)
    with Ledger(tmp_path, ManualClock()) as ledger, exporting(ledger, good=good, bad=bad):
        for step in range(6):
            ledger.record(step_record(step))
            good.wait_for_logs(step + 1)
            bad.wait_for_logs(step + 1)
    told = [event for event in events_of(tmp_path) if event.event.startswith("exporter")]
    assert [event.event for event in told] == ["exporter_failed", "exporter_lost"]
    assert "bad: OSError: no route to host" in told[0].detail
    assert told[1].data["lines"] == 7  # six steps, and the event that told of the first
    assert sum(name == "log" for name, _ in good.calls) == 6


def test_a_hanging_exporter_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "FINISH_S", 0.05)
    stuck = Recorder()
    stuck.gate.clear()
    with Ledger(tmp_path, ManualClock()) as ledger, exporting(ledger, capacity=10, stuck=stuck):
        started = time.monotonic()
        for step in range(200):
            ledger.record(step_record(step))
        assert time.monotonic() - started < 2.0
    stuck.gate.set()
    lost = events_of(tmp_path)[-1]
    assert lost.event == "exporter_lost"
    assert int(lost.data["lines"]) >= 190
    assert sum(event.event == "exporter_failed" for event in events_of(tmp_path)) == 1


class SlowToFinish(Recorder):
    """Takes a moment to finish, as one does that still has to send what it holds."""

    def finish(self, status: str) -> None:
        threading.Event().wait(0.05)
        super().finish(status)


@pytest.mark.parametrize("capacity", [2, 100])  # 2: the hanging one's queue is full at the end
@pytest.mark.parametrize("hanging_first", [True, False])
def test_a_hanging_exporter_takes_no_time_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging_first: bool, capacity: int
) -> None:
    monkeypatch.setattr(exporters, "FINISH_S", 0.5)
    stuck, good = Recorder(), SlowToFinish()
    stuck.gate.clear()
    pair: dict[str, Any] = {"stuck": stuck, "good": good} if hanging_first else {"good": good, "stuck": stuck}
    with Ledger(tmp_path, ManualClock()) as ledger:
        with exporting(ledger, capacity=capacity, **pair):
            for step in range(6):
                ledger.record(step_record(step))
                good.wait_for_logs(step + 1)
        calls = [call for call in good.calls if call[0] != "event"]
        assert calls == [*(("log", step) for step in range(6)), ("finish", "finished")]
    lost = [event for event in events_of(tmp_path) if event.event == "exporter_lost"]
    stuck.gate.set()
    assert [event.detail.partition(":")[0] for event in lost] == ["stuck"]
    told = sum(event.event == "exporter_failed" for event in events_of(tmp_path))
    assert int(lost[0].data["lines"]) == 6 + told


@pytest.mark.parametrize(("error", "status"), [(ValueError("x"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_how_the_run_ended_is_passed_on(tmp_path: Path, error: BaseException, status: str) -> None:
    recorder = Recorder()
    with Ledger(tmp_path, ManualClock()) as ledger, pytest.raises(type(error)), exporting(ledger, a=recorder):
        raise error
    assert recorder.calls == [("finish", status)]


def test_kept_rollouts_come_as_tables_of_several_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    with Ledger(tmp_path, ManualClock()) as ledger, exporting(ledger, table_every_steps=3, a=recorder) as exports:
        for step in range(7):
            exports.sample({"member": step})
            ledger.record(step_record(step))
    assert [rows for name, rows in recorder.calls if name == "table"] == [[0], [1, 2, 3], [4, 5, 6]]


# --- starting --------------------------------------------------------------------------------------------


def begun(tmp_path: Path, **ledger: Any) -> tuple[Experiment, RunDirectory]:
    experiment = experiment_of(tmp_path / "run", ledger=ledger)
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment, resume=directory.has_run())
    return experiment, directory


def test_a_missing_package_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPORTERS, "trackio", ("nowhere:Nothing", "no_such_package", "headway[trackio]"))
    experiment, directory = begun(tmp_path, trackers=["tensorboard", "trackio"])
    with directory, Ledger(directory.path, ManualClock()) as ledger:
        with pytest.raises(ConfigurationError, match=r"ledger.trackers: 'trackio' needs .* pip install 'headway\[tr"):
            start_exports(experiment, directory, ledger, resume=False)
        assert not (directory.path / "trackers.json").exists()


def test_an_exporter_that_fails_to_start_ends_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Recorder] = []

    def build(start: ExporterContext) -> Recorder:
        if started:
            raise RuntimeError("no such project")
        started.append(Recorder())
        return started[0]

    monkeypatch.setattr(exporters.importlib, "import_module", lambda name: SimpleNamespace(Build=build))
    monkeypatch.setitem(EXPORTERS, "wandb", ("fake:Build", "json", ""))
    monkeypatch.setitem(EXPORTERS, "mlflow", ("fake:Build", "json", ""))
    experiment, directory = begun(tmp_path, trackers=["wandb", "mlflow"])
    refusal = pytest.raises(ConfigurationError, match="'mlflow' can't be started: RuntimeError: no such project")
    with directory, Ledger(directory.path, ManualClock()) as ledger, refusal:
        start_exports(experiment, directory, ledger, resume=False)
    assert started[0].calls == [("finish", "failed")]


def test_a_resumed_run_goes_on_in_the_same_tracker_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str | None] = []

    class Counted(Recorder):
        def __init__(self, start: ExporterContext) -> None:
            super().__init__()
            ids.append(start.run_id)
            self.run_id = start.run_id or f"new-{len(ids)}"

    monkeypatch.setattr(exporters.importlib, "import_module", lambda name: SimpleNamespace(Build=Counted))
    monkeypatch.setitem(EXPORTERS, "wandb", ("fake:Build", "json", ""))
    for resume in (False, True, True):
        experiment, directory = begun(tmp_path, trackers=["wandb"])
        with directory, Ledger(directory.path, ManualClock()) as ledger:
            start_exports(experiment, directory, ledger, resume=resume).close()
    assert ids == [None, "new-1", "new-1"]
    assert json.loads((tmp_path / "run" / "trackers.json").read_text()) == {"wandb": "new-1"}


# --- names -----------------------------------------------------------------------------------------------


def test_every_number_of_a_step_has_a_name() -> None:
    easy = SourceScore(tasks=2, samples=4, solve_rate=0.25, standard_error=0.1)
    lengths = {"8": 3, "10": 1, "20": 2}
    step = step_record(3, failures={"engine": 2}, lengths__histogram=lengths, rewards__by_source={"sums (easy)": easy})
    values = scalars(step)
    assert values["rates/consumption_samples_per_s"] == step.consumption_per_s
    assert values["failures/engine_rollouts"] == 2
    assert values["by_source/sums__easy__solve_rate"] == 0.25
    assert "router/routed" not in values  # a ledger of before there was a router
    routed = scalars(step_record(3, router=RouterStatistics(routed=5, spills=2, used_tokens=70)))
    assert (routed["router/routed"], routed["router/spills"], routed["router/used_tokens"]) == (5, 2, 70)
    named = {name.removeprefix("router/") for name in routed if name.startswith("router/")}
    assert named == set(RouterStatistics.__struct_fields__)


def test_every_field_of_a_step_and_of_its_sections_has_a_name() -> None:
    sections = {
        "engines": EngineLoad, "tokens": TokenStatistics, "lengths": LengthStatistics, "rewards": RewardStatistics,
        "length_bias": LengthBiasStatistics, "judges": JudgeStatistics, "agents": AgentStatistics,
        "weights": WeightsStatistics, "teaching": TeacherStatistics, "episodes": EpisodeStatistics,
    }  # fmt: skip
    other = {"step", "version", "skipped", "time_s", "samples", "groups", "trajectory_staleness",
             "environment_staleness", "optimizer_step_staleness", "endings", "failures", "filtered", "group_meta",
             "demonstrations", "curriculum", "peak_flops_per_s", "metrics", "pruning", "flow", "router", "nodes",
             "sandboxes", "kernels", "replica_versions",
             "tokens.staleness", "tokens.ended", "rewards.solve_rate_histogram", "rewards.pass_at",
             "rewards.by_source", "lengths.histogram", "length_bias.cut_share", "weights.transport",
             "episodes.return_interval", "episodes.success_interval", "episodes.transitions", "episodes.rebuilt",
             "episodes.admitted"}  # fmt: skip
    fields = {name for name in StepRecord.__struct_fields__ if name not in sections}
    fields |= {f"{name}.{field}" for name, section in sections.items() for field in section.__struct_fields__}
    named = {field for field, _ in STEP_METRICS.values()}
    assert named | other == fields, "give a new field of StepRecord or of a section a name in STEP_METRICS"
    ended = EpisodeStatistics(return_mean=1.0, success_rate=0.5, length_mean=3.0)
    whole = changed(step_record(3), **{name: section() for name, section in sections.items()} | {"episodes": ended})
    assert STEP_METRICS.keys() <= scalars(whole).keys()


def test_what_a_step_lacks_has_no_name_and_no_place_in_its_line() -> None:
    bare = StepRecord(step=0, version=1, consumption_per_s=2.0)
    names = {name for name, (field, _) in STEP_METRICS.items() if "." not in field}
    assert scalars(bare).keys() - names == {
        f"staleness/{kind}_{of}_steps" for kind in ("trajectory", "environment", "optimizer") for of in ("mean", "max")
    }
    assert histograms(bare) == {}
    counts = {"samples", "groups", "open_groups", "running_groups", "parked_groups", "buffered_groups", "parkings",
              "buffer_capacity_groups", "offload_freed_bytes", "admitted_rollouts"}  # fmt: skip
    line = msgspec.json.decode(msgspec.json.encode(bare))
    assert line.keys() == {"kind", "step", "version", "skipped", "consumption_per_s", *counts}


def test_pass_at_k_and_staleness_in_optimiser_steps_have_names() -> None:
    found = {
        "1": PassAt(groups=9, value=0.5, standard_error=0.1),
        "8": PassAt(groups=4, value=0.9, standard_error=0.05),
    }
    older = Distribution(mean=2.5, max=7, histogram={"2": 3, "7": 1})
    values = scalars(step_record(0, rewards__pass_at=found, optimizer_step_staleness=older))
    assert [values[f"reward/pass_at_{name}"] for name in ("1", "8", "8_standard_error")] == [0.5, 0.9, 0.05]
    assert (values["staleness/optimizer_mean_steps"], values["staleness/optimizer_max_steps"]) == (2.5, 7)
    assert sum(histograms(step_record(0, optimizer_step_staleness=older))["staleness/optimizer_steps"].counts) == 4
    held = scalars(evaluation("after", 5, 0.5, pass_at=found))
    assert (held["evaluation/test_pass_at_8"], held["evaluation/test_pass_at_8_standard_error"]) == (0.9, 0.05)


def test_names_that_trackers_refuse_are_mended() -> None:
    assert "loss/my_metric____" in scalars(step_record(0, metrics={"my metric (%)": 1.0}))


AWKWARD = ("/data/a.jsonl", "./data/a.jsonl", "../data/a.jsonl", "data//a.jsonl", "data_a.jsonl", "data/a_jsonl",
           "data_a_jsonl", "openai/gsm8k", "reasoning_gym:sums", "..", "数学", "物理", "/long" * 100,
           "plain")  # fmt: skip


def named_sources(line: LedgerLine) -> list[str]:
    return [name for name in scalars(line) if "by_source/" in name and "solve_rate" in name]


def scored(labels: Iterable[str]) -> dict[str, SourceScore]:
    return {label: SourceScore(tasks=2, samples=4, solve_rate=0.25, standard_error=0.1) for label in labels}


@pytest.mark.parametrize(
    "path", ["/data/a.jsonl", "./data/a.jsonl", "../data/a.jsonl", "../../data/a.jsonl", "data/a.jsonl"]
)
def test_a_source_called_by_its_path_has_a_name_of_safe_characters(path: str) -> None:
    values = scalars(step_record(0, rewards__by_source=scored([path])))
    assert values["by_source/data_a.jsonl_solve_rate"] == 0.25
    assert values["by_source/data_a.jsonl_samples"] == 4
    held = scalars(evaluation("after", 5, 0.5, by_source=scored([path])))
    assert held["evaluation_by_source/test_data_a.jsonl_solve_rate"] == 0.25


def test_no_two_sources_share_a_name() -> None:
    step = step_record(0, rewards__by_source=scored(AWKWARD))
    held = evaluation("after", 5, 0.5, by_source=scored(AWKWARD))
    for names in (named_sources(step), named_sources(held)):
        assert len(names) == len(AWKWARD)
        assert len({re.sub("[^a-zA-Z0-9_]", "_", name) for name in names}) == len(AWKWARD)  # Prometheus's spelling
        assert all(re.fullmatch(r"\w+/[\w.-]+", name) for name in names)
    assert {"by_source/plain_solve_rate", "by_source/data_a_jsonl_solve_rate"} <= set(named_sources(step))


def test_a_source_keeps_its_name_when_the_one_like_it_was_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Names(Recorder):
        def __init__(self, start: ExporterContext) -> None:
            super().__init__()

        def log(self, step: int, values: dict[str, float], shapes: Any) -> None:
            seen.append([name for name in values if name.startswith("by_source/")])

    seen: list[list[str]] = []
    monkeypatch.setattr(exporters.importlib, "import_module", lambda name: SimpleNamespace(Build=Names))
    monkeypatch.setitem(EXPORTERS, "wandb", ("fake:Build", "json", ""))
    labels = ["/data/a.jsonl", "data/a.jsonl"]
    experiment = experiment_of(tmp_path / "run", ledger={"trackers": ["wandb"]}, tasks={"train": labels})
    directory = RunDirectory(tmp_path / "run")
    directory.begin(experiment, resume=False)
    ledger = Ledger(directory.path, ManualClock())
    with directory, ledger, start_exports(experiment, directory, ledger, resume=False):
        for step, drawn in enumerate((labels, labels[:1], labels[1:])):
            ledger.record(step_record(step, rewards__by_source=scored(drawn)))
    both, first, second = seen
    assert len(set(both)) == 4
    assert sorted(both) == sorted(first + second)


def test_mlflow_takes_the_names_of_all_sources() -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    step = step_record(0, rewards__by_source=scored(AWKWARD))
    held = evaluation("after", 5, 0.5, by_source=scored(AWKWARD))
    for name in [*scalars(step), *scalars(held)]:
        validation._validate_metric_name(name)
        assert len(name) <= validation.MAX_ENTITY_KEY_LENGTH


def test_histograms_keep_every_count() -> None:
    step = step_record(3, lengths__histogram={"8": 3, "10": 1, "20": 2})
    shapes = histograms(step)
    assert shapes["length/tokens"].edges == [0, 8, 10, 20]
    assert shapes["length/tokens"].counts == [3, 1, 2]
    assert shapes["staleness/trajectory_steps"].edges == [-0.5, 0.5, 1.5, 2.5, 3.5]
    assert shapes["staleness/trajectory_steps"].counts == [10, 30, 20, 4]
    assert histograms(EventRecord(event="start")) == {}


def test_an_evaluation_that_measured_nothing_has_no_numbers() -> None:
    assert scalars(evaluation("during", 3, 0.0, samples=0)) == {}
    assert scalars(evaluation("during", 3, 0.5))["evaluation/test_solve_rate"] == 0.5


logged: list[LedgerLine] = []


def log_steps(line: LedgerLine) -> None:
    logged.append(line)
    if isinstance(line, EventRecord) and line.event == "start":
        raise RuntimeError("no room")


def test_a_users_function_is_called_with_every_line(tmp_path: Path) -> None:
    logged.clear()
    name = f"{__name__}:log_steps"
    experiment = experiment_of(tmp_path, hooks={"logging": name}, ledger={"trackers": []})
    directory = RunDirectory(tmp_path)
    lines = [EventRecord(event="start"), step_record(0), evaluation("after", 1, 0.5)]
    with Ledger(tmp_path, ManualClock()) as ledger, start_exports(experiment, directory, ledger, resume=False):
        for line in lines:
            ledger.record(line)
    assert [line for line in logged if getattr(line, "event", "") not in ("exporter_failed",)] == lines
    told = events_of(tmp_path)[-1]
    assert (told.event, told.data["lines"]) == ("exporter_lost", 1)
    assert (
        f"logging: 1 lines of the ledger are missing there; first cause: HookFailed: hooks.logging = '{name}' raised"
        in (told.detail)
    )


def test_a_logging_function_that_cannot_be_called_so_is_refused(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, hooks={"logging": "time:sleeep"}, ledger={"trackers": []})
    refused = pytest.raises(ConfigurationError, match=r"hooks.logging = 'time:sleeep': time has no 'sleeep'")
    with Ledger(tmp_path, ManualClock()) as ledger, refused:
        start_exports(experiment, RunDirectory(tmp_path), ledger, resume=False)
