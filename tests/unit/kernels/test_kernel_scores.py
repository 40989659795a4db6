"""Scores of a step's kernels: counts by hand, pass@k by subsets, what metrics and the report show of them."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from headway.orchestrator.source_scores import kernel_scores, kernel_shares
from headway.records.kernels import KERNEL_ANSWERS, KernelAnswer
from headway.records.ledger import StepRecord
from headway.records.rollout import Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.report.kernels import kernel_sentences
from headway.report.watch.view_report import _kernel_bars
from headway.telemetry.metrics import scalars

FAULTY = KernelAnswer(reward=0.0, compiled=False, correct=False, fault="syntax_error", evaluation_s={"compile": 0.5})
WRONG = KernelAnswer(reward=0.1, compiled=True, correct=False, fault="wrong", evaluation_s={"wait": 3.0, "check": 1.0})
RIGHT = KernelAnswer(reward=0.3, compiled=True, correct=True, repeated=True)
FASTER = KernelAnswer(reward=0.82, compiled=True, correct=True, speedup=1.52, evaluation_s={"wait": 1.0, "time": 2.0})


def group(*members: list[KernelAnswer]) -> FinishedGroup:
    rollouts = [verified({KERNEL_ANSWERS: msgspec.to_builtins(answers)}, n) for n, answers in enumerate(members)]
    task = Task(task_id="t", prompt="p")
    one = Group(index=0, task=task, prompt_ids=(1,), size=len(members), admitted_version=0, admitted_s=0.0)
    return FinishedGroup(group=one, rollouts=tuple(rollouts))


def verified(verdict: dict[str, Any], member: int = 0) -> Rollout:
    return Rollout(
        group=0,
        member=member,
        prompt_ids=(1,),
        response_ids=(2,),
        response_logprobs=(-0.5,),
        response_mask=(True,),
        versions=(),
        verdict=verdict,
    )


GROUPS = [group([FAULTY, WRONG], [WRONG, FASTER], [RIGHT]), group([FAULTY], [FAULTY, FAULTY, WRONG], [FAULTY])]


def test_counts_are_those_of_the_answers():
    scores = kernel_scores(GROUPS)
    assert (scores.evaluations, scores.repeated) == (10, 1)
    assert scores.faults == {"syntax_error": 5, "wrong": 3}
    assert scores.rewards == {"0.0": 5, "0.1": 3, "0.3": 1, "0.8": 1}
    assert scores.log_speedups == {"0.4": 1}
    assert (scores.wait_s, scores.busy_s) == (10.0, 7.5)


def test_pass_at_is_the_share_of_subsets_with_one():
    scores = kernel_scores(GROUPS, ks=(1, 2, 3))
    for found, groups in ((scores.compiled_at, [[1, 1, 1], [0, 1, 0]]), (scores.correct_at, [[0, 1, 1], [0, 0, 0]])):
        for k in (1, 2, 3):
            subsets = [[any(chosen) for chosen in itertools.combinations(members, k)] for members in groups]
            exact = sum(Fraction(sum(one), len(one)) for one in subsets) / len(groups)
            assert found[str(k)].value == pytest.approx(float(exact), abs=1e-12)


def test_shares_of_an_evaluation_are_means_over_tasks_of_what_did_not_fail():
    cheat = KernelAnswer(reward=0.0, compiled=True, correct=False, fault="cheat")
    slower = KernelAnswer(reward=0.3, compiled=True, correct=True, speedup=0.9)
    failed = verified({}, 3)
    failed = msgspec.structs.replace(failed, failure=Failure(boundary="reward", cause="down", infrastructure=True))
    first = [[FAULTY, WRONG], [WRONG, FASTER], [slower, RIGHT]]  # compiles 3, correct 2, faster 1; the last untimed
    second = [[cheat], []]  # of the last no answer was judged
    rollouts = [verified({KERNEL_ANSWERS: msgspec.to_builtins(answers)}, n) for n, answers in enumerate(first)]
    for n, answers in enumerate(second):
        made = verified({KERNEL_ANSWERS: msgspec.to_builtins(answers)}, n)
        rollouts.append(msgspec.structs.replace(made, group=1))
    shares = kernel_shares([*rollouts, failed])
    assert {name: (one.value, one.count, one.rollouts, one.untimed) for name, one in shares.items()} == {
        "compiles": (pytest.approx(1 / 2), 3, 5, 0),
        "correct": (pytest.approx(1 / 3), 2, 5, 0),
        "faster": (pytest.approx(1 / 6), 1, 5, 1),
    }
    assert shares["correct"].interval == (0.0, pytest.approx(2 / 3))  # over two tasks: of 0 and 2/3
    assert kernel_shares([failed, verified({"text": "no kernels"})]) == {}
    assert kernel_shares([verified({}, 1), *rollouts])["compiles"].rollouts == 6  # cut before it was scored


def test_other_verdicts_are_no_kernels():
    task = Task(task_id="t", prompt="p")
    one = Group(index=0, task=task, prompt_ids=(1,), size=2, admitted_version=0, admitted_s=0.0)
    for verdict in ({}, {KERNEL_ANSWERS: "four"}, {KERNEL_ANSWERS: [{"reward": "much"}]}):
        rollouts = verified(verdict), verified(verdict, 1)
        assert kernel_scores([FinishedGroup(group=one, rollouts=rollouts)]) is None


def test_metrics_and_report_show_them():
    steps = [StepRecord(step=n, version=n + 1, samples=6, kernels=kernel_scores(GROUPS)) for n in range(3)]
    found = scalars(steps[0])
    assert found["kernels/fault_wrong"] == 3.0
    assert found["kernels/correct_pass_at_1"] == pytest.approx(1 / 3)
    said = " ".join(kernel_sentences(steps))
    assert "30 answers were evaluated, 3 of them by an equal one's" in said
    assert "syntax error 50.0%, wrong 30.0%" in said
    assert "This run waits for its evaluators" in said
    assert [one["title"] for one in _kernel_bars(steps)] == ["Raw rewards", "Speed-ups of correct answers"]
    assert _kernel_bars([StepRecord(step=0, version=1)]) == []
    assert kernel_sentences([StepRecord(step=0, version=1)]) == []
