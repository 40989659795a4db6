"""Advantages against values computed by hand."""

import pytest

from headway.algorithms.advantages import advantages_of, resolve
from headway.records.errors import ConfigurationError

# rewards (1, 0, 0, 1, 0): mean 2/5; population variance (2*0.6^2 + 3*0.4^2) / 5 = 0.24, deviation 0.4898979485566356;
# others' means: 1/4 for a solved member, 2/4 for an unsolved one.
BINARY = [1.0, 0.0, 0.0, 1.0, 0.0]
# rewards (2, -1, 5): mean 2; squares 0 + 9 + 9 = 18, variance 6, deviation 2.449489742783178;
# others' means: 4/2 = 2, 7/2 = 3.5, 1/2 = 0.5.
GRADED = [2.0, -1.0, 5.0]

CASES = [
    ("group_mean", BINARY, [0.6, -0.4, -0.4, 0.6, -0.4]),
    # 0.6 / 0.4898989485566356 and 0.4 / 0.4898989485566356
    (
        "group_mean_std",
        BINARY,
        [1.224742371396692, -0.8164949142644614, -0.8164949142644614, 1.224742371396692, -0.8164949142644614],
    ),
    ("leave_one_out", BINARY, [0.75, -0.5, -0.5, 0.75, -0.5]),
    ("group_mean", GRADED, [0.0, -3.0, 3.0]),
    # 3 / 2.449490742783178
    ("group_mean_std", GRADED, [0.0, -1.2247443713917932, 1.2247443713917932]),
    ("leave_one_out", GRADED, [0.0, -4.5, 4.5]),
]


@pytest.mark.parametrize(("name", "rewards", "expected"), CASES)
def test_values(name: str, rewards: list[float], expected: list[float]) -> None:
    assert advantages_of(resolve(name), rewards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["group_mean", "group_mean_std", "leave_one_out"])
@pytest.mark.parametrize("rewards", [[], [3.7], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_no_signal_is_exactly_zero(name: str, rewards: list[float]) -> None:
    # 0.1 three times has a mean that isn't 0.1: without care the deviation divides rounding error by 1e-6.
    assert advantages_of(resolve(name), rewards) == [0.0] * len(rewards)


def test_own_function_by_name() -> None:
    assert resolve("numpy:negative")([1.0, 2.0]).tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("name", ["grouped", "no.such.module:f", "numpy:no_such", "numpy:", ":f"])
def test_unknown_names_say_what_is_valid(name: str) -> None:
    with pytest.raises(ConfigurationError, match="group_mean_std"):
        resolve(name)


def test_own_function_is_held_to_its_contract() -> None:
    with pytest.raises(ValueError, match="shape"):
        advantages_of(lambda rewards_g: rewards_g[:1], [1.0, 2.0])
    with pytest.raises(ValueError, match="non-finite"):
        advantages_of(lambda rewards_g: rewards_g * float("inf"), [1.0, 2.0])
