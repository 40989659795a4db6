"""Delays between attempts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.retries import backoff_s

seconds = st.floats(min_value=1e-3, max_value=1e3)


@given(retry=st.integers(1, 10_000), first_s=seconds, longest_s=seconds)
def test_delays_double_from_the_first_to_the_longest(retry: int, first_s: float, longest_s: float) -> None:
    delay_s, next_s = backoff_s(retry, first_s, longest_s), backoff_s(retry + 1, first_s, longest_s)
    assert backoff_s(1, first_s, longest_s) == min(first_s, longest_s)
    assert next_s == min(longest_s, 2 * delay_s)
    assert 0 < delay_s <= longest_s


@pytest.mark.parametrize("retry", [0, -1])
def test_the_first_attempt_waits_for_nothing(retry: int) -> None:
    assert backoff_s(retry, 0.5) == 0.0


def test_a_delay_without_a_limit_is_finite() -> None:
    assert backoff_s(3, 0.25) == 1.0
    assert 0 < backoff_s(100_000, 0.5) < float("inf")
