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

from headway.config.load import changed_experiment, placed_experiment
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
    present = _outcomes(fitted.model)
    if not all(outcome.samples_per_s for outcome in present):
        return "the queue that this ledger describes would deadlock: nothing can be predicted from it"
    model_per_s, peak = fmean(outcome.samples_per_s for outcome in present), _peak_samples_per_s(steps, fitted)
    if model_per_s > _CREDIBLE * peak:
        return (
            f"steps {steps[0].step} to {steps[-1].step} describe a queue of {model_per_s:.3g} samples/s, and the run's "
            f"devices have shown {peak:.3g} at most: their times can't be right, and nothing is predicted from them"
        )
    least_budget = needed_budget(
        longest_tokens=fitted.lengths.quantile(0.99),
        concurrency=max(1, round(fitted.in_generation)),
        samples_per_step=shape.samples_per_step,
        mean_tokens=fitted.lengths.mean_tokens,
    )
    candidates = _candidates(fitted, experiment, shape, least_budget, shared_devices, between_turns(steps))
    candidates = itertools.chain(candidates, _split_changes(fitted.model, shape, splits))
    changes = _recommendations(candidates, fitted, experiment, present)
    # A change may double the devices, hence the square.
    for change in [change for change in changes if change.samples_per_s > _CREDIBLE**2 * peak]:
        changes.remove(change)
        fitted.unidentified[next(iter(change.settings))] = (
            f"{change.samples_per_s:.3g} samples/s would be predicted: the run's devices have shown {peak:.3g} at most"
        )
    waits, measured_outcome = waits_of(steps), msgspec.structs.replace(present[0], straggler_wait=fitted.straggler_wait)
    gains: list[tuple[Constraint, float]] = [(change.relieves, change.gain) for change in changes]
    binding, reason = binding_constraint(shape, fitted.model, measured_outcome, waits, gains)
    reason += f". {measured_limits(steps).rstrip('.')}" if binding == "other" else ""
    return Diagnosis(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        samples_per_s=fitted.samples_per_s,
        useful_per_s=fitted.useful_per_s,
        error=fitted.noise,
        simulated_per_s=model_per_s,
        balance=balance_of(waits, shape.budget),
        binding=binding,
        reason=reason.replace("would wait", "waits"),
        trainer_wait=waits.trainer,
        straggler_wait=fitted.straggler_wait,
        generator_wait=waits.generator,
        staleness_mean=fitted.staleness_mean,
        acceptance=fitted.model.acceptance,
        in_generation=fitted.in_generation,
        needed_budget=least_budget,
        kv_slots=fitted.model.slots,
        changes=changes[:_CHANGES_LISTED],
        unidentified=fitted.unidentified,
    )


def _peak_samples_per_s(steps: Sequence[StepRecord], fitted: LedgerModel) -> float:
    """Return the largest samples/s that trainer and generators both reached, while computing, in one of ``steps``."""
    trained_per_s = max(r.samples / training_s(r) for r in steps)
    token_times = [(r.flow.generated_tokens, r.flow.generator_busy_s) for r in steps if r.flow.generator_busy_s > 0]
    tokens_per_s = max((tokens / busy_s for tokens, busy_s in token_times), default=math.inf)
    return min(trained_per_s, tokens_per_s * fitted.model.replicas / fitted.lengths.mean_tokens)


def steady_steps(records: Sequence[StepRecord], budget: int) -> list[StepRecord]:
    """Return the last regime's records, 60 at most, without those in which the queue was filling.

    A regime that has just started is taken together with earlier steps."""
    steps = [r for r in usable(records) if r.step > budget]
    last: list[StepRecord] = []
    for record in steps[-_MOST_STEPS:]:
        last.append(record)
        drift = find_drift(last[-16 - RECENT :])
        if drift is not None:
            last = [r for r in last if r.step >= drift[0]]
    if len(last) < LEAST_STEPS:
        last = steps[-2 * LEAST_STEPS :]
    flows = [r.flow for r in last]
    knob_values = [(f.open_groups, f.concurrent_rollouts, f.steps_per_publish, f.idle_replicas) for f in flows]
    change_index = max((i for i in range(1, len(knob_values)) if knob_values[i] != knob_values[i - 1]), default=0)
    return last[change_index:] if len(last) - change_index >= LEAST_STEPS else last  # since the knobs last changed


def _outcomes(model: QueueModel) -> list[QueueOutcome]:
    return [simulate_or_zero(model, seed=seed, rollouts=_ROLLOUTS) for seed in _SEEDS]


def device_splits(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """Return the valid splits that move 1, 2, 4, … devices from one side to the other; each side keeps one.

    Only for sides that share no device and whose devices are of one kind."""
    generator, trainer = experiment.generator.devices, experiment.trainer.devices
    if experiment.generator.engine_arguments.get("tensor_parallel_size", 1) != 1:
        return ()  # a replica has more devices than are listed
    device_pairs = [([*generator, *trainer[-k:]], trainer[:-k]) for k in (1, 2, 4, 8, 16, 32) if k < len(trainer)]
    device_pairs += [(generator[:-k], [*generator[-k:], *trainer]) for k in (1, 2, 4, 8, 16, 32) if k < len(generator)]
    return _valid_splits(experiment, device_pairs)


def all_device_splits(experiment: Experiment) -> tuple[DeviceSplit, ...]:
    """Return all other valid splits of an experiment's devices, which must be of one kind.

    Each side has its own devices (spatial), both have all (temporal), or one has all and the other some (hybrid). The
    generator's devices come first in order, the trainer's last, so that a change moves as few as possible. GPUs are
    shared only where the experiment shares some: whether one has the memory for both sides isn't known here."""
    generator, trainer = list(experiment.generator.devices), list(experiment.trainer.devices)
    pool = list(dict.fromkeys([*generator, *trainer]))
    cuts = sorted({cut for k in (1, 2, 4, 8, 16, 32) for cut in (k, len(pool) - k) if 0 < cut < len(pool)})
    device_pairs = [(pool[:cut], pool[cut:]) for cut in cuts]
    if set(generator) & set(trainer) or not any("cuda" in device for device in pool):
        device_pairs += [(pool, pool), *((pool, pool[cut:]) for cut in cuts), *((pool[:cut], pool) for cut in cuts)]
    return _valid_splits(experiment, [pair for pair in device_pairs if pair != (generator, trainer)])


def _valid_splits(
    experiment: Experiment, sides: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> tuple[DeviceSplit, ...]:
    splits: list[DeviceSplit] = []
    for replicas, ranks in sides:
        settings = {"generator.devices": json.dumps(replicas), "trainer.devices": json.dumps(ranks)}
        try:
            split_experiment = placed_experiment(experiment, settings)
        except ConfigurationError:
            continue
        for key in ("shards", "context_parallel", "expert_parallel"):
            if (number := getattr(split_experiment.trainer, key)) != getattr(experiment.trainer, key):
                settings[f"trainer.{key}"] = str(number)
        split = DeviceSplit(
            settings=settings,
            replicas=len(replicas),
            ranks=len(ranks),
            concurrent_rollouts=split_experiment.concurrent_rollouts,
            open_groups=split_experiment.open_groups,
            yielded_share=len(set(replicas) & set(ranks)) / len(replicas),
        )
        splits.append(split)
    return tuple(splits)


def best_split(fitted: LedgerModel, shape: RunShape, splits: Sequence[DeviceSplit]) -> Recommendation | None:
    """Return the split of the devices with the largest predicted gain over the current one; None where none gains."""
    present_outcomes = _outcomes(fitted.model) if splits else []
    if not splits or not all(outcome.samples_per_s for outcome in present_outcomes):
        return None  # a model under which the current run would deadlock predicts nothing about another one
    changes = _recommendations(_split_changes(fitted.model, shape, splits), fitted, None, present_outcomes)
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
    best_by_key: dict[str, Recommendation] = {}
    for candidate in candidates:
        configured = candidate if experiment is None else _as_configured(candidate, experiment)
        if configured is None:
            continue
        changed_model = msgspec.structs.replace(fitted.model, **configured.change)
        changed_outcomes = _outcomes(changed_model)
        rate_ratios = [b.samples_per_s / a.samples_per_s for a, b in zip(now, changed_outcomes, strict=True)]
        gain = fmean(rate_ratios) - 1.0
        if gain < WORTH_IT:
            continue
        shifts = [_ratio(variant, configured.change) / rate_ratios[0] - 1.0 for variant in fitted.variants()]
        model_error = math.sqrt(sum(shift**2 for shift in shifts) / 2)  # each parameter is moved in both directions
        seed_error = stdev(rate_ratios) / math.sqrt(len(rate_ratios)) / (1 + gain)
        recommendation = Recommendation(
            settings=configured.settings,
            relieves=configured.relieves,
            samples_per_s=fitted.samples_per_s * (1 + gain),
            useful_per_s=fitted.useful_per_s * (1 + gain),
            gain=gain,
            error=math.hypot(fitted.noise, model_error, seed_error, configured.error),
            staleness_mean=fmean(outcome.staleness_mean for outcome in changed_outcomes),
            needs=configured.needs,
        )
        key = next(iter(configured.settings))
        if key not in best_by_key or recommendation.gain > best_by_key[key].gain:
            best_by_key[key] = recommendation
    return sorted(best_by_key.values(), key=lambda change: -change.gain)


def _as_configured(candidate: _Candidate, experiment: Experiment) -> _Candidate | None:
    """Return the candidate with the figures of a run with its settings; None where these are invalid."""
    try:
        candidate_experiment = changed_experiment(experiment, candidate.settings)
    except ConfigurationError:
        return None
    fields = dict(candidate.change)
    if candidate_experiment.concurrent_rollouts != experiment.concurrent_rollouts or "concurrent_rollouts" in fields:
        fields["concurrent_rollouts"] = candidate_experiment.concurrent_rollouts
    if candidate_experiment.surplus_groups != experiment.surplus_groups:
        fields["surplus_groups"] = candidate_experiment.surplus_groups
    if candidate_experiment.open_groups != experiment.open_groups:
        fields["open_groups"] = candidate_experiment.open_groups
    return msgspec.structs.replace(candidate, change=fields)


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
    held_share = fitted.in_generation * (1 - acting) / (model.slots * model.replicas)
    if acting > _ENVIRONMENT_SHARE and held_share < _FULL:
        # More slots or replicas would help only by their additional rollouts.
        yield from (_environment_change(model, experiment, factor) for factor in (1.5, 2.0))
        yield from _generator_changes(model, experiment, shape, larger=False)
    else:
        yield from _generator_changes(model, experiment, shape)
        yield from _sharing_changes(model, experiment, shape, shared_devices)
    if model.verify_response_s:
        worker_count = 2 * shape.verifiers
        yield _Candidate({"verifier.workers": str(worker_count)}, "verifier", {"verifiers": worker_count})
    p99_tokens = fitted.lengths.quantile(0.99)
    if p99_tokens < shape.max_response_tokens * 3 // 4:
        cut_change = {"length_at": fitted.lengths.capped(p99_tokens).quantile}
        needs_text = "cuts 1 % of the responses: it changes what is learned"
        yield _Candidate({"rollout.max_response_tokens": str(p99_tokens)}, "admission", cut_change, needs_text)


def _queue_changes(fitted: LedgerModel, experiment: Experiment, shape: RunShape, needed: int) -> Iterator[_Candidate]:
    model, queue = fitted.model, experiment.queue
    budgets = {2 * shape.budget, shape.budget + 1, min(needed, 4 * shape.budget + 4)}
    for budget in sorted(b for b in budgets if b > shape.budget):
        yield _Candidate({"queue.budget": str(budget)}, "admission", {"budget": budget}, "older samples")
    oversampling_limit = shape.budget + 1
    if queue.oversampling is not None and queue.surplus != "discard" and queue.oversampling < oversampling_limit:
        for factor in sorted({min(float(oversampling_limit), queue.oversampling * 1.5), float(oversampling_limit)}):
            open_groups = math.ceil(factor * shape.groups_per_step)
            yield _Candidate({"queue.oversampling": f"{factor:g}"}, "admission", {"open_groups": open_groups})
    if queue.oversampling is None and shape.budget <= 1:
        for factor in (1.5, 2.0):
            open_groups = math.ceil(factor * shape.groups_per_step)
            surplus_groups = open_groups - shape.groups_per_step
            change = {"open_groups": open_groups, "surplus_groups": surplus_groups}
            settings = {"queue.oversampling": f"{factor:g}", "queue.surplus": '"discard"'}
            needs_text = "trains what ends first: shorter responses, and the rest is wasted"
            yield _Candidate(settings, "admission", change, needs_text)
    batch = 2 * shape.groups_per_step
    batch_change = {"groups_per_step": batch}
    if model.open_groups is not None:
        batch_change["open_groups"] = 2 * model.open_groups
    yield _Candidate(
        {"queue.groups_per_step": str(batch)}, "admission", batch_change, "batches twice as large: half as many updates"
    )
    if shape.budget >= 1 and model.steps_per_publish == 1:
        settings = {"weights.steps_per_publish": "2"}
        yield _Candidate(settings, "trainer", {"steps_per_publish": 2}, "older samples")


def _environment_change(model: QueueModel, experiment: Experiment, factor: float) -> _Candidate:
    """Make a candidate with ``factor`` times as many concurrent rollouts, and environment capacity for them.

    While a rollout waits for a tool it needs no slot."""
    rollout_count = round(factor * model.concurrent_rollouts / model.group_size) * model.group_size
    settings = {"queue.max_concurrent_rollouts": str(rollout_count)}
    environment = experiment.environment
    if environment.is_class and experiment.sandbox.live < rollout_count:
        settings["sandbox.live"] = str(rollout_count)
    if environment.concurrency is not None and environment.concurrency < rollout_count:
        settings["environment.concurrency"] = str(rollout_count)
    needs_text = "environments that don't slow down when more of them run"
    return _Candidate(settings, "environment", {"concurrent_rollouts": rollout_count}, needs_text)


def _generator_changes(
    model: QueueModel, experiment: Experiment, shape: RunShape, *, larger: bool = True
) -> Iterator[_Candidate]:
    fixed_rollouts = experiment.queue.max_concurrent_rollouts
    prefetched_rollouts = experiment.generator.prefetch_groups * shape.group_size
    if model.slots < shape.slots:
        kv_tokens = shape.slots * shape.max_sequence_tokens
        settings = {"generator.kv_capacity_tokens": str(kv_tokens)}
        yield _Candidate(settings, "kv", {"slots": shape.slots}, "memory for the KV")
    for slots in (2 * shape.slots, shape.slots // 2):
        if slots < 1 or (slots > shape.slots > model.slots) or (slots > shape.slots and not larger):
            continue
        rollouts = max(slots * model.replicas, shape.group_size) + prefetched_rollouts
        settings = {"generator.slots": str(slots)}
        if fixed_rollouts is not None:
            settings["queue.max_concurrent_rollouts"] = str(rollouts)
        change = {"slots": slots, "concurrent_rollouts": rollouts}
        yield _Candidate(settings, "generator", change, "memory for the KV" if slots > shape.slots else "")
    for factor in (0.5, 0.75, 1.5) if larger else (0.5, 0.75):
        rollouts = round(model.concurrent_rollouts * factor / shape.group_size) * shape.group_size
        if rollouts >= shape.group_size and rollouts <= 2 * model.slots * model.replicas + prefetched_rollouts:
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
    replica_count = shape.replicas + len(shared_devices)
    rollout_count = model.concurrent_rollouts + len(shared_devices) * model.slots
    sharing_change = {
        "replicas": replica_count,
        "yielded_share": len(shared_devices) / replica_count,
        "concurrent_rollouts": rollout_count,
    }
    devices_json = json.dumps([*generator, *shared_devices])
    settings = {"generator.devices": devices_json}
    if experiment.queue.max_concurrent_rollouts is not None:
        settings["queue.max_concurrent_rollouts"] = str(rollout_count)
    yield _Candidate(settings, "generator", sharing_change, "memory for weights and KV beside the trainer")
    rank_count = shape.ranks + len(generator)
    trainer_settings = {"trainer.devices": json.dumps([*generator, *trainer])}
    yielded = {"yielded_share": 1.0, "train_token_s": token_s_with(model, shape.ranks, rank_count)}
    needs_text = "memory for both sides on every device"
    yield _Candidate({**trainer_settings, **settings}, "trainer", {**sharing_change, **yielded}, needs_text, RANK_ERROR)
