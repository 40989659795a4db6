"""What becomes of a reward, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithms.groups.rewards import overlong_penalty, reward_to_go


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (140, -1.0)],
)
def test_overlong(tokens: int, penalty: float) -> None:
    # Limit 100, buffer 20: (tokens - 80) / 20.
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty, abs=1e-15)


def test_overlong_buffers_at_their_limits() -> None:
    assert [overlong_penalty(tokens, 4, 1) for tokens in range(6)] == [0, 0, 0, 0, -1, -1]
    assert [overlong_penalty(tokens, 4, 4) for tokens in range(5)] == [0, -0.25, -0.5, -0.75, -1]


def test_reward_to_go() -> None:
    # Sample 0: 1 + 2 + 4, 2 + 4, 4. Sample 2: 8. Sample 3: -1 + 0.5, 0.5. Nothing of sample 1.
    penalties, samples = np.array([1.0, 2.0, 4.0, 8.0, -1.0, 0.5]), np.array([0, 0, 0, 2, 3, 3])
    assert reward_to_go(penalties, samples).tolist() == [7.0, 6.0, 4.0, 8.0, -0.5, 0.5]
    assert reward_to_go(np.zeros(0), np.zeros(0, np.int64)).tolist() == []


@given(st.lists(st.lists(st.floats(-10, 10), max_size=5), max_size=6))
def test_reward_to_go_is_the_sum_of_what_comes(penalties: list[list[float]]) -> None:
    flat = np.array([value for sample in penalties for value in sample])
    samples = np.array([index for index, sample in enumerate(penalties) for _ in sample], np.int64)
    expected = [sum(sample[i:]) for sample in penalties for i in range(len(sample))]
    assert reward_to_go(flat, samples).tolist() == pytest.approx(expected, abs=1e-9)
