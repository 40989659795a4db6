"""Diagnoses a run from its ledger: its binding constraint, and changes that would help, predicted relative to it.

Every change is simulated beside the run as it is, with the same random lengths; the predicted rate is the measured one
times the ratio of the two. So effects missing from the model matter only where a change alters them. The uncertainty of
a prediction combines the noise of the measured rate, the spread over random lengths, and how far the ratio moves when
the poorly identified parameters (``LedgerModel.variants``) are moved by a standard deviation.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

import msgspec

from headway.config.load import changed_experiment
from headway.config.schema import Experiment
from headway.control.tuning.balance import Balance, balance_of, between_turns, measured_limits, waits_of
from headway.control.tuning.drift import RECENT, find_drift
from headway.control.tuning.forecast import RANK_ERROR, WORTH_IT, RunShape, binding_constraint, token_s_with
from headway.control.tuning.ledger_model import LedgerModel, as_recorded, estimate, training_s
from headway.control.tuning.measured import usable
from headway.control.tuning.queue_model import QueueModel, needed_budget, simulate_or_still
from headway.records.check_report import Constraint, QueueOutcome
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord

LEAST_STEPS = 8  # usable records, without those in which the queue was filling
_MOST_STEPS = 60
_SEEDS = (0, 1, 2)
_ROLLOUTS = 2000
_SHOWN = 3
_ACTING = 0.30  # share of the rollouts' time between turns, above which more rollouts at once are tried
_FULL = 0.9  # share of the slots in use, above which more rollouts would only wait for one
_BELIEVED = 2.0  # times the best measured rate of the run's devices, above which a prediction is refused


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the configuration, its predicted effect, and the uncertainty of that."""

    settings: dict[str, str]  # key -> value as TOML: to be set together
    relieves: Constraint
    samples_per_s: float  # predicted
    useful_per_s: float  # predicted, of samples whose advantage isn't 0
    gain: float  # relative
    error: float  # standard error of the predicted rates, relative
    staleness_mean: float  # predicted, versions
    needs: str = ""  # its cost, or other effects


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a run's last steps: measured rates, the binding constraint, recommended changes."""

    first_step: int  # of those it is based on
    last_step: int
    samples_per_s: float  # measured
    useful_per_s: float
    error: float  # standard error of both, relative
    simulated_per_s: float  # the model's rate for the run as it is: shows how good the model is
    balance: Balance  # of these steps, by the rule of every verdict
    binding: Constraint  # what it comes from
    reason: str
    trainer_wait: float  # shares of the time ...
    straggler_wait: float  # ... of the trainer's wait
    generator_wait: float
    staleness_mean: float
    acceptance: float
    in_generation: float  # rollouts, mean
    needed_budget: int  # eta >= L_max x concurrency / (samples per step x mean length), with the p99 for L_max
    kv_slots: int  # requests whose KV fits, one replica
    changes: list[Recommendation]  # the largest predicted gain first
    unidentified: dict[str, str]  # parameters that the ledger doesn't determine


class DeviceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Another split of a run's devices between generator and trainer, and what its experiment would then be."""

    settings: dict[str, str]  # key -> value as TOML
    replicas: int
    ranks: int
    concurrent_rollouts: int
    open_groups: int | None
    lent_share: float = 0.0  # share of the replicas whose device is the trainer's too


def diagnose(
    records: Sequence[StepRecord],
    experiment: Experiment,
    shape: RunShape,
    shared_devices: Sequence[str] = (),
    splits: Sequence[DeviceSplit] = (),
) -> Diagnosis | str:
    """Diagnose the run's last regime, or describe what is missing for that. ``shared_devices``: the trainer's devices
    on which no replica generates yet; ``splits``: of `device_splits`."""
    steps = steady_steps(records, shape.budget)
    if len(steps) < LEAST_STEPS:
        return (
            f"{len(steps)} of the {LEAST_STEPS} steps in steady state that a diagnosis needs are recorded (the first "
            f"{shape.budget + 1} only fill the queue; skipped ones, those rebuilt after a kill and those around a "
            "worker's restart say nothing)"
        )
    shape = as_recorded(shape, steps)
    found = estimate(steps, shape)
    if found is None:
        return "no response finished in the last steps"
    now = _outcomes(found.model)
    if not all(one.samples_per_s for one in now):
        return "the queue that this ledger describes would stand still: nothing can be predicted from it"
    simulated, shown = fmean(one.samples_per_s for one in now), _shown_per_s(steps, found)
    if simulated > _BELIEVED * shown:
        return (
            f"steps {steps[0].step} to {steps[-1].step} describe a queue of {simulated:.3g} samples/s, and the run's "
            f"devices have shown {shown:.3g} at most: their times can't be right, and nothing is predicted from them"
        )
    needed = needed_budget(
        longest_tokens=found.lengths.at(0.99),
        concurrency=max(1, round(found.in_generation)),
        samples_per_step=shape.samples_per_step,
        mean_tokens=found.lengths.mean_tokens,
    )
    candidates = _candidates(found, experiment, shape, needed, shared_devices, between_turns(steps))
    candidates = itertools.chain(candidates, _of_splits(found.model, shape, splits))
    changes = _recommendations(candidates, found, experiment, now)
    for one in [one for one in changes if one.samples_per_s > _BELIEVED**2 * shown]:  # it may double a device
        changes.remove(one)
        found.unidentified[next(iter(one.settings))] = (
            f"{one.samples_per_s:.3g} samples/s would be predicted: the run's devices have shown {shown:.3g} at most"
        )
    waits, measured = waits_of(steps), msgspec.structs.replace(now[0], straggler_wait=found.straggler_wait)
    gains: list[tuple[Constraint, float]] = [(one.relieves, one.gain) for one in changes]
    binding, reason = binding_constraint(shape, found.model, measured, waits, gains)
    reason += f". {measured_limits(steps).rstrip('.')}" if binding == "other" else ""
    return Diagnosis(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        samples_per_s=found.samples_per_s,
        useful_per_s=found.useful_per_s,
        error=found.noise,
        simulated_per_s=simulated,
        balance=balance_of(waits, shape.budget),
        binding=binding,
        reason=reason.replace("would wait", "waits"),
        trainer_wait=waits.trainer,
        straggler_wait=found.straggler_wait,
        generator_wait=waits.generator,
        staleness_mean=found.staleness_mean,
        acceptance=found.model.acceptance,
        in_generation=found.in_generation,
        needed_budget=needed,
        kv_slots=found.model.slots,
        changes=changes[:_SHOWN],
        unidentified=found.unidentified,
    )


def _shown_per_s(steps: Sequence[StepRecord], found: LedgerModel) -> float:
    """The largest samples/s that both trainer and generators have reached, while they computed, in one of ``steps``."""
    trained = max(r.samples / training_s(r) for r in steps)
    generating = [(r.flow.generated_tokens, r.flow.generator_busy_s) for r in steps if r.flow.generator_busy_s > 0]
    tokens_per_s = max((tokens / busy_s for tokens, busy_s in generating), default=math.inf)
    return min(trained, tokens_per_s * found.model.replicas / found.lengths.mean_tokens)


def steady_steps(records: Sequence[StepRecord], budget: int) -> list[StepRecord]:
    """The last regime's records, 60 at most, without those in which the queue was filling. A regime that has only just
    started is taken together with the steps before it."""
    steps = [r for r in usable(records) if r.step > budget]
    kept: list[StepRecord] = []
    for record in steps[-_MOST_STEPS:]:
        kept.append(record)
        drifted = find_drift(kept[-16 - RECENT :])
        if drifted is not None:
            kept = [r for r in kept if r.step >= drifted[0]]
    if len(kept) < LEAST_STEPS:
        kept = steps[-2 * LEAST_STEPS :]
    flows = [(r.flow.open_groups, r.flow.concurrent_rollouts, r.flow.steps_per_publish, r.flow.resting) for r in kept]
    changed = max((i for i in range(1, len(flows)) if flows[i] != flows[i - 1]), default=0)
    return kept[changed:] if len(kept) - changed >= LEAST_STEPS else kept  # knobs as they are now


def _outcomes(model: QueueModel) -> list[QueueOutcome]:
    return [simulate_or_still(model, seed=seed, rollouts=_ROLLOUTS) for seed in _SEEDS]


def device_splits(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """The valid ways to move 1, 2, 4, … devices from one side of an experiment to the other; each side keeps one. Only
    for sides that share no device and whose devices are alike."""
    generator, trainer = experiment.generator.devices, experiment.trainer.devices
    if experiment.generator.engine_arguments.get("tensor_parallel_size", 1) != 1:
        return ()  # a replica has more devices than its name says
    sides = [([*generator, *trainer[-k:]], trainer[:-k]) for k in (1, 2, 4, 8, 16, 32) if k < len(trainer)]
    sides += [(generator[:-k], [*generator[-k:], *trainer]) for k in (1, 2, 4, 8, 16, 32) if k < len(generator)]
    return _valid_splits(experiment, sides)


def every_split(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """The valid other ways to run on an experiment's devices, which must be alike: each side has its own (spatial),
    both have all (temporal), or one has all and the other some (hybrid). The generator's come first in their order, the
    trainer's last, so that a change moves as few as can be. GPUs are shared only where the experiment shares some:
    whether one has the memory for both sides isn't known here."""
    generator, trainer = list(experiment.generator.devices), list(experiment.trainer.devices)
    pool = list(dict.fromkeys([*generator, *trainer]))
    cuts = sorted({cut for k in (1, 2, 4, 8, 16, 32) for cut in (k, len(pool) - k) if 0 < cut < len(pool)})
    sides = [(pool[:cut], pool[cut:]) for cut in cuts]
    if set(generator) & set(trainer) or not any("cuda" in device for device in pool):
        sides += [(pool, pool), *((pool, pool[cut:]) for cut in cuts), *((pool[:cut], pool) for cut in cuts)]
    return _valid_splits(experiment, [pair for pair in sides if pair != (generator, trainer)])


def _valid_splits(
    experiment: Experiment, sides: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> tuple[DeviceSplit, ...]:
    found: list[DeviceSplit] = []
    for replicas, ranks in sides:
        settings = {"generator.devices": json.dumps(replicas), "trainer.devices": json.dumps(ranks)}
        try:
            then = changed_experiment(experiment, settings)
        except ConfigurationError:
            continue
        split = DeviceSplit(
            settings=settings,
            replicas=len(replicas),
            ranks=len(ranks),
            concurrent_rollouts=then.concurrent_rollouts,
            open_groups=then.open_groups,
            lent_share=len(set(replicas) & set(ranks)) / len(replicas),
        )
        found.append(split)
    return tuple(found)


def best_split(found: LedgerModel, shape: RunShape, splits: Sequence[DeviceSplit]) -> Recommendation | None:
    """The split of the devices with the largest predicted gain, beside the run as it is; None where none gains."""
    now = _outcomes(found.model) if splits else []
    if not splits or not all(one.samples_per_s for one in now):
        return None  # a model under which this very run would stand still says nothing of another one
    changes = _recommendations(_of_splits(found.model, shape, splits), found, None, now)
    return max(changes, key=lambda one: one.gain, default=None)


# --- changes ---------------------------------------------------------------------------------------------


class _Candidate(msgspec.Struct, frozen=True):
    settings: dict[str, str]
    relieves: Constraint
    change: Mapping[str, Any]  # fields of the model
    needs: str = ""
    error: float = 0.0  # of its assumptions, relative


def _recommendations(
    candidates: Iterable[_Candidate], found: LedgerModel, experiment: Experiment | None, now: Sequence[QueueOutcome]
) -> list[Recommendation]:
    """Simulate every candidate; return those worth making, the largest gain first, for each key only the best value.
    Without an ``experiment`` they have the figures of one already."""
    best: dict[str, Recommendation] = {}
    for candidate in candidates:
        one = candidate if experiment is None else _as_configured(candidate, experiment)
        if one is None:
            continue
        changed = msgspec.structs.replace(found.model, **one.change)
        then = _outcomes(changed)
        ratios = [b.samples_per_s / a.samples_per_s for a, b in zip(now, then, strict=True)]
        gain = fmean(ratios) - 1.0
        if gain < WORTH_IT:
            continue
        shifts = [_ratio(variant, one.change) / ratios[0] - 1.0 for variant in found.variants()]
        model_error = math.sqrt(sum(shift**2 for shift in shifts) / 2)  # each parameter is moved both ways
        spread = stdev(ratios) / math.sqrt(len(ratios)) / (1 + gain)
        recommended = Recommendation(
            settings=one.settings,
            relieves=one.relieves,
            samples_per_s=found.samples_per_s * (1 + gain),
            useful_per_s=found.useful_per_s * (1 + gain),
            gain=gain,
            error=math.hypot(found.noise, model_error, spread, one.error),
            staleness_mean=fmean(outcome.staleness_mean for outcome in then),
            needs=one.needs,
        )
        key = next(iter(one.settings))
        if key not in best or recommended.gain > best[key].gain:
            best[key] = recommended
    return sorted(best.values(), key=lambda one: -one.gain)


def _as_configured(candidate: _Candidate, experiment: Experiment) -> _Candidate | None:
    """The candidate with the figures that a run with its settings would have; None where they would be refused."""
    try:
        then = changed_experiment(experiment, candidate.settings)
    except ConfigurationError:
        return None
    change = dict(candidate.change)
    if then.concurrent_rollouts != experiment.concurrent_rollouts or "concurrent_rollouts" in change:
        change["concurrent_rollouts"] = then.concurrent_rollouts
    if then.surplus_groups != experiment.surplus_groups:
        change["surplus_groups"] = then.surplus_groups
    if then.open_groups != experiment.open_groups:
        change["open_groups"] = then.open_groups
    return msgspec.structs.replace(candidate, change=change)


def _ratio(model: QueueModel, change: Mapping[str, Any]) -> float:
    run = partial(simulate_or_still, seed=_SEEDS[0], rollouts=_ROLLOUTS)
    return run(msgspec.structs.replace(model, **change)).samples_per_s / max(run(model).samples_per_s, 1e-9)


def _candidates(
    found: LedgerModel,
    experiment: Experiment,
    shape: RunShape,
    needed: int,
    shared_devices: Sequence[str],
    acting: float,
) -> Iterator[_Candidate]:
    model = found.model
    yield from _of_the_queue(found, experiment, shape, needed)
    held = found.in_generation * (1 - acting) / (model.slots * model.replicas)
    if acting > _ACTING and held < _FULL:  # more slots or replicas would help only by the extra rollouts they bring
        yield from (_more_in_environments(model, experiment, factor) for factor in (1.5, 2.0))
        yield from _of_the_generator(model, experiment, shape, larger=False)
    else:
        yield from _of_the_generator(model, experiment, shape)
        yield from _of_devices(model, experiment, shape, shared_devices)
    if model.verify_response_s:
        workers = 2 * shape.verifiers
        yield _Candidate({"verifier.workers": str(workers)}, "verifier", {"verifiers": workers})
    p99 = found.lengths.at(0.99)
    if p99 < shape.max_response_tokens * 3 // 4:
        cut = {"length_at": found.lengths.capped(p99).at}
        needs = "cuts 1 % of the responses: it changes what is learnt"
        yield _Candidate({"rollout.max_response_tokens": str(p99)}, "admission", cut, needs)


def _of_the_queue(found: LedgerModel, experiment: Experiment, shape: RunShape, needed: int) -> Iterator[_Candidate]:
    model, queue = found.model, experiment.queue
    budgets = {2 * shape.budget, shape.budget + 1, min(needed, 4 * shape.budget + 4)}
    for budget in sorted(b for b in budgets if b > shape.budget):
        yield _Candidate({"queue.budget": str(budget)}, "admission", {"budget": budget}, "older samples")
    limit = shape.budget + 1
    if queue.oversampling is not None and queue.surplus != "discard" and queue.oversampling < limit:
        for factor in sorted({min(float(limit), queue.oversampling * 1.5), float(limit)}):
            groups = math.ceil(factor * shape.groups_per_step)
            yield _Candidate({"queue.oversampling": f"{factor:g}"}, "admission", {"open_groups": groups})
    if queue.oversampling is None and shape.budget <= 1:
        for factor in (1.5, 2.0):
            groups = math.ceil(factor * shape.groups_per_step)
            surplus = groups - shape.groups_per_step
            change = {"open_groups": groups, "surplus_groups": surplus}
            settings = {"queue.oversampling": f"{factor:g}", "queue.surplus": '"discard"'}
            needs = "trains what ends first: shorter responses, and the rest is wasted"
            yield _Candidate(settings, "admission", change, needs)
    batch = 2 * shape.groups_per_step
    larger = {"groups_per_step": batch}
    if model.open_groups is not None:
        larger["open_groups"] = 2 * model.open_groups
    yield _Candidate(
        {"queue.groups_per_step": str(batch)}, "admission", larger, "batches twice as large: half as many updates"
    )
    if shape.budget >= 1 and model.steps_per_publish == 1:
        settings = {"weights.steps_per_publish": "2"}
        yield _Candidate(settings, "trainer", {"steps_per_publish": 2}, "older samples")


def _more_in_environments(model: QueueModel, experiment: Experiment, factor: float) -> _Candidate:
    """``factor`` times as many rollouts at once, with room for them in their environments: while waiting for a tool
    they need no slot."""
    rollouts = round(factor * model.concurrent_rollouts / model.group_size) * model.group_size
    settings = {"queue.max_concurrent_rollouts": str(rollouts)}
    environment = experiment.environment
    if environment.replies and experiment.sandbox.live < rollouts:
        settings["sandbox.live"] = str(rollouts)
    if environment.concurrency is not None and environment.concurrency < rollouts:
        settings["environment.concurrency"] = str(rollouts)
    needs = "environments that are as quick when more of them run"
    return _Candidate(settings, "environment", {"concurrent_rollouts": rollouts}, needs)


def _of_the_generator(
    model: QueueModel, experiment: Experiment, shape: RunShape, *, larger: bool = True
) -> Iterator[_Candidate]:
    fixed = experiment.queue.max_concurrent_rollouts
    ahead = experiment.generator.prefetch_groups * shape.group_size
    if model.slots < shape.slots:
        kv = shape.slots * shape.max_sequence_tokens
        settings = {"generator.kv_capacity_tokens": str(kv)}
        yield _Candidate(settings, "kv", {"slots": shape.slots}, "memory for the KV")
    for slots in (2 * shape.slots, shape.slots // 2):
        if slots < 1 or (slots > shape.slots > model.slots) or (slots > shape.slots and not larger):
            continue
        rollouts = max(slots * model.replicas, shape.group_size) + ahead
        settings = {"generator.slots": str(slots)}
        if fixed is not None:
            settings["queue.max_concurrent_rollouts"] = str(rollouts)
        change = {"slots": slots, "concurrent_rollouts": rollouts}
        yield _Candidate(settings, "generator", change, "memory for the KV" if slots > shape.slots else "")
    for factor in (0.5, 0.75, 1.5) if larger else (0.5, 0.75):
        rollouts = round(model.concurrent_rollouts * factor / shape.group_size) * shape.group_size
        if rollouts >= shape.group_size and rollouts <= 2 * model.slots * model.replicas + ahead:
            settings = {"queue.max_concurrent_rollouts": str(rollouts)}
            yield _Candidate(settings, "generator", {"concurrent_rollouts": rollouts})


def _of_splits(model: QueueModel, shape: RunShape, splits: Sequence[DeviceSplit]) -> Iterator[_Candidate]:
    for split in splits:
        change = {
            "replicas": split.replicas,
            "train_token_s": token_s_with(model, shape.ranks, split.ranks),
            "concurrent_rollouts": split.concurrent_rollouts,
            "open_groups": split.open_groups,
            "lent_share": split.lent_share,
        }
        error = RANK_ERROR if split.ranks != shape.ranks else 0.0
        relieves: Constraint = "generator" if split.replicas > shape.replicas else "trainer"
        yield _Candidate(split.settings, relieves, change, "a resume with these devices", error)


def _of_devices(
    model: QueueModel, experiment: Experiment, shape: RunShape, shared_devices: Sequence[str]
) -> Iterator[_Candidate]:
    """Changes that share devices: the generator also on the trainer's, or both on all; the side that would wait lends
    them."""
    generator, trainer = experiment.generator.devices, experiment.trainer.devices
    if shape.lent_replicas or not shared_devices:
        return
    replicas = shape.replicas + len(shared_devices)
    rollouts = model.concurrent_rollouts + len(shared_devices) * model.slots
    more = {
        "replicas": replicas,
        "lent_share": len(shared_devices) / replicas,
        "concurrent_rollouts": rollouts,
    }
    devices = json.dumps([*generator, *shared_devices])
    settings = {"generator.devices": devices}
    if experiment.queue.max_concurrent_rollouts is not None:
        settings["queue.max_concurrent_rollouts"] = str(rollouts)
    yield _Candidate(settings, "generator", more, "memory for weights and KV beside the trainer")
    ranks = shape.ranks + len(generator)
    both = {"trainer.devices": json.dumps([*generator, *trainer])}
    lent = {"lent_share": 1.0, "train_token_s": token_s_with(model, shape.ranks, ranks)}
    needs = "memory for both sides on every device"
    yield _Candidate({**both, **settings}, "trainer", {**more, **lent}, needs, RANK_ERROR)
