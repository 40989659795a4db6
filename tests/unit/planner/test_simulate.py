"""`headway simulate`: determinism, timelines by hand, agreement with the queue model, memory, errors."""

from __future__ import annotations

import math
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import synthetic_lines, write_run

from headway.cli.main import main as headway
from headway.config.load import validate
from headway.control.tuning.ledger_model import estimate, shape_of
from headway.control.tuning.queue_model import QueueModel
from headway.control.tuning.queue_model import simulate as simulate_queue
from headway.planner.outcome import SimulationOutcome
from headway.planner.quantities import Quantity, constant
from headway.planner.scenario import Scenario, load_scenario
from headway.planner.simulate import simulate
from headway.records.errors import ConfigurationError, NoProgress, RunLocked
from headway.records.ledger import EventRecord, StepRecord
from headway.report.doctor import diagnose_run
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import read_ledger

EXAMPLES = Path(__file__).parents[3] / "examples"
LONG_TAIL = {"kind": "lognormal", "median": 60, "p99": 480}


def scenario_from(folder: Path, **sections: dict[str, Any]) -> Scenario:
    raw: dict[str, Any] = {
        "run": {"directory": str(folder / "run"), "steps": 6},
        "rollout": {"group_size": 4, "max_response_tokens": 1000},
        "queue": {"groups_per_step": 2, "budget": 2},
        "generator": {"slots": 16},
        "hardware": {"generator": {"decode_fixed_s": 0.01}, "trainer": {"token_s": 1e-4}},
        "workload": {"response_tokens": LONG_TAIL},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate(raw, "scenario", Scenario)


def steps_of(folder: Path) -> list[StepRecord]:
    return [line for line in read_ledger(folder / "run") if isinstance(line, StepRecord)]


def test_the_same_scenario_writes_the_same_ledger_to_the_byte(tmp_path, monkeypatch):
    ledgers = []
    for attempt in ("first", "second"):
        (tmp_path / attempt).mkdir()
        monkeypatch.chdir(tmp_path / attempt)
        simulate(load_scenario(EXAMPLES / "scenarios" / "tools.toml", ["run.steps=2", "run.directory=run"]))
        ledgers.append(Path("run/ledger.jsonl").read_bytes())
    assert ledgers[0] == ledgers[1]
    simulate(load_scenario(EXAMPLES / "scenarios" / "tools.toml", ["run.steps=2", "run.directory=run", "run.seed=1"]))
    assert Path("run/ledger.jsonl").read_bytes() != ledgers[0]


def test_simulation_writes_files_of_live_run(tmp_path, capsys):
    scenario = scenario_from(tmp_path)
    outcome = simulate(scenario, name="short")
    assert outcome.summary.finished
    assert outcome.summary.accounting_balanced
    assert outcome.summary.simulated
    assert outcome.summary.samples_trained == 6 * 2 * 4
    assert outcome.staleness_max <= 2
    assert headway(["report", str(tmp_path / "run")]) == 0
    assert headway(["show", str(tmp_path / "run"), "--limit", "1"]) == 0
    simulate(scenario)  # over an earlier simulation
    named = [line.detail for line in read_ledger(tmp_path / "run") if isinstance(line, EventRecord)]
    assert "scenario" in named


def taught_scenario(folder: Path, **teachers: Any) -> Scenario:
    teacher = {"path": "big", "top_k": 20, "address": "http://gpu7:8000"}
    return scenario_from(
        folder,
        run={"steps": 30},
        algorithm={"teacher": "big"},
        teachers={"big": teacher},
        hardware={
            "generator": {"decode_fixed_s": 0.002},
            "teachers": {"at_once": 2, "rollout_s": 0.1, "token_s": 0.001} | teachers,
        },
        workload={"response_tokens": 72, "prompt_tokens": 28},
        queue={"filter_zero_variance": False},
    )


def test_teachers_score_rollouts_in_their_time_and_a_run_that_waits_for_them_is_named_so(tmp_path, capsys):
    """Two at once, each 0.1 s + 100 tokens x 1 ms: 10 rollouts a second."""
    outcome = simulate(taught_scenario(tmp_path))
    assert outcome.balance == "teacher-bound"
    assert outcome.samples_per_s == pytest.approx(10, rel=0.08)
    assert outcome.summary.accounting_balanced
    sections = [step.teaching for step in steps_of(tmp_path) if step.teaching]
    assert sum(section.tokens for section in sections) == 100 * sum(section.rollouts for section in sections)
    steady_steps = steps_of(tmp_path)[10:20]
    assert sum(step.teaching.busy_s for step in steady_steps) == pytest.approx(sum(s.step_s for s in steady_steps))
    assert headway(["report", str(tmp_path / "run")]) == 0
    assert "Teacher-bound" in (text := capsys.readouterr().out)
    assert "rollouts scored" in " ".join(text.split())
    assert headway(["doctor", str(tmp_path / "run")]) == 0
    assert "the teachers: the trainer waits" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_simulation_of_a_taught_run_keeps_its_teachers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = simulate(taught_scenario(tmp_path))
    assert headway(["simulate", "run", "--write", "again.toml"]) == 0
    again = load_scenario("again.toml", ["run.steps=40"])
    assert again.hardware.teachers.at_once == 8  # requests of the server: address.concurrency
    outcome = simulate(again)
    assert (outcome.balance, outcome.samples_per_s) == ("teacher-bound", pytest.approx(first.samples_per_s, rel=0.1))


def test_teachers_that_keep_up_change_no_rate(tmp_path):
    plain = simulate(taught_scenario(tmp_path, rollout_s=0.0, token_s=0.0))
    assert not any(step.teaching for step in steps_of(tmp_path))
    quick = simulate(taught_scenario(tmp_path, at_once=32, rollout_s=0.001, token_s=0.0))
    assert quick.samples_per_s == pytest.approx(plain.samples_per_s, rel=0.05)
    assert quick.balance == plain.balance != "teacher-bound"


def test_synchronous_step_time_is_sum_of_parts(tmp_path):
    """Budget 0, two groups of four, 100 tokens each at 0.01 + 8 x 0.001 s; training 8 x 228 tokens x 1 ms; updates."""
    scenario = scenario_from(
        tmp_path,
        queue={"groups_per_step": 2, "budget": 0, "filter_zero_variance": False},
        hardware={
            "generator": {"decode_fixed_s": 0.01, "decode_request_s": 0.001, "update_s": 0.5},
            "trainer": {"token_s": 1e-3, "step_fixed_s": 0.2, "publish_s": 0.3},
        },
        workload={"response_tokens": 100, "verify_s": 0.01},
    )
    simulate(scenario)
    generated, verified, trained, published = 100 * 0.018, 2 * 4 * 0.01, 0.2 + 8 * 228e-3, 0.3 + 0.5
    for step in steps_of(tmp_path)[1:]:
        assert step.step_s == pytest.approx(generated + verified + trained + published)
        assert step.trainer_wait_s == pytest.approx(generated + verified)


def turned(tmp_path: Path, **environment: Any) -> Scenario:
    return scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 3},
        rollout={"group_size": 2, "max_response_tokens": 1000},
        queue={"groups_per_step": 1, "budget": 0, "filter_zero_variance": False},
        hardware={"generator": {"decode_fixed_s": 0.1}, "trainer": {"token_s": 0.0}},
        workload={"turns": 2, "turn_tokens": 10, "reply_tokens": 5, "tool_s": 3.0, "prompt_tokens": 7},
        environment={"start_s": 2.0} | environment,
    )


def test_turns_alternate_between_model_and_sandbox(tmp_path):
    """10 tokens (1 s), the sandbox starts (2 s), the tool (3 s), 10 tokens (1 s): 7 s; 25 tokens, 5 of them replies."""
    outcome = simulate(turned(tmp_path))
    for step in steps_of(tmp_path):
        assert step.step_s == pytest.approx(7.0)
        assert step.lengths.mean == 25
        assert step.tokens.trained_per_s * step.step_s == pytest.approx(2 * 20)
    counts = outcome.environment
    assert (counts["started"], counts["tool_calls"], counts["live_peak"]) == (6, 6, 2)
    assert counts["live_s"] == pytest.approx(6 * 6.0)


def test_concurrent_sandbox_starts_are_limited(tmp_path):
    simulate(turned(tmp_path, starting_at_once=1))
    assert steps_of(tmp_path)[1].step_s == pytest.approx(9.0)


def test_a_sandbox_that_never_starts_fails_its_rollout_after_the_retries(tmp_path):
    with pytest.raises(NoProgress, match="sandbox"):
        simulate(turned(tmp_path, start_failure=1.0))


def test_sandbox_failures_are_retried_and_counted_where_they_belong(tmp_path):
    scenario = turned(tmp_path, tool_failure=0.5).model_copy(
        update={"run": turned(tmp_path).run.model_copy(update={"steps": 20})}
    )
    outcome = simulate(scenario)
    failures: dict[str, int] = {}
    for step in steps_of(tmp_path):
        for boundary, count in step.failures.items():
            failures[boundary] = failures.get(boundary, 0) + count
    assert failures.keys() <= {"sandbox"}
    assert outcome.environment["tool_failures"] > 10
    assert outcome.summary.samples_trained + sum(failures.values()) >= 20


def test_parked_rollouts_resume_at_their_turn(tmp_path):
    """However often rollouts are interrupted, the same ones are trained, with the same tokens."""
    found: dict[str, SimulationOutcome] = {}
    modes = {"never": ("keep", "continue"), "updates": ("abort", "continue"), "both": ("abort", "park")}
    for name, (update_mode, surplus) in modes.items():
        scenario = scenario_from(
            tmp_path,
            run={"directory": str(tmp_path / "run"), "steps": 12},
            rollout={"group_size": 4, "max_response_tokens": 10_000},
            queue={
                "groups_per_step": 2,
                "budget": 3,
                "oversampling": 2,
                "surplus": surplus,
                "filter_zero_variance": False,
            },
            generator={"slots": 16, "update_mode": update_mode},
            workload={
                "turns": 6,
                "turn_tokens": {"kind": "lognormal", "median": 20, "p99": 200},
                "reply_tokens": 10,
                "tool_s": {"kind": "lognormal", "median": 1, "p99": 10},
            },
        )
        found[name] = simulate(scenario)
    assert found["never"].environment["resumed_states"] == 0
    assert 0 < found["updates"].environment["resumed_states"] < found["both"].environment["resumed_states"]
    assert len({outcome.trained_tokens for outcome in found.values()}) == 1
    assert len({outcome.generated_tokens for outcome in found.values()}) == 1


@pytest.mark.slow
def test_simulation_agrees_with_queue_model(tmp_path):
    """Two independent simulations of one queue: the real loops, and control/tuning/queue_model.py's events."""
    lengths = Quantity.model_validate(LONG_TAIL)
    quantile = partial(_length_at, lengths)
    for slots, token_s in ((16, 2e-4), (64, 2e-4), (32, 1e-3)):
        scenario = scenario_from(
            tmp_path,
            run={"directory": str(tmp_path / "run"), "steps": 160},
            rollout={"group_size": 4, "max_response_tokens": 10_000},
            queue={"groups_per_step": 4, "budget": 3, "filter_zero_variance": False, "max_concurrent_rollouts": slots},
            generator={"slots": slots},
            hardware={"generator": {"decode_fixed_s": 0.01}, "trainer": {"token_s": token_s}},
        )
        simulate(scenario)
        steady = steps_of(tmp_path)[8:-8]
        seconds = sum(step.step_s for step in steady)
        model = QueueModel(
            groups_per_step=4, group_size=4, budget=3, slots=slots, concurrent_rollouts=slots, length_at=quantile,
            prompt_tokens=128, decode_fixed_s=0.01, decode_request_s=0.0, train_fixed_s=0.0, train_token_s=token_s,
        )  # fmt: skip
        expected = simulate_queue(model)
        assert sum(step.samples for step in steady) / seconds == pytest.approx(expected.samples_per_s, rel=0.1)
        assert sum(step.trainer_wait_s for step in steady) / seconds == pytest.approx(expected.trainer_wait, abs=0.08)


def _length_at(lengths: Quantity, share: float) -> int:
    from statistics import NormalDist

    return max(1, round(lengths.at_normal(NormalDist().inv_cdf(max(1e-12, share)))))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lengths(tmp_path):
    """64 responses of 50,000 tokens in flight: 75 MB as tuples."""
    scenario = scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 2},
        rollout={"group_size": 8, "max_response_tokens": 100_000, "timeout_s": 1e6},
        queue={"groups_per_step": 8, "budget": 1, "filter_zero_variance": False},
        generator={"slots": 64},
        workload={"response_tokens": 50_000},
    )
    tracemalloc.start()
    try:
        outcome = simulate(scenario)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcome.generated_tokens >= 128 * 50_000
    assert peak < 30e6


def test_drift_changes_what_is_generated_while_the_run_goes_on(tmp_path):
    drift = {"key": "workload.response_tokens", "factor": 3.0, "from_step": 4}
    scenario = scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 14},
        queue={"groups_per_step": 2, "budget": 1, "filter_zero_variance": False},
        workload={"response_tokens": 100},
    ).model_copy(update={"drift": validate({"drift": [drift]}, "x", Scenario).drift})
    simulate(scenario)
    lengths = {step.lengths.mean for step in steps_of(tmp_path) if step.lengths}
    assert {100.0, 300.0} <= lengths
    assert all(100.0 <= length <= 300.0 for length in lengths)


def test_drift_of_a_share_ends_again(tmp_path):
    drift = {"key": "workload.trivial_share", "value": 1.0, "from_step": 4, "until_step": 9}
    scenario = scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 16},
        queue={"groups_per_step": 2, "budget": 0, "filter_zero_variance": False},
        workload={"response_tokens": 100},
    ).model_copy(update={"drift": validate({"drift": [drift]}, "x", Scenario).drift})
    simulate(scenario)
    solved = {step.step for step in steps_of(tmp_path) if step.rewards and step.rewards.solve_rate == 1.0}
    assert {5, 6, 7, 8} <= solved <= {4, 5, 6, 7, 8, 9}


def test_tool_time_is_not_counted_as_decoding(tmp_path):
    """The queue model finds in the ledger how long rollouts wait for their tools."""
    scenario = scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 20},
        queue={"groups_per_step": 4, "budget": 2, "filter_zero_variance": False},
        workload={"turns": 3, "turn_tokens": 20, "reply_tokens": 4, "tool_s": 0.5},
    )
    simulate(scenario)
    found = estimate(steps_of(tmp_path)[5:], shape_of(scenario.experiment()))
    assert found is not None
    assert found.model.environment_s == pytest.approx(1.0)  # two tool calls
    assert found.model.delay_s < 0.1
    again = simulate_queue(found.model)
    assert again.samples_per_s == pytest.approx(found.samples_per_s, rel=0.1)


@pytest.mark.slow
def test_where_tools_take_the_time_the_doctor_wants_more_rollouts_at_once_and_is_right(tmp_path):
    def rate(name, **queue):
        scenario = scenario_from(
            tmp_path,
            run={"directory": str(tmp_path / name), "steps": 30},
            queue={"groups_per_step": 4, "budget": 8, "filter_zero_variance": False, **queue},
            workload={"turns": 3, "turn_tokens": 20, "reply_tokens": 4, "tool_s": 4.0},
        )
        simulate(scenario)
        return diagnose_run(tmp_path / name)

    found = rate("before", max_concurrent_rollouts=32).diagnosis
    assert found.binding == "environment"
    change = found.changes[0]
    assert change.settings == {"queue.max_concurrent_rollouts": "64"}
    assert change.gain > 0.5
    assert not {key for one in found.changes for key in one.settings} & {"generator.slots", "generator.devices"}
    after = rate("after", max_concurrent_rollouts=64).diagnosis
    assert after.samples_per_s == pytest.approx(change.samples_per_s, rel=0.15)


@pytest.mark.parametrize(("shares", "devices"), [(False, 11), (True, 8)])
def test_the_doctor_counts_a_simulated_runs_devices(tmp_path, shares, devices):
    generator = {"decode_fixed_s": 0.01, "replicas": 2, "devices_per_replica": 4, "shares_devices": shares}
    scenario = scenario_from(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 24},
        hardware={"generator": generator, "trainer": {"token_s": 1e-4, "devices": 3, "publish_s": 0.05}},
    )
    simulate(scenario)
    report = diagnose_run(tmp_path / "run")
    assert report.costs.devices == devices
    published_s = sum(step.publish_s for step in steps_of(tmp_path))
    assert report.costs.lost_h["trainer: publishes"] == pytest.approx(3 * published_s / 3600)
    assert sum(report.costs.lost_h.values()) <= report.costs.device_h
    waits = [cause for cause in report.costs.lost_h if cause.startswith("trainer: waits for groups")]
    assert bool(waits) != shares  # who waits on a device of both sides lends it


def test_quantities_draw_their_distributions():
    assert constant(3.0).draw(1) == 3.0
    values = Quantity(kind="steps", values=(1.0, 2.0))
    assert [values.draw(0, step) for step in (0, 1, 5)] == [1.0, 2.0, 2.0]
    lognormal = Quantity(kind="lognormal", median=100, p99=800)
    drawn = sorted(lognormal.draw(key) for key in range(4000))
    assert drawn[2000] == pytest.approx(100, rel=0.1)
    assert drawn[3960] == pytest.approx(800, rel=0.25)
    assert sum(drawn) / 4000 == pytest.approx(100 * math.exp((math.log(8) / 2.3263) ** 2 / 2), rel=0.06)
    empirical = Quantity(kind="quantiles", at=((0, 0.0), (0.5, 10.0), (1, 20.0)))
    assert [empirical.at_normal(z) for z in (-9.0, 0.0, 9.0)] == pytest.approx([0.0, 10.0, 20.0], abs=1e-3)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"workload": {"respons_tokens": 3}}, "unknown key 'workload.respons_tokens'; did you mean 'response_tokens'?"),
        (
            {"trainer": {"devices": ["cuda:0"]}},
            "trainer.devices has no place in a scenario: set hardware.trainer.devices",
        ),
        ({"hardwar": {}}, "unknown key 'hardwar'; did you mean 'hardware'?"),
        ({"queue": {"budgt": 3}}, "unknown key 'queue.budgt'; did you mean 'budget'?"),
        ({"workload": {"response_tokens": {"kind": "lognormal", "median": 100}}}, "kind = 'lognormal' needs p99"),
        ({"workload": {"tool_s": {"kind": "lognormal", "median": 9, "p99": 3}}}, "p99 = 3 is below the median 9"),
        ({"workload": {"turns": {"kind": "constant", "value": 1, "p99": 3}}}, "'constant' takes value, not p99"),
        ({"workload": {"trivial_share": 0.7, "impossible_share": 0.7}}, "are more than all tasks together"),
        ({"model": {"path": "x"}}, "[model] isn't valid in a scenario: no model is loaded"),
        ({"environment": {"name": "agent"}}, "environment.name has no place in a scenario: turns are described by"),
        ({"generator": {"devices": ["cuda:0"]}}, "set hardware.generator.replicas"),
        ({"drift": [{"key": "workload.tool", "factor": 3}]}, "valid: workload.prompt_tokens"),
        ({"drift": [{"key": "workload.tool_s", "value": 0.5}]}, "key = 'workload.tool_s' takes factor, not value"),
        ({"drift": [{"key": "workload.trivial_share", "factor": 2}]}, "takes value, not factor"),
        (
            {"drift": [{"key": "workload.turns", "factor": 2, "from_step": 5, "until_step": 5}]},
            "until_step = 5 must be after from_step = 5",
        ),
    ],
)
def test_errors_name_the_key_and_what_would_be_valid(raw, said):
    with pytest.raises(ConfigurationError) as error:
        validate(raw, "scenario.toml", Scenario)
    assert said in str(error.value)
    assert str(error.value).startswith("scenario.toml: ")


def test_the_command_ends_with_2_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text("[workload]\ntrivial_shar = 0.5\n")
    assert headway(["simulate", "s.toml"]) == 2
    assert "did you mean 'trivial_share'" in capsys.readouterr().err
    assert headway(["simulate", "missing.toml"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.toml"]


def test_a_live_run_is_never_overwritten(tmp_path):
    write_run(tmp_path / "run", synthetic_lines(2))
    with pytest.raises(ConfigurationError, match="holds a live run"):
        simulate(scenario_from(tmp_path))


def test_a_folder_that_only_looks_like_a_simulation_is_left_alone(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "scenario.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    simulate(scenario_from(tmp_path, run={"directory": str(folder)}))
    assert (folder / "notes.txt").read_text() == "mine"


def test_running_simulation_is_not_deleted(tmp_path):
    simulate(scenario_from(tmp_path))
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    held = RunDirectory(tmp_path / "run")
    held.acquire()
    with pytest.raises(RunLocked):
        simulate(scenario_from(tmp_path))
    held.release()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    scenario = str(EXAMPLES / "scenarios" / "long_tail.toml")
    directory = f"--run.directory={tmp_path / 'run'}"
    assert headway(["simulate", scenario, "--run.steps=3", directory]) == 0
    printed = capsys.readouterr().out
    assert "samples trained" in printed
    assert "device-hours" in printed
    assert headway(["simulate", scenario, "--run.steps=3", directory, "--json"]) == 0
    import msgspec

    outcome = msgspec.json.decode(capsys.readouterr().out, type=SimulationOutcome)
    assert outcome.summary.samples_trained == 3 * 16 * 8


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("case_studies/*.toml")) + sorted(EXAMPLES.glob("scenarios/*.toml"))
)
def test_the_example_scenarios_are_valid(path):
    assert load_scenario(path).run.directory == f"runs/simulated/{path.stem}"


def test_explain_task_knows_the_tasks_of_a_simulation(tmp_path, capsys):
    curriculum = {"curriculum": {"mode": "adaptive"}, "workload": {"tasks": 40}}
    scenario = scenario_from(tmp_path, run={"directory": str(tmp_path / "run"), "steps": 6}, **curriculum)
    simulate(scenario)
    assert headway(["explain-task", str(tmp_path / "run")]) == 0
    assert "40" in capsys.readouterr().out
    assert headway(["explain-task", str(tmp_path / "run"), f"{7:016x}"]) == 0
    assert headway(["explain-task", str(tmp_path / "run"), "xyz"]) == 2
    assert "none of the 40 training tasks" in capsys.readouterr().err
