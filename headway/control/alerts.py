"""Rules that call for a person's attention: pure functions over a run's last steps, and what of them is reported when.

A rule returns what it has found as a sentence, or "". It asks for a change that is large and lasts: a person is called.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Literal, get_args

import msgspec

from headway.config.alerts import AlertRule
from headway.records.ledger import EvaluationRecord, LedgerLine, StepRecord

RULES: tuple[AlertRule, ...] = get_args(AlertRule)
_FINITE = ("loss", "grad_norm", "entropy", "kl")  # metrics of the trainer that are numbers while training is sound


class AlertLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the rules."""

    first: int = 16  # steps kept from the run's beginning, which entropy is compared with
    window: int = 512  # last steps kept
    recent: int = 8  # steps that stand for "now": a batch or two of odd tasks are no trend
    skipped: int = 3  # in a row: one is the guard at work; train_loop.py gives up after 20
    kl: float = 0.15  # nats per token between the weights that sampled and those that train: the importance ratio of
    # 20 tokens is then off by a factor of 20 on average. Asynchronous runs that learn have 0.0001 to 0.05
    kl_reference: float = 2.0  # nats per token from the reference model: tokens are 7 times as likely as they were
    entropy_share: float = 0.1  # of the first steps': GRPO without safeguards falls so far within 200 steps (DAPO)
    entropy_least: float = 0.02  # nats per token at the start, below which there was nothing to collapse
    solved: float = 0.9  # solve rate from which low entropy, or an evaluation that doesn't rise, is as it should be
    evaluations: int = 8  # last ones looked at, in two halves ...
    evaluations_least: int = 4  # ... and the fewest that are
    reward_rise: float = 0.5  # of training, in standard deviations of a reward ...
    flat_share: float = 0.25  # ... of which the evaluation's rise, at most, is at most so much
    length_start: int = 4  # steps at the start that lengths are compared with
    length_ratio: float = 1.5  # of responses, where more of them are cut as well ...
    truncated: float = 0.3  # ... their share, and its rise
    length_ratio_alone: float = 3.0  # whatever is cut: runs that learn to think grow by less than 1.3 ...
    length_before: int = 64  # ... in so many steps


@dataclass
class RunHistory:
    """The steps and evaluations that the rules look at."""

    limits: AlertLimits = field(default_factory=AlertLimits)
    first: list[StepRecord] = field(default_factory=list[StepRecord])
    steps: deque[StepRecord] = field(default_factory=deque[StepRecord])
    evaluations: deque[EvaluationRecord] = field(default_factory=deque[EvaluationRecord])  # of validation

    def take(self, line: LedgerLine) -> None:
        if isinstance(line, StepRecord):
            if len(self.first) < self.limits.first and not line.skipped:
                self.first.append(line)
            self.steps.append(line)
            if len(self.steps) > self.limits.window:
                self.steps.popleft()
        elif isinstance(line, EvaluationRecord) and line.split == "validation" and line.samples:
            self.evaluations.append(line)
            if len(self.evaluations) > self.limits.evaluations:
                self.evaluations.popleft()

    def metric(self, name: str, steps: Iterable[StepRecord]) -> list[float]:
        """The finite values of a trainer's metric."""
        return [value for s in steps if not s.skipped and math.isfinite(value := s.metrics.get(name, math.nan))]

    @property
    def recent(self) -> list[StepRecord]:
        return list(self.steps)[-self.limits.recent :]

    @property
    def solve_rate(self) -> float:
        """Mean solve rate of the recent steps that measured one; NaN without any."""
        found = [step.solve_rate for step in self.recent if math.isfinite(step.measured_solve_rate)]
        return fmean(found) if found else math.nan


# --- rules -----------------------------------------------------------------------------------------------


def skipped_steps(history: RunHistory) -> str:
    """Steps in a row whose gradient, loss or divergence wasn't finite."""
    last = list(history.steps)[-history.limits.skipped :]
    bad = [step.skipped or not all(math.isfinite(step.metrics.get(name, 0.0)) for name in _FINITE) for step in last]
    if len(last) < history.limits.skipped or not all(bad):
        return ""
    return f"{len(last)} steps in a row were skipped or not finite: the weights no longer change"


def divergence(history: RunHistory) -> str:
    """KL between the weights that sampled and those that train, or from the reference model."""
    limits = history.limits
    for name, limit, whom in (
        ("kl", limits.kl, "the weights that sampled"),
        ("mismatch_k3", limits.kl, "the weights that sampled"),
        ("kl_reference", limits.kl_reference, "the reference model"),
    ):
        values = [abs(value) for value in history.metric(name, history.recent)][-limits.recent // 2 :]
        if len(values) >= limits.recent // 2 and median(values) > limit:
            return f"KL from {whom} is {median(values):.3g} nats per token, over {limit:g} ({name})"
    return ""


def entropy_collapse(history: RunHistory) -> str:
    """Entropy that has fallen to a small share of the first steps', though tasks are left to solve."""
    limits = history.limits
    then, now = history.metric("entropy", history.first), history.metric("entropy", history.recent)
    if len(history.steps) < 2 * limits.recent or len(then) < limits.recent or len(now) < limits.recent:
        return ""
    before, after = median(then[: limits.recent]), median(now)
    if before < limits.entropy_least or after >= limits.entropy_share * before or history.solve_rate >= limits.solved:
        return ""
    return (
        f"entropy fell from {before:.3g} to {after:.3g} nats per token, with a solve rate of {history.solve_rate:.2f}"
    )


def reward_hacking(history: RunHistory) -> str:
    """Training reward that rises while the evaluation on validation tasks doesn't.

    Of the last evaluations and the steps since the first of them, two halves are compared. Both changes are in standard
    deviations of one attempt (of the reward; of solved or not), and the evaluation's is taken at the upper end of its
    95 % interval: too few tasks raise no alarm.
    """
    limits, seen = history.limits, list(history.evaluations)
    seen = [one for one in seen if history.steps and one.step >= history.steps[0].step]
    if len(seen) < limits.evaluations_least:
        return ""
    half = len(seen) // 2
    middle = seen[half].step
    measured = [s for s in history.steps if s.step >= seen[0].step and math.isfinite(s.measured_solve_rate)]
    then = [s.reward_mean for s in measured if s.step < middle]
    now = [s.reward_mean for s in measured if s.step >= middle]
    if min(len(then), len(now)) < limits.recent:
        return ""
    spread = fmean(s.reward_std for s in measured)
    rise = fmean(now) - fmean(then)
    error = math.hypot(pstdev(then) / math.sqrt(len(then)), pstdev(now) / math.sqrt(len(now)))
    solved = [fmean(one.solve_rate for one in part) for part in (seen[:half], seen[half:])]
    errors = [math.hypot(*(e.standard_error for e in part)) / len(part) for part in (seen[:half], seen[half:])]
    attempt = max(0.1, math.sqrt(fmean(solved) * (1 - min(1.0, fmean(solved)))))
    most = (solved[1] - solved[0] + 2 * math.hypot(*errors)) / attempt
    if spread <= 0 or solved[1] >= limits.solved or rise < max(limits.reward_rise * spread, 3 * error):
        return ""
    if most > limits.flat_share * rise / spread:
        return ""
    return (
        f"training reward rose from {fmean(then):.3g} to {fmean(now):.3g} while the solve rate on validation tasks "
        f"went from {solved[0]:.3f} to {solved[1]:.3f}: a reward that can be had without solving tasks, or tasks "
        "learned by heart"
    )


def lengths_running_away(history: RunHistory) -> str:
    """Response lengths that have grown since the run's start until many are cut, or faster than learning makes them."""
    limits = history.limits
    measured = [step for step in history.steps if step.length_mean > 0]
    start = [step for step in history.first if step.length_mean > 0][: limits.length_start]
    before = measured[-limits.recent - limits.length_before : -limits.recent]
    now = measured[-limits.recent :]
    if len(before) < limits.length_start or len(start) < limits.length_start:
        return ""
    cut_then, cut = (fmean(step.truncated_share for step in part) for part in (start, now))
    then, lately, length = (median(step.length_mean for step in part) for part in (start, before, now))
    if length >= limits.length_ratio * then and min(cut, cut - cut_then) >= limits.truncated:
        return f"responses grew from {then:.0f} to {length:.0f} tokens; {cut:.0%} are cut, at the start {cut_then:.0%}"
    if length >= limits.length_ratio_alone * lately:
        return f"responses grew from {lately:.0f} to {length:.0f} tokens within {len(before)} steps"
    return ""


def full_disk(free_bytes: int, needed_bytes: int, place: str) -> str:
    """A file system without room for what the run writes next."""
    if free_bytes >= needed_bytes:
        return ""
    return f"{place} has {free_bytes / (1 << 30):.2f} GiB left; the run may need {needed_bytes / (1 << 30):.2f}"


def no_step(since_s: float, gaps_s: Sequence[float], times: float, least_s: float) -> str:
    """No step for much longer than the longest of the last ones took; "" while fewer than three are known."""
    usual_s = max(gaps_s, default=math.inf)
    if len(gaps_s) < 3 or not since_s >= max(least_s, times * usual_s):  # NaN: none in this process
        return ""
    return f"no step for {since_s:.0f} s; the last {len(gaps_s)} took {usual_s:.3g} s at most"


STEP_RULES: dict[AlertRule, Callable[[RunHistory], str]] = {
    "skipped": skipped_steps,
    "kl": divergence,
    "entropy": entropy_collapse,
    "reward_hacking": reward_hacking,
    "length": lengths_running_away,
}


# --- when they are reported ------------------------------------------------------------------------------


class AlertChange(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that has begun or ceased to hold."""

    rule: AlertRule
    kind: Literal["raised", "cleared"]
    detail: str


class AlertTracker:
    """Decides which findings are reported.

    Lifecycle of a rule: *quiet* -> found: *raised*, reported once -> not found so many times in a row: *cleared*, quiet
    again. Invariant: two alerts of one rule are at least ``min_interval_s`` apart; one that returns sooner and stays is
    raised then.
    """

    def __init__(self, rules: Iterable[str], min_interval_s: float, limits: AlertLimits = AlertLimits()) -> None:
        """``rules``: names, or "all"."""
        wanted = set(rules)
        self.rules = [rule for rule in RULES if rule in wanted or "all" in wanted]
        self.history = RunHistory(limits)
        self.raised: dict[AlertRule, str] = {}  # rule -> what it found
        self._min_interval_s = min_interval_s
        self._raised_s: dict[AlertRule, float] = {}
        self._missed: dict[AlertRule, int] = {}

    def take(self, line: LedgerLine) -> list[AlertChange]:
        """Take in a step or an evaluation and return what changes by it."""
        self.history.take(line)
        if not isinstance(line, StepRecord):
            return []
        misses = self.history.limits.recent
        found = [self.update(rule, look(self.history), line.time_s, misses) for rule, look in STEP_RULES.items()]
        return [change for change in found if change is not None]

    def update(self, rule: AlertRule, found: str, now_s: float, misses: int = 1) -> AlertChange | None:
        """Take in what ``rule`` has ``found`` now ("": nothing), and return what changes by it. ``misses``: times in a
        row without a finding after which it is over."""
        if rule not in self.rules:
            return None
        if found:
            self._missed[rule] = 0
            if rule in self.raised or now_s - self._raised_s.get(rule, -math.inf) < self._min_interval_s:
                return None
            self.raised[rule], self._raised_s[rule] = found, now_s
            return AlertChange(rule=rule, kind="raised", detail=found)
        self._missed[rule] = self._missed.get(rule, 0) + 1
        if rule not in self.raised or self._missed[rule] < misses:
            return None
        return AlertChange(rule=rule, kind="cleared", detail=self.raised.pop(rule))
