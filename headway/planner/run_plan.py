"""Plans a run: devices of the generator and the trainer, their mode, and the predicted rate.

Placements of every mode that a run knows are compared by the rates of generator and trainer; the best of them are then
simulated as a queue (`control/tuning/forecast.py`), which decides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headway.config.load import flatten
from headway.config.schema import Experiment
from headway.control.tuning.forecast import (
    RunShape,
    consumption_rate,
    forecast,
    ideal_rate,
    production_rate,
    queue_model,
)
from headway.control.tuning.ledger_model import shape_of
from headway.control.tuning.queue_model import QueueModel, simulate_or_zero
from headway.planner.pool_file import PlanDevices, PlannedWorkload, PlanPool
from headway.planner.stage_curves import GenerationCurve, StageCurves, TrainingCurve
from headway.planner.teachers import teacher_stages
from headway.records.check_report import Calibration, Forecast
from headway.records.errors import ConfigurationError
from headway.records.plan import Alternative, Mode, Objective, PlannedStage, RunPlan

# Keys that a plan sets: a configuration may differ in them from the one that the plan was made for.
PLANNED_KEYS = (
    "generator.devices",
    "generator.slots",
    "generator.kv_capacity_tokens",
    "generator.engine_arguments",
    "trainer.devices",
    "trainer.shards",
    "trainer.context_parallel",
    "trainer.expert_parallel",
    "trainer.host_memory",
)
_EXCLUDED = ("run.", "ledger.", "tasks.", "evaluation.", "checkpoint.", "sft.")  # a plan doesn't depend on them
_SIMULATED = 8  # candidates


class Placement(NamedTuple):
    """Numbers of devices of generator and trainer. ``shared``: the trainer's devices that the generator has as well."""

    generate_on: int  # class
    generators: int
    train_on: int
    trainers: int
    shared: int

    @property
    def mode(self) -> Mode:
        if not self.shared:
            return "spatial"
        return "temporal" if self.shared == self.generators else "hybrid"


class Candidate(NamedTuple):
    placement: Placement
    generation: GenerationCurve
    training: TrainingCurve
    shape: RunShape
    measured: Calibration  # the predicted calibration
    model: QueueModel
    ideal: float  # samples/s when only the rates of generator and trainer limit
    usd_per_hour: float | None


class PlannedRun(NamedTuple):
    """A plan, with the candidate and the workload that it was made from."""

    plan: RunPlan
    best: Candidate
    workload: PlannedWorkload


def plan_run(experiment: Experiment, pool: PlanPool, curves: StageCurves, objective: Objective) -> PlannedRun:
    """The plan that is best in ``objective``: trained samples/s, or dollars for a sample.

    Raises ConfigurationError where no placement has the memory (which stage, how much, what would do) and for a plan
    by cost without prices.
    """
    if objective == "cost" and any(kind.usd_per_hour is None for kind in pool.classes):
        raise ConfigurationError("pool: price is missing: a plan by cost needs one for each class of devices")
    candidates = [fit for placement in _placements(pool) if (fit := _candidate(experiment, pool, curves, placement))]
    if not candidates:
        raise ConfigurationError(
            "; ".join(curves.reasons.values()) or "pool: needs two devices, or one on which both sides fit"
        )
    ideal_bound = max(candidate.ideal for candidate in candidates)
    candidates.sort(key=lambda candidate: -_merit(candidate, candidate.ideal, objective))
    chosen: list[Candidate] = []
    for mode in ("temporal", "spatial", "hybrid"):  # the best of each mode, then the best of all
        chosen += [candidate for candidate in candidates if candidate.placement.mode == mode][:2]
    chosen += [candidate for candidate in candidates if candidate not in chosen][: max(0, _SIMULATED - len(chosen))]
    rated_finalists = [(candidate, _queue_rate(candidate)) for candidate in chosen]
    rated_finalists.sort(key=lambda pair: -_merit(*pair, objective))
    best = rated_finalists[0][0]
    predicted = forecast(best.shape, best.measured, curves.lengths)
    alternatives: dict[Mode, Alternative] = {}
    for candidate, rate in rated_finalists[1:]:
        mode = candidate.placement.mode
        if mode != best.placement.mode and mode not in alternatives:
            value = rate if objective == "time" else 1e6 * (candidate.usd_per_hour or 0.0) / 3600 / rate
            alternative_name = f"{candidate.placement.generators} generate, {candidate.placement.trainers} train"
            alternatives[mode] = Alternative(name=alternative_name, value=value)
    plan = _make_plan(experiment, pool, curves, objective, best, predicted, ideal_bound, alternatives)
    return PlannedRun(plan, best, curves.workload)


def predicted_rate(experiment: Experiment, pool: PlanPool, curves: StageCurves, placement: Placement) -> float | None:
    """Trained samples/s of one placement; None where generator or trainer doesn't fit on its devices."""
    candidate = _candidate(experiment, pool, curves, placement)
    return None if candidate is None else _queue_rate(candidate)


def _merit(candidate: Candidate, samples_per_s: float, objective: Objective) -> float:
    return samples_per_s if objective == "time" else samples_per_s / max(1e-12, candidate.usd_per_hour or 0.0)


def digest(experiment: Experiment) -> str:
    """Digest of all keys that a plan depends on and doesn't set."""
    kept = {key: value for key, value in flatten(experiment).items() if not key.startswith((*PLANNED_KEYS, *_EXCLUDED))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def planned_settings(experiment: Experiment, plan: RunPlan, origin: str) -> dict[str, str]:
    """Keys that the plan sets for this experiment. Raises ConfigurationError where it was made for another, or can't be
    run."""
    if plan.made_for != digest(experiment):
        raise ConfigurationError(
            f"{origin} was made for another configuration (digest {plan.made_for}, this one has {digest(experiment)}): "
            "plan again with headway plan, or take the configuration it was made for"
        )
    if plan.refused:
        raise ConfigurationError(f"{origin} can't be run: {'; '.join(plan.refused)}")
    return plan.settings


# --- candidates ------------------------------------------------------------------------------------------


def _device_counts(available: int) -> list[int]:
    """Numbers of devices to offer: all up to 8, then four for each power of two, and all devices."""
    device_counts = {count for count in range(1, min(available, 8) + 1)} | {available}
    step = 2
    while 5 * step <= available:
        device_counts |= {multiple * step for multiple in (5, 6, 7, 8) if multiple * step <= available}
        step *= 2
    return sorted(device_counts)


def _placements(pool: PlanPool) -> Iterator[Placement]:
    for g, generating in enumerate(pool.classes):
        for t, training in enumerate(pool.classes):
            for trainers in _device_counts(training.count):
                if g != t:
                    yield from (Placement(g, n, t, trainers, 0) for n in _device_counts(generating.count))
                    continue
                separate_counts = {n for n in _device_counts(training.count) if n + trainers <= training.count}
                separate_counts |= {training.count - trainers} - {0}
                yield from (Placement(g, n, t, trainers, 0) for n in sorted(separate_counts))
                yield Placement(g, trainers, t, trainers, trainers)
                if trainers < training.count:
                    yield Placement(g, training.count, t, trainers, trainers)


def _candidate(experiment: Experiment, pool: PlanPool, curves: StageCurves, placement: Placement) -> Candidate | None:
    training = curves.training(placement.train_on, placement.trainers)
    if training is None:
        return None
    resident = (training.bytes_per_device or 0.0) if placement.shared else 0.0
    generation = curves.generation(placement.generate_on, placement.generators, resident)
    if generation is None or (placement.mode == "hybrid" and placement.shared % generation.per_replica):
        return None
    run_shape = _shape(experiment, generation, training, placement)
    measured = curves.calibration(pool.classes[placement.train_on], generation, training, shared=bool(placement.shared))
    taught_per_s = [stage.samples_per_s for stage in teacher_stages(curves) if stage.samples_per_s]
    teach_s = run_shape.teachers / min(taught_per_s, default=math.inf)
    measured = msgspec.structs.replace(measured, teach_response_s=teach_s)
    model = queue_model(run_shape, measured, curves.lengths)
    mean_tokens = curves.lengths.mean_tokens
    accepted_rate = production_rate(model, mean_tokens) * model.acceptance
    ideal = ideal_rate(accepted_rate, consumption_rate(model, mean_tokens), run_shape.yielded_share)
    prices = [pool.classes[placement.generate_on].usd_per_hour, pool.classes[placement.train_on].usd_per_hour]
    usd_per_hour = None
    if prices[0] is not None and prices[1] is not None:
        usd_per_hour = prices[0] * placement.generators + prices[1] * (placement.trainers - placement.shared)
    return Candidate(placement, generation, training, run_shape, measured, model, ideal, usd_per_hour)


def _shape(experiment: Experiment, generation: GenerationCurve, training: TrainingCurve, placed: Placement) -> RunShape:
    limited = experiment.queue.max_concurrent_rollouts is not None  # by a key that a plan doesn't set
    slots = generation.slots * generation.replicas
    return msgspec.structs.replace(
        shape_of(experiment, placed.shared // generation.per_replica),
        slots=generation.slots,
        replicas=generation.replicas,
        ranks=training.copies,
        concurrent_rollouts=experiment.concurrent_rollouts if limited else max(experiment.concurrent_rollouts, slots),
        kv_tokens=1 << 60,  # slots were chosen by memory
    )


def _queue_rate(candidate: Candidate) -> float:
    """Trained samples/s of the queue under the run's own rules."""
    return max(1e-9, simulate_or_zero(candidate.model).samples_per_s)


# --- what is written -------------------------------------------------------------------------------------


def _make_plan(
    experiment: Experiment,
    pool: PlanPool,
    curves: StageCurves,
    objective: Objective,
    best: Candidate,
    predicted: Forecast,
    bound: float,
    others: dict[Mode, Alternative],
) -> RunPlan:
    placement, outcome = best.placement, predicted.outcome
    generating, training = pool.classes[placement.generate_on], pool.classes[placement.train_on]
    first_trainer = 0 if placement.generate_on != placement.train_on else placement.generators - placement.shared
    device_names = _names(generating, 0, placement.generators), _names(training, first_trainer, placement.trainers)
    sample_tokens = curves.prompt_tokens + curves.lengths.mean_tokens
    samples_per_s, error = outcome.samples_per_s, curves.error
    stages = (
        PlannedStage(
            name="generate",
            device=generating.device.name,
            names=device_names[0],
            copies=best.generation.replicas,
            spread=best.generation.spread,
            samples_per_s=predicted.production_per_s,
            bytes_per_device=best.generation.bytes_per_device,
            slots=best.generation.slots,
        ),
        PlannedStage(
            name="train",
            device=training.device.name,
            names=device_names[1],
            copies=placement.trainers // (best.training.layout.ranks if best.training.layout else 1),
            spread=best.training.spread,
            samples_per_s=predicted.consumption_per_s,
            bytes_per_device=best.training.bytes_per_device,
        ),
        *teacher_stages(curves),
    )
    settings = {
        "generator.devices": json.dumps(device_names[0][:: best.generation.per_replica]),
        "generator.slots": str(best.generation.slots),
        "trainer.devices": json.dumps(device_names[1]),
    }
    layout = {} if best.training.layout is None else msgspec.structs.asdict(best.training.layout)
    changed = {key: value for key, value in layout.items() if value != getattr(experiment.trainer, key)}
    settings |= {f"trainer.{key}": json.dumps(value) for key, value in changed.items()}
    full_cache_tokens = best.generation.slots * experiment.max_sequence_tokens
    if best.generation.kv_tokens is not None and best.generation.kv_tokens < full_cache_tokens:  # else all slots fit
        settings["generator.kv_capacity_tokens"] = str(best.generation.kv_tokens)
    set_arguments = experiment.generator.engine_arguments
    if best.generation.tensor != set_arguments.get("tensor_parallel_size", 1):
        arguments = set_arguments | {"tensor_parallel_size": best.generation.tensor}
        settings["generator.engine_arguments"] = json.dumps(arguments)
    usd_per_hour = best.usd_per_hour
    return RunPlan(
        made_for=digest(experiment),
        pool=", ".join(f"{kind.count} {kind.device.name}" for kind in pool.classes),
        objective=objective,
        mode=placement.mode,
        stages=stages,
        items_per_chunk=curves.samples,
        samples_per_s=samples_per_s,
        samples_per_s_range=(samples_per_s / (1 + error), samples_per_s * (1 + error)),
        error=error,
        error_is=curves.error_is,
        trainer_wait=outcome.trainer_wait,
        generator_wait=outcome.generator_wait,
        staleness_mean=outcome.staleness_mean,
        usd_per_hour=usd_per_hour,
        usd_per_mtok=None if usd_per_hour is None else 1e6 * usd_per_hour / 3600 / (samples_per_s * sample_tokens),
        bound_samples_per_s=bound,
        others=others,
        changes=tuple(
            f"{edit.key} = {edit.value}: {edit.gain:+.0%} samples/s" for edit in predicted.changes if not edit.needs
        ),
        settings=settings,
        refused=tuple(_unsupported(experiment, best, (generating, training), curves, device_names)),
    )


def _names(kind: PlanDevices, first: int, count: int) -> tuple[str, ...]:
    """Devices of a class as the configuration names them, machine by machine."""
    family, per_node = "cpu" if kind.device.name == "cpu" else "cuda", kind.device.per_node
    names: list[str] = []
    for index in range(first, first + count):
        node = kind.nodes[index // per_node] + "/" if kind.nodes else ""
        names.append(f"{node}{family}:{index % per_node if kind.nodes else index}")
    return tuple(names)


def _unsupported(
    experiment: Experiment,
    best: Candidate,
    kinds: tuple[PlanDevices, PlanDevices],
    curves: StageCurves,
    names: tuple[tuple[str, ...], tuple[str, ...]],
) -> Iterator[str]:
    """Yield the plan's needs that a configuration can't express."""
    if best.training.layout is None:
        yield f"train: {best.training.spread}: the trainer has no tensor and no pipeline parallelism"
    if best.generation.per_replica > 1 and experiment.generator.engine != "vllm":
        yield f"generate: {best.generation.spread}: generator.engine = {experiment.generator.engine!r} has one device"
    if best.generation.per_replica != best.generation.tensor:
        yield f"generate: {best.generation.spread}: a replica is spread by tensor parallelism alone"
    for stage in teacher_stages(curves):
        if placed := {*stage.names} & {*names[0], *names[1]}:
            yield f"{stage.name}: the plan uses its {min(placed)}; valid: other devices, or a pool without them"
    for key in curves.unusual:
        yield f"{key}: the configuration has another value, or no key for it"
    needs_machines = kinds[0] is not kinds[1] or kinds[0].count > kinds[0].device.per_node
    if needs_machines and not all(kind.nodes for kind in kinds):
        yield "several machines: name them in the pool (nodes), as in [cluster]"
