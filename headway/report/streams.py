"""Describes the streams of a run's loss, and its teachers outside of the trainer."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config.objective.rules import STREAMS
from headway.control.tuning.balance import teaching_share
from headway.records.ledger import StepRecord


def streams_text(steps: Sequence[StepRecord]) -> str:
    """Describe each stream with tokens by its means over ``steps``; "" where the loss has one stream and rule."""
    measured = [step.metrics for step in steps if f"stream_{STREAMS[0]}_tokens" in step.metrics]
    parts: list[str] = []
    for stream in STREAMS:
        loss, tokens, slope = (
            sum(metrics[f"stream_{stream}_{figure}"] for metrics in measured) / max(1, len(measured))
            for figure in ("loss", "tokens", "slope")
        )
        parts += [f"{stream}: loss {loss:+.4g}, {tokens:,.0f} tokens, slope {slope:.3g}"] if tokens else []
    return "; ".join(parts)


def teaching_text(steps: Sequence[StepRecord]) -> str:
    """Describe what teachers outside of the trainer did in ``steps``; "" where all are in it."""
    sections = [step.teaching for step in steps if step.teaching is not None]
    if not sections:
        return ""
    rollouts, failures, tokens = (
        sum(getattr(section, name) for section in sections) for name in ("rollouts", "failures", "tokens")
    )
    cost = sum(section.cost for section in sections)
    cost_text = f", at a cost of {cost:,.4g}" if cost else ""
    scored_text = f"{rollouts:,} rollouts scored" + (f", {failures:,} failed" if failures else "")
    return f"{scored_text}, {tokens:,} tokens read{cost_text}, busy {teaching_share(steps):.0%} of the time"
