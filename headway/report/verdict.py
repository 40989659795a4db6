"""Judges a run's figures. Pure: its input are ledger lines, its output are sentences and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from headway.control.tuning.balance import BUSY, Balance, WaitShares, balance_of, measured_limits, waits_of
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, PrunerFigures, RunSummary, StepRecord
from headway.records.training import SKIPPED_VALUE_UPDATES
from headway.report.episodes import mean_text, returns_text, simulators_text
from headway.report.incidents import incident_text
from headway.report.plans.placements import change_sentence
from headway.report.streams import streams_text, teaching_text
from headway.telemetry.ledger import EVENT_CONTROL, EVENT_MOSTLY_SOLVED, EVENT_NO_PROGRESS
from headway.telemetry.pages import troubleshooting
from headway.telemetry.summary import accounting_event, evaluations, failures, measured_evaluation

Learning = Literal["improved", "worse", "no measurable change", "unknown"]

SIGNIFICANT_Z = 2.0  # difference over its standard error, beyond which learning counts as measured
_SIMULATOR_TERMS = {
    "generator capacity (replicas, slots, devices) or shorter responses": "devices for the simulators, smaller blocks",
    "the generator's devices": "the simulators' devices",
    "the generator": "the simulators",
    "more generators": "more simulators",
    "generation-bound": "simulation-bound",
    "finished groups": "finished fragments",
    "rollout": "fragment",
    "trajectories": "fragments",
}  # words of texts on the balance -> those of runs in simulators
_NOT_MEASURED = "Not measured, too many attempts failed"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The answers at the top of a report."""

    balance: Balance  # who waits for whom
    balance_text: str
    staleness_budget: int | None  # None: the run's configuration can't be read
    staleness_within_budget: bool | None
    staleness_text: str
    learning: Learning
    solve_rate_change: float | None
    solve_rate_change_error: float | None  # standard error of the change
    learning_text: str
    accounting_text: str
    failures: dict[str, int]  # rollouts lost, by boundary
    failures_text: str
    streams_text: str = ""  # means over the steps; "": the loss has one stream and rule
    teaching_text: str = ""  # of teachers outside of the trainer; "": there is none
    values_text: str = ""  # of a critic; "": there is none
    pruning_text: str = ""  # "": nothing was pruned
    plan_text: str = ""  # the controller's last recommendation, of a plan to which the run can't change; "": none
    changes_text: str = ""  # changes of plan in the run; "": none
    cost_text: str = ""  # "": no price is known
    simulators_text: str = ""  # rates of a policy in simulators; "": there are none
    untrained_text: str = ""  # why groups have ended untrained since the last step; "": they haven't
    untrained_reason: str = ""  # of the last such ending

    @property
    def sentences(self) -> dict[str, str]:
        """Return the answers by question, in reading order."""
        answers = {
            "Who waits for whom?": self.balance_text,
            "How stale?": self.staleness_text,
            "Is it learning?": self.learning_text,
            "How fast?": self.simulators_text,
            "From which streams?": self.streams_text,
            "What do teachers do?": self.teaching_text,
            "Is every rollout accounted for?": self.accounting_text,
            "What failed?": self.failures_text,
            "What do values explain?": self.values_text,
            "Why is nothing trained?": self.untrained_text,
            "What was pruned?": self.pruning_text,
            "Would another plan pay?": self.plan_text,
            "Did the plan change?": self.changes_text,
            "What did it cost?": self.cost_text,
        }
        return {question: answer for question, answer in answers.items() if answer}

    @property
    def pages(self) -> list[str]:
        """Return the sections of the documentation about the problems of the run."""
        holds_by_title = {
            str(self.balance): self.balance not in ("matched", "unknown"),
            "Budget broken": self.staleness_within_budget is False,
            "Not learning": self.learning in ("worse", "no measurable change"),
            "Rollouts not accounted for": self.accounting_text.startswith("NO:"),
            "Rollouts that failed": bool(self.failures)
            or self.untrained_reason == "too_few_valid"
            or self.learning_text.startswith(_NOT_MEASURED),
            "Most groups are filtered": self.untrained_reason == "zero_variance",
            "No progress": self.untrained_reason not in ("", "too_few_valid", "zero_variance"),
        }
        return [troubleshooting(title) for title, holds in holds_by_title.items() if holds]


def judge(lines: Sequence[LedgerLine], summary: RunSummary, budget: int | None) -> Judgement:
    """Judge a run. ``budget``: η, the largest trajectory staleness allowed; None: unknown."""
    steps = [line for line in lines if isinstance(line, StepRecord)]
    if steps:
        balance, balance_text = judge_balance(waits_of(steps), budget)
        balance_text += f" {measured_limits(steps)}" if balance == "other-bound" else ""
    else:
        balance, balance_text = "unknown", "No training step is recorded yet."
    is_within, staleness_text = judge_staleness(steps, summary.max_trajectory_staleness, budget)
    learning, rate_change, change_error, learning_text = judge_learning(lines)
    failed, untrained_event = failures(lines), _untrained(lines)
    word = _in_simulators if steps and steps[-1].episodes else str
    is_alarm = untrained_event is not None and untrained_event.event == EVENT_NO_PROGRESS
    no_failures = "No recorded step shows a cause, but no step completes." if is_alarm else "Nothing."
    return Judgement(
        balance=balance,
        balance_text=word(balance_text),
        staleness_budget=budget,
        staleness_within_budget=is_within,
        staleness_text=word(staleness_text),
        learning=learning,
        solve_rate_change=rate_change,
        solve_rate_change_error=change_error,
        learning_text=learning_text,
        accounting_text=word(_accounting_text(lines, summary)),
        failures=failed,
        failures_text=" ".join(filter(None, (_failures_text(failed, summary), incident_text(lines)))) or no_failures,
        simulators_text=simulators_text(steps),
        streams_text=streams_text(steps),
        teaching_text=teaching_text(steps),
        values_text=_values_text(steps),
        pruning_text=_pruning_text(steps),
        plan_text=_plan_text(lines),
        changes_text=change_sentence(lines),
        untrained_text=f"At version {untrained_event.step} {untrained_event.detail}." if untrained_event else "",
        untrained_reason=str(untrained_event.data.get("reason", "")) if untrained_event else "",
    )


def _in_simulators(text: str) -> str:
    """Reword a text for a run in simulators, in whose processes the policy acts."""
    for term, simulators_term in _SIMULATOR_TERMS.items():
        text = text.replace(term, simulators_term).replace(term.capitalize(), simulators_term.capitalize())
    return text


def _values_text(steps: Sequence[StepRecord]) -> str:
    """Describe the critic's values in the last step that has any."""
    metrics = next((step.metrics for step in reversed(steps) if "value_error" in step.metrics), None)
    if metrics is None:
        return ""
    explained, skipped = metrics.get("explained_variance"), sum(s.metrics.get(SKIPPED_VALUE_UPDATES, 0) for s in steps)
    share_text = "" if explained is None else f"{explained:.0%} of the variance of returns; "
    skipped_text = f" {skipped:.0f} updates of the critic were not finite and skipped." if skipped else ""
    return f"In the last step {share_text}the error is {metrics['value_error']:.3g} in units of reward.{skipped_text}"


def _untrained(lines: Sequence[LedgerLine]) -> EventRecord | None:
    """Return the last event about groups that end untrained; None if a step came after it, or there is none."""
    for line in reversed(lines):
        if isinstance(line, EventRecord) and line.event in (EVENT_NO_PROGRESS, EVENT_MOSTLY_SOLVED):
            return line
        if isinstance(line, StepRecord):
            return None
    return None


def _plan_text(lines: Sequence[LedgerLine]) -> str:
    control_events = [event for event in lines if isinstance(event, EventRecord) and event.event == EVENT_CONTROL]
    recommended = next((event for event in reversed(control_events) if event.data.get("kind") == "recommended"), None)
    return f"At version {recommended.step} the controller {recommended.detail}" if recommended else ""


def judge_balance(waits: WaitShares, budget: int | None) -> tuple[Balance, str]:
    """Return the bottleneck by `balance_of`, and a sentence about it."""
    numbers = f"the trainer waits {waits.trainer:.0%} of the time, the generator {waits.generator:.0%}"
    both_busy = max(waits.trainer, waits.generator) < BUSY
    busy_text = "Both sides are busy" if both_busy else "Neither side is clearly the bottleneck"
    text_by_balance: dict[Balance, str] = {
        "time-shared": _time_shared(waits.generator, budget, waits.yielded),
        "synchronous": (
            f"Synchronous (budget 0): the two sides take turns by design; {numbers}. "
            "A budget of 1 or more lets them overlap."
        ),
        "matched": f"Matched: {numbers}. {busy_text}.",
        "environment-bound": (
            f"Environment-bound: {numbers}; rollouts spend {waits.environment:.0%} of their time in their environments "
            "(tools, sandboxes). More of them at once (queue.max_concurrent_rollouts, sandbox.live) or quicker "
            "environments would speed this run up; more generators would not."
        ),
        "teacher-bound": (
            f"Teacher-bound: {numbers}; teachers score for {waits.teaching:.0%} of the time. More of their replicas "
            "(teachers.NAME.devices), more requests at once to a server (address.concurrency) or a smaller teacher "
            "would speed this run up; more generators would not."
        ),
        "generation-bound": (
            f"Generation-bound: {numbers}. More generator capacity (replicas, slots, devices) or shorter responses "
            "would speed this run up; a faster trainer would not."
        ),
        "training-bound": (
            f"Training-bound: {numbers}. Finished groups wait for the trainer and the staleness budget holds "
            "admission back; more trainer capacity would speed this run up, more generators would not."
        ),
        "other-bound": f"Bound by neither model: {numbers}, both high.",
    }
    balance = balance_of(waits, budget)
    return balance, text_by_balance[balance]


def _time_shared(generator_wait: float, budget: int | None, yielded: float) -> str:
    text = (
        f"Time-shared: the generator's devices are the trainer's for {yielded:.0%} of the time, and are idle "
        f"for {generator_wait:.0%}."
    )
    if generator_wait < BUSY:
        return f"{text} Neither waits for long."
    if budget == 0:
        return f"{text} A budget of 1 or more would keep them busy through the long tail."
    return f"{text} The staleness budget or the concurrency holds admission back."


def judge_staleness(steps: Sequence[StepRecord], worst: int, budget: int | None) -> tuple[bool | None, str]:
    """Judge whether the oldest trained trajectory was within the budget. Returns (judgement or None, sentence)."""
    trained_steps = [step for step in steps if step.samples and not step.skipped]
    if not trained_steps:
        return None, "Nothing has been trained yet."
    sample_count = sum(step.samples for step in trained_steps)
    mean_staleness = sum(step.trajectory_staleness.mean * step.samples for step in trained_steps) / sample_count
    measured_text = f"at most {_versions(worst)} old, {mean_staleness:.1f} on average"
    if budget is None:
        return None, f"Trajectories were {measured_text} when trained; the budget isn't recorded here."
    if worst > budget:
        return False, f"BUDGET BROKEN: trajectories were {measured_text} when trained, against a budget of {budget}."
    return True, f"Within budget: trajectories were {measured_text} when trained, against a budget of {budget}."


def judge_learning(lines: Sequence[LedgerLine]) -> tuple[Learning, float | None, float | None, str]:
    """Judge whether the solve rate changed by more than chance, by the held evaluations before and after where both
    exist, else by the first and last validation. Returns (judgement, change, its standard error, sentence)."""
    record_pair = _evaluation_pair(lines)
    if record_pair is None:
        return "unknown", None, None, _training_trend(lines)
    first, last = record_pair
    if first.return_interval and last.return_interval:
        return _judge_returns(first, last)
    rate_change = last.solve_rate - first.solve_rate
    change_error = math.hypot(first.standard_error, last.standard_error)
    task_set = "held-out tasks" if first.split == "test" else f"{first.split} tasks"
    numbers_text = (
        f"solve rate on {first.tasks:,} {task_set} {first.solve_rate:.3f} ± {first.standard_error:.3f} (version "
        f"{first.last_version}) → {last.solve_rate:.3f} ± {last.standard_error:.3f} (version {last.last_version}), "
        f"change {rate_change:+.3f} ± {change_error:.3f}"
    )
    failed_text = "".join(
        f"; {phase}: {record.failures_text}" for phase, record in (("before", first), ("after", last)) if record.failed
    )
    numbers_text += failed_text
    if first.mostly_failed or last.mostly_failed:
        return "unknown", None, None, f"{_NOT_MEASURED}: {numbers_text}."
    if abs(rate_change) <= SIGNIFICANT_Z * change_error or rate_change == 0:
        return "no measurable change", rate_change, change_error, f"No measurable change: {numbers_text}."
    if rate_change > 0:
        return "improved", rate_change, change_error, f"Yes: {numbers_text}."
    return "worse", rate_change, change_error, f"NO, it got worse: {numbers_text}."


def _judge_returns(first: EvaluationRecord, last: EvaluationRecord) -> tuple[Learning, None, None, str]:
    """Judge the change of the mean return between two evaluations by their intervals."""
    text = " → ".join(
        f"{mean_text(record.reward_mean, record.return_interval)} (version {record.last_version})"
        for record in (first, last)
    )
    text = f"mean return of {last.tasks:,} episodes with fixed seeds {text}"
    if math.isfinite(last.solve_rate):
        text += f", success rate {first.solve_rate:.3f} → {last.solve_rate:.3f}"
    if last.return_interval[0] > first.return_interval[1]:
        return "improved", None, None, f"Yes: {text}."
    if last.return_interval[1] < first.return_interval[0]:
        return "worse", None, None, f"NO, it got worse: {text}."
    return "no measurable change", None, None, f"No measurable change: {text}."


def _evaluation_pair(lines: Sequence[LedgerLine]) -> tuple[EvaluationRecord, EvaluationRecord] | None:
    baseline, final = measured_evaluation(lines, "before"), measured_evaluation(lines, "after")
    if baseline is not None and final is not None and baseline.split == final.split:
        return baseline, final
    validation_records = [record for record in evaluations(lines) if record.split == "validation" and record.samples]
    return (validation_records[0], validation_records[-1]) if len(validation_records) > 1 else None


def _training_trend(lines: Sequence[LedgerLine]) -> str:
    episodes = [line.episodes for line in lines if isinstance(line, StepRecord) and line.episodes]
    if episodes:
        return f"No two evaluations to compare. Of the last 100 episodes of training: {returns_text(episodes[-1])}."
    rates = [line.rewards.solve_rate for line in lines if isinstance(line, StepRecord) and line.rewards]
    if len(rates) < 10:
        return "Too early to tell: no two evaluations to compare."
    fifth_count = len(rates) // 5
    first, last_rate = sum(rates[:fifth_count]) / fifth_count, sum(rates[-fifth_count:]) / fifth_count
    return (
        f"No two evaluations to compare. On the training tasks the solve rate went from {first:.3f} (first fifth of "
        f"the steps) to {last_rate:.3f} (last fifth)."
    )


def _accounting_text(lines: Sequence[LedgerLine], summary: RunSummary) -> str:
    endings = ", ".join(f"{count:,} {ending}" for ending, count in summary.endings.items()) or "none ended"
    accounting = accounting_event(lines)
    if accounting is None:
        return f"Not closed yet (the run goes on, or was killed). Rollouts so far: {endings}."
    if summary.accounting_balanced:
        return f"Yes: every rollout is open at the end or ended exactly once: {endings}."
    return f"NO: {accounting.detail or 'a rollout is missing or ended twice'}. Endings: {endings}."


def _failures_text(failures: dict[str, int], summary: RunSummary) -> str:
    if not failures:
        return ""
    total_rollouts = sum(summary.endings.values())
    share_text = f" of {total_rollouts:,} rollouts" if total_rollouts else ""
    parts_text = ", ".join(f"{count:,} at the {boundary}" for boundary, count in sorted(failures.items()))
    return f"{sum(failures.values()):,}{share_text}: {parts_text}."


def _versions(count: int) -> str:
    return "1 version" if count == 1 else f"{count} versions"


def _pruning_text(steps: Sequence[StepRecord]) -> str:
    total = PrunerFigures.total(figures for step in steps for figures in step.pruning.values())
    if not total.rollouts and not total.audits:
        return ""
    pruners = sorted({pruner for step in steps for pruner in step.pruning})
    pruner_totals = {name: PrunerFigures.total(s.pruning[name] for s in steps if name in s.pruning) for name in pruners}
    saved = sum(figures.saving_tokens for figures in pruner_totals.values())
    counts_text = ", ".join(f"{name} {figures.rollouts:,}" for name, figures in pruner_totals.items())
    generated_tokens = sum(sum(step.tokens.ended.values()) for step in steps if step.tokens)
    text = (
        f"{total.rollouts:,} rollouts ended early ({counts_text}), {total.dropped:,} of them left their group; about "
        f"{saved:,.0f} response tokens saved, {saved / max(1.0, saved + generated_tokens):.0%} of what would have been "
        "generated. "
    )
    if not total.audits:
        return text + "Nothing was audited."
    return text + (
        f"Of {total.audits:,} audited ones, which ran to their own end, pruning would have been wrong about "
        f"{total.wrong:,} ({total.wrong_rate:.0%}); their reward is {total.reward_bias:+.3f} off what it would have "
        "given."
    )
