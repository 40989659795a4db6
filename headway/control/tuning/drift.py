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
    recent, older = records[-last:], records[:-last]
    if len(older) < 4:
        return None
    log_changes = {cost: _change(signal, older, recent) for cost, signal in _COSTS.items()}
    for cost, share_of in _SHARES.items():
        if max(share_of(older), share_of(recent)) < _LEAST_SHARE:
            del log_changes[cost]
    # The cost of a step may depend on its tokens or its samples: a slower trainer shows in both.
    trainer = [log_changes.pop("training time per token"), log_changes.pop("training time per sample")]
    log_changes["training time"] = min(trainer, key=abs) if trainer[0] * trainer[1] > 0 else 0.0
    log_changes["time of a decode step"] = _change(_decode_cost(older), older, recent)
    for cost, change in log_changes.items():
        if change:
            return recent[0].step, f"{cost}: {math.exp(change):.2f} times what it was"
    reason = _length_drift(older, recent) or _acceptance_drift(older, recent)
    return (recent[0].step, reason) if reason else None


def _verification_share(records: Sequence[StepRecord]) -> float:
    return sum(record.verify_s for record in records) / sum(record.step_s for record in records)


_SHARES = {"verification of a response": _verification_share, "time with tools": between_turns}


def _change(signal: Callable[[StepRecord], float], former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> float:
    """Return the logarithm of the factor by which a signal has changed; 0 where that isn't significant."""
    former_logs = [math.log(signal_value) for record in former if (signal_value := signal(record)) > 0]
    recent_logs = [math.log(signal_value) for record in recent if (signal_value := signal(record)) > 0]
    if len(former_logs) < 4 or len(recent_logs) < len(recent):
        return 0.0
    change = fmean(recent_logs) - fmean(former_logs)
    log_error = max(0.05, stdev(former_logs)) * math.sqrt(1 / len(recent_logs) + 1 / len(former_logs))
    z_limit = _Z * (1.5 if len(former_logs) < 8 else 1.0)  # few values: their spread is poorly known
    is_consistent = all((signal_value - fmean(former_logs)) * change > 0 for signal_value in recent_logs)
    return change if abs(change) > math.log(_FACTOR) and abs(change) > z_limit * log_error and is_consistent else 0.0


def _decode_cost(former: Sequence[StepRecord]) -> Callable[[StepRecord], float]:
    """Make a signal: a decode step's time over its ``former`` time with as many requests; 0 where unknown."""
    line, _ = decode_line(former)  # our engine's prior, also on a GPU: it matters little near ``x_mean``

    def cost(record: StepRecord) -> float:
        point = decode_point(record)
        if point is None or not (line.identified or 0.75 * line.x_mean < point[0] < 1.33 * line.x_mean):
            return 0.0
        expected_s = line.fixed + line.slope * point[0]
        return point[1] / expected_s if expected_s > 0 else 0.0

    return cost


def _length_drift(former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    """Describe a drift of response lengths by a two-sample Kolmogorov-Smirnov test; "": none.

    Lengths in a group are correlated: n of them count as n / (1 + (group size - 1) x intraclass correlation)
    independent ones (Kish's design effect)."""
    former_lengths, now = (pooled(r.lengths.histogram for r in records if r.lengths) for records in (former, recent))
    if min(former_lengths.total(), now.total()) < 20:
        return ""
    ks_distance = ks_statistic(former_lengths, now)
    all_records = (*former, *recent)
    group_size = sum(r.flow.responses for r in all_records) / max(1, sum(r.flow.finished_groups for r in all_records))
    design_effect = max(2.0, 1.0 + (group_size - 1.0) * length_correlation(all_records, group_size))
    ks_error = math.sqrt(design_effect / former_lengths.total() + design_effect / now.total())
    if ks_distance < max(_LENGTHS_DIFFER, _LENGTHS_DIFFER_Z * ks_error):
        return ""
    means = [sum(end * count for end, count in lengths.items()) / lengths.total() for lengths in (now, former_lengths)]
    return f"response length: {means[0] / means[1]:.2f} times what it was (KS {ks_distance:.2f})"


def _acceptance_drift(former: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    group_counts = sum(r.flow.finished_groups for r in former), sum(r.flow.finished_groups for r in recent)
    if not all(group_counts):
        return ""
    accepted_counts = sum(r.flow.accepted_groups for r in former), sum(r.flow.accepted_groups for r in recent)
    former_rate, recent_rate = accepted_counts[0] / group_counts[0], accepted_counts[1] / group_counts[1]
    pooled_rate = (sum(accepted_counts) + 1) / (sum(group_counts) + 2)
    rate_error = math.sqrt(pooled_rate * (1 - pooled_rate) * (1 / group_counts[0] + 1 / group_counts[1]))
    if abs(recent_rate - former_rate) > 0.15 and abs(recent_rate - former_rate) > _Z * rate_error:
        return f"groups that can be trained: {recent_rate:.0%}, before {former_rate:.0%}"
    return ""
