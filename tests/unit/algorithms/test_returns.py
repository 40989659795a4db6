"""Advantages and value targets against their sums term by term, and the field's known silent faults by name."""

from __future__ import annotations

import numpy as np
import pytest
import sb3_values as sb3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headway.algorithms.returns import Steps, decay_by_length, gae, gae_of_tokens, v_trace

NUMBERS = st.floats(-3, 3, allow_nan=False, width=32)
SHARES = st.floats(0, 1, allow_nan=False, width=32)


@st.composite
def steps(draw, lanes: bool = True) -> Steps:
    """Episodes that follow each other in some lanes: they go on, end, or are cut."""
    shape = (draw(st.integers(1, 12)), *([draw(st.integers(1, 3))] if lanes else []))
    rewards, values, cut_values = (draw(arrays.arrays(np.float64, shape, elements=NUMBERS)) for _ in range(3))
    ends = draw(arrays.arrays(np.int8, shape, elements=st.sampled_from([0, 0, 0, 1, 2])))  # 1: ends, 2: is cut
    ends[-1] = np.where(ends[-1] == 0, 2, ends[-1])
    following = np.concatenate([values[1:], values[:1]])
    next_values = np.where(ends == 0, following, np.where(ends == 1, 0.0, cut_values))
    return Steps(rewards, values, next_values, ends == 0)


def term_by_term(all_steps: Steps, ratios, discount, decay, limit):
    """Targets v and advantages, as the papers' sums, lane by lane."""
    rewards, values, next_values, continues = (np.atleast_2d(part.T).T for part in all_steps)
    cut = np.minimum(np.atleast_2d(ratios.T).T, limit)
    targets, advantages = np.zeros_like(values), np.zeros_like(values)
    count = len(rewards)
    for lane in range(rewards.shape[1]):
        for t in range(count):
            weight, total = 1.0, 0.0
            for k in range(t, count):
                delta = rewards[k, lane] + discount * next_values[k, lane] - values[k, lane]
                total += weight * cut[k, lane] * delta
                if not continues[k, lane]:
                    break
                weight *= discount * decay * cut[k, lane]
            targets[t, lane] = values[t, lane] + total
    for lane in range(rewards.shape[1]):
        for t in range(count):
            after = next_values[t, lane]
            target = targets[t + 1, lane] if continues[t, lane] else after
            mixed = decay * target + (1 - decay) * after
            advantages[t, lane] = rewards[t, lane] + discount * mixed - values[t, lane]
    return advantages.reshape(all_steps.values_t.shape), targets.reshape(all_steps.values_t.shape)


@given(steps(), SHARES, SHARES, st.data())
def test_v_trace_is_its_sum(all_steps, discount, decay, data):
    shape = all_steps.values_t.shape
    ratios = data.draw(arrays.arrays(np.float64, shape, elements=st.floats(0, 3, width=32)))
    advantages, targets = v_trace(all_steps, ratios, discount, decay)
    expected_advantages, expected_targets = term_by_term(all_steps, ratios, discount, decay, 1.0)
    np.testing.assert_allclose(targets, expected_targets, atol=1e-9)
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-9)


@given(steps(), SHARES, SHARES)
def test_gae_is_v_trace_on_policy(all_steps, discount, decay):
    advantages, targets = gae(all_steps, discount, decay)
    expected_advantages, expected_targets = term_by_term(
        all_steps, np.ones_like(all_steps.values_t), discount, decay, 1
    )
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-9)
    np.testing.assert_allclose(targets, expected_targets, atol=1e-9)


def test_stable_baselines3_has_the_same_advantages_and_returns():
    following = np.concatenate([sb3.VALUES[1:], [sb3.LAST_VALUES]])
    next_values = np.choose(sb3.ENDS, [following, np.zeros_like(following), sb3.CUT_VALUES])
    returns = gae(Steps(sb3.REWARDS, sb3.VALUES, next_values, sb3.ENDS == 0), 0.99, 0.95)
    np.testing.assert_allclose(returns.advantages_t, sb3.ADVANTAGES, atol=2e-6)
    np.testing.assert_allclose(returns.targets_t, sb3.RETURNS, atol=2e-6)


def test_without_decay_it_is_the_return_less_the_value():
    rewards, values = np.array([1.0, 0, 0, 2]), np.array([0.5, 0.25, -1, 3])
    returns = gae(Steps(rewards, values, np.array([0.25, -1, 3, 0]), np.array([True, True, True, False])), 1.0, 1.0)
    np.testing.assert_allclose(returns.advantages_t, [3, 2, 2, 2] - values)
    np.testing.assert_allclose(returns.targets_t, [3, 2, 2, 2])


def test_an_episode_that_is_cut_bootstraps_and_one_that_ends_does_not():
    rewards, values, continues = np.zeros(2), np.array([0.5, 0.5]), np.array([True, False])
    ended = gae(Steps(rewards, values, np.array([0.5, 0.0]), continues), 0.9, 0.8)
    cut = gae(Steps(rewards, values, np.array([0.5, 2.0]), continues), 0.9, 0.8)
    np.testing.assert_allclose(ended.advantages_t, [-0.05 + 0.72 * -0.5, -0.5])
    np.testing.assert_allclose(cut.advantages_t, [-0.05 + 0.72 * 1.3, 1.3])


def test_nothing_crosses_from_an_episode_into_the_one_before():
    """The next row of a lane is another episode's."""
    steps_of = lambda later: Steps(  # noqa: E731
        np.array([0.0, 1.0, *later]), np.zeros(4), np.zeros(4), np.array([True, False, True, False])
    )
    for returns in (lambda s: gae(s, 1.0, 1.0), lambda s: v_trace(s, np.full(4, 0.5), 1.0)):
        np.testing.assert_array_equal(
            returns(steps_of((5, 7))).advantages_t[:2], returns(steps_of((-9, 0))).advantages_t[:2]
        )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), SHARES, st.data())
def test_tokens_of_sequences_are_steps_of_episodes(counts, discount, data):
    sequence = np.repeat(np.arange(len(counts)), counts)
    rewards, values = (data.draw(arrays.arrays(np.float64, sum(counts), elements=NUMBERS)) for _ in range(2))
    decay = data.draw(arrays.arrays(np.float64, len(counts), elements=SHARES))
    cut = data.draw(arrays.arrays(np.float64, len(counts), elements=NUMBERS))
    advantages, targets = gae_of_tokens(rewards, values, sequence, discount, decay, cut)
    for number, count in enumerate(counts):
        of_sequence = sequence == number
        its_values = values[of_sequence]
        one = Steps(
            rewards[of_sequence], its_values, np.append(its_values[1:], cut[number]), np.arange(count) < count - 1
        )
        expected = gae(one, discount, decay[number])
        np.testing.assert_allclose(advantages[of_sequence], expected.advantages_t, atol=1e-12)
        np.testing.assert_allclose(targets[of_sequence], expected.targets_t, atol=1e-12)


def test_tokens_of_an_environment_take_no_part():
    """Whether a tool answered one token or a thousand between two turns changes nothing."""
    rewards, values = np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.1, 0.2, 0.3, 0.4])
    mask = np.array([1, 1, 0, 0, 0, 1, 1], np.bool_)
    at = np.flatnonzero(mask)
    with_tool_rewards = np.full(7, 9.0)
    with_tool_rewards[at] = rewards
    returns = gae_of_tokens(with_tool_rewards[mask], values, np.zeros(4, np.int64), 0.99, 0.95)
    plain = gae_of_tokens(rewards, values, np.zeros(4, np.int64), 0.99, 0.95)
    np.testing.assert_array_equal(returns.advantages_t, plain.advantages_t)
    assert plain.advantages_t[0] == pytest.approx(
        (0.99 * 0.2 - 0.1)
        + 0.99 * 0.95 * (0.99 * 0.3 - 0.2)
        + (0.99 * 0.95) ** 2 * (0.99 * 0.4 - 0.3)
        + (0.99 * 0.95) ** 3 * (1 - 0.4)
    )


def test_no_tokens():
    returns = gae_of_tokens(np.zeros(0), np.zeros(0), np.zeros(0, np.int64), 1.0, 1.0)
    assert returns.advantages_t.shape == returns.targets_t.shape == (0,)


def test_the_decay_grows_with_the_length():
    np.testing.assert_allclose(decay_by_length([1, 20, 40, 2000]), [0, 0, 0.5, 0.99])
