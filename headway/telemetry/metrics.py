"""Conversion of ledger lines to named numbers, with one set of names for all trackers and `/metrics`.

A name is ``group/quantity_unit``. A quantity without a unit is a share, a count of its group's items, or dimensionless
(a reward, a loss).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headway.records.curriculum import CurriculumStep
from headway.records.generation import ROUTER_COUNTERS, RouterStatistics
from headway.records.ledger import (
    Distribution,
    EpisodeStatistics,
    EvaluationRecord,
    KernelScores,
    LedgerLine,
    PassAt,
    PrunerFigures,
    RewardStatistics,
    StepRecord,
)
from headway.records.sandbox_statistics import (
    EDGES_S,
    POOL_CAUSES,
    POOL_COUNTERS,
    POOL_LATENCIES,
    Latencies,
    SandboxStatistics,
)

# name -> (field of StepRecord, or "section.field", meaning); a metric has no value if the step lacks its section
STEP_METRICS: dict[str, tuple[str, str]] = {
    "rates/consumption_samples_per_s": ("consumption_per_s", "what the trainer would take if it never waited"),
    "rates/production_samples_per_s": ("production_per_s", "rollouts finished"),
    "rates/effective_production_samples_per_s": ("effective_production_per_s", "production times acceptance rate"),
    "rates/generated_tokens_per_s": ("tokens.generated_per_s", "sampled by all replicas"),
    "rates/trained_tokens_per_s": ("tokens.trained_per_s", "tokens that carry loss"),
    "rates/trained_flop_per_s": ("flops_per_s", "model FLOP of the trainer over the whole step"),
    "rates/computed_token_share": ("tokens.computed_share", "tokens the trainer computed of those in its samples"),
    "rates/mfu_step": ("mfu_step", "share of the measured peak, over the whole step"),
    "rates/mfu_compute": ("mfu_compute", "share of the measured peak, over the trainer's compute"),
    "wait/trainer_ratio": ("trainer_wait_ratio", "share of the step the trainer waited for a batch"),
    "wait/generator_ratio": ("generator_wait_ratio", "share of the step the replicas had nothing to do"),
    "wait/generator_yielded_ratio": ("generator_yielded_ratio", "share of the step the trainer used its devices"),
    "time/step_s": ("step_s", "the whole step"),
    "time/trainer_wait_s": ("trainer_wait_s", "waiting for a batch"),
    "time/trainer_compute_s": ("trainer_compute_s", "inside the training step"),
    "time/publish_s": ("publish_s", "publishing weights"),
    "time/apply_s": ("apply_s", "until every replica had applied the version"),
    "time/apply_pause_s": ("apply_pause_s", "worst replica: no token could be generated"),
    "weights/bytes": ("weights.size_bytes", "of a version"),
    "weights/snapshot_s": ("weights.snapshot_s", "publishing: until the trainer could go on"),
    "weights/copy_s": ("weights.copy_s", "publishing: from the snapshot to the host"),
    "weights/hash_s": ("weights.hash_s", "publishing: the checksum"),
    "weights/encode_s": ("weights.encode_s", "publishing: what has changed since the version before"),
    "weights/delta_bytes": ("weights.delta_bytes", "bytes of that, for other nodes; 0: whole versions"),
    "weights/fetch_s": ("weights.fetch_s", "slowest replica: copying a version, beside decoding"),
    "weights/check_s": ("weights.check_s", "slowest replica: verifying it, beside decoding"),
    "time/checkpoint_s": ("checkpoint_s", "writing a checkpoint"),
    "time/switch_s": ("switch_s", "on- and offloading of replicas and trainer"),
    "time/offload_freed_bytes": ("offload_freed_bytes", "freed on devices by offloading"),
    "time/orchestrator_cpu_s": ("orchestrator_cpu_s", "CPU of the orchestrator's process, exporters included"),
    "time/verify_s": ("verify_s", "inside the verifiers, summed over responses"),
    "queue/open_groups": ("open_groups", "running, parked and buffered"),
    "queue/running_groups": ("running_groups", "being generated or verified"),
    "queue/parked_groups": ("parked_groups", "waiting to be resumed"),
    "queue/buffered_groups": ("buffered_groups", "finished, waiting for the trainer"),
    "queue/buffer_capacity_groups": ("buffer_capacity_groups", "places in the buffer"),
    "queue/oldest_age_s": ("oldest_age_s", "age of the longest-buffered group"),
    "queue/admitted_rollouts": ("admitted_rollouts", "opened since the last step"),
    "queue/parkings": ("parkings", "members parked since the last step, on a full batch or an update"),
    "queue/kv_used_tokens": ("engines.kv_used_tokens", "KV tokens in use, all replicas"),
    "queue/kv_capacity_tokens": ("engines.kv_capacity_tokens", "KV tokens that fit, all replicas"),
    "queue/running_rollouts": ("engines.running_rollouts", "requests that hold a slot"),
    "queue/waiting_rollouts": ("engines.waiting_rollouts", "requests that wait for a slot"),
    "queue/slots": ("engines.slots", "slots of all replicas"),
    "reward/mean": ("rewards.mean", "over the groups finished in the step"),
    "reward/std": ("rewards.std", "over the groups finished in the step"),
    "reward/solve_rate": ("rewards.solve_rate", "share of responses that solve their task"),
    "reward/zero_variance_share": ("rewards.zero_variance_share", "share of groups whose rewards are all equal"),
    "reward/judge_tokens": ("judges.tokens", "read and written by language models that judge"),
    "reward/judge_cost": ("judges.cost", "cost of these, in the currency of their price"),
    "episodes/return_mean": ("episodes.return_mean", "mean return of the last 100 episodes"),
    "episodes/success_rate": ("episodes.success_rate", "share of them that succeeded"),
    "episodes/length_mean_steps": ("episodes.length_mean", "environment steps of an episode"),
    "episodes/ended": ("episodes.episodes", "episodes that ended in the step's fragments"),
    "episodes/cut": ("episodes.cut", "episodes lost with their lanes, since the run began"),
    "episodes/constructions": ("episodes.constructions", "simulators built since the run began"),
    "rates/environment_steps_per_s": ("episodes.steps_per_s", "environment steps trained, over the whole step"),
    "episodes/worker_bytes": ("episodes.worker_bytes", "largest resident memory of a simulators' worker"),
    "episodes/learner_bytes": ("episodes.learner_bytes", "resident memory of the learner"),
    "time/simulate_s": ("episodes.simulate_s", "collecting the step's fragments, summed over blocks"),
    "teaching/rollouts": ("teaching.rollouts", "scored by teachers outside of the trainer"),
    "teaching/failures": ("teaching.failures", "rollouts that failed because a teacher did"),
    "teaching/tokens": ("teaching.tokens", "read by them"),
    "teaching/cost": ("teaching.cost", "of these, in the currency of their price"),
    "teaching/busy_s": ("teaching.busy_s", "in which a group was being scored"),
    "agents/calls": ("agents.calls", "model calls of agents that were answered"),
    "agents/branches": ("agents.branches", "sequences that didn't extend their rollout's trunk"),
    "agents/rewritten_calls": ("agents.rewritten", "branches because the chat template rewrites answers"),
    "agents/abandoned_tokens": ("agents.abandoned_tokens", "sampled for calls whose client left, or that failed"),
    "length/mean_tokens": ("lengths.mean", "of responses"),
    "length/p50_tokens": ("lengths.p50", "of responses"),
    "length/p99_tokens": ("lengths.p99", "of responses"),
    "length/max_tokens": ("lengths.max", "of responses"),
    "length/truncated_share": ("lengths.truncated_share", "responses cut at the limit"),
    "length_bias/ks": ("length_bias.ks", "KS distance of trained from all completed lengths"),
    "length_bias/scheduling_ks": ("length_bias.scheduling_ks", "the part scheduling causes"),
    "length_bias/filter_ks": ("length_bias.filter_ks", "the part filters cause"),
    "length_bias/pruning_ks": ("length_bias.pruning_ks", "the part pruning causes"),
    "length_bias/censored_share": ("length_bias.censored_share", "admitted rollouts in cohorts not closed yet"),
}
STALENESS = {
    "staleness/trajectory_steps": "trajectory_staleness",
    "staleness/token_steps": "tokens.staleness",
    "staleness/environment_steps": "environment_staleness",
    "staleness/optimizer_steps": "optimizer_step_staleness",
}
LENGTHS = "length/tokens"

_UNUSUAL = re.compile(r"[^\w./-]")
_UNUSUAL_OR_SLASH = re.compile(r"[^\w.-]")
_PLAINEST = re.compile(r"[^a-zA-Z0-9_]")  # Prometheus knows no other characters
_LONGEST_LABEL = 100  # characters: MLflow refuses names longer than 250


class Histogram(NamedTuple):
    """A histogram: ``counts[i]`` values lie in (edges[i], edges[i + 1]]."""

    edges: list[float]  # [N + 1], ascending
    counts: list[int]  # [N]


def scalars(line: LedgerLine, sources: Iterable[str] = ()) -> dict[str, float]:
    """Map names to the finite numbers of ``line``; an event has none.

    ``sources``: labels of all task sources of the run. A line has only the sources that were drawn, and the name of a
    source must not depend on the others in the line.
    """
    return {name: value for name, value in _scalars(line, sources) if math.isfinite(value)}


def _scalars(line: LedgerLine, sources: Iterable[str]) -> Iterator[tuple[str, float]]:
    if isinstance(line, EvaluationRecord):
        if line.samples:  # else it measured nothing
            prefix = f"evaluation/{line.split}"
            yield f"{prefix}_solve_rate", line.solve_rate
            yield f"{prefix}_solve_rate_standard_error", line.standard_error
            yield f"{prefix}_reward_mean", line.reward_mean
            for bound, value in zip(("low", "high"), line.return_interval, strict=False):
                yield f"{prefix}_reward_{bound}", value
            yield f"{prefix}_length_mean_tokens", line.length_mean
            yield f"{prefix}_duration_s", line.duration_s
            yield from _pass_at(f"{prefix}_", line.pass_at)
            name_by_label = source_names({*sources, *line.by_source})
            for label, score in line.by_source.items():
                yield f"evaluation_by_source/{line.split}_{name_by_label[label]}_solve_rate", score.solve_rate
            for name, share in line.kernels.items():
                yield f"{prefix}_kernels_{name}", share.value
    elif isinstance(line, StepRecord):
        for name, (field, _) in STEP_METRICS.items():
            if (value := _value(line, field)) is not None:
                yield name, float(value)
        for name, distribution in _staleness(line):
            staleness_name = name.removesuffix("_steps")
            yield f"{staleness_name}_mean_steps", distribution.mean
            yield f"{staleness_name}_max_steps", distribution.max
        if line.flow.concurrent_rollouts:
            yield "control/open_groups", float(line.flow.open_groups)  # 0: no limit
            yield "control/concurrent_rollouts", float(line.flow.concurrent_rollouts)
            yield "control/steps_per_publish", float(line.flow.steps_per_publish)
            yield "control/verifier_workers", float(line.flow.verifier_workers)
            yield "rates/useful_samples_per_s", line.flow.useful_samples / line.step_s if line.step_s else 0.0
        if line.demonstrations:
            yield "rates/demonstrations_per_s", line.demonstrations / line.step_s if line.step_s else 0.0
        for ending, count in line.endings.items():
            yield f"endings/{ending}_rollouts", float(count)
        for ending, token_count in line.tokens.ended.items() if line.tokens else ():
            yield f"endings/{ending}_tokens", float(token_count)
        for boundary, count in line.failures.items():
            yield f"failures/{boundary}_rollouts", float(count)
        for reason, count in line.filtered.items():
            yield f"filtered/{_UNUSUAL_OR_SLASH.sub('_', reason)}_rollouts", float(count)
        for name, value in line.group_meta.items():
            yield f"group_meta/{_UNUSUAL_OR_SLASH.sub('_', name)}", value
        if line.rewards:
            yield from _of_rewards(line.rewards, sources)
        for name, metrics_of in _SECTION_METRICS.items():
            if section := getattr(line, name):
                yield from metrics_of(section)
        for name, value in line.metrics.items():
            yield f"{_metric_group(name)}/{_UNUSUAL.sub('_', name)}", value


def _value(line: StepRecord, field: str) -> Any:
    """A field of ``line``, or of a section ("section.field"); None if ``line`` lacks the section."""
    section, _, name = field.rpartition(".")
    holder = getattr(line, section) if section else line
    return None if holder is None else getattr(holder, name)


def _staleness(line: StepRecord) -> Iterator[tuple[str, Distribution]]:
    for name, field in STALENESS.items():
        if (distribution := _value(line, field)) is not None:
            yield name, distribution


def _of_rewards(rewards: RewardStatistics, sources: Iterable[str]) -> Iterator[tuple[str, float]]:
    yield from _pass_at("reward/", rewards.pass_at)
    name_by_label = source_names({*sources, *rewards.by_source})
    for label, score in rewards.by_source.items():
        if score.samples:
            yield f"by_source/{name_by_label[label]}_solve_rate", score.solve_rate
            yield f"by_source/{name_by_label[label]}_samples", float(score.samples)


def _pass_at(prefix: str, shares: Mapping[str, PassAt]) -> Iterator[tuple[str, float]]:
    for k, pass_at in shares.items():
        yield f"{prefix}pass_at_{k}", pass_at.value
        yield f"{prefix}pass_at_{k}_standard_error", pass_at.standard_error


def _of_kernels(kernels: KernelScores) -> Iterator[tuple[str, float]]:
    for name in ("evaluations", "repeated", "wait_s", "busy_s"):
        yield f"kernels/{name}", float(getattr(kernels, name))
    for fault, count in kernels.faults.items():
        yield f"kernels/fault_{fault}", float(count)
    yield from _pass_at("kernels/compiled_", kernels.compiled_at)
    yield from _pass_at("kernels/correct_", kernels.correct_at)


def router_metrics(router: RouterStatistics) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of all counters and gauges of a router."""
    for name in (*ROUTER_COUNTERS, *_ROUTER_LOAD, "breakers_open"):
        yield f"router/{name}", float(getattr(router, name))


_ROUTER_LOAD = ("used_tokens", "capacity_tokens", "peak_tokens", "open_requests", "waiters", "oldest_age_s")
_POOL_GAUGES = ("used", "capacity", "peak", "waiters", "oldest_wait_s", "starting", "live", "paused", "leaked")


def _of_sandboxes(sandboxes: SandboxStatistics) -> Iterator[tuple[str, float]]:
    pool, reaper = sandboxes.pool, sandboxes.reaper
    for name in (*_POOL_GAUGES, "breaker_open", *POOL_COUNTERS):
        yield f"sandboxes/{name}", float(getattr(pool, name))
    for cause_field in POOL_CAUSES:
        for cause, count in getattr(pool, cause_field).items():
            yield f"sandboxes/{cause_field}_{cause}", float(count)
    for name in POOL_LATENCIES:
        latencies: Latencies = getattr(pool, name)
        if latencies.count:  # else nothing took any time
            yield f"sandboxes/{name}_p50_s", latencies.quantile_s(0.5)
            yield f"sandboxes/{name}_p99_s", latencies.quantile_s(0.99)
    yield "sandboxes/reaped_owners", float(reaper.owners)
    yield "sandboxes/reaped_sandboxes", float(reaper.sandboxes)
    yield "sandboxes/reaper_stuck", float(reaper.stuck)
    for fault, count in sandboxes.injected.items():
        yield f"sandboxes/injected_{_UNUSUAL_OR_SLASH.sub('_', fault)}", float(count)


def _of_curriculum(curriculum: CurriculumStep) -> Iterator[tuple[str, float]]:
    draw_count = sum(curriculum.draws.values())
    if draw_count:  # else there is no mean
        for reason, count in curriculum.draws.items():
            yield f"curriculum/{reason}_draw_share", count / draw_count
        yield "curriculum/drawn_solve_rate", curriculum.solve_rate_mean
        yield "curriculum/drawn_signal", curriculum.signal_mean
        yield "curriculum/group_size_rollouts", curriculum.group_size_mean
    yield "curriculum/min_signal", curriculum.min_signal
    for region, count in curriculum.tasks.items():
        yield f"curriculum/{region}_tasks", float(count)


def _of_pruning(pruning: Mapping[str, PrunerFigures]) -> Iterator[tuple[str, float]]:
    total = PrunerFigures.total(pruning.values())
    yield "pruning/rollouts", float(total.rollouts)
    yield "pruning/dropped_rollouts", float(total.dropped)
    yield "pruning/saved_tokens", total.saved_tokens
    yield "pruning/audited_rollouts", float(total.audits)
    if total.audits:
        yield "pruning/wrong_rate", total.wrong_rate
        yield "pruning/reward_bias", total.reward_bias
    for pruner, figures in pruning.items():
        yield f"pruning_by/{pruner}_rollouts", float(figures.rollouts)


def _of_episodes(episodes: EpisodeStatistics) -> Iterator[tuple[str, float]]:
    for name in ("return", "success"):
        for bound, value in zip(("low", "high"), getattr(episodes, f"{name}_interval"), strict=False):
            yield f"episodes/{name}_{bound}", value


# section of a step -> its metrics that aren't in STEP_METRICS
_SECTION_METRICS: dict[str, Callable[[Any], Iterator[tuple[str, float]]]] = {
    "router": router_metrics,
    "sandboxes": _of_sandboxes,
    "curriculum": _of_curriculum,
    "pruning": _of_pruning,
    "kernels": _of_kernels,
    "episodes": _of_episodes,
}


def source_names(labels: Iterable[str]) -> dict[str, str]:
    """Map labels of task sources to unique parts of metric names.

    By default a label is a path, and MLflow refuses a complete line for one name that contains ``//`` or a part of
    dots. A long path keeps its end, which identifies it best. Labels that would get equal names get a hash of their
    characters, so that names don't depend on the labels' order; a label that needs no change keeps its name.
    """
    cleaned_names = {label: _UNUSUAL_OR_SLASH.sub("_", label)[-_LONGEST_LABEL:].lstrip("._") for label in labels}
    plain_names = {label: _PLAINEST.sub("_", name) for label, name in cleaned_names.items()}
    plain_counts = Counter(plain_names.values())
    names: dict[str, str] = {}
    for label, name in cleaned_names.items():
        is_unique = name and plain_counts[plain_names[label]] == 1
        names[label] = name if is_unique or label == plain_names[label] else f"{name or 'source'}_{_hash_suffix(label)}"
    return names


def _hash_suffix(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:6]


def _metric_group(name: str) -> str:
    if name.startswith("ratio") or name.startswith("clip"):
        return "ratio"
    if name.startswith(("mismatch", "experts", "kept")):
        return "mismatch"
    return "optimiser" if name in ("grad_norm", "learning_rate") else "loss"


def histograms(line: LedgerLine) -> dict[str, Histogram]:
    """Map names to a step's histograms: staleness by trajectory and by token (steps, optimiser steps), response lengths
    (tokens), and latencies of sandboxes (seconds). Empty histograms are left out."""
    if not isinstance(line, StepRecord):
        return {}
    histogram_by_name = {name: _of_values(distribution.histogram) for name, distribution in _staleness(line)}
    if line.lengths:
        histogram_by_name[LENGTHS] = _of_buckets(line.lengths.histogram)
    if pool := line.sandboxes and line.sandboxes.pool:
        histogram_by_name |= {f"sandboxes/{name}_s": _of_latencies(getattr(pool, name)) for name in POOL_LATENCIES}
    return {name: histogram for name, histogram in histogram_by_name.items() if histogram.counts}


def _of_values(counts: dict[str, int]) -> Histogram:
    """Make a histogram with a bucket for every integer from the smallest to the largest value."""
    count_by_value = {int(value): count for value, count in counts.items() if count > 0}
    if not count_by_value:
        return Histogram([], [])
    values = range(min(count_by_value), max(count_by_value) + 1)
    return Histogram([values[0] - 0.5, *(v + 0.5 for v in values)], [count_by_value.get(v, 0) for v in values])


def _of_latencies(latencies: Latencies) -> Histogram:
    """Make a histogram with the latencies' buckets, from the first to the last nonempty one; the bucket beyond all
    edges ends at twice the last edge."""
    edges = (0.0, *EDGES_S, 2 * EDGES_S[-1])
    filled_buckets = [index for index, count in enumerate(latencies.counts) if count]
    if not filled_buckets:
        return Histogram([], [])
    first, last = filled_buckets[0], filled_buckets[-1]
    return Histogram(list(edges[first : last + 2]), list(latencies.counts[first : last + 1]))


def _of_buckets(counts: dict[str, int]) -> Histogram:
    """Make a histogram from counts by upper bound; empty buckets are merged with the next."""
    bounds = sorted(int(end) for end, count in counts.items() if count > 0)
    return Histogram([0.0, *map(float, bounds)], [counts[str(end)] for end in bounds]) if bounds else Histogram([], [])
