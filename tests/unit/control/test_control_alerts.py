"""Rules that call for a person: what lasts and is large is found, noise isn't, each finding is reported once."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import step_of

from headway.control.alerts import (
    EVALUATIONS,
    FIRST,
    RULES,
    STEP_RULES,
    WINDOW,
    AlertHistory,
    AlertTracker,
    divergence,
    entropy_collapse,
    full_disk,
    no_step,
    reward_hacking,
    runaway_lengths,
    skipped_steps,
)
from headway.records.ledger import EvaluationRecord, LedgerLine, StepRecord

SEEDS = st.integers(0, 10_000)


def step(number: int, *, reward: float = 0.5, **changes: object) -> StepRecord:
    metrics = {"loss": 0.0, "entropy": 0.5, "grad_norm": 0.3, "kl": 0.003, "mismatch_k3": 0.003}
    metrics |= changes.pop("metrics", {})  # type: ignore[arg-type]
    fields: dict[str, object] = {"time_s": 10.0 * number, "samples": 64, "rewards__solve_rate": 0.5}
    fields |= {"rewards__mean": reward, "rewards__std": 0.5, "lengths__mean": 200.0, "lengths__max": 512}
    return step_of(number, metrics=metrics, **(fields | changes))


def evaluation(number: int, rate: float, tasks: int = 256, split: str = "validation") -> EvaluationRecord:
    error = math.sqrt(rate * (1 - rate) / tasks)
    return EvaluationRecord(
        split=split, phase="during", step=number, first_version=number, last_version=number, held=False,
        tasks=tasks, samples=tasks, solve_rate=rate, standard_error=error, reward_mean=rate, length_mean=200.0,
    )  # fmt: skip


def history(lines: Iterable[LedgerLine]) -> AlertHistory:
    found = AlertHistory()
    for line in lines:
        found.take(line)
    return found


def raised(lines: Iterable[LedgerLine], interval_s: float = 0.0) -> list[str]:
    tracker = AlertTracker(["all"], interval_s)
    return [rule for line in lines for rule, change in tracker.take(line) if change == "raised"]


# --- rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [{"skipped": True}, {"metrics": {"loss": math.nan}}, {"metrics": {"kl": math.inf}}])
def test_three_bad_steps_in_a_row_are_found_and_two_are_not(spoilt: dict[str, object]):
    good, bad = [step(n) for n in range(5)], [step(5 + n, **spoilt) for n in range(3)]
    assert "3 steps in a row" in skipped_steps(history([*good, *bad]))
    assert skipped_steps(history([*good, *bad[:2]])) == ""
    assert skipped_steps(history([*good, *bad[:2], step(9), bad[2]])) == ""
    assert skipped_steps(history(bad[:2])) == ""


@pytest.mark.parametrize(("name", "limit"), [("kl", 0.15), ("mismatch_k3", 0.15), ("kl_reference", 2.0)])
def test_divergence_that_lasts_is_found_and_a_spike_is_not(name: str, limit: float):
    quiet = [step(n) for n in range(10)]
    high = [step(10 + n, metrics={name: 1.1 * limit}) for n in range(4)]
    assert name in divergence(history([*quiet, *high]))
    assert divergence(history([*quiet, high[0], step(11), step(12), step(13)])) == ""
    assert divergence(history([*quiet, *(step(10 + n, metrics={name: 0.9 * limit}) for n in range(9))])) == ""


def test_entropy_is_compared_with_the_first_steps_while_tasks_are_unsolved():
    def fallen(to: float, solved: float = 0.5, start: float = 0.5) -> str:
        first = [step(n, metrics={"entropy": start}) for n in range(16)]
        return entropy_collapse(history([*first, *(step(16 + n, metrics={"entropy": to}, rewards__solve_rate=solved)
                                                   for n in range(8))]))  # fmt: skip

    assert "entropy fell from 0.5 to 0.04" in fallen(0.04)
    assert fallen(0.06) == ""
    assert fallen(0.04, solved=0.95) == ""
    assert fallen(0.0001, start=0.01) == ""  # there was nothing to collapse


def test_reward_hacking_needs_a_flat_evaluation_that_could_have_shown_a_rise():
    def run(
        reward_rise: float, solve_rise: float, tasks: int = 256, solved: float = 0.4, split: str = "validation"
    ) -> str:
        lines: list[LedgerLine] = []
        for number in range(80):
            done = number / 79
            if number % 10 == 0:
                lines.append(evaluation(number, solved + solve_rise * done, tasks, split))
            lines.append(step(number, reward=0.5 + reward_rise * done + 0.02 * (number % 3)))
        return reward_hacking(history(lines))

    assert "solve rate on validation tasks went from 0.400 to 0.400" in run(1.0, 0.0)
    assert run(1.0, -0.2)
    assert run(1.0, 0.4) == ""  # it learns
    assert run(0.3, 0.0) == ""  # it hardly rises
    assert run(1.0, 0.0, tasks=20) == ""  # 20 tasks can't show that it doesn't learn
    assert run(1.0, 0.0, solved=0.95) == ""  # there is nothing left to learn
    assert run(1.0, 0.0, split="test") == ""


def test_lengths_run_away_when_many_more_are_cut_or_they_grow_within_few_steps():
    def grown(factor: float, cut: float, cut_before: float = 0.0) -> str:
        before = [step(n, lengths__truncated_share=cut_before) for n in range(30)]
        changes = {"lengths__mean": 200.0 * factor, "lengths__truncated_share": cut}
        return runaway_lengths(history([*before, *(step(30 + n, **changes) for n in range(8))]))

    assert "from 200 to 320 tokens; 50% are cut, at the start 0%" in grown(1.6, 0.5)
    assert grown(1.4, 0.9) == ""
    assert grown(1.6, 0.2) == ""
    assert grown(1.6, 0.9, cut_before=0.8) == ""  # most were cut from the start
    assert "within 30 steps" in grown(3.1, 0.0)
    assert grown(2.9, 0.0) == ""


def test_slow_growth_is_found_once_responses_are_cut():
    thinking = [step(n, lengths__mean=200.0 * 1.004**n, lengths__truncated_share=0.0) for n in range(400)]
    assert raised(thinking) == []
    cut = [step(n, lengths__mean=200.0 * 1.004**n, lengths__truncated_share=min(1.0, n / 600)) for n in range(400)]
    assert raised(cut) == ["length"]


def test_no_step_asks_for_many_times_the_longest_of_three_known():
    assert "no step for 6000 s" in no_step(6000.0, [100.0, 60.0, 500.0], 10.0, 600.0)
    assert no_step(4999.0, [100.0, 60.0, 500.0], 10.0, 600.0) == ""
    assert no_step(599.0, [1.0] * 5, 10.0, 600.0) == ""
    assert no_step(1e9, [1.0, 1.0], 10.0, 600.0) == ""
    assert no_step(math.nan, [1.0] * 5, 10.0, 600.0) == ""


def test_disk_is_full_below_what_is_needed():
    assert "/runs has 1.00 GiB left; the run may need 2.00" in full_disk(1 << 30, 2 << 30, "/runs")
    assert full_disk(2 << 30, 2 << 30, "/runs") == ""


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(SEEDS, st.floats(0.05, 3.0), st.floats(20.0, 20_000.0), st.floats(-0.001, 0.004))
def test_noise_and_slow_learning_raise_nothing(seed: int, entropy: float, length: float, learns: float):
    draw, lines = random.Random(seed), list[LedgerLine]()
    for number in range(200):
        solved = min(0.97, max(0.02, 0.4 + learns * number))
        if number % 20 == 0:
            lines.append(evaluation(number, min(0.99, max(0.01, solved + draw.gauss(0, 0.03)))))
        lines.append(
            step(
                number,
                reward=solved + draw.gauss(0, 0.05),
                rewards__solve_rate=min(1.0, max(0.0, solved + draw.gauss(0, 0.05))),
                lengths__mean=length * math.exp(draw.gauss(0, 0.15)),
                lengths__truncated_share=min(1.0, max(0.0, 0.1 + draw.gauss(0, 0.05))),
                skipped=draw.random() < 0.02,
                metrics={"entropy": entropy * math.exp(-number / 150 + draw.gauss(0, 0.1)), "kl": draw.gauss(0, 0.02)},
            )
        )
    assert raised(lines) == []


@given(st.lists(st.builds(StepRecord, step=st.integers(0, 9), version=st.integers(0, 9),
                          metrics=st.dictionaries(st.sampled_from(["kl", "entropy", "loss"]), st.floats())),
                max_size=40))  # fmt: skip
def test_any_records_can_be_read(lines: list[StepRecord]):
    tracker = AlertTracker(["all"], 0.0)
    for line in lines:
        tracker.take(line)
    assert len(tracker.history.steps) == len(lines)


def test_history_is_bounded():
    found = history([line for n in range(600) for line in (step(n), evaluation(n, 0.5))])
    assert len(found.steps) == WINDOW
    assert len(found.evaluations) == EVALUATIONS
    assert [one.step for one in found.first] == list(range(FIRST))


# --- when they are reported ------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 100.0)), max_size=60), st.floats(0.0, 300.0), st.integers(1, 5))
def test_alerts_alternate_with_their_ends_and_keep_the_interval(
    looks: list[tuple[bool, float]], interval_s: float, misses: int
):
    tracker, now_s, changes, missed = AlertTracker(["disk"], interval_s), 0.0, [], 0
    for found, passed_s in looks:
        now_s += passed_s
        missed = 0 if found else missed + 1
        change = tracker.update("disk", "full" if found else "", now_s, misses)
        if change:
            changes.append((change, now_s))
            assert found if change == "raised" else missed >= misses
    kinds = [kind for kind, _ in changes]
    assert kinds == ["raised", "cleared"] * (len(kinds) // 2) + ["raised"] * (len(kinds) % 2)
    times = [at for kind, at in changes if kind == "raised"]
    assert all(later - earlier >= interval_s for earlier, later in itertools.pairwise(times))
    assert bool(changes) == any(found for found, _ in looks)


def test_finding_that_stays_is_raised_once_and_one_that_returns_early_later():
    tracker = AlertTracker(["all"], 100.0)
    assert [tracker.update("disk", "full", now_s) for now_s in (0.0, 1.0, 500.0)] == ["raised", "", ""]
    assert tracker.update("disk", "", 501.0) == "cleared"
    tracker = AlertTracker(["all"], 100.0)
    tracker.update("disk", "full", 0.0)
    tracker.update("disk", "", 1.0)
    assert [tracker.update("disk", "full", now_s) for now_s in (2.0, 99.0, 100.0)] == ["", "", "raised"]


def test_only_the_rules_that_are_named_are_looked_at():
    assert AlertTracker(["all"], 0.0).rules == list(RULES)
    tracker = AlertTracker(["length"], 0.0)
    assert tracker.update("disk", "full", 0.0) == ""
    assert tracker.raised == {}
    assert set(STEP_RULES) < set(RULES)
