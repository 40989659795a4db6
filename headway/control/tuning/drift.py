"""Detects drift of a run by comparing its last steps with earlier ones.

Each test requires a change that is both large and significant; serial correlation of the steps makes the uncertainty
larger than it seems, hence the high thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from headway.control.length_bias import ks_statistic
from headway.control.summaries import pooled
from headway.control.tuning.balance import between_turns
from headway.control.tuning.ledger_model import decode_line, decode_point, length_correlation, training_s
from headway.records.ledger import StepRecord

RECENT = 3  # steps that must differ from earlier ones
SLOWLY = 8  # ... where the change may have been gradual
_FACTOR = 1.25
_Z = 4.0
_LENGTHS_DIFFER, _LENGTHS_DIFFER_Z = 0.2, 2.5  # KS statistic, and in its scale (p < 1e-5)

_LEAST_SHARE = 0.1  # of a verifier's time, or of a rollout's: a smaller part affects no rate
_COSTS: dict[str, Callable[[StepRecord], float]] = {
    "training time per token": lambda r: training_s(r) / r.flow.trained_tokens if r.flow.trained_tokens else 0.0,
    "training time per sample": lambda r: training_s(r) / r.samples,
    "time with tools": lambda r: r.flow.environment_s / r.flow.responses if r.flow.responses else 0.0,
    "verification of a response": lambda r: r.verify_s / r.flow.responses if r.flow.responses else 0.0,
}


def find_drift(records: Sequence[StepRecord], last: int = RECENT) -> tuple[int, str] | None:
    """Return (first step of a new regime, what changed) when the ``last`` records differ from earlier ones, or None."""
    recent, former = records[-last:], records[:-last]
    if len(former) < 4:
        return None
    changes = {name: _change(signal, former, recent) for name, signal in _COSTS.items()}
    for name, share in _SHARES.items():
        if max(share(former), share(recent)) < _LEAST_SHARE:
            del changes[name]
    # The cost of a step may depend on its tokens or its samples: a slower trainer shows in both.
    trainer = [changes.pop("training time per token"), changes.pop("training time per sample")]
    changes["training time"] = min(trainer, key=abs) if trainer[0] * trainer[1] > 0 else 0.0
    changes["time of a decode step"] = _change(_decode_cost(former), former, recent)
    for name, change in changes.items():
        if change:
            return recent[0].step, f"{name}: {math.exp(change):.2f} times what it was"
    reason = _length_drift(former, recent) or _acceptance_drift(former, recent)
    return (recent[0].step, reason) if reason else None


def _verification_share(records: Sequence[StepRecord]) -> float:
    return sum(r.verify_s for r in records) / sum(r.step_s for r in records)


_SHARES = {"verification of a response": _verification_share, "time with tools": between_turns}


def _change(signal: Callable[[StepRecord], float], former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> float:
    """Return the logarithm of the factor by which a signal has changed; 0 where that isn't significant."""
    then = [math.log(value) for r in former if (value := signal(r)) > 0]
    now = [math.log(value) for r in recent if (value := signal(r)) > 0]
    if len(then) < 4 or len(now) < len(recent):
        return 0.0
    change = fmean(now) - fmean(then)
    error = max(0.05, stdev(then)) * math.sqrt(1 / len(now) + 1 / len(then))
    certain = _Z * (1.5 if len(then) < 8 else 1.0)  # few values: their spread is poorly known
    consistent = all((value - fmean(then)) * change > 0 for value in now)
    return change if abs(change) > math.log(_FACTOR) and abs(change) > certain * error and consistent else 0.0


def _decode_cost(former: Sequence[StepRecord]) -> Callable[[StepRecord], float]:
    """Make a signal: a decode step's time over its ``former`` time with as many requests; 0 where unknown."""
    line, _ = decode_line(former)  # our engine's prior, also on a GPU: it matters little near ``x_mean``

    def cost(record: StepRecord) -> float:
        point = decode_point(record)
        if point is None or not (line.identified or 0.75 * line.x_mean < point[0] < 1.33 * line.x_mean):
            return 0.0
        expected = line.fixed + line.slope * point[0]
        return point[1] / expected if expected > 0 else 0.0

    return cost


def _length_drift(former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    """Describe a drift of response lengths by a two-sample Kolmogorov-Smirnov test; "": none.

    Lengths in a group are correlated: n of them count as n / (1 + (group size - 1) x intraclass correlation)
    independent ones (Kish's design effect)."""
    then, now = (pooled(r.lengths.histogram for r in records if r.lengths) for records in (former, recent))
    if min(then.total(), now.total()) < 20:
        return ""
    distance = ks_statistic(then, now)
    every = (*former, *recent)
    size = sum(r.flow.responses for r in every) / max(1, sum(r.flow.finished_groups for r in every))
    design_effect = max(2.0, 1.0 + (size - 1.0) * length_correlation(every, size))
    error = math.sqrt(design_effect / then.total() + design_effect / now.total())
    if distance < max(_LENGTHS_DIFFER, _LENGTHS_DIFFER_Z * error):
        return ""
    means = [sum(end * count for end, count in lengths.items()) / lengths.total() for lengths in (now, then)]
    return f"response length: {means[0] / means[1]:.2f} times what it was (KS {distance:.2f})"


def _acceptance_drift(former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    groups = sum(r.flow.finished_groups for r in former), sum(r.flow.finished_groups for r in recent)
    if not all(groups):
        return ""
    accepted = sum(r.flow.accepted_groups for r in former), sum(r.flow.accepted_groups for r in recent)
    then, now = accepted[0] / groups[0], accepted[1] / groups[1]
    pooled = (sum(accepted) + 1) / (sum(groups) + 2)
    error = math.sqrt(pooled * (1 - pooled) * (1 / groups[0] + 1 / groups[1]))
    if abs(now - then) > 0.15 and abs(now - then) > _Z * error:
        return f"groups that can be trained: {now:.0%}, before {then:.0%}"
    return ""
