"""Scores of held-out tasks: how many at once, how certain, and what a resume may change."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.config.load import require_resumable, validate_experiment
from headway.config.schema import Experiment
from headway.control.estimates import pass_at
from headway.generator.fake import FakeGenerator
from headway.models.hf.prompts import PromptMaker
from headway.orchestrator.evaluation import attempt_tasks, clustered_standard_error, end_reason, evaluation_record
from headway.records.errors import ConfigurationError
from headway.records.ledger import PassAt
from headway.records.task import Task
from headway.report.live_view import evaluation_line
from headway.report.tables import summary_rows
from headway.rollout.fake import FakeVerifier
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verification.scored_text import ScoredText
from headway.runtime.clock import Clock, run_virtual
from headway.telemetry.summary import summarise
from tests.support.simulated_run import PlainTokenizer, experiment_of, simulate, small_run


def test_attempts_at_one_task_are_not_independent_measurements() -> None:
    """Two tasks, one always and one never solved: eight attempts at each teach no more than one."""
    once = clustered_standard_error([(0, 1.0), (1, 0.0)])
    often = clustered_standard_error([(0, 1.0), (1, 0.0)] * 8)
    assert once == pytest.approx(often)
    assert once == pytest.approx(0.5)
    # One attempt each: the sample standard error of a proportion.
    values = [1.0] * 30 + [0.0] * 70
    assert clustered_standard_error(list(enumerate(values))) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert clustered_standard_error([]) == clustered_standard_error([(3, 1.0)]) == 0.0


TASKS = [Task(task_id=str(i), prompt=str(i), source="first" if i < 10 else "rest") for i in range(40)]


def attempt_all(concurrent: int, timeout_s: float) -> tuple[list[Any], int]:
    """40 tasks of 1 s each through an engine of 4 slots; the rollouts and the most that ran at once."""

    async def main(clock: Clock) -> tuple[list[Any], int]:
        generator = FakeGenerator(clock, slots=4, token_s=0.1, length_of=lambda request: 10)
        await generator.start()
        running, most = 0, 0

        async def counted(request: Any, watch: Any = None, /) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await generator.generate(request, watch)
            finally:
                running -= 1

        settings = experiment_of(Path("unused"), rollout={"timeout_s": timeout_s, "retries": 0}).rollout
        tokenizer = PlainTokenizer()
        rollouts = await attempt_tasks(
            TASKS,
            rollouts=SingleTurn(TurnSampler(counted, tokenizer, settings, clock, run_seed=0)),
            verifier=FakeVerifier(lambda task, response: 1.0, clock),
            scored=ScoredText(tokenizer),
            clock=clock,
            prompts=PromptMaker(tokenizer, "raw"),
            samples_per_task=1,
            version=0,
            concurrent=concurrent,
        )
        return rollouts, most

    return run_virtual(main)


def test_the_time_limit_of_a_rollout_does_not_run_while_it_waits_for_its_turn() -> None:
    rollouts, most = attempt_all(concurrent=4, timeout_s=3.0)
    assert most == 4
    assert [rollout.failure for rollout in rollouts] == [None] * 40


def test_an_evaluation_without_a_valid_rollout_says_that_nothing_was_measured() -> None:
    rollouts, _ = attempt_all(concurrent=4, timeout_s=0.5)
    record = evaluation_record(rollouts, split="test", phase="after", step=0, tasks=TASKS, duration_s=1.0, time_s=1.0)
    assert (record.samples, record.failed) == (0, 40)


def experiment(**trainer: object) -> Experiment:
    raw = {
        "run": {"directory": "r", "steps": trainer.pop("steps", 100)},
        "model": {"path": "m"},
        "tasks": {"train": {"path": "t.jsonl"}},
        "trainer": trainer,
    }
    return validate_experiment(raw, "test")


def test_a_resume_may_train_longer_unless_that_changes_the_steps_it_replays() -> None:
    require_resumable(experiment(), experiment(steps=200))
    require_resumable(
        experiment(schedule="cosine", schedule_steps=100), experiment(schedule="cosine", schedule_steps=100, steps=200)
    )
    with pytest.raises(ConfigurationError, match=r"schedule_steps: 100 -> 200 .*keep it with .*schedule_steps = 100"):
        require_resumable(experiment(schedule="cosine"), experiment(schedule="cosine", steps=200))
    require_resumable(experiment(schedule="cosine"), experiment(schedule="cosine", schedule_steps=100, steps=200))


def test_a_run_says_why_it_ended() -> None:
    assert small_run(steps=3).event("end").detail == "all 3 steps of run.steps are done, at version 3"
    limited = simulate(experiment_of(Path("unused"), run={"steps": 1000, "time_limit_s": 1.0}))
    assert re.fullmatch(r"run.time_limit_s = 1 have passed, at version \d+", limited.event("end").detail)
    assert summarise(limited.lines).ended == summary_rows(summarise(limited.lines))["ended"] != ""
    aim = experiment_of(Path("unused"), evaluation={"stop_at_solve_rate": 0.95})
    assert end_reason(aim, 11, 1.0) == "validation solve rate 1.000 >= evaluation.stop_at_solve_rate 0.95"
    assert end_reason(aim, 11, 0.94) == ""


def test_an_evaluation_over_several_sources_says_how_each_is_solved() -> None:
    rollouts, _ = attempt_all(concurrent=40, timeout_s=30.0)
    solved = [msgspec.structs.replace(rollout, solved=place < 15) for place, rollout in enumerate(rollouts)]
    record = evaluation_record(solved, split="test", phase="after", step=0, tasks=TASKS, duration_s=1.0, time_s=1.0)
    first, rest = record.by_source["first"], record.by_source["rest"]
    assert (first.tasks, first.samples, first.solve_rate, first.standard_error) == (10, 10, 1.0, 0.0)
    assert (rest.tasks, rest.samples, rest.solve_rate) == (30, 30, pytest.approx(5 / 30))
    assert rest.standard_error == pytest.approx(math.sqrt(5 / 30 * 25 / 30 / 29))
    assert evaluation_line(record).endswith("; first 1.000 ± 0.000; rest 0.167 ± 0.069")
    alone = evaluation_record(solved[:5], split="test", phase="after", step=0, tasks=TASKS, duration_s=1.0, time_s=1.0)
    assert alone.by_source == {}


def test_pass_at_k_by_hand_and_by_looking_at_every_subset() -> None:
    # Of (1, 4): 1/4, 1 - C(3, 2) / C(4, 2) = 1/2, 1. Of (0, 4): 0. Of (3, 4): 3/4, 1, 1.
    found = pass_at([(1, 4), (0, 4), (3, 4)])
    assert list(found) == ["1", "2", "4"]
    assert [found[k].value for k in found] == pytest.approx([1 / 3, 1 / 2, 2 / 3])
    # deviations of (1/4, 0, 3/4), (1/2, 0, 1), (1, 0, 1), over sqrt(3)
    errors = [math.sqrt(7 / 48 / 3), math.sqrt(1 / 4 / 3), math.sqrt(1 / 3 / 3)]
    assert [found[k].standard_error for k in found] == pytest.approx(errors)
    for solved in range(7):
        for k in range(1, 7):
            subsets = list(combinations([place < solved for place in range(6)], k))
            (one,) = pass_at([(solved, 6)], [k]).values()
            assert one == PassAt(
                groups=1, value=pytest.approx(sum(map(any, subsets)) / len(subsets)), standard_error=0.0
            )


def test_pass_at_k_leaves_out_what_is_too_small() -> None:
    assert pass_at([]) == pass_at([(0, 0)]) == {}
    found = pass_at([(1, 3), (0, 1), (2, 5), (0, 0)])
    assert {k: at.groups for k, at in found.items()} == {"1": 3, "2": 2, "4": 1}
    assert list(pass_at([(1, 3)], [3, 7])) == ["3"]


def test_an_evaluation_says_how_often_the_best_of_k_solves_a_task() -> None:
    rollouts, _ = attempt_all(concurrent=40, timeout_s=30.0)
    paired = [
        msgspec.structs.replace(r, group=-1 - place // 2, solved=place % 4 == 0) for place, r in enumerate(rollouts)
    ]
    shared = {"split": "test", "phase": "after", "step": 0, "tasks": TASKS, "duration_s": 1.0, "time_s": 1.0}
    record = evaluation_record(paired, **shared)
    assert (record.solve_rate, record.pass_at["1"].value, record.pass_at["2"].value) == (0.25, 0.25, 0.5)
    assert f"solve rate 0.250 ± {record.standard_error:.3f}, pass@2 0.500 ± 0.115 (" in evaluation_line(record)
    assert list(evaluation_record(paired, **shared, ks=(2,)).pass_at) == ["2"]
