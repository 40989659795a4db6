"""Advantages against values computed by hand."""

from itertools import combinations

import numpy as np
import pytest

from headway.algorithms.advantages import KEY, Advantage, advantages_of, length_weighted, pass_at_k, resolve
from headway.records.errors import ConfigurationError, HookFailed
from headway.runtime.hooks import Hook

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


WITHIN_GROUPS = ["group_mean", "group_mean_std", "leave_one_out", "length_weighted", "pass_at_k"]
EVERY = [*WITHIN_GROUPS, "batch_mean_std", "group_mean_batch_std"]


def advantages(name: str, rewards: list[float], groups: list[int] | None = None) -> list[float]:
    """Advantages of a batch, by default of one group."""
    groups_s = np.array([0] * len(rewards) if groups is None else groups, np.int64)
    return resolve(name)(np.array(rewards, np.float64), groups_s).tolist()


@pytest.mark.parametrize(("name", "rewards", "expected"), CASES)
def test_values(name: str, rewards: list[float], expected: list[float]) -> None:
    assert advantages(name, rewards) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("name", "rewards", "expected"), CASES)
def test_groups_of_a_batch_are_apart_in_any_order(name: str, rewards: list[float], expected: list[float]) -> None:
    # Each member of group 7 is followed by one of group 3, whose rewards are all 9.
    between = [value for reward in rewards for value in (reward, 9.0)]
    found = advantages(name, between, [7, 3] * len(rewards))
    assert found[::2] == pytest.approx(expected, abs=1e-12)
    assert found[1::2] == [0.0] * len(rewards)


# Rewards (3, 1, 5, 3, 8) of groups (0, 0, 1, 1, 2).
# Over the batch: mean 20/5 = 4; squares 1 + 9 + 1 + 1 + 16 = 28, variance 5.6, deviation 2.366431913239846; so
# -1, -3, 1, -1, 4 over 2.366432913239846.
# Group means 2, 4, 8: centred 1, -1, 1, -1, 0; their mean 0, variance 4/5, deviation 0.8944271909999159; so
# 1 / 0.8944281909999159 = 1.1180327387512923, and 0 for the group of one.
BATCH, GROUPS = [3.0, 1.0, 5.0, 3.0, 8.0], [0, 0, 1, 1, 2]


def by_subsets(rewards: list[float], k: int) -> list[float]:
    """Pass@k's advantages by looking at every subset of k."""
    subsets = list(combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    mean, std = float(np.mean(best)), float(np.std(best)) + 1e-6
    return [
        float(np.mean([(b - mean) / std for b, subset in zip(best, subsets, strict=True) if i in subset]))
        for i in range(len(rewards))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "rewards", [[*BINARY, 0.0], [*GRADED, 0.5, 2.0, -3.0], [0, 0, 0, 0, 0, 1.0], [1e6, 0, 0, 1, 2, 3]]
)
def test_pass_at_k_is_the_mean_over_subsets(rewards: list[float], k: int) -> None:
    found = pass_at_k(np.array(rewards), k).tolist()
    assert found == pytest.approx(by_subsets(rewards, k), abs=1e-9)
    # No subset is better or worse than they are on average: the advantages of all members sum to 0.
    assert sum(found) == pytest.approx(0.0, abs=1e-9)


def test_pass_at_k_by_hand() -> None:
    # One of four solved, k = 2: R = 1 - C(3, 2) / C(4, 2) = 0.5, deviation 0.5; (1 - 1/3 ... of an unsolved one: its
    # pairs are solved one time in three, (1/3 - 0.5) / 0.5.
    unit = 0.5 / 0.500001
    assert pass_at_k(np.array([0, 1.0, 0, 0]), 2).tolist() == pytest.approx([-unit / 3, unit, -unit / 3, -unit / 3])
    # Every pair of three solved ones and one unsolved one holds a solved one, as all of a group is one subset.
    assert pass_at_k(np.array([1.0, 1.0, 0, 1.0]), 2).tolist() == [0.0] * 4
    assert pass_at_k(np.array([1.0, 0, 0]), 3).tolist() == pass_at_k(np.array([1.0, 0, 0]), 9).tolist() == [0.0] * 3
    found = resolve("pass_at_k", 2)(np.array([0, 5.0, 1, 5, 0, 5, 0, 5]), np.array([0, 1] * 4)).tolist()
    assert found == pytest.approx([-unit / 3, 0, unit, 0, -unit / 3, 0, -unit / 3, 0])


def test_length_weighted_by_hand() -> None:
    # (10 * 1 + 30 * 0 + 60 * 0.5) / 100 = 0.4; without lengths, and with equal ones, the mean.
    rewards, lengths = np.array([1.0, 0.0, 0.5]), np.array([10, 30, 60])
    assert length_weighted(rewards, lengths).tolist() == pytest.approx([0.6, -0.4, 0.1], abs=1e-12)
    assert float(length_weighted(rewards, lengths) @ lengths) == pytest.approx(0.0, abs=1e-12)
    for equal in (np.zeros(3, np.int64), np.full(3, 7)):
        assert length_weighted(rewards, equal).tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-12)
    batch = resolve("length_weighted", tokens_s=np.array([10, 1, 30, 1, 60]))
    found = batch(np.array([1.0, 2.0, 0.0, 4.0, 0.5]), np.array([3, 8, 3, 8, 3])).tolist()
    assert found == pytest.approx([0.6, -1.0, -0.4, 1.0, 0.1], abs=1e-12)


def test_batch_values() -> None:
    assert advantages("batch_mean_std", BATCH, GROUPS) == pytest.approx(
        [-0.42257694879290514, -1.2677308463787154, 0.42257694879290514, -0.42257694879290514, 1.6903077951716206],
        abs=1e-12,
    )
    unit = 1.1180327387512923
    assert advantages("group_mean_batch_std", BATCH, GROUPS) == pytest.approx([unit, -unit, unit, -unit, 0], abs=1e-12)
    # Which group a sample is in says nothing to batch_mean_std, and all that matters to group_mean_batch_std.
    assert advantages("batch_mean_std", BATCH, [4] * 5) == advantages("batch_mean_std", BATCH, GROUPS)
    shuffled = [3, 0, 4, 1, 2]
    found = advantages("group_mean_batch_std", [BATCH[i] for i in shuffled], [GROUPS[i] for i in shuffled])
    assert found == pytest.approx([-unit, unit, 0, -unit, unit], abs=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("rewards", [[], [3.7], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_no_signal_is_exactly_zero(name: str, rewards: list[float]) -> None:
    # 0.1 three times has a mean that isn't 0.1: without care the deviation divides rounding error by 1e-6.
    assert advantages(name, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", [*WITHIN_GROUPS, "group_mean_batch_std"])
def test_groups_of_one_member_or_of_equal_rewards_teach_nothing(name: str) -> None:
    assert advantages(name, [0.1, 0.7, 0.3], [0, 1, 2]) == [0.0] * 3
    assert advantages(name, [0.1, 0.1, 0.1, 0.7, 0.7, 0.7], [0, 0, 0, 1, 1, 1]) == [0.0] * 6


def test_groups_of_one_member_teach_over_the_batch() -> None:
    # Mean 0.5, deviation 0.5: 0.5 / 0.500001.
    assert advantages("batch_mean_std", [0.0, 1.0], [0, 1]) == pytest.approx(
        [-0.999998000004, 0.999998000004], abs=1e-12
    )


def test_own_function_by_name() -> None:
    assert advantages("numpy:negative", [1.0, 2.0]) == [-1.0, -2.0]
    # It is called once for each group and sees nothing of the others.
    assert advantages("numpy:cumsum", [1.0, 2.0, 3.0, 4.0], [0, 1, 0, 1]) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("name", ["grouped", "no.such.module:f", "numpy:no_such", "numpy:", ":f"])
def test_unknown_names_say_what_is_valid(name: str) -> None:
    with pytest.raises(ConfigurationError, match="group_mean_std"):
        resolve(name)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda rewards_g: rewards_g[:1], r"returned shape \[1\] for 2 rewards"),
        (lambda rewards_g: rewards_g * float("inf"), r"returned \[inf, inf\] for \[1.0, 2.0\]: not all finite"),
        (lambda rewards_g: "high", "returned 'high': 2 numbers are required"),
        (lambda rewards_g: rewards_g[5], "raised IndexError: .*test_advantages.py, line"),
    ],
)
def test_own_function_is_held_to_its_contract(function: Advantage, what: str) -> None:
    with pytest.raises(HookFailed, match="algorithm.advantage = 'mine:own' " + what):
        advantages_of(Hook(key=KEY, name="mine:own", function=function), np.array([1.0, 2.0]))
