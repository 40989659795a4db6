"""pass@k, fast_p, intervals and speed-ups against arithmetic by other means."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scripted_kernels import evaluation

from headway.control.estimates import pass_share
from headway.kernels.scores import JudgedTask, mean_over_tasks, score_tasks, scores_by_level


def judged(name: str, *outcomes: str | float, level: int = 1) -> JudgedTask:
    """A number: correct, with that speed-up."""
    found = [evaluation("correct", one) if isinstance(one, float) else evaluation(one) for one in outcomes]
    return JudgedTask(name=name, level=level, evaluations=tuple(found))


def rational_share(solved: int, valid: int, k: int) -> Fraction:
    """The share of all subsets of k, counted one by one."""
    subsets = list(itertools.combinations([True] * solved + [False] * (valid - solved), k))
    return Fraction(sum(map(any, subsets)), len(subsets))


def test_pass_share_equals_the_counted_subsets():
    for valid in range(1, 9):
        for solved, k in itertools.product(range(valid + 1), range(1, valid + 1)):
            assert abs(pass_share(solved, valid, k) - float(rational_share(solved, valid, k))) <= 1e-12


def test_pass_share_is_exact_for_many_attempts():
    for solved, valid, k in [(1, 1000, 100), (3, 2000, 64), (500, 1000, 2), (7, 64, 32)]:
        exact = 1 - Fraction(math.comb(valid - solved, k), math.comb(valid, k))
        assert abs(Fraction(pass_share(solved, valid, k)) - exact) <= Fraction(1, 10**12)


TASKS = [
    judged("a", "not compiled", "wrong", 2.5, 0.9),
    judged("b", "cheat", "not compiled", "segmentation_fault", 1.0),
    judged("c", "infrastructure", 1.6, 1.2, "timeout", level=2),
    judged("d", level=2),
    judged("e", "infrastructure", level=3),
]


def test_shares_equal_rational_arithmetic():
    scores = score_tasks(TASKS, (1, 2, 4))
    compiled, correct = ((3, 4), (2, 4), (3, 3)), ((2, 4), (1, 4), (2, 3))
    for shares, counts in ((scores.compiled, compiled), (scores.correct, correct)):
        for k in (1, 2, 4):
            exact = [rational_share(c, n, k) for c, n in counts if n >= k]
            assert abs(Fraction(shares[str(k)].value) - sum(exact) / len(exact)) <= Fraction(1, 10**12)
            assert shares[str(k)].tasks == len(exact)
    faster = {"0.8": ((2, 4), (1, 4), (2, 3)), "1": ((1, 4), (0, 4), (2, 3)), "1.5": ((1, 4), (0, 4), (1, 3))}
    faster["2"] = ((1, 4), (0, 4), (0, 3))
    for p, counts in faster.items():
        assert abs(scores.fast[p].value - float(sum(Fraction(*one) for one in counts) / 3)) <= 1e-12
    assert (scores.tasks, scores.candidates, scores.missing, scores.unanswered) == (5, 11, 2, 1)
    assert scores.outcomes == {
        "correct": 5, "not compiled": 2, "wrong": 1, "cheat": 1, "segmentation_fault": 1, "timeout": 1
    }  # fmt: skip


def test_one_candidate_a_task_gives_kernelbenchs_fast_p():
    speedups = [0.5, 0.9, 1.0, 1.4, 1.8, 2.0, 7.0]
    scores = score_tasks([judged(str(one), one) for one in speedups] + [judged("x", "wrong")], (1,))
    for p in (0.8, 1.0, 1.5, 2.0):
        assert scores.fast[f"{p:g}"].value == pytest.approx(sum(one > p for one in speedups) / 8, abs=1e-12)


def test_correct_candidates_without_a_speedup_are_counted_and_no_faster():
    refused = JudgedTask(name="r", level=1, evaluations=(evaluation("correct", None), evaluation("correct", 3.0)))
    scores = score_tasks([refused], (1,))
    assert (scores.untimed, scores.correct["1"].value, scores.fast["2"].value) == (1, 1.0, 0.5)
    assert score_tasks([refused], (1,), timed=False).fast == {}


def test_intervals_cover_the_mean_of_random_sets_of_tasks():
    random = np.random.default_rng(5)
    covered, widths = 0, []
    for _ in range(200):
        values = random.beta(2, 3, size=40)
        found = mean_over_tasks(list(values))
        assert found is not None
        low, high = found.interval
        covered += low <= 0.4 <= high
        widths.append(high - low)
    assert 180 <= covered <= 199
    assert np.mean(widths) == pytest.approx(2 * 1.96 * 0.2 / math.sqrt(40), rel=0.1)


def test_intervals_are_the_same_every_time_and_honest_where_all_tasks_agree():
    assert mean_over_tasks([0.0, 0.5, 1.0]) == mean_over_tasks([0.0, 0.5, 1.0])
    assert mean_over_tasks([]) is None
    none, every = mean_over_tasks([0.0] * 20), mean_over_tasks([1.0] * 20)
    assert none is not None
    assert every is not None
    assert none.interval == (0.0, pytest.approx(0.1611, abs=1e-4))  # Wilson's of 0 in 20
    assert every.interval == (pytest.approx(0.8389, abs=1e-4), 1.0)


def test_speedups_are_summed_up_as_logarithms():
    found = score_tasks([judged("a", 0.5, 2.0, 4.0, "wrong")], (1,)).speedups
    assert found is not None
    assert (found.count, found.mean) == (3, pytest.approx(math.log(4) / 3, abs=1e-12))
    assert found.quantiles["0.5"] == pytest.approx(math.log(2), abs=1e-12)
    assert found.histogram == {"-0.7": 1, "0.6": 1, "1.3": 1}
    assert score_tasks([judged("a", "wrong")], (1,)).speedups is None


def test_levels_are_scored_apart():
    levels = scores_by_level(TASKS, (1,))
    assert {level: (one.tasks, one.candidates) for level, one in levels.items()} == {
        "1": (2, 8), "2": (2, 3), "3": (1, 0)
    }  # fmt: skip
    assert levels["3"].compiled == levels["3"].correct == levels["3"].fast == {}
    assert levels["2"].correct["1"].value == pytest.approx(2 / 3, abs=1e-12)
