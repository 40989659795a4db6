"""Runs of a policy in simulators, in real processes: placements, deaths, resumes, interruptions."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from embodied_runs import STEPS, digest, pinned_children, walk_experiment

from headway.embodied.driver import train
from headway.records.errors import ConfigurationError, Interrupted, RemoteError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.telemetry.ledger import read_ledger


def steps_of(directory: Path) -> list[StepRecord]:
    return [line for line in read_ledger(directory) if isinstance(line, StepRecord)]


def test_run_trains_evaluates_draws_and_balances(tmp_path: Path):
    experiment = walk_experiment(tmp_path / "run", evaluation={"every_steps": 2, "episodes": 6})
    summary = train(experiment)
    assert (summary.finished, summary.steps, summary.accounting_balanced) == (True, STEPS, True)
    assert summary.endings == {"trained": 2 * STEPS}
    records = steps_of(tmp_path / "run")
    assert [record.trajectory_staleness.max for record in records] == [0] * STEPS
    episodes = records[-1].episodes
    assert episodes is not None
    assert (episodes.constructions, episodes.rebuilt, episodes.transitions) == (2, 0, 8 * 24)
    low, high = episodes.return_interval
    assert low <= episodes.return_mean <= high
    assert 0 <= episodes.success_rate <= 1
    evaluations = [line for line in read_ledger(tmp_path / "run") if isinstance(line, EvaluationRecord)]
    assert [(record.step, record.samples, record.failed) for record in evaluations] == [(0, 6, 0), (2, 6, 0), (4, 6, 0)]
    assert summary.best_version in (0, 2, 4)
    assert (tmp_path / "run" / "best" / "state.json").is_file()
    pytest.importorskip("PIL")
    assert (tmp_path / "run" / "videos" / "step_00000004.gif").read_bytes().startswith(b"GIF89a")


@pytest.mark.real
def test_weights_are_equal_in_every_placement(tmp_path: Path):
    placements: dict[str, tuple[list[str], list[str]]] = {
        "spatial": (["cpu:0"], ["cpu:1"]),
        "temporal": (["cpu:0"], ["cpu:0"]),
        "hybrid": (["cpu:0", "cpu:1"], ["cpu:1"]),
    }
    for name, (simulators, learner) in placements.items():
        train(walk_experiment(tmp_path / name, simulator={"devices": simulators}, trainer={"devices": learner}))
    train(walk_experiment(tmp_path / "auto", control={"mode": "act", "devices": "move"}))
    assert len({digest(tmp_path / name, STEPS) for name in placements}) == 1
    with_other_noise = walk_experiment(tmp_path / "other", run={"seed": 4})
    train(with_other_noise)
    assert digest(tmp_path / "other", STEPS) != digest(tmp_path / "spatial", STEPS)


@pytest.mark.real
def test_stale_fragments_are_within_the_budget(tmp_path: Path):
    summary = train(walk_experiment(tmp_path / "run", queue={"budget": 2}, algorithm={"correction": "vtrace"}))
    assert [record.trajectory_staleness.max for record in steps_of(tmp_path / "run")] == [0, 1, 2, 2]
    assert summary.max_trajectory_staleness == 2
    assert summary.endings == {"trained": 2 * STEPS}


@pytest.mark.real
@pytest.mark.parametrize("budget", [0, 2])
def test_killed_simulators_are_rebuilt_and_the_others_go_on(tmp_path: Path, budget: int):
    trouble, kills = tmp_path / "trouble", [1, 2, 3, 4, 5]  # more than the deaths in a row that end a run
    trouble.mkdir()

    def on_line(line: LedgerLine) -> None:
        if isinstance(line, StepRecord) and line.version in kills:
            (trouble / ("step.kill" if line.version % 2 else "crash")).write_text("1")

    experiment = walk_experiment(
        tmp_path / "run",
        run={"steps": 8},
        simulator={"devices": ["cpu:0", "cpu:1"], "arguments": {"trouble": str(trouble)}},
        queue={"budget": budget},
        algorithm={"correction": "vtrace"},
    )
    summary = train(experiment, on_line=on_line)
    assert (summary.steps, summary.endings, summary.accounting_balanced) == (8, {"trained": 16}, True)
    last = steps_of(tmp_path / "run")[-1].episodes
    assert last is not None
    assert (last.rebuilt, last.cut, last.constructions) == (len(kills), 4 * len(kills), 2 + len(kills))
    assert not any(trouble.iterdir())
    events = [line.event for line in read_ledger(tmp_path / "run") if isinstance(line, EventRecord)]
    assert events.count("simulate_restarted") == len(kills)


@pytest.mark.real
def test_hung_simulator_is_ended_and_rebuilt(tmp_path: Path):
    (tmp_path / "step.hang").write_text("1")
    experiment = walk_experiment(
        tmp_path / "run", simulator={"arguments": {"trouble": str(tmp_path)}, "step_timeout_s": 1.0}
    )
    assert train(experiment).endings == {"trained": 2 * STEPS}
    last = steps_of(tmp_path / "run")[-1].episodes
    assert last is not None
    assert last.rebuilt == 2


@pytest.mark.real
def test_memory_that_grows_is_in_the_ledger(tmp_path: Path):
    train(walk_experiment(tmp_path / "run", simulator={"arguments": {"leak": 1 << 19}}))
    sizes = [step.episodes.worker_bytes for step in steps_of(tmp_path / "run") if step.episodes]
    assert all(later - earlier > 20e6 for earlier, later in itertools.pairwise(sizes))  # 48 steps of half a MiB


@pytest.mark.real
def test_nan_ends_the_run_with_block_lane_and_step(tmp_path: Path):
    with pytest.raises(RemoteError, match=r"block \d, lane \d, step 0 of fragment 0: the reward is nan"):
        train(walk_experiment(tmp_path / "run", simulator={"environment": "embodied_runs:Lost"}))


@pytest.mark.real
def test_killed_learner_goes_on_with_the_same_weights(tmp_path: Path):
    train(walk_experiment(tmp_path / "undisturbed"))
    killed: list[int] = []

    def on_line(line: LedgerLine) -> None:
        if isinstance(line, StepRecord) and line.version in (1, 3):
            [process_id] = pinned_children(1)
            killed.append(process_id)
            os.kill(process_id, signal.SIGKILL)

    train(walk_experiment(tmp_path / "killed"), on_line=on_line)
    assert len(set(killed)) == 2
    assert digest(tmp_path / "killed", STEPS) == digest(tmp_path / "undisturbed", STEPS)


@pytest.mark.real
def test_two_resumes_from_one_checkpoint_are_equal(tmp_path: Path):
    train(walk_experiment(tmp_path / "run", checkpoint={"every_steps": 2, "keep_last": 5}))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")  # as if it had been killed before
    for name in ("first", "second"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        summary = train(walk_experiment(tmp_path / name, run={"steps": 6}), resume=True, take_over=True)
        assert (summary.steps, summary.accounting_balanced) == (6, True)
        assert summary.endings == {"trained": 12, "failed": 4}  # the fragments of steps 2 and 3 that were lost
        last = steps_of(tmp_path / name)[-1].episodes
        assert last is not None
        assert (last.rebuilt, last.cut, last.constructions) == (2, 8, 4)
    assert digest(tmp_path / "first", 6) == digest(tmp_path / "second", 6)


@pytest.mark.real
def test_interrupt_trains_what_is_under_way_and_the_run_is_resumed(tmp_path: Path):
    def on_line(line: LedgerLine) -> None:
        if isinstance(line, StepRecord) and line.version == 1:
            os.kill(os.getpid(), signal.SIGINT)

    sections: dict[str, Any] = {"queue": {"budget": 1}, "algorithm": {"correction": "vtrace"}, "run": {"steps": 8}}
    experiment = walk_experiment(tmp_path / "run", **sections)
    with pytest.raises(Interrupted, match="stopped at version"):
        train(experiment, on_line=on_line)
    stopped = max(record.version for record in steps_of(tmp_path / "run"))
    assert stopped < 8
    assert (tmp_path / "run" / "checkpoints" / f"step_{stopped:08d}" / "state.json").is_file()
    summary = train(experiment, resume=True)
    assert (summary.steps, summary.endings, summary.accounting_balanced) == (8, {"trained": 16}, True)


@pytest.mark.real
def test_unknown_environment_leaves_a_folder_in_which_the_run_can_start(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"simulator\.environment"):
        train(walk_experiment(tmp_path / "run", simulator={"environment": "embodied_runs:Wolk"}))
    assert train(walk_experiment(tmp_path / "run", run={"steps": 1})).steps == 1
