"""Diagnoses a run from its ledger: its binding constraint, and helpful changes with predicted gains.

Every change is simulated beside the current configuration, with the same random lengths; the predicted rate is the
measured one times the ratio of the two. So effects missing from the model matter only where a change alters them. The
uncertainty of a prediction combines the noise of the measured rate, the spread over random lengths, and how far the
ratio moves when the poorly identified parameters (``LedgerModel.variants``) are moved by a standard deviation.
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
from headway.control.tuning.queue_model import QueueModel, needed_budget, simulate_or_zero
from headway.control.tuning.run_figures import usable
from headway.records.check_report import Constraint, QueueOutcome
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord

LEAST_STEPS = 8  # usable records, without those in which the queue was filling
_MOST_STEPS = 60
_SEEDS = (0, 1, 2)
_ROLLOUTS = 2000
_CHANGES_LISTED = 3
_ENVIRONMENT_SHARE = 0.30  # of the rollouts' time between turns, above which more rollouts at once are tried
_FULL = 0.9  # share of the slots in use, above which more rollouts would only wait for one
_CREDIBLE = 2.0  # times the best measured rate of the run's devices, above which a prediction is rejected


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the configuration, its predicted effect, and the uncertainty of that."""

    settings: dict[str, str]  # key -> value as TOML; set together
    relieves: Constraint
    samples_per_s: float  # predicted
    useful_per_s: float  # predicted, of samples whose advantage isn't 0
    gain: float  # relative
    error: float  # standard error of the predicted rates, relative
    staleness_mean: float  # predicted, versions
    needs: str = ""  # its cost, or side effects


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a run's last steps: measured rates, the binding constraint, recommended changes."""

    first_step: int  # of the records it is based on
    last_step: int
    samples_per_s: float  # measured
    useful_per_s: float
    error: float  # standard error of both, relative
    simulated_per_s: float  # the model's rate for the current configuration: shows the model's accuracy
    balance: Balance  # of these steps, by `balance_of`
    binding: Constraint  # its cause
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
    """Another split of a run's devices between generator and trainer, and the resulting experiment's figures."""

    settings: dict[str, str]  # key -> value as TOML
    replicas: int
    ranks: int
    concurrent_rollouts: int
    open_groups: int | None
    yielded_share: float = 0.0  # share of the replicas whose device is the trainer's too


def diagnose(
    records: Sequence[StepRecord],
    experiment: Experiment,
    shape: RunShape,
    shared_devices: Sequence[str] = (),
    splits: Sequence[DeviceSplit] = (),
) -> Diagnosis | str:
    """Diagnose the run's last regime, or return a sentence on the missing data.

    ``shared_devices``: the trainer's devices on which no replica generates yet; ``splits``: of `device_splits`."""
    steps = steady_steps(records, shape.budget)
    if len(steps) < LEAST_STEPS:
        return (
            f"{len(steps)} of the {LEAST_STEPS} steps in steady state that a diagnosis needs are recorded (the first "
            f"{shape.budget + 1} only fill the queue; skipped ones, those rebuilt after a kill and those around a "
            "worker's restart don't count)"
        )
    shape = as_recorded(shape, steps)
    fitted = estimate(steps, shape)
    if fitted is None:
        return "no response finished in the last steps"
    now = _outcomes(fitted.model)
    if not all(outcome.samples_per_s for outcome in now):
        return "the queue that this ledger describes would deadlock: nothing can be predicted from it"
    simulated, shown = fmean(outcome.samples_per_s for outcome in now), _peak_samples_per_s(steps, fitted)
    if simulated > _CREDIBLE * shown:
        return (
            f"steps {steps[0].step} to {steps[-1].step} describe a queue of {simulated:.3g} samples/s, and the run's "
            f"devices have shown {shown:.3g} at most: their times can't be right, and nothing is predicted from them"
        )
    needed = needed_budget(
        longest_tokens=fitted.lengths.quantile(0.99),
        concurrency=max(1, round(fitted.in_generation)),
        samples_per_step=shape.samples_per_step,
        mean_tokens=fitted.lengths.mean_tokens,
    )
    candidates = _candidates(fitted, experiment, shape, needed, shared_devices, between_turns(steps))
    candidates = itertools.chain(candidates, _split_changes(fitted.model, shape, splits))
    changes = _recommendations(candidates, fitted, experiment, now)
    # A change may double the devices, hence the square.
    for change in [change for change in changes if change.samples_per_s > _CREDIBLE**2 * shown]:
        changes.remove(change)
        fitted.unidentified[next(iter(change.settings))] = (
            f"{change.samples_per_s:.3g} samples/s would be predicted: the run's devices have shown {shown:.3g} at most"
        )
    waits, measured = waits_of(steps), msgspec.structs.replace(now[0], straggler_wait=fitted.straggler_wait)
    gains: list[tuple[Constraint, float]] = [(change.relieves, change.gain) for change in changes]
    binding, reason = binding_constraint(shape, fitted.model, measured, waits, gains)
    reason += f". {measured_limits(steps).rstrip('.')}" if binding == "other" else ""
    return Diagnosis(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        samples_per_s=fitted.samples_per_s,
        useful_per_s=fitted.useful_per_s,
        error=fitted.noise,
        simulated_per_s=simulated,
        balance=balance_of(waits, shape.budget),
        binding=binding,
        reason=reason.replace("would wait", "waits"),
        trainer_wait=waits.trainer,
        straggler_wait=fitted.straggler_wait,
        generator_wait=waits.generator,
        staleness_mean=fitted.staleness_mean,
        acceptance=fitted.model.acceptance,
        in_generation=fitted.in_generation,
        needed_budget=needed,
        kv_slots=fitted.model.slots,
        changes=changes[:_CHANGES_LISTED],
        unidentified=fitted.unidentified,
    )


def _peak_samples_per_s(steps: Sequence[StepRecord], fitted: LedgerModel) -> float:
    """Return the largest samples/s that trainer and generators both reached, while computing, in one of ``steps``."""
    trained = max(r.samples / training_s(r) for r in steps)
    generating = [(r.flow.generated_tokens, r.flow.generator_busy_s) for r in steps if r.flow.generator_busy_s > 0]
    tokens_per_s = max((tokens / busy_s for tokens, busy_s in generating), default=math.inf)
    return min(trained, tokens_per_s * fitted.model.replicas / fitted.lengths.mean_tokens)


def steady_steps(records: Sequence[StepRecord], budget: int) -> list[StepRecord]:
    """Return the last regime's records, 60 at most, without those in which the queue was filling.

    A regime that has just started is taken together with earlier steps."""
    steps = [r for r in usable(records) if r.step > budget]
    kept: list[StepRecord] = []
    for record in steps[-_MOST_STEPS:]:
        kept.append(record)
        drifted = find_drift(kept[-16 - RECENT :])
        if drifted is not None:
            kept = [r for r in kept if r.step >= drifted[0]]
    if len(kept) < LEAST_STEPS:
        kept = steps[-2 * LEAST_STEPS :]
    flows = [r.flow for r in kept]
    knobs = [(f.open_groups, f.concurrent_rollouts, f.steps_per_publish, f.idle_replicas) for f in flows]
    changed = max((i for i in range(1, len(knobs)) if knobs[i] != knobs[i - 1]), default=0)
    return kept[changed:] if len(kept) - changed >= LEAST_STEPS else kept  # since the knobs last changed


def _outcomes(model: QueueModel) -> list[QueueOutcome]:
    return [simulate_or_zero(model, seed=seed, rollouts=_ROLLOUTS) for seed in _SEEDS]


def device_splits(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """Return the valid splits that move 1, 2, 4, … devices from one side to the other; each side keeps one.

    Only for sides that share no device and whose devices are of one kind."""
    generator, trainer = experiment.generator.devices, experiment.trainer.devices
    if experiment.generator.engine_arguments.get("tensor_parallel_size", 1) != 1:
        return ()  # a replica has more devices than are listed
    sides = [([*generator, *trainer[-k:]], trainer[:-k]) for k in (1, 2, 4, 8, 16, 32) if k < len(trainer)]
    sides += [(generator[:-k], [*generator[-k:], *trainer]) for k in (1, 2, 4, 8, 16, 32) if k < len(generator)]
    return _valid_splits(experiment, sides)


def all_device_splits(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """Return all other valid splits of an experiment's devices, which must be of one kind.

    Each side has its own devices (spatial), both have all (temporal), or one has all and the other some (hybrid). The
    generator's devices come first in order, the trainer's last, so that a change moves as few as possible. GPUs are
    shared only where the experiment shares some: whether one has the memory for both sides isn't known here."""
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
    splits: list[DeviceSplit] = []
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
            yielded_share=len(set(replicas) & set(ranks)) / len(replicas),
        )
        splits.append(split)
    return tuple(splits)


def best_split(fitted: LedgerModel, shape: RunShape, splits: Sequence[DeviceSplit]) -> Recommendation | None:
    """Return the split of the devices with the largest predicted gain over the current one; None where none gains."""
    now = _outcomes(fitted.model) if splits else []
    if not splits or not all(outcome.samples_per_s for outcome in now):
        return None  # a model under which the current run would deadlock predicts nothing about another one
    changes = _recommendations(_split_changes(fitted.model, shape, splits), fitted, None, now)
    return max(changes, key=lambda change: change.gain, default=None)


# --- changes ---------------------------------------------------------------------------------------------


class _Candidate(msgspec.Struct, frozen=True):
    settings: dict[str, str]
    relieves: Constraint
    change: Mapping[str, Any]  # fields of the model
    needs: str = ""
    error: float = 0.0  # of its assumptions, relative


def _recommendations(
    candidates: Iterable[_Candidate], fitted: LedgerModel, experiment: Experiment | None, now: Sequence[QueueOutcome]
) -> list[Recommendation]:
    """Simulate every candidate; return the worthwhile ones, the largest gain first, one value for each key.

    Without an ``experiment`` the candidates have its figures already."""
    best: dict[str, Recommendation] = {}
    for candidate in candidates:
        configured = candidate if experiment is None else _as_configured(candidate, experiment)
        if configured is None:
            continue
        changed = msgspec.structs.replace(fitted.model, **configured.change)
        then = _outcomes(changed)
        ratios = [b.samples_per_s / a.samples_per_s for a, b in zip(now, then, strict=True)]
        gain = fmean(ratios) - 1.0
        if gain < WORTH_IT:
            continue
        shifts = [_ratio(variant, configured.change) / ratios[0] - 1.0 for variant in fitted.variants()]
        model_error = math.sqrt(sum(shift**2 for shift in shifts) / 2)  # each parameter is moved in both directions
        spread = stdev(ratios) / math.sqrt(len(ratios)) / (1 + gain)
        recommended = Recommendation(
            settings=configured.settings,
            relieves=configured.relieves,
            samples_per_s=fitted.samples_per_s * (1 + gain),
            useful_per_s=fitted.useful_per_s * (1 + gain),
            gain=gain,
            error=math.hypot(fitted.noise, model_error, spread, configured.error),
            staleness_mean=fmean(outcome.staleness_mean for outcome in then),
            needs=configured.needs,
        )
        key = next(iter(configured.settings))
        if key not in best or recommended.gain > best[key].gain:
            best[key] = recommended
    return sorted(best.values(), key=lambda change: -change.gain)


def _as_configured(candidate: _Candidate, experiment: Experiment) -> _Candidate | None:
    """Return the candidate with the figures of a run with its settings; None where these are invalid."""
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
    run = partial(simulate_or_zero, seed=_SEEDS[0], rollouts=_ROLLOUTS)
    return run(msgspec.structs.replace(model, **change)).samples_per_s / max(run(model).samples_per_s, 1e-9)


def _candidates(
    fitted: LedgerModel,
    experiment: Experiment,
    shape: RunShape,
    needed: int,
    shared_devices: Sequence[str],
    acting: float,
) -> Iterator[_Candidate]:
    model = fitted.model
    yield from _queue_changes(fitted, experiment, shape, needed)
    held = fitted.in_generation * (1 - acting) / (model.slots * model.replicas)
    if acting > _ENVIRONMENT_SHARE and held < _FULL:
        # More slots or replicas would help only by their additional rollouts.
        yield from (_environment_change(model, experiment, factor) for factor in (1.5, 2.0))
        yield from _generator_changes(model, experiment, shape, larger=False)
    else:
        yield from _generator_changes(model, experiment, shape)
        yield from _sharing_changes(model, experiment, shape, shared_devices)
    if model.verify_response_s:
        workers = 2 * shape.verifiers
        yield _Candidate({"verifier.workers": str(workers)}, "verifier", {"verifiers": workers})
    p99 = fitted.lengths.quantile(0.99)
    if p99 < shape.max_response_tokens * 3 // 4:
        cut = {"length_at": fitted.lengths.capped(p99).quantile}
        needs = "cuts 1 % of the responses: it changes what is learned"
        yield _Candidate({"rollout.max_response_tokens": str(p99)}, "admission", cut, needs)


def _queue_changes(fitted: LedgerModel, experiment: Experiment, shape: RunShape, needed: int) -> Iterator[_Candidate]:
    model, queue = fitted.model, experiment.queue
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


def _environment_change(model: QueueModel, experiment: Experiment, factor: float) -> _Candidate:
    """Make a candidate with ``factor`` times as many concurrent rollouts, and environment capacity for them.

    While a rollout waits for a tool it needs no slot."""
    rollouts = round(factor * model.concurrent_rollouts / model.group_size) * model.group_size
    settings = {"queue.max_concurrent_rollouts": str(rollouts)}
    environment = experiment.environment
    if environment.is_class and experiment.sandbox.live < rollouts:
        settings["sandbox.live"] = str(rollouts)
    if environment.concurrency is not None and environment.concurrency < rollouts:
        settings["environment.concurrency"] = str(rollouts)
    needs = "environments that don't slow down when more of them run"
    return _Candidate(settings, "environment", {"concurrent_rollouts": rollouts}, needs)


def _generator_changes(
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


def _split_changes(model: QueueModel, shape: RunShape, splits: Sequence[DeviceSplit]) -> Iterator[_Candidate]:
    for split in splits:
        change = {
            "replicas": split.replicas,
            "train_token_s": token_s_with(model, shape.ranks, split.ranks),
            "concurrent_rollouts": split.concurrent_rollouts,
            "open_groups": split.open_groups,
            "yielded_share": split.yielded_share,
        }
        error = RANK_ERROR if split.ranks != shape.ranks else 0.0
        relieves: Constraint = "generator" if split.replicas > shape.replicas else "trainer"
        yield _Candidate(split.settings, relieves, change, "a resume with these devices", error)


def _sharing_changes(
    model: QueueModel, experiment: Experiment, shape: RunShape, shared_devices: Sequence[str]
) -> Iterator[_Candidate]:
    """Yield changes that share devices: the generator also on the trainer's, or both on all.

    The waiting side yields them."""
    generator, trainer = experiment.generator.devices, experiment.trainer.devices
    if shape.yielded_replicas or not shared_devices:
        return
    replicas = shape.replicas + len(shared_devices)
    rollouts = model.concurrent_rollouts + len(shared_devices) * model.slots
    more = {
        "replicas": replicas,
        "yielded_share": len(shared_devices) / replicas,
        "concurrent_rollouts": rollouts,
    }
    devices = json.dumps([*generator, *shared_devices])
    settings = {"generator.devices": devices}
    if experiment.queue.max_concurrent_rollouts is not None:
        settings["queue.max_concurrent_rollouts"] = str(rollouts)
    yield _Candidate(settings, "generator", more, "memory for weights and KV beside the trainer")
    ranks = shape.ranks + len(generator)
    both = {"trainer.devices": json.dumps([*generator, *trainer])}
    yielded = {"yielded_share": 1.0, "train_token_s": token_s_with(model, shape.ranks, ranks)}
    needs = "memory for both sides on every device"
    yield _Candidate({**both, **settings}, "trainer", {**more, **yielded}, needs, RANK_ERROR)
