"""`headway simulate RUN`: a scenario out of a ledger says what the run did, and what its ledger doesn't say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import step_of

from headway.cli.main import main as headway
from headway.config.load import validate
from headway.control.summaries import solve_rate_histogram
from headway.planner.from_run import RunScenario, read_run, response_tokens, scenario_from, window
from headway.planner.interference import _separate
from headway.planner.live_comparison import Agreement, agreement
from headway.planner.quantities import Quantity, uniform
from headway.planner.scenario import Scenario, load_scenario
from headway.planner.scenario_text import toml_text
from headway.planner.simulate import simulate
from headway.planner.solve_rates import solve_rates
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, StepRecord
from headway.telemetry.ledger import read_ledger
from tests.support.synthetic_run import synthetic_lines, write_run

LENGTHS = {"kind": "lognormal", "median": 60, "p99": 300}


def described(folder: Path, steps: int = 60, **sections: dict[str, Any]) -> Scenario:
    """A run with known hardware; decode and training step grow with their load."""
    raw: dict[str, Any] = {
        "run": {"directory": str(folder), "steps": steps},
        "rollout": {"group_size": 4, "max_response_tokens": 400},
        "queue": {"groups_per_step": 4, "budget": 3},
        "generator": {"slots": 24},
        "hardware": {
            "verifiers": 2,
            "generator": {"decode_fixed_s": 0.006, "decode_request_s": 3e-4, "update_s": 0.02},
            "trainer": {"step_fixed_s": 0.2, "token_s": 1e-4, "publish_s": 0.03},
        },
        "workload": {
            "response_tokens": LENGTHS,
            "group_correlation": 0.4,
            "prompt_tokens": 40,
            "verify_s": 0.004,
            "solve_rate": {"kind": "quantiles", "at": [[0.0, 0.2], [1.0, 0.9]]},
            "trivial_share": 0.2,
        },
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return validate(raw, "scenario", Scenario)


def found_in(folder: Path, overrides: list[str], **options: Any) -> RunScenario:
    run = read_run(folder)
    return scenario_from(run, window(run), [f"run.directory={folder}-again", *overrides], **options)


def again(folder: Path, overrides: list[str], **options: Any) -> Agreement:
    found = found_in(folder, ["run.steps=60", *overrides], **options)
    simulate(found.scenario)
    return agreement(found, read_ledger(f"{folder}-again"), overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queue", "token_s"),
    [
        ({"budget": 3}, 1e-4),
        ({"budget": 3}, 1e-3),
        ({"budget": 0}, 1e-3),
        ({"budget": 0, "oversampling": 2.0, "surplus": "discard"}, 1e-3),
    ],
)
def test_scenario_from_simulated_run_reproduces_its_figures(tmp_path, queue, token_s):
    folder = tmp_path / "run"
    trainer = {"step_fixed_s": 0.2, "token_s": token_s, "publish_s": 0.03}
    hardware = {
        "verifiers": 2,
        "generator": {"decode_fixed_s": 0.006, "decode_request_s": 3e-4, "update_s": 0.02},
        "trainer": trainer,
    }
    simulate(described(folder, steps=60, queue={"groups_per_step": 4} | queue, hardware=hardware))
    found = again(folder, [])
    assert found.simulated.samples_per_s / found.live.samples_per_s == pytest.approx(1.0, abs=0.07)
    for name in ("trainer_wait", "generator_wait"):
        assert getattr(found.simulated, name) == pytest.approx(getattr(found.live, name), abs=0.04)
    assert found.simulated.staleness_mean == pytest.approx(found.live.staleness_mean, abs=0.3)
    known = "lengths" not in found.unidentified  # not of those that were discarded
    assert found.simulated.length_mean == pytest.approx(found.live.length_mean, rel=0.06 if known else 0.15)
    assert found.simulated.acceptance == pytest.approx(found.live.acceptance, abs=0.04)


def test_a_run_with_a_critic_is_simulated_with_all_its_groups(tmp_path):
    """In groups of one all rewards are equal; its passes and their limit are the trainer's."""
    sections = {"algorithm": {"advantage": "gae", "early_stop_kl": 0.1}, "trainer": {"passes": 2}}
    simulate(described(tmp_path / "run", steps=30, rollout={"group_size": 1}, **sections))
    found = again(tmp_path / "run", [])
    assert (found.live.acceptance, found.simulated.acceptance) == (1.0, 1.0)
    assert "acceptance" not in found.unidentified


def test_exactly_known_parameters_are_recovered_exactly(tmp_path):
    simulate(described(tmp_path / "run"))
    scenario = found_in(tmp_path / "run", []).scenario
    generator, trainer = scenario.hardware.generator, scenario.hardware.trainer
    assert generator.update_s == pytest.approx(0.02)
    assert trainer.publish_s == pytest.approx(0.03)
    assert trainer.devices == 1
    assert scenario.hardware.verifiers == 2
    assert scenario.workload.verify_s.value == pytest.approx(0.004)
    assert scenario.workload.prompt_tokens.value == pytest.approx(40)
    assert scenario.queue.budget == 3
    assert scenario.generator.slots == 24


@pytest.mark.slow
def test_a_changed_run_is_predicted_from_the_ledger_of_another(tmp_path):
    """Budget 3 -> 0 and half the slots: within 10 % of the run that has them."""
    folder = tmp_path / "run"
    simulate(described(folder, steps=60))
    for number, (section, keys) in enumerate((("queue", {"budget": 0}), ("generator", {"slots": 12}))):
        overrides = [f"{section}.{key}={value}" for key, value in keys.items()]
        predicted = again(folder, overrides)
        assert predicted.changed == overrides
        other = tmp_path / f"other-{number}"
        wanted = {"groups_per_step": 4, **keys} if section == "queue" else keys
        simulate(described(other, steps=60, **{section: wanted}))
        run = read_run(other)
        actual = scenario_from(run, window(run), [f"run.directory={tmp_path}/x"]).live
        assert predicted.simulated.samples_per_s == pytest.approx(actual.samples_per_s, rel=0.1)
        assert actual.samples_per_s < 0.95 * predicted.live.samples_per_s


@pytest.mark.slow
def test_two_runs_identify_interference(tmp_path):
    hardware = {
        "generator": {"decode_fixed_s": 0.006, "decode_request_s": 3e-4, "beside": 1.6},
        "trainer": {"step_fixed_s": 0.1, "token_s": 6e-4, "beside": 1.3},
    }
    overlapping, apart = tmp_path / "overlapping", tmp_path / "apart"
    simulate(described(overlapping, steps=60, hardware=hardware))
    simulate(described(apart, steps=60, hardware=hardware, queue={"groups_per_step": 4, "budget": 0}))
    run, other = read_run(overlapping), read_run(apart)
    overrides = [f"run.directory={tmp_path}/again", "run.steps=60"]
    beside = other, window(other)
    found = scenario_from(run, window(run), overrides, beside=beside)
    assert found.scenario.hardware.generator.beside == pytest.approx(1.6, abs=0.15)
    assert found.scenario.hardware.trainer.beside == pytest.approx(1.3, abs=0.08)
    assert "interference" not in found.unidentified
    actual = scenario_from(other, window(other), overrides).live
    rates = {}
    for name, measured in (("told", beside), ("not told", None)):
        changed = scenario_from(run, window(run), [*overrides, "queue.budget=0", "run.steps=40"], beside=measured)
        simulate(changed.scenario)
        rates[name] = agreement(changed, read_ledger(tmp_path / "again"), []).simulated.samples_per_s
    assert rates["told"] == pytest.approx(actual.samples_per_s, rel=0.06)
    assert rates["not told"] < 0.9 * actual.samples_per_s
    with pytest.raises(ConfigurationError, match=r"queue\.budget = 0"):
        scenario_from(run, window(run), overrides, beside=(run, window(run)))


def test_interference_slows_steps_by_given_factor(tmp_path):
    """One group of two, 100 tokens at 10 ms, beside a training step of 1 s alone: with budget 1 both go on at once.

    A step of the trainer, 1 s of work at 1/2 of its speed while the other side decodes; a group takes 1 s alone and 4 s
    beside it. While both work for t seconds, the trainer does t/2 and the generator t/4 of its second."""
    scenario = described(
        tmp_path / "run",
        steps=30,
        rollout={"group_size": 2, "max_response_tokens": 400},
        queue={"groups_per_step": 1, "budget": 1, "filter_zero_variance": False},
        hardware={
            "generator": {"decode_fixed_s": 0.01, "beside": 4.0},
            "trainer": {"step_fixed_s": 1.0, "token_s": 0.0, "beside": 2.0},
        },
        workload={"response_tokens": 100, "verify_s": 0.0, "trivial_share": 0.0},
        generator={"slots": 2, "prefetch_groups": 0},
    )
    simulate(scenario)
    steps = [line for line in read_ledger(tmp_path / "run") if isinstance(line, StepRecord)][5:25]
    # Both begin together: after 2 s the trainer is done and the group is half way; it takes 0.5 s more, alone.
    for step in steps:
        assert step.step_s == pytest.approx(2.5, rel=1e-3)
        assert step.trainer_compute_s == pytest.approx(2.0, rel=1e-3)


# --- its parts -------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([2, 4, 8, 16]),
    trivial=st.sampled_from([0.0, 0.3]),
    impossible=st.sampled_from([0.0, 0.25]),
    rate=st.floats(0.1, 0.9),
    seed=st.integers(0, 1000),
)
def test_solve_rates_reproduce_share_of_mixed_groups(size, trivial, impossible, rate, seed):
    groups = []
    for index in range(600):
        kind = uniform(seed * 7919 + index)
        p = 1.0 if kind < trivial else 0.0 if kind < trivial + impossible else rate
        groups.append((sum(uniform(10**9 + seed * 10**6 + index * 64 + k) < p for k in range(size)), size))
    mixed = sum(0 < solved < n for solved, n in groups) / len(groups)
    found = solve_rates(solve_rate_histogram(groups), size, mixed)
    assert 0.0 <= found.trivial_share + found.impossible_share <= 1.0
    among = _mean(found.solve_rate, lambda p: 1.0 - p**size - (1.0 - p) ** size)
    assert found.mixed_share * among == pytest.approx(min(mixed, among), abs=0.01)
    assert among > mixed - 0.05
    solved = sum(n for n, _ in groups) / (size * len(groups))
    assert found.trivial_share + found.mixed_share * _mean(found.solve_rate, float) == pytest.approx(solved, abs=0.04)


def _mean(quantity: Quantity, of: Any) -> float:
    normal = NormalDist()
    points = [quantity.at_normal(normal.inv_cdf((index + 0.5) / 1000)) for index in range(1000)]
    return sum(map(of, points)) / len(points)


def test_truncated_responses_are_truncated_in_simulation(tmp_path):
    simulate(described(tmp_path / "run", rollout={"group_size": 4, "max_response_tokens": 100}))
    found = again(tmp_path / "run", ["rollout.max_response_tokens=100"])
    assert "long responses" in found.unidentified
    steps = [line for line in read_ledger(tmp_path / "run") if isinstance(line, StepRecord)]
    repeated = [line for line in read_ledger(f"{tmp_path / 'run'}-again") if isinstance(line, StepRecord)]
    share = sum(s.lengths.truncated_share for s in steps) / len(steps)
    assert share > 0.1
    assert sum(s.lengths.truncated_share for s in repeated) / len(repeated) == pytest.approx(share, abs=0.04)
    assert max(s.lengths.max for s in repeated) == 100


def test_scenario_text_round_trips(tmp_path):
    simulate(described(tmp_path / "run", steps=30))
    found = found_in(tmp_path / "run", ["queue.budget=2", "weights.steps_per_publish=2"])
    text = toml_text(found.raw, ["two\nlines"])
    assert text.startswith("# two\n# lines\n\n[run]\n")
    assert tomllib.loads(text) == json.loads(json.dumps(found.raw))
    (tmp_path / "found.toml").write_text(text)
    assert load_scenario(tmp_path / "found.toml") == found.scenario
    odd = {"a": {"text": 'say "no"\n\\', "b c": {"kind": "x", "at": [[0, 1e-07]]}, "inner": {"on": True}}}
    assert tomllib.loads(toml_text(odd)) == odd


# --- the command -----------------------------------------------------------------------------------------


def test_the_command_compares_writes_and_simulates_what_it_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulate(described(Path("run"), steps=40))
    assert headway(["simulate", "run", "--run.steps=30", "--write", "found.toml"]) == 0
    printed = capsys.readouterr().out
    assert "steps 20 to 35 of run" in printed
    assert "ratio" in printed
    assert "Not in the ledger" in printed
    assert read_ledger("runs/simulated/run")
    assert headway(["simulate", "found.toml", "--queue.budget=1"]) == 0
    capsys.readouterr()
    assert headway(["simulate", "run", "--steps", "10:30", "--run.steps=30", "--queue.budget=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["agreement"]
    assert (found["first_step"], found["last_step"]) == (10, 29)
    assert found["changed"] == ["--queue.budget=1"]
    assert found["simulated"]["staleness_mean"] < found["live"]["staleness_mean"]
    assert headway(["simulate", "run", "--beside", "run"]) == 2
    assert "estimating interference takes two runs" in capsys.readouterr().err


def test_simulation_of_simulation_uses_sibling_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/simulated/mine")
    simulate(described(folder, steps=30))
    before = (folder / "ledger.jsonl").read_bytes()
    assert headway(["simulate", str(folder), "--run.steps=20"]) == 0
    assert read_ledger("runs/simulated/mine-again")
    assert headway(["simulate", str(folder), f"--run.directory={folder}"]) == 2
    assert "is the run itself" in capsys.readouterr().err
    assert (folder / "ledger.jsonl").read_bytes() == before


def _short(folder: Path) -> list[str]:
    simulate(described(folder, steps=5))
    return [str(folder)]


def _without_ledger(folder: Path) -> list[str]:
    simulate(described(folder, steps=5))
    (folder / "ledger.jsonl").unlink()
    return [str(folder)]


def _without_rates(folder: Path) -> list[str]:
    write_run(folder, synthetic_lines(40))
    simulate(described(folder.with_name("other"), steps=5))
    (folder / "config.json").write_text((folder.with_name("other") / "config.json").read_text())
    return [str(folder)]


def _turns(folder: Path) -> list[str]:
    simulate(described(folder, steps=5, workload={"turns": 2}))
    return [str(folder)]


def _own_rollouts(folder: Path) -> list[str]:
    path = Path(_short(folder)[0]) / "config.json"
    config = json.loads(path.read_text())
    config["hooks"]["rollout"] = "mine:play"
    path.write_text(json.dumps(config))
    return [str(folder)]


def _agents(folder: Path) -> list[str]:
    path = Path(_short(folder)[0]) / "config.json"
    config = json.loads(path.read_text())
    config["environment"] |= {"name": "agent", "agent": "mine:play"}
    path.write_text(json.dumps(config))
    return [str(folder)]


def _exists(folder: Path) -> list[str]:
    simulate(described(folder, steps=30))
    (folder / "there.toml").write_text("mine")
    return [str(folder), "--write", str(folder / "there.toml")]


@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        (lambda folder: [str(folder)], "no such configuration file"),
        (lambda folder: [str(folder.parent)], "holds no run"),
        (_without_ledger, "holds no run: there is no"),
        (_short, "1 of its steps after the first 4, which fill the queue, show its rates, and 4 are"),
        (lambda folder: [*_short(folder), "--steps", "90:"], "0 of its steps from 90 to before the end show"),
        (lambda folder: [*_short(folder), "--steps", "x"], "valid: A:B"),
        (_without_rates, "show its rates"),
        (_turns, "simulates rollouts of several turns"),
        (_own_rollouts, "hooks.rollout = 'mine:play'"),
        (_agents, "environment.name = 'agent', and a ledger doesn't record"),
        (_exists, "the file already exists"),
        (lambda folder: ["missing.toml", "--steps", "1:2"], "--steps needs a run's folder"),
        (lambda folder: [*_short(folder), "--steps", "0:", "--queue.budgt=3"], "did you mean 'budget'?"),
    ],
)
def test_errors_end_with_2_and_simulate_nothing(tmp_path, capsys, monkeypatch, prepared, said):
    monkeypatch.chdir(tmp_path)
    arguments = prepared(tmp_path / "run")
    assert headway(["simulate", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_negligible_bucket_joins_its_neighbour():
    record = step_of(0, lengths__histogram={"10": 1_199_999, "400": 1}, lengths__mean=9.0)
    found = response_tokens([record], 500)
    assert [share for share, _ in found.at] == sorted({share for share, _ in found.at})
    assert found.at[-1][1] > 100


def test_equal_overlaps_identify_no_interference():
    assert _separate(1.03, 1.0, 0.05, 0.0) == (1.03, 1.0)
    alone, beside = _separate(1.2, 1.0, 0.5, 0.0)
    assert alone == pytest.approx(1.0)
    assert beside == pytest.approx(1.5)  # 1.2 - 0.5 x 1.2 / 1.5 ... : half of the time takes 1.5 times as long


def test_text_of_a_scenario_is_toml_whatever_it_holds():
    raw = {"run": {"directory": 'runs/\N{ROCKET}\x7f "x"'}}
    assert tomllib.loads(toml_text(raw, [])) == raw


def test_steps_before_last_resume_are_ignored(tmp_path):
    """It may have gone on with other settings, and its queue filled again."""
    simulate(described(tmp_path / "run"))
    run = read_run(tmp_path / "run")
    steps = [line for line in run.lines if isinstance(line, StepRecord)]
    at = run.lines.index(steps[40])
    resumed = msgspec.structs.replace(run, lines=[*run.lines[:at], EventRecord(event="resume"), *run.lines[at:]])
    assert window(run)[0].step < 40
    assert window(resumed)[0].step > 40 + 3
