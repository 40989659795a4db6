"""Texts on the episodes of policies in simulators: returns with intervals, successes, rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headway.records.ledger import EpisodeStatistics, EvaluationRecord, StepRecord
from headway.report.formats import percent, quantity, score


def mean_text(mean: float, interval: Sequence[float]) -> str:
    """Format a mean with its interval; – without data."""
    if not math.isfinite(mean):
        return "–"
    bounds_text = f" [{', '.join(f'{bound:,.4g}' for bound in interval)}]" if interval else ""
    return f"{mean:,.4g}{bounds_text}"


def returns_text(episodes: EpisodeStatistics) -> str:
    """Describe the last episodes: their mean return, and their success rate where simulators report successes."""
    text = f"return {mean_text(episodes.return_mean, episodes.return_interval)}"
    if math.isfinite(episodes.success_rate):
        text += f", success {mean_text(episodes.success_rate, episodes.success_interval)}"
    return text


def score_text(step: StepRecord, label: str) -> str:
    """Describe a step's returns of a policy in simulators, else its solve rate after the ``label``."""
    if step.episodes:
        return returns_text(step.episodes)
    return f"{label} {score(step.rewards and step.rewards.solve_rate)}"


def throughput_text(step: StepRecord, recent_mean: Callable[[Callable[[StepRecord], float]], float]) -> str:
    """Describe the rate of the last steps, over which ``recent_mean`` averages: of environment steps, else samples."""
    if step.episodes:
        rate = recent_mean(lambda s: s.episodes.steps_per_s if s.episodes else 0.0)
        return f"{quantity(rate)} environment steps/s"
    return f"{quantity(recent_mean(lambda s: s.samples / s.step_s if s.step_s else 0.0))} samples/s"


def evaluation_text(record: EvaluationRecord) -> str:
    """Describe an evaluation over episodes."""
    success_text = f", success rate {record.solve_rate:.3f}" if math.isfinite(record.solve_rate) else ""
    failed_text = f"; {record.failures_text}" if record.failed else ""
    return (
        f"{record.split} {record.phase}: return {mean_text(record.reward_mean, record.return_interval)}{success_text} "
        f"({record.tasks} episodes, version {record.last_version}){failed_text}"
    )


def simulators_text(steps: Sequence[StepRecord]) -> str:
    """Describe the simulators of a run: rates, and how their time compares with the learner's; "": it has none."""
    records = [(step, step.episodes) for step in steps if step.episodes is not None]
    if not records:
        return ""
    step_s = sum(step.step_s for step, _ in records)
    transitions, last = sum(episodes.transitions for _, episodes in records), records[-1][1]
    simulate_s, learn_s = sum(e.simulate_s for _, e in records), sum(step.trainer_compute_s for step, _ in records)
    text = (
        f"{transitions:,} environment steps, {quantity(transitions / step_s)}/s; simulators and policy took "
        f"{1e6 * simulate_s / transitions:,.0f} µs a step, the learner {1e6 * learn_s / transitions:,.0f}, which "
        f"waited {percent(sum(step.trainer_wait_s for step, _ in records) / step_s)} of the time. "
        f"{last.constructions:,} simulators were built"
    )
    rebuilt_text = f", {last.rebuilt:,} blocks again, which cut {last.cut:,} episodes" if last.rebuilt else ""
    return f"{text}{rebuilt_text}."
