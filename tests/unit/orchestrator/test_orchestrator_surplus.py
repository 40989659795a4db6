"""Oversampling in virtual time: surplus that goes on, is parked in the buffer, or is discarded."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.orchestrator.train_loop import TrainLoop
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord
from headway.rollout.makers.user_function import Attempt
from tests.support.simulated_run import Outcome, experiment_of, simulate


def run_of(queue: dict[str, Any], **options: Any) -> Outcome:
    experiment = experiment_of(
        Path("unused"),
        run={"steps": options.pop("steps", 8)},
        rollout={"group_size": 2, "max_response_tokens": 200},
        queue={"groups_per_step": 3, "budget": 2, "filter_zero_variance": False} | queue,
        generator={"slots": options.pop("slots", 32), "update_mode": options.pop("update_mode", "keep")},
        checkpoint={"every_steps": 3},
        hooks=options.pop("hooks", {}),
    )
    return simulate(experiment, **options)


def balanced(outcome: Outcome) -> bool:
    return outcome.event("accounting").data["balanced"] == 1 and outcome.audit == []


def summed(outcome: Outcome, field: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for step in outcome.steps:
        for name, count in attrgetter(field)(step).items():
            total[name] = total.get(name, 0) + count
    return total


@given(st.integers(0, 500), st.sampled_from([1.0, 1.4, 2.0, 3.0]), st.sampled_from(["continue", "park"]))
@settings(deadline=None, max_examples=15)
def test_kept_surplus_is_limited_and_trained(seed, oversampling, surplus):
    outcome = run_of({"oversampling": oversampling, "surplus": surplus}, seed=seed)
    limit = -(-oversampling * 3 // 1)
    assert all(step.open_groups <= limit for step in outcome.steps)
    assert sorted(outcome.trained_groups) == list(range(outcome.admitted_groups))
    assert summed(outcome, "endings").keys() == {"trained"}
    trained, completed = outcome.bias_lengths
    assert trained == completed
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= 2
    assert balanced(outcome)


@given(
    st.integers(0, 500),
    st.integers(0, 3),
    st.sampled_from([1.0, 1.4, 3.0, 6.0]),
    st.sampled_from([0.001, 0.05, 0.3]),
)
@settings(deadline=None, max_examples=15)
def test_discarded_surplus_ends_with_the_batch(seed, budget, oversampling, sample_s):
    outcome = run_of(
        {"budget": budget, "oversampling": oversampling, "surplus": "discard"}, seed=seed, sample_s=sample_s
    )
    assert len(outcome.steps) == 8
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= budget
    assert summed(outcome, "endings").keys() <= {"trained", "discarded", "overdue"}
    assert balanced(outcome)


def test_discarding_on_policy_trains_the_shortest_and_says_so() -> None:
    plain = run_of({"budget": 0}, seed=3, steps=20)
    outcome = run_of({"budget": 0, "oversampling": 3.0, "surplus": "discard"}, seed=3, steps=20)
    endings, tokens = summed(outcome, "endings"), summed(outcome, "tokens.ended")
    assert endings["trained"] == 20 * 6
    assert endings["discarded"] > 2 * 20 * 2  # finished in vain or cut
    assert tokens["discarded"] / endings["discarded"] > tokens["trained"] / endings["trained"]  # the long ones
    assert max(step.trajectory_staleness.max for step in outcome.steps) == 0
    assert outcome.steps[-1].length_bias.scheduling_ks > 0.1 > plain.steps[-1].length_bias.scheduling_ks
    assert outcome.duration_s < plain.duration_s  # no step waits for the longest of its own
    assert sum(step.admitted_rollouts for step in outcome.steps) >= sum(endings.values())


def test_parked_members_hold_no_slot_and_go_on_from_their_tokens() -> None:
    outcome = run_of({"oversampling": 2.0, "surplus": "park"}, seed=1)
    assert sum(step.parkings for step in outcome.steps) > 10
    rollouts = [r for batch in outcome.trainer.batches for r in (s.rollout for s in batch.samples)]
    resumed = [r for r in rollouts if r.resumes]
    assert resumed
    assert max(r.resumes for r in rollouts) <= 2
    assert any(len(r.versions) > 1 for r in resumed)
    for rollout in rollouts:  # the fake's tokens are a function of seed and position: none was sampled twice
        ids = rollout.response_ids[:-1]
        assert all((b - a) % 991 == 1 for a, b in pairwise(ids))


@given(st.integers(0, 500), st.lists(st.floats(0.1, 2.0), min_size=1, max_size=3), st.sampled_from(["keep", "abort"]))
@settings(deadline=None, max_examples=12)
def test_parked_members_survive_a_kill(seed, kills_s, update_mode):
    outcome = run_of(
        {"oversampling": 2.0, "surplus": "park"}, seed=seed, kills_s=tuple(kills_s), update_mode=update_mode
    )
    assert len(outcome.trained_groups) == len(set(outcome.trained_groups)) == 24
    assert max(step.trajectory_staleness.max for step in outcome.steps) <= 2
    assert balanced(outcome)


def test_a_kill_costs_a_parked_member_nothing() -> None:
    """Killed while the trainer computes and members are parked: some go on from the tokens they had before."""
    outcome = run_of({"oversampling": 3.0, "surplus": "park"}, seed=2, sample_s=0.5, token_s=0.05, kills_s=(4.0,))
    resumed_at = next(i for i, line in enumerate(outcome.lines) if getattr(line, "event", "") == "resume")
    version = sum(isinstance(line, StepRecord) for line in outcome.lines[:resumed_at])
    assert 0 < version < 8
    rollouts = [sample.rollout for batch in outcome.trainer.batches for sample in batch.samples]
    crossing = [r for r in rollouts if r.first_version < version < r.last_version]
    assert crossing
    assert all(r.resumes for r in crossing)


@pytest.mark.parametrize(
    ("queue", "told"),
    [
        ({"surplus": "park"}, "needs queue.oversampling"),
        ({"oversampling": 4.0}, "at most budget \\+ 1 = 3"),
        ({"budget": 0, "oversampling": 1.5, "surplus": "park"}, "at most budget \\+ 1 = 1"),
        ({"oversampling": 0.5}, "greater than or equal to 1"),
    ],
)
def test_what_can_not_work_is_refused(queue: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        run_of(queue)


async def two_turns(attempt: Attempt) -> None:
    await attempt.generate(max_tokens=20)
    attempt.observe_ids((7,))
    await asyncio.sleep(0.1 + attempt.group.index % 7 * 0.02)  # a tool
    await attempt.generate(max_tokens=20)


@pytest.mark.parametrize("hooks", [{}, {"rollout": f"{__name__}:two_turns"}])
def test_nobody_generates_while_the_trainer_works_on_a_parked_run(
    hooks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes longer than it takes to fill the next batch: its end must not let anybody go on. Nor does who
    comes back from a tool meanwhile."""
    running: list[int] = []
    compute = TrainLoop._compute

    async def watched(self: TrainLoop, call: Any) -> Any:
        for _ in range(4):
            await self._run.clock.sleep(0.05)
            running.append((await self._run.generator.statistics())[0].running)
        return await compute(self, call)

    monkeypatch.setattr(TrainLoop, "_compute", watched)
    monkeypatch.setattr("headway.orchestrator.assembly._MOST_RESUMES", 100)
    outcome = run_of(
        {"oversampling": 3.0, "surplus": "park"},
        seed=4,
        token_s=0.02,
        generator_options={"update_s": 0.15},
        hooks=hooks,
    )
    assert sum(step.parkings for step in outcome.steps) > 10
    assert max(running) == 0


def test_discarding_shows_in_the_length_bias() -> None:
    outcome = run_of({"budget": 0, "oversampling": 3.0, "surplus": "discard"}, seed=3, steps=20)
    assert outcome.steps[-1].length_bias.ks > 0.02  # members that came to their own end in discarded groups


@pytest.mark.parametrize(("budget", "interval"), [(1, 2), (2, 3)])
def test_the_controller_bears_discarded_surplus(budget: int, interval: int) -> None:
    """Its model of the queue may drop all that is open and stand still for a moment."""
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 40},
        rollout={"group_size": 2, "max_response_tokens": 60},
        generator={"slots": 64},
        weights={"steps_per_publish": interval},
        queue={"groups_per_step": 4, "budget": budget, "oversampling": 1.5, "surplus": "discard"}
        | {"filter_zero_variance": False},
        control={"mode": "act"},
    )
    outcome = simulate(experiment, token_s=0.0005, sample_s=0.1)
    assert len(outcome.steps) == 40
    assert balanced(outcome)
