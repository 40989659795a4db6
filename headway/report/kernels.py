"""Sentences of the report about kernels: faults, and the evaluators' time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.records.ledger import StepRecord
from headway.report.formats import percent

BOUND = 0.5  # share of the evaluators' time that answers wait for a device: more names the run


def kernel_sentences(steps: Sequence[StepRecord]) -> list[str]:
    """Summarise the kernels of all steps in sentences; [] where no step has any."""
    found = [step.kernels for step in steps if step.kernels]
    if not found:
        return []
    count, repeated = sum(one.evaluations for one in found), sum(one.repeated for one in found)
    faults = Counter[str]()
    for one in found:
        faults.update(one.faults)
    shares = ", ".join(f"{name.replace('_', ' ')} {percent(n / max(1, count))}" for name, n in faults.most_common())
    wait_s, busy_s = sum(one.wait_s for one in found), sum(one.busy_s for one in found)
    waited = f"They waited {wait_s:,.0f} s for a device and were evaluated for {busy_s:,.0f} s."
    if wait_s > BOUND * (wait_s + busy_s):
        waited += " The evaluators are what this run waits for: give it more of them, or fewer timed trials."
    return [
        f"{count:,} answers were evaluated, {repeated:,} of them by an equal one's evaluation.",
        f"Of all answers: {shares}." if shares else "No answer failed.",
        waited,
    ]
