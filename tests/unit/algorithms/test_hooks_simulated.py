"""Whole runs in virtual time with filters, hooks and group timeouts: backfill, sound books, the same batches again."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.rollout import Rollout
from headway.records.trace import GroupTrace, TraceLine
from headway.records.training import TrainBatch
from tests.support.simulated_run import Outcome, experiment_of, long_tailed, simulate


@pytest.fixture(scope="module", autouse=True)
def own() -> ModuleType:
    """The user's module: hooks that filter by what a rollout is, and one that answers otherwise every time."""
    module = ModuleType("own_hooks")
    answers: list[int] = []

    def short_only(group: Any, rollout: Rollout) -> tuple[bool, str]:
        return len(rollout.response_ids) % 3 > 0, "thirds"

    def even_tasks(group: Any, rollouts: Any) -> tuple[bool, str]:
        return int(group.task.task_id) % 2 == 0, "odd task"

    def never_the_same(group: Any, rollouts: Any, rewards: Any) -> Any:
        answers.append(0)
        return rewards + len(answers) * (rewards > 0)

    def broken(group: Any, rollout: Rollout) -> bool:
        if rollout.member == 1 and group.index % 4 == 0:
            raise KeyError("score")
        return True

    module.__dict__.update(
        short_only=short_only, even_tasks=even_tasks, never_the_same=never_the_same, broken=broken, answers=answers
    )
    sys.modules["own_hooks"] = module
    return module


def run_of(*, steps: int = 8, **options: Any) -> Outcome:
    sections = {
        "run": {"steps": steps},
        "rollout": {"group_size": 4, "max_response_tokens": 200},
        "queue": {"groups_per_step": 3, "budget": 2},
        "generator": {"slots": 16},
    }
    for name in ("rollout", "queue", "hooks", "algorithm"):
        sections[name] = sections.get(name, {}) | options.pop(name, {})
    return simulate(experiment_of(Path("unused"), **sections), **options)


def require_sound(outcome: Outcome, steps: int = 8) -> None:
    """All steps whole, nothing stale, nothing trained twice, books that balance."""
    queue = outcome.experiment.queue
    assert [step.version for step in outcome.steps] == list(range(1, steps + 1))
    assert all(step.groups == queue.groups_per_step for step in outcome.steps)
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= queue.budget
    assert all(step.open_groups <= queue.groups_per_step * (queue.budget + 1) for step in outcome.steps)
    assert len(set(outcome.trained_groups)) == len(outcome.trained_groups)
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []


def reasons(outcome: Outcome) -> Counter[str]:
    return sum((Counter(step.filtered) for step in outcome.steps), Counter())


def test_filters_are_backfilled_and_their_reasons_counted() -> None:
    outcome = run_of(hooks={"filter_item": "own_hooks:short_only", "is_valid_group": "own_hooks:even_tasks"})
    require_sound(outcome)
    found = reasons(outcome)
    assert {"user:thirds", "user:odd task", "zero_variance", "too_few_kept"} >= set(found)
    assert min(found["user:thirds"], found["user:odd task"]) > 10
    assert sum(found.values()) <= outcome.endings["filtered"]  # those of the interval after the last step aside
    assert outcome.admitted_groups > 8 * 3 + 10  # others were generated in the place of those that left
    trained = [s.rollout for batch in outcome.trainer.batches for s in batch.samples]
    assert all(len(r.response_ids) % 3 > 0 for r in trained)
    assert sum(step.samples for step in outcome.steps) == len(trained) < 8 * 3 * 4
    assert all(
        set(step.group_meta) == {"valid_share", "reward_min", "reward_mean", "reward_max"} for step in outcome.steps
    )


def test_groups_of_low_advantage_and_long_members_leave() -> None:
    reward = lambda task, response: (int(response) % 7) / 100  # noqa: E731
    outcome = run_of(
        rollout={"max_response_tokens": 40},
        queue={"min_advantage": 0.02},
        algorithm={"advantage": "group_mean", "overlong": "filter"},
        reward=reward,
        generator_options={"length_of": lambda request: long_tailed(0, request, 1000)},  # longer ones are cut
    )
    require_sound(outcome)
    found = reasons(outcome)
    assert found["low_advantage"] > 0
    assert found["overlong"] > 0
    for batch in outcome.trainer.batches:
        by_group: dict[int, list[float]] = {}
        for sample in batch.samples:
            by_group.setdefault(sample.rollout.group, []).append(abs(sample.advantage))
            assert sample.rollout.finish_reason == "stop"
        assert all(max(sizes) >= 0.02 for sizes in by_group.values())


def test_a_hook_that_breaks_fails_its_groups_and_is_told_once() -> None:
    outcome = run_of(hooks={"filter_item": "own_hooks:broken"})
    require_sound(outcome)
    told = [line for line in outcome.lines if getattr(line, "event", "") == "hook_failed"]
    assert [line.detail.partition(" (")[0] for line in told] == [
        "hooks.filter_item = 'own_hooks:broken' raised KeyError: 'score'"
    ]
    assert outcome.endings["failed"] >= 4
    assert not any(index % 4 == 0 for index in outcome.trained_groups)


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    st.sampled_from(["keep", "abort"]),
)
@settings(deadline=None, max_examples=15)
def test_groups_that_take_too_long_go_on_without_the_rest(seed: int, timeout_s: float, ratio: float, mode: str) -> None:
    experiment = {"queue": {"group_timeout_s": timeout_s, "min_timeout_group_ratio": ratio}}
    outcome = run_of(seed=seed, **experiment)
    require_sound(outcome)
    for batch in outcome.trainer.batches:
        members = Counter(sample.rollout.group for sample in batch.samples)
        assert all(count == 4 or count >= max(2, 4 * ratio) for count in members.values())
        for sample in batch.samples:
            rollout = sample.rollout
            assert rollout.finish_reason in ("stop", "length")
            assert rollout.generated_s - rollout.opened_s <= timeout_s + 1e-6


def test_a_timeout_stops_the_stragglers_with_the_tokens_they_have() -> None:
    traced: list[TraceLine] = []
    limits = {"group_timeout_s": 0.5, "min_timeout_group_ratio": 0.5}
    outcome = run_of(queue=limits, observe=lambda clock: traced.append)
    groups = [line for line in traced if isinstance(line, GroupTrace)]
    stopped = [r for g in groups for r in g.rollouts if r.generated_s - g.admitted_s >= 0.5 - 1e-6]
    assert len(stopped) >= outcome.endings["discarded"] > 5
    assert min(r.tokens for r in stopped) > 10
    plain = run_of()
    assert plain.endings.get("discarded", 0) == 0
    assert outcome.duration_s < plain.duration_s
    bias = [step.length_bias.scheduling_ks for step in outcome.steps]
    assert max(bias) > 0  # and the price is told
    assert max(step.length_bias.scheduling_ks for step in plain.steps) == 0


HOOKS = {
    "filter_item": "own_hooks:short_only",
    "normalize_group": "own_hooks:never_the_same",
    "pad_group": "repeat",
}


def by_step(outcome: Outcome) -> dict[int, list[TrainBatch]]:
    """Every batch any trainer of the run was given, by step."""
    found: dict[int, list[TrainBatch]] = {}
    for trainer in outcome.trainers:
        for batch in trainer.batches:
            found.setdefault(batch.step, []).append(batch)
    return found


@pytest.mark.parametrize("kills_s", [(1.0, 1.0), (1.6,), (0.4, 0.9, 1.7)])
def test_a_replay_trains_the_very_same_batches(kills_s: tuple[float, ...], own: ModuleType) -> None:
    """Though the hook would answer otherwise: what it said is stored with the rollouts."""
    own.answers.clear()
    outcome = run_of(hooks=HOOKS, queue={"group_timeout_s": 0.6, "min_timeout_group_ratio": 0.5}, kills_s=kills_s)
    require_sound(outcome)
    batches = by_step(outcome)
    assert sorted(batches) == list(range(8))
    assert any(len(again) > 1 for again in batches.values())
    for again in batches.values():
        assert all(batch == again[0] for batch in again)
    samples = [sample for again in batches.values() for sample in again[0].samples]
    assert len({s.rollout.trained_reward for s in samples}) > 8
    assert any(s.weight < 1 for s in samples)
