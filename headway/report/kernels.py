"""Writes the report's sentences about kernels: faults, and the evaluators' time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.records.ledger import StepRecord
from headway.report.formats import percent

EVALUATOR_BOUND_SHARE = 0.5  # above this share of time spent waiting for a device, the run waits for its evaluators


def kernel_sentences(steps: Sequence[StepRecord]) -> list[str]:
    """Summarise the kernels of all steps in sentences; [] where no step has any."""
    scores = [step.kernels for step in steps if step.kernels]
    if not scores:
        return []
    count, repeated_count = (sum(stats.evaluations for stats in scores), sum(stats.repeated for stats in scores))
    faults = Counter[str]()
    for stats in scores:
        faults.update(stats.faults)
    share_text = ", ".join(f"{name.replace('_', ' ')} {percent(n / max(1, count))}" for name, n in faults.most_common())
    wait_s, busy_s = (sum(stats.wait_s for stats in scores), sum(stats.busy_s for stats in scores))
    wait_text = f"They waited {wait_s:,.0f} s for a device and were evaluated for {busy_s:,.0f} s."
    if wait_s > EVALUATOR_BOUND_SHARE * (wait_s + busy_s):
        wait_text += " This run waits for its evaluators: add evaluators, or lower the number of timed trials."
    return [
        f"{count:,} answers were evaluated, {repeated_count:,} of them by an equal one's evaluation.",
        f"Of all answers: {share_text}." if share_text else "No answer failed.",
        wait_text,
    ]
