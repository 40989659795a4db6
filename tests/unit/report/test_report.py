"""The report: verdicts in words."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import evaluation, step_record, synthetic_lines

from headway.control.summaries import pooled
from headway.control.tuning.balance import WaitShares
from headway.records.ledger import Distribution, EventRecord, LedgerLine, PrunerFigures, QueueFlow
from headway.report import live_view
from headway.report.formats import duration, quantity
from headway.report.tables import summary_rows
from headway.report.verdict import judge, judge_balance, judge_learning
from headway.report.watch.view_report import _evaluations as evaluation_section
from headway.telemetry.metrics import scalars
from headway.telemetry.summary import summarise

# --- verdict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "generator", "budget", "balance"),
    [
        (0.00, 0.00, 4, "matched"),
        (0.05, 0.09, 4, "matched"),
        (0.45, 0.02, 4, "generation-bound"),
        (0.21, 0.10, 4, "generation-bound"),
        (0.02, 0.45, 4, "training-bound"),
        (0.15, 0.08, 4, "matched"),
        (0.18, 0.12, 4, "matched"),
        (0.50, 0.45, 4, "other-bound"),
        (0.22, 0.15, 4, "other-bound"),
        (0.60, 0.19, 4, "generation-bound"),
        (0.60, 0.35, 4, "other-bound"),
        (0.45, 0.57, 4, "other-bound"),
        (0.55, 0.45, 0, "synchronous"),
        (0.45, 0.02, None, "generation-bound"),
    ],
)
def test_balance(trainer: float, generator: float, budget: int | None, balance: str) -> None:
    found, text = judge_balance(WaitShares(trainer=trainer, generator=generator), budget)
    assert found == balance
    assert f"{trainer:.0%}" in text
    assert f"{generator:.0%}" in text


@given(*[st.floats(0, 1)] * 3, st.sampled_from([None, 0, 4]))
def test_environments_bind_only_where_both_wait_a_lot_and_rollouts_are_mostly_there(
    trainer: float, generator: float, environment: float, budget: int | None
) -> None:
    waits = WaitShares(trainer=trainer, generator=generator, environment=environment)
    balance, text = judge_balance(waits, budget)
    binds = min(trainer, generator) > 0.2 and environment > 0.4 and budget != 0
    assert (balance == "environment-bound") == binds
    assert binds == ("more generators would not" in text and "sandbox.live" in text)
    if not binds:
        assert (balance, text) == judge_balance(WaitShares(trainer=trainer, generator=generator), budget)


def test_the_share_of_the_environments_is_read_from_the_ledger() -> None:
    lines = [step_record(s, trainer_wait_ratio=0.6, trainer_wait_s=0.7, generator_wait_ratio=0.6) for s in range(4)]

    def text(environment_s: float, hop_s: float = 0.0) -> str:
        flow = QueueFlow(generating_s=10.0, environment_s=environment_s, environment_hop_s=hop_s)
        steps: list[LedgerLine] = [msgspec.structs.replace(line, flow=flow) for line in lines]
        return judge(steps, summarise(steps), 4).balance_text

    assert "rollouts spend 75% of their time" in text(7.5)
    assert text(1.0).startswith("Bound by neither model")
    assert text(7.5, 6.5).startswith("Bound by neither model"), "an instant environment, in another process"


def test_on_shared_devices_nobody_is_the_bottleneck() -> None:
    balance, busy = judge_balance(WaitShares(trainer=0.5, generator=0.02, yielded=0.48), 4)
    assert balance == "time-shared"
    assert "48%" in busy
    assert "Neither waits" in busy
    idle = WaitShares(trainer=0.7, generator=0.3, yielded=0.3)
    assert "budget of 1" in judge_balance(idle, 0)[1]
    assert "admission" in judge_balance(idle, 4)[1]


def test_where_both_sides_wait_the_report_says_what_was_measured_of_it() -> None:
    waits: dict[str, float] = {"trainer_wait_ratio": 0.45, "generator_wait_ratio": 0.57}
    quiet = {"orchestrator_cpu_s": 0.0, "verify_s": 0.0, "publish_s": 0.0}
    flow = QueueFlow(generating_s=10.0, environment_s=4.5, environment_hop_s=4.2, straggler_wait_s=0.25)

    def text(**changes: object) -> str:
        steps: list[LedgerLine] = [
            step_record(s, trainer_wait_s=0.45, step_s=1.0, **waits, **{**quiet, **changes}) for s in range(4)
        ]
        return judge(steps, summarise(steps), 4).balance_text

    assert text(flow=flow).endswith(
        "both high. The steps measured: rollouts spent 42% of their time between processes; the trainer "
        "waited 25% for the oldest groups, at the budget's edge."
    )
    assert "the orchestrator computed for 60% of the time" in text(flow=flow, orchestrator_cpu_s=0.6)
    assert "None of what a step measures" in text(flow=QueueFlow(generating_s=10.0))


def test_evaluations_that_mostly_failed_measure_no_learning() -> None:
    failing = {"samples": 5, "failed": 91, "failure_cause": "KeyError: 'x'"}
    lines = [evaluation("before", 0, 0.4), evaluation("after", 9, 1.0, **failing)]
    learning, change, _, text = judge_learning(lines)
    assert (learning, change) == ("unknown", None)
    assert text.startswith("Not measured, too many attempts failed: solve rate on 500")
    assert "after: MOST FAILED, and count in no rate: 91 of 96 attempts failed: KeyError: 'x'" in text
    assert "docs/troubleshooting.md#rollouts-that-failed" in judged(lines, 4).pages
    assert "91 of 96" in summary_rows(summarise(lines))["failed"]
    assert judge_learning([lines[0], evaluation("after", 9, 1.0, failed=2)])[0] == "improved"


def test_learning_needs_two_standard_errors() -> None:
    def judged(before: float, after: float, error: float) -> str:
        lines = [
            evaluation("before", 0, before, standard_error=error),
            evaluation("after", 9, after, standard_error=error),
        ]
        return judge_learning(lines)[0]

    assert judged(0.45, 0.93, 0.01) == "improved"
    assert judged(0.93, 0.45, 0.01) == "worse"
    assert judged(0.50, 0.52, 0.01) == "no measurable change"  # 0.02 < 2 x 0.0141
    assert judged(0.50, 0.53, 0.01) == "improved"
    assert judged(0.50, 0.50, 0.0) == "no measurable change"


def test_learning_text_has_the_numbers() -> None:
    learning, change, error, text = judge_learning(synthetic_lines(20))
    assert learning == "improved"
    assert change == pytest.approx(0.478)
    assert error == pytest.approx(math.hypot(math.sqrt(0.452 * 0.548 / 500), math.sqrt(0.93 * 0.07 / 500)))
    assert text.startswith(
        "Yes: solve rate on 500 held-out tasks 0.452 ± 0.022 (version 0) → 0.930 ± 0.011 (version 20)"
    )


def test_learning_without_held_evaluations_uses_validation_then_training() -> None:
    validations = [evaluation("during", step, rate, "validation") for step, rate in ((20, 0.4), (60, 0.7))]
    assert judge_learning(validations)[0] == "improved"
    steps = [step_record(step, rewards__solve_rate=0.2 if step < 5 else 0.8) for step in range(10)]
    learning, change, _, text = judge_learning(steps)
    assert (learning, change) == ("unknown", None)
    assert "from 0.200" in text
    assert "to 0.800" in text
    assert "Too early" in judge_learning(steps[:3])[3]


def test_an_evaluation_whose_every_attempt_failed_measured_nothing() -> None:
    nothing = {"samples": 0, "failed": 500, "standard_error": 0.0}
    lines = [
        evaluation("before", 0, 0.0, "validation", **nothing),
        evaluation("during", 20, 0.4, "validation"),
        evaluation("during", 40, 0.0, "validation", **nothing),
        evaluation("during", 60, 0.7, "validation"),
        evaluation("after", 60, 0.0, **nothing),
    ]
    learning, change, _, _ = judge_learning(lines)
    assert learning == "improved"
    assert change == pytest.approx(0.3)
    assert judge_learning([lines[0], lines[1], lines[4]])[0] == "unknown"
    summary = summarise(lines)
    assert (summary.solve_rate_before, summary.solve_rate_after) == (None, None)
    assert "–" in evaluation_section([lines[0]])["rows"][0]
    assert "–" not in evaluation_section([lines[1]])["rows"][0]
    assert live_view.evaluation_line(lines[0]).startswith("validation before: solve rate – (500 tasks")
    assert scalars(lines[0]) == {}


def judged(lines: list[LedgerLine], budget: int | None):
    return judge(lines, summarise(lines), budget)


def test_a_broken_budget_is_said_loudly() -> None:
    stale = step_record(0, trajectory_staleness=Distribution(mean=2.0, max=5.0, histogram={"5": 1}))
    verdict = judged([stale], 4)
    assert verdict.staleness_within_budget is False
    assert verdict.staleness_text.startswith("BUDGET BROKEN: trajectories were at most 5 versions old")
    assert judged([stale], 5).staleness_within_budget is True
    assert judged([stale], None).staleness_within_budget is None


def test_a_skipped_step_trained_nothing() -> None:
    fresh = Distribution(mean=0.0, max=0.0, histogram={"0": 64})
    stale = Distribution(mean=4.0, max=4.0, histogram={"4": 64})
    lines: list[LedgerLine] = [
        step_record(0, trajectory_staleness=fresh),
        step_record(1, trajectory_staleness=stale, skipped=True),
    ]
    assert "0.0 on average" in judged(lines, 4).staleness_text
    assert judged(lines[1:], 4).staleness_text == "Nothing has been trained yet."


def test_books_and_failures() -> None:
    lines = synthetic_lines(5)
    assert judged(lines, 4).accounting_text.startswith("Yes: every rollout")
    assert judged(lines, 4).failures_text == "Nothing."
    unbalanced = [
        *lines[:-2],
        EventRecord(event="accounting", detail="rollout 3-1 ended twice", data={"balanced": 0}),
    ]
    assert judged(unbalanced, 4).accounting_text.startswith("NO: rollout 3-1 ended twice")
    failing = [step_record(0, failures={"reward": 2, "engine": 1}, endings={"trained": 61, "failed": 3})]
    verdict = judged(failing, 4)
    assert verdict.failures == {"reward": 2, "engine": 1}
    assert verdict.failures_text == "3 of 64 rollouts: 1 at the engine, 2 at the reward."
    assert verdict.accounting_text.startswith("Not closed yet")


def test_groups_that_end_untrained_are_no_nothing() -> None:
    said = EventRecord(event="no_progress", detail="64 groups in a row", data={"groups": 64, "reason": "zero_variance"})
    verdict = judged([said], 4)
    assert verdict.sentences["Why is nothing trained?"] == "At version 0 64 groups in a row."
    assert verdict.failures_text == "No recorded step shows a cause, but no step completes."
    assert "docs/troubleshooting.md#most-groups-are-filtered" in verdict.pages
    solved = msgspec.structs.replace(said, event="mostly_solved")
    assert judged([solved], 4).failures_text == "Nothing."
    assert "Why is nothing trained?" not in judged([said, step_record(0)], 4).sentences


def test_nothing_recorded_yet() -> None:
    verdict = judged([EventRecord(event="start")], 4)
    assert verdict.balance == "unknown"
    assert verdict.staleness_within_budget is None
    assert verdict.learning == "unknown"


# --- numbers ---------------------------------------------------------------------------------------------


def test_histograms_pool_in_numeric_order() -> None:
    assert list(pooled([{"10": 1, "2": 3}, {"2": 1}]).items()) == [(2, 4), (10, 1)]


def test_numbers_read_well() -> None:
    assert [duration(s) for s in (0.0123, 3.42, 59.99, 307, 7500)] == [
        "12 ms", "3.4 s", "1 min 00 s", "5 min 07 s", "2 h 05 min",
    ]  # fmt: skip
    assert [quantity(v) for v in (0.1234, 12.34, 1700.4, 20000, 3.1e9)] == ["0.123", "12.3", "1,700", "20 k", "3.1 G"]


def test_what_was_pruned_is_said_where_something_was() -> None:
    plain = [step_record(step, tokens__ended={"trained": 500}) for step in range(4)]
    assert judge(plain, summarise(plain), 2).pruning_text == ""
    figures = PrunerFigures(rollouts=10, dropped=4, saved_tokens=100, audits=3, audited_tokens=900, wrong=1,
                            reward_bias=0.25)  # fmt: skip
    pruned = [*plain, step_record(4, pruning={"repetition": figures}, tokens__ended={"trained": 275})]
    verdict = judge(pruned, summarise(pruned), 2)
    assert verdict.pruning_text == (
        "10 rollouts ended early (repetition 10), 4 of them left their group; about 2,275 response tokens saved, 50% "
        "of what would have been generated. Of 3 audited ones, which ran to their own end, pruning would have been "
        "wrong about 1 (33%); their reward is +0.250 off what it would have given."
    )
    assert list(verdict.sentences.items())[-1] == ("What was pruned?", verdict.pruning_text)
    assert "What was pruned?" not in judge(plain, summarise(plain), 2).sentences
