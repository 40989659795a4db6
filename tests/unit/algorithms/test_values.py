"""Rewards at their tokens, values to advantages, and the field's known silent faults of both by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headway.algorithms.groups.batches import build_batch, trains_without_reward, useful_samples
from headway.algorithms.groups.filters import GroupFilters
from headway.algorithms.samples import build_arrays, lay_out
from headway.algorithms.values import Moments, least_probabilities, values_of_tokens, with_ends
from headway.config.load import validate_experiment
from headway.config.objective.critic import CriticConfig
from headway.config.schema import Experiment
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, FinishedGroup, Group, Rollout, Sample
from headway.records.task import Task
from headway.records.tokens import EXPERTS, TokenRows
from headway.records.training import TrainBatch

NUMBERS = st.floats(-3, 3, allow_nan=False, width=32)
RAW: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}


def experiment(**algorithm: Any) -> Experiment:
    return validate_experiment({**RAW, "algorithm": {"advantage": "gae"} | algorithm}, "test")


def rollout(mask: list[int], reward: float = 1.0, group: int = 0, **fields: Any) -> Rollout:
    tokens = len(mask)
    return Rollout(
        group=group,
        member=0,
        prompt_ids=(7, 8),
        response_ids=tuple(range(tokens)),
        response_mask=tuple(map(bool, mask)),
        versions=(VersionSpan(version=0, tokens=tokens),),
        reward=reward,
        **({"response_logprobs": (-1.0,) * tokens} | fields),
    )


def finished(*rollouts: Rollout) -> FinishedGroup:
    group = Group(
        index=rollouts[0].group,
        task=Task(task_id="t", prompt="p"),
        prompt_ids=(7, 8),
        size=len(rollouts),
        admitted_version=0,
        admitted_s=0.0,
    )
    return FinishedGroup(group=group, rollouts=rollouts)


def rewards(made: Experiment, one: Rollout) -> list[float]:
    return build_arrays(build_batch(0, [finished(one)], made)).advantages_n.tolist()[2:]


def test_the_outcome_stands_at_the_last_loss_token() -> None:
    """Not at the last token: an answer that ends with a tool's text would lose its reward."""
    assert rewards(experiment(), rollout([1, 1, 0, 1, 0, 0], 0.5)) == [0, 0, 0, 0.5, 0, 0]
    assert rewards(experiment(), rollout([1, 1, 1], 0.5)) == [0, 0, 0.5]
    assert rewards(experiment(), rollout([0, 0], 0.5)) == [0, 0]
    assert rewards(experiment(), rollout([], 0.5)) == []


def test_rewards_by_turn_stand_where_they_were_given() -> None:
    turns = {"turn_ends": (2, 4, 6), "turn_rewards": (0.25, 0.5, 2.0)}
    assert rewards(experiment(), rollout([1, 1, 0, 1, 1, 0], 2.75, **turns)) == [0, 0.25, 0, 0.5, 2.0, 0]
    # A turn without a loss token rewards the token before it; what came before the first one rewards nothing.
    assert rewards(experiment(), rollout([1, 1, 0, 0, 1, 0], 2.75, **turns)) == [0, 0.75, 0, 0, 2.0, 0]
    assert rewards(experiment(), rollout([0, 0, 0, 1, 1, 0], 2.75, **turns)) == [0, 0, 0, 0.5, 2.0, 0]
    shaped = rollout([1, 1, 0, 1, 1, 0], 2.75, **turns, trained_reward=3.75)
    assert rewards(experiment(), shaped) == [0, 0.25, 0, 0.5, 3.0, 0], "what hooks add is the last turn's"


def test_equal_rewards_are_filtered_neither_alone_nor_together() -> None:
    made = experiment()
    filters = GroupFilters(made, lambda r: "")
    assert filters.apply(finished(rollout([1], 1.0))).outcome.ending is None
    pair = finished(rollout([1], 1.0), msgspec.structs.replace(rollout([1], 1.0), member=1))
    assert filters.apply(pair).outcome.ending is None
    assert trains_without_reward((), made.algorithm)
    samples = build_batch(0, [finished(rollout([1], 0.0)), finished(rollout([0], 0.0, 1))], made).samples
    assert useful_samples(samples, made.rules) == 1


def test_trees_are_filtered_by_name() -> None:
    """Of several roles, or of a history that was rewritten: a batch with one would end the run at every replay."""
    trunk = rollout([1, 1])
    branch = Branch(
        prompt_ids=trunk.prompt_ids,
        response_ids=trunk.response_ids,
        response_logprobs=trunk.response_logprobs,
        response_mask=trunk.response_mask,
        versions=trunk.versions,
    )
    pair = finished(msgspec.structs.replace(trunk, branches=(branch,)), msgspec.structs.replace(trunk, member=1))
    for algorithm, kept in (({}, [1]), ({"advantage": "group_mean"}, [0, 1])):
        filtered = GroupFilters(experiment(**algorithm), lambda r: "").apply(pair).finished
        assert [member.member for member in filtered.valid] == kept
        assert [member.removal_reason for member in filtered.rollouts] == ["" if 0 in kept else "branches", ""]


@pytest.mark.parametrize(("overlong", "bootstraps"), [("score", None), ("bootstrap", [True, False])])
def test_a_cut_response_bootstraps_if_the_key_says_so(overlong: str, bootstraps: list[bool] | None) -> None:
    cut = rollout([1, 1], finish_reason="length")
    batch = build_batch(0, [finished(cut), finished(rollout([1, 1], group=1))], experiment(overlong=overlong))
    made = lay_out(batch)
    assert (None if made.bootstraps_s is None else made.bootstraps_s.tolist()) == bootstraps
    taken = made.take(np.array([1])).arrays().bootstraps_s
    assert (None if taken is None else taken.tolist()) == (None if bootstraps is None else [False])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data(), st.sampled_from([0.5, 1.0, "length"]))
def test_tools_tokens_neither_decay_nor_carry_value(counts: list[int], data: st.DataObject, decay: Any) -> None:
    """Sequences with tools' tokens between loss tokens have the advantages of those without, and one without a loss
    token takes no part."""
    sequence_m = np.repeat(np.arange(len(counts)), counts)
    rewards_m, values_m = (data.draw(arrays.arrays(np.float64, len(sequence_m), elements=NUMBERS)) for _ in range(2))
    cut_s = data.draw(arrays.arrays(np.float64, len(counts), elements=NUMBERS))
    settings = CriticConfig(gae=(0.9, decay))
    found = values_of_tokens(rewards_m, values_m, sequence_m, cut_s, settings)
    start = 0
    for number, count in enumerate(counts):
        behind_a = behind_t = 0.0
        following, total = cut_s[number], cut_s[number]
        lam = max(0.0, 1 - 1 / (0.05 * count)) if decay == "length" and count else decay
        for t in reversed(range(start, start + count)):
            delta = rewards_m[t] + 0.9 * following - values_m[t]
            behind_a = delta + (0.9 * lam * behind_a if t < start + count - 1 else 0.0)
            total = rewards_m[t] + 0.9 * total
            behind_t = total if decay == "length" else behind_a + values_m[t]
            following = values_m[t]
            assert found.advantages_m[t] == pytest.approx(behind_a, abs=1e-9)
            assert found.targets_m[t] == pytest.approx(behind_t, abs=1e-9)
            assert found.returns_m[t] == pytest.approx(total, abs=1e-9)
        start += count


def test_a_cut_response_ends_or_bootstraps() -> None:
    settings, zero = CriticConfig(gae=(1.0, 1.0)), np.zeros(2, np.int64)
    for behind in (0.0, 5.0):
        found = values_of_tokens(np.array([0.0, 1.0]), np.array([0.5, 0.25]), zero, np.array([behind]), settings)
        assert found.advantages_m.tolist() == [0.5 + behind, 0.75 + behind]
        assert found.targets_m.tolist() == [1.0 + behind, 1.0 + behind]


@given(st.lists(arrays.arrays(np.float64, st.integers(0, 6), elements=NUMBERS), min_size=1, max_size=5))
def test_moments_of_parts_are_those_of_all(parts: list[np.ndarray]) -> None:
    joined, together = Moments.joined([Moments.of(part) for part in parts]), np.concatenate(parts)
    assert joined.count == len(together)
    if len(together):
        assert joined.mean == pytest.approx(together.mean(), abs=1e-9)
        assert joined.squares == pytest.approx(together.var() * len(together), abs=1e-9)
        assert joined.deviation == pytest.approx(together.std() if together.std() > 1e-6 else 1.0)


def test_a_token_is_added_behind_each_cut_sequence() -> None:
    rows = {EXPERTS: TokenRows.of([[1], [2], [3], [4]])}
    cut = Sample(rollout=rollout([1, 0], token_rows=rows), advantage=0.0, rewards=(1.0,), bootstraps=True)
    whole = Sample(rollout=rollout([1, 1], group=1, token_rows=rows), advantage=0.0, rewards=(1.0,))
    for samples, added in (((cut, whole), [4]), ((whole, cut), [8]), ((cut, whole, cut), [4, 13])):
        before = build_arrays(TrainBatch(step=0, samples=samples))
        after, own_n = with_ends(before)
        kept = np.flatnonzero(own_n)
        assert np.flatnonzero(~own_n).tolist() == added
        for name in ("token_ids_n", "loss_mask_n", "advantages_n", "versions_n"):
            np.testing.assert_array_equal(getattr(after, name)[kept], getattr(before, name))
        assert after.loss_mask_n[added].all()
        assert after.lengths_s.tolist() == [5 if sample.bootstraps else 4 for sample in samples]
        row_lengths = np.array(list(after.token_rows[EXPERTS].lengths))
        assert row_lengths[added].tolist() == [0] * len(added)
        assert row_lengths.sum() == 4 * len(samples)


def test_the_lowest_probability_is_that_of_earlier_loss_tokens() -> None:
    """A tool's answer isn't sampled, and another sequence begins with none."""
    logprobs = tuple(np.log([0.9, 0.2, 1e-9, 0.5]).tolist())
    first, second = (rollout([1, 1, 0, 1], group=group, response_logprobs=logprobs) for group in range(2))
    samples = tuple(Sample(rollout=one, advantage=0.0, rewards=(1.0,)) for one in (first, second))
    probabilities_n = least_probabilities(build_arrays(TrainBatch(step=0, samples=samples)))
    np.testing.assert_allclose(probabilities_n, [1, 1, 1, 0.9, 0.2, 0.2] * 2, rtol=1e-6)
