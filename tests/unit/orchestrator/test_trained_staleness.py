"""Staleness in optimiser steps: what the books say against what a trainer does, and the limit that a user may set."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import experiment_of, simulate

from headway.algorithms.samples import lay_out, split_by_group
from headway.algorithms.step_plan import pass_order
from headway.config.schema import TrainerConfig
from headway.orchestrator.trained_staleness import optimizer_step_staleness
from headway.records.errors import ConfigurationError
from headway.records.generation import VersionSpan
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.records.task import Task


def experiment(updates: int, budget: int, limit: int | None = None, passes: int = 1, **queue: object):
    return experiment_of(
        Path("unused"),
        run={"steps": 6},
        rollout={"group_size": 2, "max_response_tokens": 200},
        queue={
            "groups_per_step": 3,
            "budget": budget,
            "filter_zero_variance": False,
            "max_optimizer_step_staleness": limit,
            **queue,
        },
        trainer={"optimizer_steps_per_batch": updates, "passes": passes},
    )


def finished(index: int, version: int) -> FinishedGroup:
    task = Task(task_id="t", prompt="p")
    group = Group(index=index, task=task, prompt_ids=(1,), size=2, admitted_version=version, admitted_s=0.0)
    spans = (VersionSpan(version=version, tokens=2),)
    rollouts = [
        Rollout(
            group=index,
            member=member,
            prompt_ids=(1,),
            response_ids=(2, 3),
            response_logprobs=(-1.0, -1.0),
            response_mask=(True, True),
            versions=spans,
        )
        for member in range(2)
    ]
    return FinishedGroup(group=group, rollouts=tuple(rollouts))


@pytest.mark.slow
@given(
    updates=st.integers(1, 4),
    passes=st.integers(1, 3),
    budget=st.integers(0, 3),
    overdue=st.sampled_from(["wait", "drop", "mask"]),
    token_s=st.sampled_from([0.001, 0.05]),
    skipped=st.sets(st.integers(0, 6), max_size=2),
)
@settings(deadline=None, max_examples=30)
def test_every_gradient_is_as_many_updates_old_as_counted_and_within_the_limit(
    updates: int, passes: int, budget: int, overdue: str, token_s: float, skipped: set[int]
):
    """Counted again from the batches that were trained, as the trainer splits them, update by update."""
    limit = (budget + 1) * passes * updates - 1
    outcome = simulate(
        experiment(updates, budget, limit, passes, overdue=overdue),
        seed=1,
        token_s=token_s,
        skip_steps=frozenset(skipped),
    )
    steps = [step for step in outcome.steps if not step.skipped]
    batches = [batch for batch, step in zip(outcome.trainer.batches, outcome.steps, strict=True) if not step.skipped]
    taken_before = [0]  # updates before each version
    for step, batch in zip(steps, batches, strict=True):
        orders = [partial(pass_order, number=number, seed=1, step=batch.step) for number in range(passes)]
        minibatches = [
            minibatch for order in orders for minibatch in split_by_group(lay_out(batch).arrays(), updates, order)
        ]
        ages: list[int] = []
        for number, minibatch in enumerate(minibatches):
            for at in minibatch:
                versions = [span.version for span in batch.samples[at].rollout.versions]
                versions = [v for v in versions if overdue != "mask" or batch.step - v <= budget]
                if versions:  # else all its tokens are masked
                    ages.append(taken_before[batch.step] + number - taken_before[min(versions)])
        taken_before.append(taken_before[-1] + passes * updates)  # a whole one, also of fewer groups
        counted = step.optimizer_step_staleness
        assert counted.histogram == {str(age): ages.count(age) for age in sorted(set(ages))}
        assert counted.max <= limit
        if updates * passes == 1:
            assert counted == step.trajectory_staleness


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_minibatches_that_were_left_out_count_nothing(left_out: int):
    """Seven groups, one step old, in three updates of 3, 2 and 2 groups; a group has two rollouts."""
    groups = [finished(index, version=4) for index in range(7)]
    found = optimizer_step_staleness(groups, 5, TrainerConfig(optimizer_steps_per_batch=3), skipped=left_out)
    assert found.histogram == dict([("3", 6), ("4", 4), ("5", 4)][: 3 - left_out])


def test_minibatches_of_later_passes_are_older_and_those_at_the_end_are_left_out() -> None:
    """Two passes of two updates: groups of age 1 are 4 to 7 updates old, and each is counted in both passes."""
    groups = [finished(index, version=4) for index in range(6)]
    several = TrainerConfig(optimizer_steps_per_batch=2, passes=2)
    assert optimizer_step_staleness(groups, 5, several).histogram == {"4": 6, "5": 6, "6": 6, "7": 6}
    assert optimizer_step_staleness(groups, 5, several, skipped=1).histogram == {"4": 6, "5": 6, "6": 6}
    mixed = [finished(index, version=5 if index < 3 else 4) for index in range(6)]
    shuffled = pass_order(6, number=1, seed=3, step=5)
    young = int((shuffled[:3] < 3).sum())
    counted = optimizer_step_staleness(mixed, 5, several, seed=3).histogram
    expected = {"0": 6, "2": 2 * young, "3": 6 - 2 * young, "5": 6, "6": 6 - 2 * young, "7": 2 * young}
    assert counted == {age: rollouts for age, rollouts in expected.items() if rollouts}


@given(updates=st.integers(1, 6), budget=st.integers(0, 6), limit=st.integers(0, 30))
@settings(deadline=None)
def test_a_limit_allows_exactly_the_budgets_that_keep_to_it(updates: int, budget: int, limit: int):
    """The oldest sample of a batch is in the last of its updates."""
    worst = max(age * updates + number for age in range(budget + 1) for number in range(updates))
    if worst <= limit:
        experiment(updates, budget, limit)
        return
    with pytest.raises(ConfigurationError, match="max_optimizer_step_staleness") as raised:
        experiment(updates, budget, limit)
    best = max((b for b in range(7) if (b + 1) * updates - 1 <= limit), default=None)
    assert f"valid: queue.budget = {best}" in str(raised.value) or (best is None and "at least" in str(raised.value))
