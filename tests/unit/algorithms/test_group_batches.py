"""Finished groups as what the trainer consumes: rewards shaped, advantages attached, truncated responses unlearnt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.algorithms.groups.batches import build_batch, shaped_reward
from headway.algorithms.samples import build_arrays
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.records.generation import VersionSpan
from headway.records.rollout import Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task

LIMIT = 20


def experiment(**algorithm: Any) -> Experiment:
    raw = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
    return validate_experiment(
        raw | {"rollout": {"max_response_tokens": LIMIT}, "algorithm": {"advantage": "group_mean"} | algorithm}, "test"
    )


def finished(index: int, *members: tuple[float, int] | None) -> FinishedGroup:
    """A group whose members have (reward, response tokens); None: it failed. The limit cuts a response."""
    rollouts = []
    for member, given in enumerate(members):
        reward, tokens = given or (0.0, 3)
        rollouts.append(
            Rollout(
                group=index,
                member=member,
                prompt_ids=(7,),
                response_ids=(5,) * tokens,
                response_logprobs=(-0.5,) * tokens,
                response_mask=(True,) * tokens,
                versions=(VersionSpan(version=2, tokens=tokens),),
                finish_reason="length" if tokens == LIMIT else "stop",
                reward=reward,
                failure=None if given else Failure(boundary="reward", cause="it failed", infrastructure=False),
            )
        )
    task = Task(task_id=str(index), prompt="p")
    group = Group(index=index, task=task, prompt_ids=(7,), size=len(members), admitted_version=2, admitted_s=0.0)
    return FinishedGroup(group=group, rollouts=tuple(rollouts))


def advantages(given: Experiment, *groups: FinishedGroup) -> list[float]:
    return [sample.advantage for sample in build_batch(3, groups, given).samples]


def test_advantages_are_those_of_the_valid_members_of_each_group() -> None:
    groups = finished(4, (1.0, 3), (0.0, 3)), finished(9, (1.0, 3), None, (0.0, 3), (0.5, 3))
    batch = build_batch(3, groups, experiment())
    assert batch.step == 3
    assert [sample.rollout.rollout_id for sample in batch.samples] == ["4-0", "4-1", "9-0", "9-2", "9-3"]
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5, 0.5, -0.5, 0.0]


def test_advantages_over_the_batch() -> None:
    # Rewards 1, 0 and 3: mean 4/3, population deviation sqrt(14)/3.
    found = advantages(experiment(advantage="batch_mean_std"), finished(0, (1.0, 3), (0.0, 3)), finished(1, (3.0, 3)))
    deviation = 14**0.5 / 3 + 1e-6
    assert found == pytest.approx([-1 / 3 / deviation, -4 / 3 / deviation, 5 / 3 / deviation], abs=1e-12)
    # Group means 0.5 and 3: centred 0.5, -0.5, 0, of deviation sqrt(1/6).
    centred = experiment(advantage="group_mean_batch_std")
    found = advantages(centred, finished(0, (1.0, 3), (0.0, 3)), finished(1, (3.0, 3)))
    unit = 0.5 / ((1 / 6) ** 0.5 + 1e-6)
    assert found == pytest.approx([unit, -unit, 0.0], abs=1e-12)


@pytest.mark.parametrize("advantage", ["group_mean", "group_mean_std", "leave_one_out", "group_mean_batch_std"])
def test_equal_rewards_and_lone_members_teach_exactly_nothing(advantage: str) -> None:
    given = experiment(advantage=advantage)
    assert advantages(given, finished(0, (0.1, 3), (0.1, 4), (0.1, 5)), finished(1, (7.0, 3))) == [0.0] * 4
    assert advantages(given) == []


def test_truncated_responses_are_scored_as_they_are() -> None:
    batch = build_batch(0, [finished(0, (1.0, LIMIT), (0.0, 3))], experiment())
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5]
    assert build_arrays(batch).loss_tokens == LIMIT + 3


def test_truncated_responses_are_unlearnt_and_still_compared_with() -> None:
    group = finished(0, (1.0, LIMIT), (0.0, 3), (0.5, LIMIT - 1))
    batch = build_batch(0, [group], experiment(overlong="mask"))
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5, 0.0]
    arrays = build_arrays(batch)
    assert arrays.lengths_s.tolist() == [1 + LIMIT, 4, LIMIT]
    assert arrays.loss_tokens == 3 + LIMIT - 1
    assert not any(batch.samples[0].rollout.response_mask)
    assert all(group.rollouts[0].response_mask)  # the record itself is as it was generated


def test_the_penalty_is_taken_from_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.algorithms.groups.batches._OVERLONG_PENALTY", 0.5)
    # Limit 20, buffer a fifth, 4: 16 tokens cost nothing, 18 half of 0.5, 20 all of it.
    penalised = experiment(overlong="penalty")
    group = finished(0, (1.0, 16), (1.0, 18), (1.0, LIMIT), (0.0, LIMIT))
    assert [shaped_reward(rollout, penalised) for rollout in group.rollouts] == [1.0, 0.75, 0.5, -0.5]
    mean = (1.0 + 0.75 + 0.5 - 0.5) / 4
    assert advantages(penalised, group) == pytest.approx([1.0 - mean, 0.75 - mean, 0.5 - mean, -0.5 - mean])
    assert build_batch(0, [group], penalised).samples[2].rollout.reward == 1.0  # what the verifier said stays
    # Equal rewards of unlike lengths are no longer equal.
    assert advantages(penalised, finished(0, (1.0, 16), (1.0, LIMIT))) == [0.25, -0.25]
    assert advantages(experiment(), finished(0, (1.0, 16), (1.0, LIMIT))) == [0.0, 0.0]


def test_the_same_groups_build_the_same_batch() -> None:
    groups = [finished(0, (1.0, LIMIT), (0.0, 3)), finished(2, (0.2, 4), (0.3, LIMIT))]
    for overlong in ("score", "mask", "penalty"):
        given = experiment(overlong=overlong, advantage="group_mean_batch_std")
        assert build_batch(5, groups, given) == build_batch(5, groups, given)


def test_advantages_of_lengths_and_of_the_best_of_k() -> None:
    # (1 * 10 + 0 * 30) / 40 = 0.25; without lengths it would be 0.5.
    groups = [finished(0, (1.0, 10), (0.0, 30))]
    assert advantages(experiment(advantage="length_weighted"), *groups) == pytest.approx([0.75, -0.25])
    # The best of two of (1, 0, 0) is 1 in two pairs of three: deviation sqrt(2) / 3.
    groups = [finished(0, (1.0, 3), (0.0, 3), (0.0, 3))]
    unit = math.sqrt(2) / 3 + 1e-6
    expected = [(1 / 3) / unit, (1 / 2 - 2 / 3) / unit, (1 / 2 - 2 / 3) / unit]
    assert advantages(experiment(advantage="pass_at_k", parameters={"k": 2}), *groups) == pytest.approx(expected)
