"""What leaves a finished group, hand-computed: default hooks, a user's, filters, padding, rewards by turn."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.aggregation import weighting
from headway.algorithms.groups.batches import build_batch, useful_samples
from headway.algorithms.groups.filters import FilteredGroup, GroupFilters
from headway.algorithms.groups.hook_conformance import synthetic_group
from headway.algorithms.groups.outcome import group_outcome, group_timeout
from headway.algorithms.groups.rewards import credits_of, returns_to_go
from headway.algorithms.samples import build_arrays, sequence_of_token
from headway.config.load import validate_experiment
from headway.config.schema import Experiment, QueueConfig
from headway.records.errors import ConfigurationError
from headway.records.rollout import FinishedGroup, Rollout
from headway.records.task import Task

TASK = Task(task_id="0", prompt="p")
PLAIN: dict[str, Any] = {"algorithm": {"advantage": "group_mean"}}


def experiment(**sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t"}}}
    for name, section in {**PLAIN, **sections}.items():
        raw[name] = PLAIN.get(name, {}) | section
    return validate_experiment(raw, "test")


def judge(members: tuple[float | str, ...], **sections: dict[str, Any]) -> FilteredGroup:
    leaving = GroupFilters(experiment(**sections), lambda rollout: "a response")
    return leaving.apply(synthetic_group(TASK, members))


def advantages(judged: FilteredGroup, **sections: dict[str, Any]) -> dict[int, float]:
    batch = build_batch(0, [judged.finished], experiment(**sections))
    return {sample.rollout.member: sample.advantage for sample in batch.samples}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module, ``own``."""
    module = ModuleType("own")
    monkeypatch.setitem(sys.modules, "own", module)
    return module


# --- defaults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "ending", "reason", "valid"),
    [
        ((2.3, 0.5, -0.7, 1.0), None, "", 4),  # rewards above 1 and negative ones are as good as others
        ((1.0, 1.0, 1.0, 1.0), "filtered", "zero_variance", 4),
        ((2.3, 2.3), "filtered", "zero_variance", 2),
        ((1.0, "failed", 0.0, "failed"), None, "", 2),
        ((1.0, "failed", "failed", "failed"), "failed", "too_few_valid", 1),
        ((1.0, "filtered", "filtered", "filtered"), "filtered", "too_few_kept", 1),
        (("failed", "failed"), "failed", "too_few_valid", 0),
        (("filtered", "filtered"), "filtered", "too_few_kept", 0),
        ((0.7,), None, "", 1),
        (("failed",), "failed", "too_few_valid", 0),
    ],
)
def test_defaults(members: tuple[float | str, ...], ending: str | None, reason: str, valid: int) -> None:
    judged = judge(members)
    assert (judged.outcome.ending, judged.outcome.reason, judged.outcome.valid) == (ending, reason, valid)
    assert judged.finished == synthetic_group(TASK, members)  # nothing is written that a default run doesn't use


def test_default_rewards_of_any_scale_keep_their_differences() -> None:
    judged = judge((2.3, 0.5, -0.7, "failed"))
    mean = (2.3 + 0.5 - 0.7) / 3
    assert advantages(judged) == pytest.approx({0: 2.3 - mean, 1: 0.5 - mean, 2: -0.7 - mean})
    assert judged.meta == pytest.approx(
        {"valid_share": 0.75, "reward_min": -0.7, "reward_mean": 0.7, "reward_max": 2.3}
    )
    assert judge(("failed", "failed")).meta == {"valid_share": 0.0}


@pytest.mark.parametrize(
    ("finished", "open_s", "stopped"),
    [
        ((), 29.9, None),
        ((0, 1, 2), 30.0, (3,)),
        ((3,), 45.0, (0, 1, 2)),
        ((), 30.0, (0, 1, 2, 3)),
        ((0, 1, 2, 3), 99.0, None),
    ],
)
def test_group_timeout(finished: tuple[int, ...], open_s: float, stopped: tuple[int, ...] | None) -> None:
    assert group_timeout(size=4, finished=finished, open_s=open_s, timeout_s=30.0) == stopped
    assert group_timeout(size=4, finished=finished, open_s=open_s, timeout_s=None) is None


def late(*members: float | str) -> FinishedGroup:
    """A group of which those called "late" were stopped at the timeout."""
    finished = synthetic_group(TASK, tuple("discarded" if m == "late" else m for m in members))
    stopped = [
        msgspec.structs.replace(r, removal_reason="group_timeout") if r.removal == "discarded" else r
        for r in finished.rollouts
    ]
    return FinishedGroup(group=finished.group, rollouts=tuple(stopped))


@pytest.mark.parametrize(
    ("members", "ending", "reason"),
    [
        ((1.0, 0.0, 0.5, "late"), None, ""),  # 0.75 of it finished, 0.7 are enough
        ((1.0, 0.0, "late", "late"), "failed", "group_timeout"),
        ((1.0, 0.0, "failed", "late"), "failed", "group_timeout"),  # though 0.5 would do without a timeout
        ((1.0, 0.0, "failed", "failed"), None, ""),
        ((1.0, 1.0, 1.0, "late"), "filtered", "zero_variance"),
        (("late", "late"), "failed", "group_timeout"),
    ],
)
def test_a_group_that_timed_out(members: tuple[float | str, ...], ending: str | None, reason: str) -> None:
    outcome = group_outcome(late(*members).rollouts, size=len(members), limits=QueueConfig())
    assert (outcome.ending, outcome.reason) == (ending, reason)


# --- a user's own -------------------------------------------------------------------------------------------


def test_own_hooks_in_their_order(own: ModuleType) -> None:
    seen: list[Any] = []

    def reward(group: Any, rollout: Rollout, response: str) -> float:
        assert response == "a response"
        return rollout.reward * 10

    def meta(group: Any, rollouts: Any) -> dict[str, float]:
        seen.append(("meta", [r.valid for r in rollouts], [r.trained_reward for r in rollouts]))
        return {"best": 3.0}

    def valid(group: Any, rollouts: Any) -> bool:
        seen.append(("valid", len(rollouts)))
        return True

    def item(group: Any, rollout: Rollout) -> tuple[bool, str]:
        seen.append(("item", rollout.member))
        return rollout.reward < 2, "too good"

    def normalize(group: Any, rollouts: Any, rewards: Any) -> Any:
        seen.append(("normalize", [r.member for r in rollouts], rewards.tolist()))
        return rewards / 5

    own.__dict__.update(reward=reward, meta=meta, valid=valid, item=item, normalize=normalize)
    names = {"reward": "reward", "group_meta": "meta", "is_valid_group": "valid", "filter_item": "item",
             "normalize_group": "normalize"}  # fmt: skip
    sections = {"hooks": {key: f"own:{name}" for key, name in names.items()}}
    judged = judge((2.3, "failed", 0.5, -0.5), **sections)
    assert seen == [
        ("meta", [True, False, True, True], [23.0, None, 5.0, -5.0]),
        ("valid", 4),
        ("item", 0),
        ("item", 2),
        ("item", 3),
        ("normalize", [2, 3], [5.0, -5.0]),
    ]
    assert judged.meta == {"best": 3.0}
    assert judged.outcome.ending is None
    left = judged.finished.rollouts[0]
    assert left.ended == ("filtered", "user:too good")
    assert [r.reward for r in judged.finished.rollouts] == [2.3, 0.0, 0.5, -0.5]  # as the verifier said
    assert [r.trained_reward for r in judged.finished.valid] == [1.0, -1.0]
    assert advantages(judged, **sections) == {2: 1.0, 3: -1.0}


def test_a_reward_hook_decides_what_varies(own: ModuleType) -> None:
    own.reward = lambda group, rollout, response: rollout.member  # of equal rewards, unlike ones
    hooks = {"hooks": {"reward": "own:reward"}}
    assert judge((1.0, 1.0), **hooks).outcome.ending is None
    own.reward = lambda group, rollout, response: 0.0
    assert judge((1.0, 0.0), **hooks).outcome.reason == "zero_variance"


def test_what_lengths_cost_is_taken_before_rewards_are_normalised(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.algorithms.groups.batches._OVERLONG_PENALTY", 0.25)
    own.double = lambda group, rollouts, rewards: rewards * 2
    # The limit is 3 tokens and every made-up response has them: the penalty of 0.25 falls on all.
    sections = {"rollout": {"max_response_tokens": 3}, "algorithm": {"overlong": "penalty"}}
    judged = judge((1.0, 0.0), hooks={"normalize_group": "own:double"}, **sections)
    assert [r.trained_reward for r in judged.finished.rollouts] == [1.5, -0.5]
    assert advantages(judged, **sections) == {0: 1.0, 1: -1.0}


def test_refused_groups_and_too_few_members(own: ModuleType) -> None:
    own.refuse = lambda group, rollouts: (False, "  stale\n task ")
    assert judge((1.0, 0.0), hooks={"is_valid_group": "own:refuse"}).outcome.reason == "user:stale task"
    own.refuse = lambda group, rollouts: False
    refused = judge((1.0, 0.0), hooks={"is_valid_group": "own:refuse"}).outcome
    assert (refused.ending, refused.reason) == ("filtered", "user:is_valid_group")
    own.item = lambda group, rollout: rollout.reward > 0
    hooks = {"hooks": {"filter_item": "own:item"}}
    three = judge((1.0, 0.0, 0.5, 0.25), **hooks)
    assert three.outcome.ending is None
    assert [r.removal_reason for r in three.finished.rollouts] == ["", "user:filter_item", "", ""]
    strict = judge((1.0, 0.0, 0.5, 0.25), queue={"min_valid_item_ratio": 0.8}, **hooks)
    assert (strict.outcome.ending, strict.outcome.reason) == ("filtered", "too_few_kept")


@pytest.mark.parametrize("hook", ["reward", "is_valid_group", "filter_item", "normalize_group", "pad_group"])
def test_a_hook_that_raises_fails_its_group_and_no_other(hook: str, own: ModuleType) -> None:
    own.hook = lambda *given: [][0]
    judged = judge((1.0, "failed", 0.0), hooks={hook: "own:hook"})
    assert (judged.outcome.ending, judged.outcome.reason) == ("failed", f"hook:{hook}")
    [problem] = judged.problems
    assert str(problem).startswith(
        f"hooks.{hook} = 'own:hook' raised IndexError: list index out of range (test_group_filters.py"
    )
    assert judged.finished == synthetic_group(TASK, (1.0, "failed", 0.0))


def test_statistics_that_fail_cost_nothing_else(own: ModuleType) -> None:
    own.meta = lambda group, rollouts: {"best": float("inf")}
    judged = judge((1.0, 0.0), hooks={"group_meta": "own:meta"})
    assert judged.outcome.ending is None
    assert (judged.meta, len(judged.problems)) == ({}, 1)


def test_low_advantages() -> None:
    # group_mean of 0.6, 0.4, 0.5: 0.1, -0.1, 0.
    assert judge((0.6, 0.4, 0.5), queue={"min_advantage": 0.099}).outcome.ending is None
    low = judge((0.6, 0.4, 0.5), queue={"min_advantage": 0.11}).outcome
    assert (low.ending, low.reason) == ("filtered", "low_advantage")
    with pytest.raises(ConfigurationError, match=r"queue.min_advantage = 0.1 .* 'batch_mean_std' is known only once"):
        experiment(queue={"min_advantage": 0.1}, algorithm={"advantage": "batch_mean_std"})


def test_overlong_members_leave() -> None:
    finished = synthetic_group(TASK, (1.0, 0.0, 0.5))
    cut = [msgspec.structs.replace(r, finish_reason="length") if r.member < 1 else r for r in finished.rollouts]
    leaving = GroupFilters(experiment(algorithm={"overlong": "filter"}), lambda rollout: "")
    judged = leaving.apply(FinishedGroup(group=finished.group, rollouts=tuple(cut)))
    assert judged.outcome.ending is None
    assert judged.finished.rollouts[0].ended == ("filtered", "overlong")
    assert advantages(judged) == {1: -0.25, 2: 0.25}


# --- padding ------------------------------------------------------------------------------------------------


def test_padding_repeats_members_and_shares_their_weight() -> None:
    judged = judge((1.0, "failed", 0.0, "failed", 0.5), hooks={"pad_group": "repeat"})
    assert [r.copies for r in judged.finished.rollouts] == [2, 1, 2, 1, 1]
    batch = build_batch(0, [judged.finished], experiment())
    assert [(s.rollout.member, s.weight, s.advantage) for s in batch.samples] == [
        (0, 0.5, 0.5), (0, 0.5, 0.5), (2, 0.5, -0.5), (2, 0.5, -0.5), (4, 1.0, 0.0),
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"hooks.pad_group = 'repeat' .*second_moment_limit"):
        experiment(hooks={"pad_group": "repeat"}, algorithm={"second_moment_limit": 0.04})


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.3, "failed"]), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]),
    st.sampled_from(["group_mean_std", "batch_mean_std"]),
)
@settings(deadline=None, max_examples=60)
def test_padding_changes_no_gradient_weight(groups, aggregation, advantage) -> None:
    """The weight of each rollout's tokens in the loss, times their advantage, is the same padded and not."""
    given_ = {"algorithm": {"advantage": advantage}, "queue": {"filter_zero_variance": False}}

    def weights(pad: str) -> tuple[dict[str, float], int]:
        leaving = GroupFilters(experiment(hooks={"pad_group": pad}, **given_), lambda rollout: "")
        judged = [leaving.apply(synthetic_group(TASK, tuple(m), index=i)) for i, m in enumerate(groups)]
        kept = [j.finished for j in judged if j.outcome.ending is None]
        batch = build_batch(0, kept, experiment(**given_))
        arrays = build_arrays(batch)
        everyone = np.arange(arrays.samples)
        found = weighting(aggregation, arrays, everyone, max_response_tokens=9)
        by_rollout: dict[str, float] = {}
        token_sample = sequence_of_token(arrays)
        for index, sample in enumerate(batch.samples):
            own = (token_sample == index) & arrays.loss_mask_n
            share = float(found.weights_s[index] / found.divisor * arrays.advantages_n[own].sum())
            by_rollout[sample.rollout.rollout_id] = by_rollout.get(sample.rollout.rollout_id, 0.0) + share
        return by_rollout, arrays.loss_tokens

    plain, padded = weights("none"), weights("repeat")
    assert padded[0] == pytest.approx(plain[0], abs=1e-12)
    assert padded[1] == plain[1]


# --- rewards by turn ----------------------------------------------------------------------------------------


def test_returns_to_go() -> None:
    assert returns_to_go([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert returns_to_go([1.0, 0.0, 4.0], 1.0) == [5.0, 4.0, 4.0]
    assert returns_to_go([1.0, 0.0, 4.0], 0.0) == [1.0, 0.0, 4.0]
    assert returns_to_go([], 0.5) == []


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0, 1))
def test_a_return_is_the_discounted_sum(rewards: list[float], discount: float) -> None:
    wanted = [sum(discount**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert returns_to_go(rewards, discount) == pytest.approx(wanted, abs=1e-9)


def turned(finished: FinishedGroup, ends: tuple[int, ...], *rewards: tuple[float, ...]) -> FinishedGroup:
    members = [
        msgspec.structs.replace(r, turn_ends=ends, turn_rewards=own, reward=sum(own))
        for r, own in zip(finished.rollouts, rewards, strict=True)
    ]
    return FinishedGroup(group=finished.group, rollouts=tuple(members))


def test_each_turn_has_the_advantage_of_its_return() -> None:
    # Three tokens, turns of 1 and 2. Discount 0.5: returns (1 + 0.5 x 2, 2) and (0, 0); mean of all turns 1.
    finished = turned(synthetic_group(TASK, (0.0, 0.0)), (1, 3), (1.0, 2.0), (0.0, 0.0))
    given_ = {"algorithm": {"turn_discount": 0.5}}
    batch = build_batch(0, [finished], experiment(**given_))
    assert [s.turn_advantages for s in batch.samples] == [(1.0, 1.0), (-1.0, -1.0)]
    finished = turned(synthetic_group(TASK, (0.0, 0.0)), (1, 3), (4.0, 0.0), (0.0, 0.0))
    batch = build_batch(0, [finished], experiment(**given_))
    assert [s.turn_advantages for s in batch.samples] == [(3.0, -1.0), (-1.0, -1.0)]
    assert batch.samples[0].advantage == pytest.approx((3.0 - 2.0) / 3)  # mean over three tokens
    arrays = build_arrays(batch)
    assert arrays.advantages_n.tolist() == [0.0, 3.0, -1.0, -1.0, 0.0, -1.0, -1.0, -1.0]
    # Without the discount only the outcome counts.
    assert [s.turn_advantages for s in build_batch(0, [finished], experiment()).samples] == [(), ()]
    assert [s.advantage for s in build_batch(0, [finished], experiment()).samples] == [2.0, -2.0]


def test_equal_outcomes_of_unlike_turns_are_no_zero_variance() -> None:
    finished = turned(synthetic_group(TASK, (0.0, 0.0)), (1, 3), (1.0, 0.0), (0.0, 1.0))
    by_turn = GroupFilters(experiment(algorithm={"turn_discount": 0.5}), lambda rollout: "")
    assert by_turn.apply(finished).outcome.ending is None
    assert GroupFilters(experiment(), lambda rollout: "").apply(finished).outcome.reason == "zero_variance"


def test_shaping_falls_on_the_last_turn() -> None:
    rollout = turned(synthetic_group(TASK, (0.0,)), (1, 3), (1.0, 2.0)).rollouts[0]
    assert credits_of(rollout, 3.0, 0.5) == [2.0, 2.0]
    assert credits_of(rollout, 2.0, 0.5) == [1.5, 1.0]  # a penalty of 1
    assert credits_of(rollout, 2.0, None) == [2.0]
    with pytest.raises(ConfigurationError, match=r"hooks.normalize_group = 'own:f' is given one reward"):
        experiment(algorithm={"turn_discount": 0.5}, hooks={"normalize_group": "own:f"})


def test_turns_that_end_elsewhere_are_refused() -> None:
    finished = turned(synthetic_group(TASK, (0.0, 0.0)), (1, 2), (1.0, 2.0), (0.0, 0.0))
    batch = build_batch(0, [finished], experiment(algorithm={"turn_discount": 0.5}))
    with pytest.raises(ValueError, match=r"rollout 0-0: 2 turn advantages, turns end at \[1, 2\] of 3 response tokens"):
        build_arrays(batch)


# --- rules of sources -------------------------------------------------------------------------------------


def observed(members: tuple[float, ...], source: str, *, runs: bool) -> FinishedGroup:
    finished = synthetic_group(Task(task_id="0", prompt="p", source=source), members)
    if not runs:
        return finished
    rollouts = tuple(msgspec.structs.replace(r, observations=((0, 1),)) for r in finished.rollouts)
    return msgspec.structs.replace(finished, rollouts=rollouts)


@pytest.mark.parametrize("minimum", [0.0, 0.5])
def test_equal_rewards_filter_a_group_only_where_nothing_else_trains_it(minimum: float) -> None:
    sections = {
        "environment": {"name": "tools_of:Shop"},
        "tasks": {"train": [{"path": "plain"}, {"path": "tools", "algorithm": {"environment_coefficient": 0.1}}]},
        "queue": {"min_advantage": minimum},
    }
    filters = GroupFilters(experiment(**sections), lambda rollout: "a response")
    outcomes = {
        (source, runs): filters.apply(observed((1.0, 1.0, 1.0), source, runs=runs)).outcome
        for source in ("plain", "tools")
        for runs in (False, True)
    }
    assert {key: outcome.ending for key, outcome in outcomes.items()} == {
        ("plain", False): "filtered",
        ("plain", True): "filtered",
        ("tools", False): "filtered",
        ("tools", True): None,
    }
    assert outcomes["plain", True].reason == "zero_variance"


def test_each_source_has_its_advantage_and_is_compared_with_its_own_rule() -> None:
    sections = {
        "algorithm": {"advantage": "batch_mean_std"},
        "tasks": {"train": [{"path": "plain"}, {"path": "own", "algorithm": {"advantage": "group_mean"}}]},
    }
    groups = [observed((1.0, 0.0), "plain", runs=False), observed((9.0, 5.0), "own", runs=False)]
    batch = build_batch(0, groups, experiment(**sections))
    assert [sample.rule for sample in batch.samples] == [0, 0, 1, 1]
    assert [round(sample.advantage, 3) for sample in batch.samples] == [1.0, -1.0, 2.0, -2.0]
    rules = experiment(**sections).rules
    assert useful_samples(batch.samples, rules) == 4
    flat = build_batch(0, [observed((1.0, 1.0), "own", runs=True)], experiment(**sections))
    assert useful_samples(flat.samples, rules) == 0
