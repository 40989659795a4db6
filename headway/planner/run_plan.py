"""Plans a run: which devices generate, which train, in which mode, and what comes of it.

Placements of every mode that a run knows are compared by the rates of their two sides; the best of them are then
simulated as a queue (`control/tuning/forecast.py`), which decides.
"""

from __future__ import annotations

import hashlib
import json
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
from headway.control.tuning.queue_model import QueueModel, simulate_or_still
from headway.planner.pool_file import PlanDevices, PlannedWorkload, PlanPool
from headway.planner.stage_curves import GenerationCurve, StageCurves, TrainingCurve
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
)
_OTHERS = ("run.", "ledger.", "tasks.", "evaluation.", "checkpoint.", "sft.")  # of no account for a plan
_SIMULATED = 8  # candidates


class Placement(NamedTuple):
    """Devices of both sides. ``shared``: of the trainer's devices, those that the generator has as well."""

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
    measured: Calibration  # as one would measure it
    model: QueueModel
    ideal: float  # samples/s when only the rates of the two sides limit
    usd_per_hour: float | None


class PlannedRun(NamedTuple):
    """A plan, and what it was made from."""

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
    every = [found for at in _placements(pool) if (found := _candidate(experiment, pool, curves, at))]
    if not every:
        raise ConfigurationError(
            "; ".join(curves.reasons.values()) or "pool: two devices, or one that both sides fit on"
        )
    bound = max(one.ideal for one in every)
    every.sort(key=lambda one: -_merit(one, one.ideal, objective))
    chosen: list[Candidate] = []
    for mode in ("temporal", "spatial", "hybrid"):  # the best of each mode, then the best of all
        chosen += [one for one in every if one.placement.mode == mode][:2]
    chosen += [one for one in every if one not in chosen][: max(0, _SIMULATED - len(chosen))]
    outcomes = [(one, _simulated(one)) for one in chosen]
    outcomes.sort(key=lambda pair: -_merit(*pair, objective))
    best = outcomes[0][0]
    predicted = forecast(best.shape, best.measured, curves.lengths)
    others: dict[Mode, Alternative] = {}
    for one, rate in outcomes[1:]:
        mode = one.placement.mode
        if mode != best.placement.mode and mode not in others:
            value = rate if objective == "time" else 1e6 * (one.usd_per_hour or 0.0) / 3600 / rate
            name = f"{one.placement.generators} generate, {one.placement.trainers} train"
            others[mode] = Alternative(name=name, value=value)
    plan = _written(experiment, pool, curves, objective, best, predicted, bound, others)
    return PlannedRun(plan, best, curves.workload)


def predicted_rate(experiment: Experiment, pool: PlanPool, curves: StageCurves, at: Placement) -> float | None:
    """Trained samples/s of one placement; None where a side doesn't fit on its devices."""
    one = _candidate(experiment, pool, curves, at)
    return None if one is None else _simulated(one)


def _merit(one: Candidate, samples_per_s: float, objective: Objective) -> float:
    return samples_per_s if objective == "time" else samples_per_s / max(1e-12, one.usd_per_hour or 0.0)


def digest(experiment: Experiment) -> str:
    """Digest of all keys that a plan depends on and doesn't set."""
    kept = {key: value for key, value in flatten(experiment).items() if not key.startswith((*PLANNED_KEYS, *_OTHERS))}
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


def _counts(most: int) -> list[int]:
    """Numbers of devices to offer: all up to 8, then four for each power of two, and all devices."""
    counts = {c for c in range(1, min(most, 8) + 1)} | {most}
    step = 2
    while 5 * step <= most:
        counts |= {part * step for part in (5, 6, 7, 8) if part * step <= most}
        step *= 2
    return sorted(counts)


def _placements(pool: PlanPool) -> Iterator[Placement]:
    for g, generating in enumerate(pool.classes):
        for t, training in enumerate(pool.classes):
            for trainers in _counts(training.count):
                if g != t:
                    yield from (Placement(g, n, t, trainers, 0) for n in _counts(generating.count))
                    continue
                apart = {n for n in _counts(training.count) if n + trainers <= training.count}
                apart |= {training.count - trainers} - {0}
                yield from (Placement(g, n, t, trainers, 0) for n in sorted(apart))
                yield Placement(g, trainers, t, trainers, trainers)
                if trainers < training.count:
                    yield Placement(g, training.count, t, trainers, trainers)


def _candidate(experiment: Experiment, pool: PlanPool, curves: StageCurves, at: Placement) -> Candidate | None:
    training = curves.training(at.train_on, at.trainers)
    if training is None:
        return None
    resident = (training.bytes_per_device or 0.0) if at.shared else 0.0
    generation = curves.generation(at.generate_on, at.generators, resident)
    if generation is None or (at.mode == "hybrid" and at.shared % generation.per_replica):
        return None
    shape = _shape(experiment, generation, training, at)
    measured = curves.calibration(pool.classes[at.train_on], generation, training, shared=bool(at.shared))
    model = queue_model(shape, measured, curves.lengths)
    mean = curves.lengths.mean_tokens
    production = production_rate(model, mean) * model.acceptance
    ideal = ideal_rate(production, consumption_rate(model, mean), shape.lent_share)
    prices = [pool.classes[at.generate_on].usd_per_hour, pool.classes[at.train_on].usd_per_hour]
    hour = None
    if prices[0] is not None and prices[1] is not None:
        hour = prices[0] * at.generators + prices[1] * (at.trainers - at.shared)
    return Candidate(at, generation, training, shape, measured, model, ideal, hour)


def _shape(experiment: Experiment, generation: GenerationCurve, training: TrainingCurve, at: Placement) -> RunShape:
    limited = experiment.queue.max_concurrent_rollouts is not None  # by a key that a plan doesn't set
    slots = generation.slots * generation.replicas
    return msgspec.structs.replace(
        shape_of(experiment, at.shared // generation.per_replica),
        slots=generation.slots,
        replicas=generation.replicas,
        ranks=training.copies,
        concurrent_rollouts=experiment.concurrent_rollouts if limited else max(experiment.concurrent_rollouts, slots),
        kv_tokens=1 << 60,  # slots were chosen by memory
    )


def _simulated(one: Candidate) -> float:
    """Trained samples/s of the queue under the run's own rules."""
    return max(1e-9, simulate_or_still(one.model).samples_per_s)


# --- what is written -------------------------------------------------------------------------------------


def _written(
    experiment: Experiment,
    pool: PlanPool,
    curves: StageCurves,
    objective: Objective,
    best: Candidate,
    predicted: Forecast,
    bound: float,
    others: dict[Mode, Alternative],
) -> RunPlan:
    at, outcome = best.placement, predicted.outcome
    generating, training = pool.classes[at.generate_on], pool.classes[at.train_on]
    first = 0 if at.generate_on != at.train_on else at.generators - at.shared
    names = _names(generating, 0, at.generators), _names(training, first, at.trainers)
    tokens = curves.prompt_tokens + curves.lengths.mean_tokens
    rate, error = outcome.samples_per_s, curves.error
    stages = (
        PlannedStage(
            name="generate",
            device=generating.device.name,
            names=names[0],
            copies=best.generation.replicas,
            spread=best.generation.spread,
            samples_per_s=predicted.production_per_s,
            bytes_per_device=best.generation.bytes_per_device,
            slots=best.generation.slots,
        ),
        PlannedStage(
            name="train",
            device=training.device.name,
            names=names[1],
            copies=best.training.copies,
            spread=best.training.spread,
            samples_per_s=predicted.consumption_per_s,
            bytes_per_device=best.training.bytes_per_device,
        ),
    )
    settings = {
        "generator.devices": json.dumps(names[0][:: best.generation.per_replica]),
        "generator.slots": str(best.generation.slots),
        "trainer.devices": json.dumps(names[1]),
    }
    whole = best.generation.slots * experiment.max_sequence_tokens
    if best.generation.kv_tokens is not None and best.generation.kv_tokens < whole:  # else every slot has its cache
        settings["generator.kv_capacity_tokens"] = str(best.generation.kv_tokens)
    given = experiment.generator.engine_arguments
    if best.generation.tensor != given.get("tensor_parallel_size", 1):
        arguments = given | {"tensor_parallel_size": best.generation.tensor}
        settings["generator.engine_arguments"] = json.dumps(arguments)
    hour = best.usd_per_hour
    return RunPlan(
        made_for=digest(experiment),
        pool=", ".join(f"{kind.count} {kind.device.name}" for kind in pool.classes),
        objective=objective,
        mode=at.mode,
        stages=stages,
        items_per_chunk=curves.samples,
        samples_per_s=rate,
        samples_per_s_range=(rate / (1 + error), rate * (1 + error)),
        error=error,
        error_is=curves.error_is,
        trainer_wait=outcome.trainer_wait,
        generator_wait=outcome.generator_wait,
        staleness_mean=outcome.staleness_mean,
        usd_per_hour=hour,
        usd_per_mtok=None if hour is None else 1e6 * hour / 3600 / (rate * tokens),
        bound_samples_per_s=bound,
        others=others,
        changes=tuple(
            f"{one.key} = {one.value}: {one.gain:+.0%} samples/s" for one in predicted.changes if not one.needs
        ),
        settings=settings,
        refused=tuple(_refused(experiment, best, (generating, training), curves)),
    )


def _names(kind: PlanDevices, first: int, count: int) -> tuple[str, ...]:
    """Devices of a class as the configuration names them, machine by machine."""
    family, per_node = "cpu" if kind.device.name == "cpu" else "cuda", kind.device.per_node
    names: list[str] = []
    for index in range(first, first + count):
        node = kind.nodes[index // per_node] + "/" if kind.nodes else ""
        names.append(f"{node}{family}:{index % per_node if kind.nodes else index}")
    return tuple(names)


def _refused(
    experiment: Experiment, best: Candidate, kinds: tuple[PlanDevices, PlanDevices], curves: StageCurves
) -> Iterator[str]:
    """Yield what the plan needs and a configuration can't say."""
    if best.training.spread != "1 device" or curves.shards:
        yield f"train: {best.training.spread}: the trainer's ranks hold the model whole"
    if best.generation.per_replica > 1 and experiment.generator.engine != "vllm":
        yield f"generate: {best.generation.spread}: generator.engine = {experiment.generator.engine!r} has one device"
    if best.generation.per_replica != best.generation.tensor:
        yield f"generate: {best.generation.spread}: a replica is spread by tensor parallelism alone"
    for key in curves.unusual:
        yield f"{key}: the configuration has another value, or no key for it"
    several = kinds[0] is not kinds[1] or kinds[0].count > kinds[0].device.per_node
    if several and not all(kind.nodes for kind in kinds):
        yield "several machines: name them in the pool (nodes), as in [cluster]"
