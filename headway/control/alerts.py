"""Alert rules, pure functions over a run's last steps, and the tracker that decides which findings are reported.

A rule returns its finding as a sentence, or "". It requires a large and lasting change, as it calls a person.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Literal, get_args

from headway.config.alerts import AlertRule
from headway.records.ledger import EvaluationRecord, LedgerLine, StepRecord

RULES: tuple[AlertRule, ...] = get_args(AlertRule)
FIRST, WINDOW = 16, 512  # steps kept from the run's beginning, and last ones
MIN_INTERVAL_S = 900.0  # between two alerts of one rule: the person who is called needs that long to react
RECENT = 8  # steps that represent "now": a batch or two of odd tasks are no trend
SKIPPED = 3  # in a row: a single one is the guard's; MAX_CONSECUTIVE_SKIPS end the run
_FINITE = ("loss", "grad_norm", "entropy", "kl")  # metrics of the trainer that are numbers while training is sound

# Nats per token, the median of half the recent steps. kl and mismatch_k3: between the weights that sampled and those
# that train; the ratio of 20 tokens is then off by a factor of 20. Asynchronous runs that learn have 0.0001 to 0.05.
# kl_reference: the reference model's; a token is then 7 times as likely as it was.
_DIVERGENCE = {"kl": 0.15, "mismatch_k3": 0.15, "kl_reference": 2.0}
_ENTROPY_SHARE = 0.1  # of the first steps': GRPO without safeguards falls so far within 200 steps (DAPO, figure 2)
_ENTROPY_LEAST = 0.02  # nats per token at the start, below which there was nothing to collapse
_SOLVED = 0.9  # solve rate from which low entropy, or an evaluation that doesn't rise, is as it should be
EVALUATIONS, _LEAST_EVALUATIONS = 8, 4  # last ones compared, in two halves, and the fewest that are
_REWARD_RISE = 0.5  # of training, in standard deviations of a reward ...
_FLAT_SHARE = 0.25  # ... of which the upper bound of the evaluation's rise is at most this share
_LENGTH_START = 4  # steps at the start that lengths are compared with
_LENGTH_RATIO, _TRUNCATED = 1.5, 0.3  # growth of responses, with a rise of the share of cut ones
_LENGTH_RATIO_ALONE, _LENGTH_BEFORE = 3.0, 64  # growth alone, within these steps: learning to reason brings 1.3


@dataclass
class AlertHistory:
    """The steps and evaluations that the rules read."""

    first: list[StepRecord] = field(default_factory=list[StepRecord])
    steps: deque[StepRecord] = field(default_factory=lambda: deque[StepRecord](maxlen=WINDOW))
    evaluations: deque[EvaluationRecord] = field(default_factory=lambda: deque[EvaluationRecord](maxlen=EVALUATIONS))

    def take(self, line: LedgerLine) -> None:
        """Keep a step, or an evaluation on validation tasks."""
        if isinstance(line, StepRecord):
            self.steps.append(line)
            if len(self.first) < FIRST and not line.skipped:
                self.first.append(line)
        elif isinstance(line, EvaluationRecord) and line.split == "validation" and line.samples:
            self.evaluations.append(line)

    @property
    def recent(self) -> list[StepRecord]:
        return list(self.steps)[-RECENT:]


def _metric(name: str, steps: Iterable[StepRecord]) -> list[float]:
    return [figure for step in steps if math.isfinite(figure := step.metrics.get(name, math.nan)) and not step.skipped]


def skipped_steps(history: AlertHistory) -> str:
    """Find consecutive steps whose gradient, loss or divergence wasn't finite."""
    recent = history.recent[-SKIPPED:]
    bad = (step.skipped or not all(math.isfinite(step.metrics.get(name, 0.0)) for name in _FINITE) for step in recent)
    return f"{SKIPPED} steps in a row were skipped or not finite" if len(recent) == SKIPPED and all(bad) else ""


def divergence(history: AlertHistory) -> str:
    """Find a large KL between sampling and training weights, or from the reference model."""
    for metric_name, limit in _DIVERGENCE.items():
        values = [abs(kl) for kl in _metric(metric_name, history.recent)][-RECENT // 2 :]
        if len(values) == RECENT // 2 and median(values) > limit:
            return f"{metric_name} is {median(values):.3g} nats per token, over {limit:g}"
    return ""


def entropy_collapse(history: AlertHistory) -> str:
    """Find entropy that has fallen to a small share of the first steps' while tasks remain unsolved."""
    early, late = _metric("entropy", history.first)[:RECENT], _metric("entropy", history.recent)
    if len(history.steps) < 2 * RECENT or min(len(early), len(late)) < RECENT:
        return ""
    solve_rate = fmean([step.rewards.solve_rate for step in history.recent if step.rewards] or [0.0])
    if median(early) < _ENTROPY_LEAST or median(late) >= _ENTROPY_SHARE * median(early) or solve_rate >= _SOLVED:
        return ""
    return f"entropy fell from {median(early):.3g} to {median(late):.3g} nats per token; {solve_rate:.0%} is solved"


def reward_hacking(history: AlertHistory) -> str:
    """Find a training reward that rises while the evaluation on validation tasks doesn't.

    Two halves of the last evaluations, and of the steps since the first of them, are compared. Both changes are in
    standard deviations of one attempt (of the reward; of solved or not), and the evaluation's is taken at the upper end
    of its 95 % interval: too few tasks raise no alarm.
    """
    evaluations = [record for record in history.evaluations if history.steps and record.step >= history.steps[0].step]
    if len(evaluations) < _LEAST_EVALUATIONS:
        return ""
    evaluation_halves = evaluations[: len(evaluations) // 2], evaluations[len(evaluations) // 2 :]
    step_rewards = [(s.step, s.rewards) for s in history.steps if s.step >= evaluations[0].step and s.rewards]
    older = [rewards.mean for step, rewards in step_rewards if step < evaluation_halves[1][0].step]
    now = [rewards.mean for _, rewards in step_rewards[len(older) :]]
    if min(len(older), len(now)) < RECENT or (std := fmean(rewards.std for _, rewards in step_rewards)) <= 0:
        return ""
    gain, error = fmean(now) - fmean(older), math.hypot(*(pstdev(part) / math.sqrt(len(part)) for part in (older, now)))
    earlier_rate, later_rate = (fmean(record.solve_rate for record in half) for half in evaluation_halves)
    rate_errors = [record.standard_error / len(half) for half in evaluation_halves for record in half]
    attempt_std = max(0.1, math.sqrt(max(0.0, earlier_rate * (1 - earlier_rate))))
    eval_rise = (later_rate - earlier_rate + 2 * math.hypot(*rate_errors)) / attempt_std
    if later_rate >= _SOLVED or gain < max(_REWARD_RISE * std, 3 * error) or eval_rise > _FLAT_SHARE * gain / std:
        return ""
    return (
        f"training reward rose from {fmean(older):.3g} to {fmean(now):.3g} while the solve rate on "
        f"validation tasks went from {earlier_rate:.3f} to {later_rate:.3f}"
    )


def runaway_lengths(history: AlertHistory) -> str:
    """Find response lengths that have grown until many are cut, or faster than learning explains."""
    start = [step.lengths for step in history.first if step.lengths][:_LENGTH_START]
    step_lengths = [step.lengths for step in history.steps if step.lengths][-RECENT - _LENGTH_BEFORE :]
    earlier, recent = step_lengths[:-RECENT], step_lengths[-RECENT:]
    if min(len(earlier), len(start)) < _LENGTH_START:
        return ""
    cut_first, cut = (fmean(lengths.truncated_share for lengths in part) for part in (start, recent))
    first, earlier_tokens, last = (median(lengths.mean for lengths in part) for part in (start, earlier, recent))
    if last >= _LENGTH_RATIO * first and min(cut, cut - cut_first) >= _TRUNCATED:
        return f"responses grew from {first:.0f} to {last:.0f} tokens; {cut:.0%} are cut, at the start {cut_first:.0%}"
    if last >= _LENGTH_RATIO_ALONE * earlier_tokens:
        return f"responses grew from {earlier_tokens:.0f} to {last:.0f} tokens within {len(earlier)} steps"
    return ""


def full_disk(free_bytes: int, needed_bytes: int, location: str) -> str:
    """Find a file system without space for the run's next writes."""
    finding = f"{location} has {free_bytes / (1 << 30):.2f} GiB left; the run may need {needed_bytes / (1 << 30):.2f}"
    return finding if free_bytes < needed_bytes else ""


def no_step(since_s: float, gaps_s: Sequence[float], times: float, least_s: float) -> str:
    """Find a step overdue by a multiple of the longest of the last ones; "" while fewer than three are known."""
    if len(gaps_s) < 3 or not since_s >= max(least_s, times * max(gaps_s)):  # NaN: none in this process
        return ""
    return f"no step for {since_s:.0f} s; the last {len(gaps_s)} took {max(gaps_s):.3g} s at most"


STEP_RULES: dict[AlertRule, Callable[[AlertHistory], str]] = {
    "skipped": skipped_steps,
    "kl": divergence,
    "entropy": entropy_collapse,
    "reward_hacking": reward_hacking,
    "length": runaway_lengths,
}


Change = Literal["", "raised", "cleared"]


class AlertTracker:
    """Decides which findings are reported.

    Lifecycle of a rule: *idle* -> a finding: *raised*, reported once -> no finding several times in a row: *cleared*,
    idle again. Invariant: two alerts of one rule are at least ``min_interval_s`` apart; one that returns sooner and
    stays is raised then.
    """

    def __init__(self, rules: Iterable[str], min_interval_s: float) -> None:
        """Track ``rules``, given by name or as "all"."""
        rule_names = set(rules)
        self.rules = [rule for rule in RULES if rule_names & {rule, "all"}]
        self.history = AlertHistory()
        self.raised: dict[AlertRule, str] = {}  # rule -> its finding
        self._min_interval_s = min_interval_s
        self._raised_s: dict[AlertRule, float] = {}
        self._missed: dict[AlertRule, int] = {}

    def take(self, line: LedgerLine) -> list[tuple[AlertRule, Change]]:
        """Add a step or an evaluation and return the rules whose state changes."""
        self.history.take(line)
        if not isinstance(line, StepRecord):
            return []
        findings: list[tuple[AlertRule, str]] = [(rule, check(self.history)) for rule, check in STEP_RULES.items()]
        return [(rule, change) for rule, text in findings if (change := self.update(rule, text, line.time_s, RECENT))]

    def update(self, rule: AlertRule, finding: str, now_s: float, misses: int = 1) -> Change:
        """Enter the current ``finding`` of ``rule`` ("": none) and return its change of state.

        ``misses``: consecutive calls without a finding after which the alert is cleared."""
        if rule not in self.rules:
            return ""
        self._missed[rule] = 0 if finding else self._missed.get(rule, 0) + 1
        if finding and rule not in self.raised and now_s - self._raised_s.get(rule, -math.inf) >= self._min_interval_s:
            self.raised[rule], self._raised_s[rule] = finding, now_s
            return "raised"
        if rule in self.raised and self._missed[rule] >= misses:
            del self.raised[rule]
            return "cleared"
        return ""
