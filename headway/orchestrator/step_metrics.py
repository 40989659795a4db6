"""Counts what happens between two steps and turns it into the step's ledger record."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec
import numpy as np

from headway.algorithms.groups.outcome import is_zero_variance
from headway.buffer.row_encoding import LoggedBatch
from headway.config.schema import Experiment
from headway.control.estimates import pass_at
from headway.control.length_bias import LengthBias
from headway.control.pruning.rules import pruner_figures
from headway.control.summaries import length_histogram, quantile, solve_rate_histogram
from headway.control.tuning.knob_search import first_knobs
from headway.orchestrator.queue_flow import flow_of
from headway.orchestrator.source_scores import kernel_scores, source_scores
from headway.orchestrator.state import RunState
from headway.orchestrator.trained_staleness import staleness_fields, token_staleness
from headway.records.curriculum import CurriculumStep
from headway.records.generation import (
    ROUTER_COUNTERS,
    AppliedWeights,
    EngineLoad,
    EngineStatistics,
    PublishedWeights,
    RouterStatistics,
)
from headway.records.ledger import (
    AgentStatistics,
    JudgeStatistics,
    LengthStatistics,
    RewardStatistics,
    StepRecord,
    TokenStatistics,
    WeightsStatistics,
)
from headway.records.rollout import Ending, FinishedGroup, Group, Rollout
from headway.records.sandbox_statistics import SandboxStatistics
from headway.records.trace import GroupEnd, GroupTrace, RolloutTrace, Span, StepTrace, TraceLine
from headway.records.training import SKIPPED_MINIBATCHES, StepReport
from headway.runtime.clock import Clock

_TYPICAL_STEPS = 8  # newest steps whose median duration is typical


@dataclass
class StepInterval:
    """Counts and seconds since the last step's record."""

    started_s: float
    cpu_s: float
    finished: list[FinishedGroup] = field(default_factory=list)
    metas: list[dict[str, float]] = field(default_factory=list)  # their statistics by hooks.group_meta
    accepted: int = 0  # rollouts of groups that entered the buffer
    accepted_groups: int = 0
    ended_tokens: Counter[str] = field(default_factory=Counter)  # ending -> response tokens
    admitted: int = 0  # rollouts
    wait_s: float = 0.0
    straggler_wait_s: float = 0.0
    device_wait_s: float = 0.0
    update_wait_s: float = 0.0
    publish_s: float = 0.0
    apply_s: float = 0.0
    apply_pause_s: float = 0.0
    weights: WeightsStatistics | None = None
    checkpoint_s: float = 0.0
    switch_s: float = 0.0
    offload_freed_bytes: int = 0


class StepMetrics:
    """Measures, on an injected clock, what the orchestrator itself observes of a step (DESIGN rule 9)."""

    def __init__(
        self,
        experiment: Experiment,
        clock: Clock,
        observe: Callable[[TraceLine], None] | None = None,
        curriculum: Callable[[], CurriculumStep | None] = lambda: None,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        """``observe`` receives the trace; ``curriculum`` returns the draws since its last call. ``cpu_s``: CPU seconds
        this process has used."""
        self._curriculum = curriculum
        self._cpu_s = cpu_s
        self._observe = observe
        self._experiment = experiment
        self._clock = clock
        self._token_budget = experiment.token_budget
        self._pass_at = experiment.ledger.pass_at
        self._configured = first_knobs(experiment)
        self.peak_flops_per_s = 0.0  # of the trainer's device; 0: not measured
        self.length_bias = LengthBias(experiment.queue.groups_per_step)
        self.applied_version = 0
        self._interval = self._new_interval()
        self._recent_step_s: deque[float] = deque(maxlen=_TYPICAL_STEPS)
        self._engines: list[EngineStatistics] = []
        self._routing = RouterStatistics()
        self._sandboxes = SandboxStatistics()
        self._engines_s = clock.now()  # when they were read

    def _new_interval(self) -> StepInterval:
        return StepInterval(started_s=self._clock.now(), cpu_s=self._cpu_s())

    def restart_interval(
        self, engines: Sequence[EngineStatistics], sandboxes: SandboxStatistics = SandboxStatistics()
    ) -> None:
        """Begin counting now: start-up and a held evaluation belong to no step."""
        self._interval = self._new_interval()
        self._engines, self._engines_s = list(engines), self._clock.now()
        self._sandboxes = sandboxes

    @property
    def last_step_s(self) -> float:
        """Clock when the last step was completed, or when counting began."""
        return self._interval.started_s

    @property
    def typical_step_s(self) -> float:
        """Median duration of the newest steps, waits included; 0.0 before the first."""
        return median(self._recent_step_s) if self._recent_step_s else 0.0

    # -- reported by the loops ---------------------------------------------------------------------------

    def admitted(self, group: Group) -> None:
        self.length_bias.admit(group.index, group.size)
        self._interval.admitted += group.size

    def finished(self, group: FinishedGroup, accepted: bool, meta: Mapping[str, float] | None = None) -> None:
        """Count a group with all members verified; ``accepted``: it entered the buffer; ``meta``: its statistics."""
        self._interval.finished.append(group)
        self._interval.metas.append(dict(meta or {}))
        if accepted:
            self._interval.accepted += len(group.valid)
            self._interval.accepted_groups += 1
        if self._observe is not None:
            self._observe(group_trace(group, self._clock.now()))

    def ended(self, group: Group, ending: Ending, step: int, *, finished: bool) -> None:
        """Observe a group's end while the trainer was at version ``step``; ``finished``: it had been verified."""
        if self._observe is not None:
            now_s = _rounded(self._clock.now())
            admitted_s = _rounded(group.admitted_s)
            self._observe(GroupEnd(index=group.index, ending=ending, step=step, time_s=now_s, admitted_s=admitted_s,
                                   finished=finished))  # fmt: skip

    def rollout_ended(self, group: int, ending: Ending, tokens: int, *, complete: bool) -> None:
        """Count a rollout that ended with ``tokens`` response tokens; ``complete``: generation came to its own end."""
        self.length_bias.end(group, ending, tokens, complete=complete)
        self._interval.ended_tokens[ending] += tokens

    def waited(self, seconds: float) -> None:
        self._interval.wait_s += seconds
        self._span("trainer-0", "wait", seconds)

    def device_waited(self, seconds: float) -> None:
        """Count the trainer's wait for replicas that have its devices: each gives them up between two of its steps."""
        self._interval.device_wait_s += seconds
        self.waited(seconds)

    def straggled(self, seconds: float) -> None:
        """Count the trainer's wait for older groups that were due, while a whole batch had finished."""
        self._interval.straggler_wait_s += seconds

    def update_waited(self, seconds: float) -> None:
        """Count the trainer's wait until every replica had applied the previous version."""
        self._interval.update_wait_s += seconds

    def published(self, seconds: float) -> None:
        self._interval.publish_s += seconds
        self._span("trainer-0", "publish", seconds)

    def applied(self, seconds: float, reports: Sequence[AppliedWeights], weights: PublishedWeights) -> None:
        self._interval.apply_s += seconds
        self._interval.apply_pause_s = max([self._interval.apply_pause_s, *(r.pause_s for r in reports)])
        if reports and weights.size_bytes:
            slowest_report = max(reports, key=lambda report: report.fetch_s)
            copy_s = weights.publish_s - weights.snapshot_s - weights.hash_s - weights.encode_s
            self._interval.weights = WeightsStatistics(
                transport=weights.transport, size_bytes=weights.size_bytes,
                snapshot_s=weights.snapshot_s, copy_s=copy_s, hash_s=weights.hash_s, encode_s=weights.encode_s,
                delta_bytes=weights.deltas[-1].size_bytes if weights.deltas else 0,
                fetch_s=slowest_report.fetch_s - slowest_report.check_s, check_s=slowest_report.check_s,
            )  # fmt: skip
        version = max((report.version for report in reports), default=self.applied_version)
        self._span("weights", f"apply version {version}", seconds)

    def checkpointed(self, seconds: float) -> None:
        self._interval.checkpoint_s += seconds
        self._span("trainer-0", "checkpoint", seconds)

    def switched(self, seconds: float, freed_bytes: int) -> None:
        """Count an offload or onload of the trainer's or a replica's memory."""
        self._interval.switch_s += seconds
        self._interval.offload_freed_bytes += freed_bytes

    def on_device(self, device: str, participant: str, activity: str, start_s: float, end_s: float) -> None:
        """See `OnSpan` of flow/device_locks.py."""
        if self._observe is not None:
            span_name = f"{participant}: {activity}"
            self._observe(Span(track=device, name=span_name, start_s=_rounded(start_s), end_s=_rounded(end_s)))

    def moved(self, action: str, seconds: float) -> None:
        self._span("plan", action, seconds)

    def _span(self, track: str, name: str, seconds: float) -> None:
        """Observe a span of ``seconds`` that ends now."""
        if self._observe is not None:
            end_s = self._clock.now()
            self._observe(Span(track=track, name=name, start_s=_rounded(end_s - seconds), end_s=_rounded(end_s)))

    # -- the step's record ---------------------------------------------------------------------------

    def close_step(
        self,
        report: StepReport,
        trained: Sequence[FinishedGroup],
        state: RunState,
        buffer_capacity_groups: int,
        time_s: float,
        useful_samples: int = 0,
    ) -> StepRecord:
        """Close the interval when a step is completed; returns the ledger record of everything since the previous step,
        whose publish and checkpoint it has in place of its own. ``trained``: its groups, none when it was skipped.
        ``useful_samples``: those with a gradient. ``with_engines`` adds the engines' statistics."""
        interval, self._interval = self._interval, self._new_interval()
        step_s = max(self._interval.started_s - interval.started_s, 1e-9)
        self._recent_step_s.append(step_s)
        sample_count = sum(len(group.valid) for group in trained)
        produced_rollouts = sum(len(group.rollouts) for group in interval.finished)
        if self._observe is not None:
            self._observe(_step_trace(report, interval.started_s, self._interval.started_s, sample_count))
        endings, failures, filtered = state.accounting.take_recent()
        return StepRecord(
            step=report.step,
            version=report.version,
            skipped=report.skipped,
            time_s=time_s,
            step_s=step_s,
            samples=sample_count,
            groups=len(trained),
            consumption_per_s=sample_count / max(step_s - interval.wait_s, 1e-9),
            production_per_s=produced_rollouts / step_s,
            effective_production_per_s=interval.accepted / step_s,
            trainer_wait_s=interval.wait_s,
            trainer_compute_s=report.compute_s,
            publish_s=interval.publish_s,
            apply_s=interval.apply_s,
            apply_pause_s=interval.apply_pause_s,
            weights=interval.weights,
            checkpoint_s=interval.checkpoint_s,
            switch_s=interval.switch_s,
            offload_freed_bytes=interval.offload_freed_bytes,
            trainer_wait_ratio=min(1.0, interval.wait_s / step_s),
            orchestrator_cpu_s=self._interval.cpu_s - interval.cpu_s,
            buffer_capacity_groups=buffer_capacity_groups,
            admitted_rollouts=interval.admitted,
            parkings=state.take_parkings(),
            endings=endings,
            failures=failures,
            filtered=filtered,
            group_meta=_means(interval.metas),
            metrics=report.metrics,
            flow=flow_of(
                interval.finished,
                knobs=state.knobs,
                configured=self._configured,
                accepted_groups=interval.accepted_groups,
                useful_samples=useful_samples,
                trained_tokens=report.tokens,
                straggler_wait_s=interval.straggler_wait_s,
                device_wait_s=interval.device_wait_s,
                update_wait_s=interval.update_wait_s,
            ),
            curriculum=self._curriculum(),
            **staleness_fields(trained, report.step, self._experiment, int(report.metrics.get(SKIPPED_MINIBATCHES, 0))),
            tokens=TokenStatistics(
                trained_per_s=report.loss_tokens / step_s,
                computed_share=report.computed_tokens / report.tokens if report.tokens else 1.0,
                staleness=token_staleness(trained, report.step, self._token_budget),
                ended=dict(interval.ended_tokens),
            ),
            length_bias=self.length_bias.statistics(),
            pruning=pruner_figures(interval.finished),
            kernels=kernel_scores(interval.finished, self._pass_at),
            **_queue_fields(state),
            **_work_fields(report, step_s, self.peak_flops_per_s),
            **_verification_fields([rollout for group in interval.finished for rollout in group.rollouts]),
            **_response_fields(interval.finished, self._pass_at),
        )

    def lost_step(self, batch: LoggedBatch, time_s: float) -> StepRecord:
        """Rebuild the record of a completed step that was lost in a kill from the batch log. Times, rates, the filtered
        groups and the trainer's figures are missing."""
        step, trained = batch.step, batch.groups
        sample_count = sum(len(group.valid) for group in trained)
        return StepRecord(
            step=step,
            version=step + 1,
            demonstrations=0 if batch.demonstrations is None else len(batch.demonstrations.rows),
            time_s=time_s,
            samples=sample_count,
            groups=len(trained),
            endings={"trained": sample_count},
            **staleness_fields(trained, step, self._experiment),
            tokens=TokenStatistics(staleness=token_staleness(trained, step, self._token_budget)),
            pruning=pruner_figures(trained),
            **_response_fields(trained, self._pass_at),
        )

    def with_engines(
        self,
        record: StepRecord,
        engines: Sequence[EngineStatistics],
        routing: RouterStatistics = RouterStatistics(),
        sandboxes: SandboxStatistics = SandboxStatistics(),
    ) -> StepRecord:
        """Add the statistics of the generators, their router and the sandboxes. Reading them takes time, so they have
        an interval of their own."""
        former_engines, self._engines = self._engines, list(engines)
        former_routing, self._routing = self._routing, routing
        former_s, self._engines_s = self._engines_s, self._clock.now()
        elapsed_s = max(self._engines_s - former_s, 1e-9)
        flow = msgspec.structs.replace(
            record.flow,
            generated_tokens=round(_growth(former_engines, engines, "generated_tokens")),
            generator_busy_s=_growth(former_engines, engines, "busy_s"),
            generator_s=elapsed_s * sum(not engine.idle for engine in engines),
            decode_steps=round(_growth(former_engines, engines, "decode_steps")),
            preemptions=round(_growth(former_engines, engines, "preemptions")),
        )
        generated_per_s = _growth(former_engines, engines, "generated_tokens") / elapsed_s
        return msgspec.structs.replace(
            record,
            flow=flow,
            engines=EngineLoad.total(engines),
            replica_versions=tuple(engine.version for engine in engines),
            router=_since(former_routing, routing) if routing != RouterStatistics() else None,
            tokens=record.tokens and msgspec.structs.replace(record.tokens, generated_per_s=generated_per_s),
            sandboxes=self._sandboxes_since(sandboxes),
            generator_wait_ratio=_mean_share(former_engines, engines, "idle_s", elapsed_s),
            generator_yielded_ratio=_mean_share(former_engines, engines, "yielded_s", elapsed_s),
        )

    def _sandboxes_since(self, now: SandboxStatistics) -> SandboxStatistics | None:
        former, self._sandboxes = self._sandboxes, now
        return now.since(former) if now.any else None


def group_trace(finished: FinishedGroup, now_s: float) -> GroupTrace:
    """A finished group's trace: times, tokens, versions and reward of each member."""
    group = finished.group
    return GroupTrace(
        index=group.index,
        task=group.task.task_id,
        admitted_s=_rounded(group.admitted_s),
        admitted_version=group.admitted_version,
        finished_s=_rounded(now_s),
        rollouts=tuple(
            RolloutTrace(
                member=rollout.member,
                first_token_s=_rounded(rollout.first_token_s),
                generated_s=_rounded(rollout.generated_s),
                finished_s=_rounded(rollout.finished_s),
                verify_s=_rounded(rollout.verify_s),
                tokens=rollout.response_tokens,
                first_version=rollout.first_version,
                last_version=rollout.last_version,
                reward=rollout.reward,
                resumes=rollout.resumes,
                reprefills=rollout.reprefills,
                failure="" if rollout.failure is None else rollout.failure.boundary,
            )
            for rollout in finished.rollouts
        ),
    )


def _step_trace(report: StepReport, start_s: float, end_s: float, samples: int) -> StepTrace:
    ranks = report.rank_compute_s or (report.compute_s,)
    return StepTrace(step=report.step, version=report.version, start_s=_rounded(start_s), end_s=_rounded(end_s),
                     rank_compute_s=tuple(map(_rounded, ranks)), samples=samples, skipped=report.skipped)  # fmt: skip


def _rounded(seconds: float) -> float:
    """``seconds`` rounded to the microsecond: more digits only make the file longer."""
    return round(seconds, 6)


def _means(metas: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the groups that have it."""
    values_by_name: dict[str, list[float]] = {}
    for meta in metas:
        for key, meta_value in meta.items():
            values_by_name.setdefault(key, []).append(meta_value)
    return {key: sum(values) / len(values) for key, values in values_by_name.items()}


def _growth(previous: Sequence[EngineStatistics], after: Sequence[EngineStatistics], name: str) -> float:
    """Growth of a counter over replicas; one that restarted in between counts from zero."""
    total_growth = 0.0
    for position, engine in enumerate(after):
        counter_now = float(getattr(engine, name))
        counter_then = float(getattr(previous[position], name)) if position < len(previous) else 0.0
        total_growth += counter_now - counter_then if counter_now >= counter_then else counter_now
    return total_growth


def _mean_share(
    previous: Sequence[EngineStatistics], after: Sequence[EngineStatistics], name: str, step_s: float
) -> float:
    """Share of the time that a counter of seconds grew, mean over the replicas that don't rest."""
    awake_positions = [position for position, engine in enumerate(after) if not engine.idle]
    if not awake_positions:
        return 0.0
    grown_s = sum(_growth(previous[index : index + 1], after[index : index + 1], name) for index in awake_positions)
    return min(1.0, grown_s / (step_s * len(awake_positions)))


def _since(previous: RouterStatistics, now: RouterStatistics) -> RouterStatistics:
    """``now`` with the growth of its counters."""
    growth_by_name = {counter: getattr(now, counter) - getattr(previous, counter) for counter in ROUTER_COUNTERS}
    return msgspec.structs.replace(now, **growth_by_name)


def _queue_fields(state: RunState) -> dict[str, Any]:
    return {
        "open_groups": state.open_groups,
        "running_groups": len(state.running),
        "parked_groups": state.parked_groups,
        "buffered_groups": len(state.finished),
        "oldest_age_s": state.oldest_age_s(),
    }


def _work_fields(report: StepReport, step_s: float, peak_flops_per_s: float) -> dict[str, Any]:
    """The record's fields on the trainer's work in a step of ``step_s`` seconds, waits included."""
    computing = peak_flops_per_s and report.compute_s
    return {
        "flops_per_s": report.flops / step_s,
        "mfu_step": report.flops / step_s / peak_flops_per_s if peak_flops_per_s else 0.0,
        "mfu_compute": report.flops / report.compute_s / peak_flops_per_s if computing else 0.0,
        "peak_flops_per_s": peak_flops_per_s,
    }


def _verification_fields(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The record's fields on judges and agents: no section of those that weren't used."""
    judges = JudgeStatistics(tokens=sum(r.judge_tokens for r in rollouts), cost=sum(r.judge_cost for r in rollouts))
    agents = AgentStatistics(
        calls=sum(r.calls for r in rollouts),
        branches=sum(len(r.branches) for r in rollouts),
        rewritten=sum(r.rewritten for r in rollouts),
        abandoned_tokens=sum(r.abandoned_tokens for r in rollouts),
    )
    return {
        "verify_s": sum(r.verify_s for r in rollouts),
        "judges": judges if judges != JudgeStatistics() else None,
        "agents": agents if agents != AgentStatistics() else None,
    }


def _response_fields(groups: Sequence[FinishedGroup], ks: Sequence[int]) -> dict[str, Any]:
    """The record's sections on rewards and lengths, of the valid members of ``groups``; {} without any."""
    valid_groups = [group.valid for group in groups if group.valid]
    if not valid_groups:
        return {}
    rollouts = [r for members in valid_groups for r in members]
    rewards = [r.reward for r in rollouts]
    lengths = [r.response_tokens for r in rollouts]
    return {
        "rewards": RewardStatistics(
            mean=float(np.mean(rewards)),
            std=float(np.std(rewards)),
            solve_rate=float(np.mean([r.solved for r in rollouts])),
            solve_rate_histogram=solve_rate_histogram((sum(r.solved for r in m), len(m)) for m in valid_groups),
            pass_at=pass_at(((sum(r.solved for r in m), len(m)) for m in valid_groups), ks),
            zero_variance_share=float(np.mean([is_zero_variance([r.reward for r in m]) for m in valid_groups])),
            by_source=source_scores((g.group.task.source, r) for g in groups for r in g.rollouts),
        ),
        "lengths": LengthStatistics(
            mean=sum(lengths) / len(lengths),
            p50=quantile(lengths, 0.5),
            p99=quantile(lengths, 0.99),
            max=max(lengths),
            histogram=length_histogram(lengths),
            truncated_share=sum(r.truncated for r in rollouts) / len(rollouts),
        ),
    }
