"""`headway doctor` over ledgers of runs in virtual time, whose bounds are known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway.cli.main import app
from headway.config.schema import Experiment
from headway.control.tuning.diagnosis import Diagnosis, _as_configured, _Candidate, _environment_change, diagnose
from headway.control.tuning.ledger_model import estimate, shape_of
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, KernelScores, LedgerLine, StepRecord
from headway.report.doctor import alerts_of, costs_of, diagnose_run, print_report
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import SCHEMA
from headway.telemetry.ledger import Ledger
from tests.support.kept_ledgers import kept_ledger
from tests.support.simulated_run import Outcome, experiment_of, small_run

DECODE = {"token_s": lambda running: 0.004 + 0.0003 * running}


def run(steps: int = 40, **options: Any) -> Outcome:
    return small_run(steps=steps, **(DECODE | options))


def diagnosis(outcome: Outcome, shared: Sequence[str] = ()) -> Diagnosis:
    found = diagnose(outcome.steps, outcome.experiment, shape_of(outcome.experiment), shared)
    assert isinstance(found, Diagnosis), found
    return found


def recorded(outcome: Outcome, folder: Path, steps: int | None = None) -> Path:
    """The run's folder as the doctor finds it."""
    lines: list[LedgerLine] = [line for line in outcome.lines if isinstance(line, StepRecord | EventRecord)][:steps]
    folder.mkdir(exist_ok=True)
    with Ledger(folder, RealClock()) as ledger:
        for line in lines:
            ledger.record(line)
    settings: Experiment = outcome.experiment
    stored = {"schema": SCHEMA, **settings.model_dump(exclude_unset=True, mode="json")}
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def keys(found: Diagnosis) -> set[str]:
    return {key for change in found.changes for key in change.settings}


def test_a_slow_trainer_binds_and_the_generator_needs_nothing() -> None:
    found = diagnosis(run(budget=4, sample_s=0.1))
    assert found.binding == "trainer"
    assert found.samples_per_s == pytest.approx(9.9, rel=0.05)
    assert not keys(found) & {"generator.slots", "generator.devices", "queue.budget"}


@pytest.mark.slow
def test_stragglers_bind_a_small_budget_and_the_predicted_gain_comes_true() -> None:
    before = run(budget=1, steps=80, sample_s=0.005)
    found = diagnosis(before)
    assert found.binding == "admission"
    assert found.needed_budget > 1
    change = next(one for one in found.changes if "queue.budget" in one.settings)
    budget = int(change.settings["queue.budget"])
    after = run(budget=budget, steps=80, sample_s=0.005)
    rates = [80 * 16 / outcome.duration_s for outcome in (before, after)]
    assert rates[1] / rates[0] == pytest.approx(1 + change.gain, rel=0.15)


def test_a_slow_verifier_binds_and_more_workers_help() -> None:
    found = diagnosis(run(budget=4, sample_s=0.002, verify_s=0.08))
    assert found.binding == "verifier"
    assert found.changes[0].settings == {"verifier.workers": "2"}
    assert found.changes[0].gain > 0.5


def test_the_doctor_says_where_the_whole_run_reads_otherwise_than_its_last_steps(tmp_path: Path) -> None:
    """The first steps, in which the queue fills, are the report's as well."""
    outcome = run(budget=4, steps=20, sample_s=0.1)
    filling = {"trainer_wait_ratio": 0.9, "generator_wait_ratio": 0.9, "step_s": 100.0}
    outcome.lines = [
        msgspec.structs.replace(line, **filling) if isinstance(line, StepRecord) and line.step < 5 else line
        for line in outcome.lines
    ]
    found = diagnose_run(recorded(outcome, tmp_path / "run"))
    assert found.diagnosis.balance == "training-bound"
    assert found.whole_run.startswith("Bound by neither model: ")
    console = Console(record=True, width=100, highlight=False)
    print_report(found, None, console)
    assert "whole run" in console.export_text()


def test_devices_are_named_as_they_are_set() -> None:
    found = diagnosis(run(slots=4, budget=4, sample_s=0.002), ["cpu:1"])
    devices = next(one for one in found.changes if "generator.devices" in one.settings)
    assert json.loads(devices.settings["generator.devices"]) == ["cpu:0", "cpu:1"]
    assert devices.needs


def test_useful_samples_are_told_apart_and_costs_add_up() -> None:
    outcome = run(budget=0, sample_s=0.02)
    costs = costs_of(outcome.steps, outcome.experiment, 3.0)
    seconds = sum(step.step_s for step in outcome.steps)
    assert costs.devices == 2
    assert costs.device_h == pytest.approx(2 * seconds / 3600)
    assert costs.usd == pytest.approx(3.0 * costs.device_h)
    trainer = sum(hours for cause, hours in costs.lost_h.items() if cause.startswith("trainer: waits for"))
    waited = sum(step.trainer_wait_s + step.flow.update_wait_s for step in outcome.steps)
    assert trainer == pytest.approx(waited / 3600, rel=0.01)
    assert list(costs.lost_h.values()) == sorted(costs.lost_h.values(), reverse=True)
    assert sum(costs.lost_h.values()) < costs.device_h


@pytest.mark.slow
def test_one_screen_and_one_object(tmp_path: Path) -> None:
    folder = recorded(run(budget=1, sample_s=0.005), tmp_path)
    console = Console(record=True, width=100)
    print_report(diagnose_run(folder, 2.0), 2.0, console)
    text = console.export_text()
    assert len(text.splitlines()) < 45
    assert "What would help most" in text
    assert "--queue.budget=" in text
    assert "USD" in text
    result = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["diagnosis"]["changes"][0]["settings"]
    assert found["costs"]["usd"] is None


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = recorded(run(steps=12), tmp_path, steps=6)
    with pytest.raises(ConfigurationError, match="of the 8 steps in steady state"):
        diagnose_run(folder)
    with pytest.raises(ConfigurationError, match="usd-per-device-hour"):
        diagnose_run(folder, -1.0)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"config\.json can't be read"):
        diagnose_run(folder)
    with pytest.raises(ConfigurationError):
        diagnose_run(tmp_path / "nothing")


def test_what_is_recommended_is_what_its_settings_give() -> None:
    """Surplus follows the batch, concurrency never falls below a group, and what is refused is not recommended."""
    raw: dict[str, Any] = {
        "rollout": {"group_size": 4, "max_response_tokens": 400},
        "queue": {"groups_per_step": 4, "budget": 0, "oversampling": 2.0, "surplus": "discard"},
        "curriculum": {"mode": "adaptive", "max_group_size": 16},
        "algorithm": {"overlong": "penalty"},
    }
    experiment = experiment_of(Path("unused"), **raw)

    def built(change: dict[str, Any], **settings: str) -> _Candidate | None:
        named = {key.replace("__", "."): value for key, value in settings.items()}
        return _as_configured(_Candidate(named, "admission", change), experiment)

    larger = built({"groups_per_step": 8}, queue__groups_per_step="8")
    assert larger is not None
    assert larger.change["surplus_groups"] == 8
    fewer = built({"concurrent_rollouts": 8}, queue__max_concurrent_rollouts="8")
    assert fewer is not None
    assert fewer.change["concurrent_rollouts"] == 16
    assert built({}, rollout__group_size="1") is None


def test_more_rollouts_in_environments_get_room_there_too() -> None:
    def settings(environment: dict[str, Any], live: int) -> dict[str, str]:
        experiment = experiment_of(
            Path("none"),
            environment=environment,
            sandbox={"live": live},
            queue={"max_concurrent_rollouts": 40},
            generator={"slots": 32},
            rollout={"group_size": 4},
        )
        found = estimate(run(steps=12).steps[4:], shape_of(experiment))
        assert found is not None
        model = msgspec.structs.replace(found.model, concurrent_rollouts=experiment.concurrent_rollouts)
        return _environment_change(model, experiment, 2.0).settings

    rollouts = {"queue.max_concurrent_rollouts": "80"}
    assert settings({"name": "python_tool"}, live=64) == rollouts | {"sandbox.live": "80"}
    assert settings({"name": "python_tool"}, live=100) == rollouts
    assert settings({"name": "python_tool", "concurrency": 40}, live=100) == rollouts | {
        "environment.concurrency": "80"
    }
    assert settings({}, live=64) == rollouts, "a function of tokens has no sandboxes of ours"


@pytest.mark.slow
def test_steps_around_a_restart_say_nothing_of_the_rates(tmp_path: Path) -> None:
    """A tenth of the steps take thirty times as long, because a worker was away."""
    outcome = run(budget=1, sample_s=0.005)
    steps = [line for line in outcome.lines if isinstance(line, StepRecord)]
    undisturbed = diagnose_run(recorded(outcome, tmp_path / "undisturbed")).diagnosis
    lines: list[LedgerLine] = []
    for step in steps:
        if step.step % 10 == 5:
            lines.append(EventRecord(event="generator_restarted", worker="generator-0", lost_s=1.0))
            step = msgspec.structs.replace(step, step_s=30 * step.step_s)
        lines.append(step)
    outcome.lines = lines
    found = diagnose_run(recorded(outcome, tmp_path / "killed")).diagnosis
    assert found.samples_per_s == pytest.approx(undisturbed.samples_per_s, rel=0.1)
    assert found.simulated_per_s == pytest.approx(undisturbed.simulated_per_s, rel=0.1)


def test_a_model_beyond_what_any_device_has_shown_is_refused() -> None:
    outcome = run(budget=1, sample_s=0.005)

    def timeless(step: StepRecord) -> StepRecord:
        flow = {
            "trained_tokens": 0,
            "generator_busy_s": 0.0,
            "decode_tokens": 0,
            "decode_steps": 0,
            "generating_s": 0.0,
        }
        none = {"publish_s": 0.0, "apply_s": 0.0, "apply_pause_s": 0.0, "verify_s": 0.0}
        return msgspec.structs.replace(step, flow=msgspec.structs.replace(step.flow, **flow), **none)

    steps = [timeless(step) for step in outcome.steps]
    found = diagnose(steps, outcome.experiment, shape_of(outcome.experiment))
    assert isinstance(found, str)
    assert "and the run's devices have shown 178 at most" in found


def test_a_run_that_waits_for_its_evaluators_is_named(tmp_path: Path) -> None:
    outcome = run(budget=4, sample_s=0.1)
    scores = KernelScores(evaluations=16, faults={"timeout": 4}, wait_s=30.0, busy_s=10.0)
    lines = [
        msgspec.structs.replace(line, kernels=scores) if isinstance(line, StepRecord) else line
        for line in outcome.lines
    ]
    report = diagnose_run(recorded(dataclasses.replace(outcome, lines=lines), tmp_path / "run"))
    assert "timeout 25.0%" in report.kernels
    assert "This run waits for its evaluators" in report.kernels
    console = Console(record=True, width=200)
    print_report(report, None, console)
    assert "evaluators" in console.export_text()


@pytest.mark.slow
def test_alerts_are_listed_as_recorded_or_found_in_an_older_ledger(tmp_path: Path) -> None:
    outcome = run()
    older = recorded(outcome, tmp_path / "older")
    assert diagnose_run(older).alerts == ()
    alert = EventRecord(event="alert", step=7, detail="disk: /runs has 0.10 GiB left", data={"rule": "disk"})
    outcome.lines.insert(2, alert)
    report = diagnose_run(recorded(outcome, tmp_path / "recorded"))
    assert report.alerts == ("step 7, disk: /runs has 0.10 GiB left (docs/troubleshooting.md#alert-disk)",)
    console = Console(width=100, record=True)
    print_report(report, None, console)
    assert "step 7, disk: /runs has 0.10 GiB left" in console.export_text()
    with pytest.raises(ConfigurationError, match=r"; alert at step 7, disk: /runs has 0\.10 GiB left"):
        diagnose_run(recorded(outcome, tmp_path / "short", 5))
    assert alerts_of(kept_ledger("collapsed")) == (
        "step 5, kl: kl is 0.203 nats per token, over 0.15 (docs/troubleshooting.md#alert-kl)",
        "step 14, length: responses grew from 293 to 461 tokens; 75% are cut, at the start 6% "
        "(docs/troubleshooting.md#alert-length)",
    )
