"""The figures of a finished simulation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.control.summaries import weighted_mean
from headway.control.tuning.balance import Balance, balance_of, waits_of
from headway.planner.scenario import Scenario
from headway.records.generation import EngineStatistics
from headway.records.ledger import LedgerLine, LengthBiasStatistics, RunSummary, StepRecord


class SimulationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a whole simulated run. Rates count from its first step to its last."""

    summary: RunSummary
    samples_per_s: float  # trained samples
    step_s: float  # mean duration of a step
    balance: Balance  # of the whole run
    trainer_wait: float  # share of the time
    generator_wait: float
    staleness_mean: float  # of trained trajectories, versions
    staleness_max: int
    generated_tokens: int
    trained_tokens: int  # of trained responses, an environment's replies left out
    wasted_share: float  # share of generated tokens that were not trained when the run ended
    model_calls: int
    prefilled_tokens: int
    preemptions: int
    length_mean: float  # response tokens of finished rollouts
    length_bias_ks: float
    length_bias_scheduling_ks: float
    length_bias_filter_ks: float
    length_bias_pruning_ks: float
    mfu_step: float  # 0: the scenario lacks the trainer's peak
    mfu_compute: float
    device_hours: float
    dollars: float
    environment: dict[str, float]  # `EnvironmentCounts`; all 0 without several turns


def measure(
    scenario: Scenario,
    summary: RunSummary,
    lines: Sequence[LedgerLine],
    engines: Sequence[EngineStatistics],
    environment: dict[str, float],
) -> SimulationOutcome:
    """Compute the figures of a run that has ended."""
    steps = [line for line in lines if isinstance(line, StepRecord)]
    timed_tokens = [(step.tokens, step.step_s) for step in steps if step.tokens]
    length_bias = (steps[-1].length_bias if steps else None) or LengthBiasStatistics()
    total_s = sum(step.step_s for step in steps)
    generated_tokens = sum(engine.generated_tokens for engine in engines)
    trained_tokens = round(sum(statistics.trained_per_s * step_s for statistics, step_s in timed_tokens))
    device_hours = scenario.devices * summary.duration_s / 3600
    return SimulationOutcome(
        summary=summary,
        samples_per_s=summary.trained_per_s,
        step_s=total_s / max(1, len(steps)),
        balance=balance_of(waits_of(steps), scenario.queue.budget),
        trainer_wait=summary.trainer_wait_ratio,
        generator_wait=summary.generator_wait_ratio,
        staleness_mean=weighted_mean(steps, lambda s: s.trajectory_staleness.mean, lambda s: s.samples),
        staleness_max=summary.max_trajectory_staleness,
        generated_tokens=generated_tokens,
        trained_tokens=trained_tokens,
        wasted_share=max(0.0, 1.0 - trained_tokens / generated_tokens) if generated_tokens else 0.0,
        model_calls=sum(engine.finished for engine in engines),
        prefilled_tokens=sum(engine.prefilled_tokens for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
        length_mean=weighted_mean([s.lengths for s in steps if s.lengths], lambda s: s.mean, lambda s: s.responses),
        length_bias_ks=length_bias.ks,
        length_bias_scheduling_ks=length_bias.scheduling_ks,
        length_bias_filter_ks=length_bias.filter_ks,
        length_bias_pruning_ks=length_bias.pruning_ks,
        mfu_step=weighted_mean(steps, lambda s: s.mfu_step, lambda s: s.step_s),
        mfu_compute=weighted_mean(steps, lambda s: s.mfu_compute, lambda s: s.trainer_compute_s),
        device_hours=device_hours,
        dollars=device_hours * scenario.hardware.dollars_per_device_hour,
        environment=environment,
    )
