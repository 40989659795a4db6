"""Forecasts a run before it starts, from a few seconds' measurements of the real workers.

It predicts samples/s, waits, staleness and the binding constraint. Pure arithmetic; the queue between the two sides is
simulated by ``queue_model``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec

from headway.control.lengths import LengthDistribution
from headway.control.tuning.balance import BUSY, WaitShares, balance_of
from headway.control.tuning.queue_model import QueueModel, QueueShape, needed_budget, queue_shape, simulate
from headway.records.check_report import BudgetShare, Calibration, Change, Constraint, Forecast, QueueOutcome

LEAST_GROUPS = 8  # with fewer finished groups the share that will be filtered is unknown
WORTH_IT = 0.03  # smaller gains are below the resolution of a simulation of some dozen steps
EVEN_REQUESTS = 16.0  # of our engine on a core (benchmarks/results/engine-2-cores.txt): see RunShape.even_requests
# Of several trainer ranks, which all make the optimiser step and all-reduce gradients. Mean and spread of
# benchmarks/ranks.py on two cores (0.61 to 0.82); not measured on GPUs.
RANK_EFFICIENCY, RANK_ERROR = 0.7, 0.1


class RunShape(QueueShape, frozen=True, kw_only=True):
    """The parts of an experiment that the forecast needs."""

    ranks: int
    kv_tokens: int  # capacity of one replica
    max_sequence_tokens: int
    max_response_tokens: int
    yielded_replicas: int  # of ``replicas``: the trainer computes on their devices, and they pause meanwhile
    steps: int
    time_limit_s: float | None
    evaluated_samples: int  # held evaluations before and after, together
    evaluated_per_step: float = 0.0  # validation samples inside the run, per training step ...
    evaluated_per_s: float = 0.0  # ... and per second
    free_devices: int = 0  # of the generator's and trainer's kind that neither of them uses
    even_requests: float = EVEN_REQUESTS  # at which half of a decode step is proportional to them, where unmeasured

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def yielded_share(self) -> float:
        return self.yielded_replicas / self.replicas


def forecast(shape: RunShape, measured: Calibration, lengths: LengthDistribution) -> Forecast:
    """Forecast rates, waits, staleness and the binding constraint of the run that ``shape`` describes."""
    model = queue_model(shape, measured, lengths)
    production, consumption = production_rate(model, lengths.mean_tokens), consumption_rate(model, lengths.mean_tokens)
    acceptance = measured.accepted_groups / measured.groups if measured.groups >= LEAST_GROUPS else None
    production_left = max(1e-9, production - shape.evaluated_per_s)
    effective_per_s = production_left * model.acceptance
    effective_per_s = 1.0 / (1.0 / effective_per_s + shape.evaluated_per_step / shape.samples_per_step / production)
    ideal_per_s = ideal_rate(effective_per_s, consumption, shape.yielded_share)
    slowed = effective_per_s / max(1e-9, production * model.acceptance)  # share of the generator left by evaluation
    model = msgspec.structs.replace(
        model, decode_fixed_s=model.decode_fixed_s / slowed, decode_request_s=model.decode_request_s / slowed
    )
    outcome = simulate(model)
    longest_tokens, longest_source = _longest(shape, measured, lengths)
    least_budget = needed_budget(
        longest_tokens=longest_tokens,
        concurrency=decoding_together(model),
        samples_per_step=shape.samples_per_step,
        mean_tokens=lengths.mean_tokens,
    )
    changes = _changes(shape, model, lengths, least_budget, outcome)
    sides = {"trainer": outcome.trainer_wait, "generator": outcome.generator_wait}
    waits = WaitShares(**sides, yielded=shape.yielded_share, teaching=outcome.teaching)
    binding, reason = binding_constraint(shape, model, outcome, waits, [(fix.constraint, fix.gain) for fix in changes])
    steps_per_s = outcome.samples_per_s / shape.samples_per_step
    training_s = min(shape.steps / steps_per_s, math.inf if shape.time_limit_s is None else shape.time_limit_s)
    evaluation_s = shape.evaluated_samples / production
    return Forecast(
        production_per_s=production,
        acceptance=acceptance,
        effective_per_s=effective_per_s,
        consumption_per_s=consumption,
        verify_per_s=shape.verifiers / measured.verify_response_s if measured.verify_response_s else None,
        yielded_share=shape.yielded_share,
        balance=effective_per_s / consumption,
        ideal_per_s=ideal_per_s,
        outcome=outcome,
        steps_per_h=3600.0 * steps_per_s,
        training_s=training_s,
        evaluation_s=evaluation_s,
        total_s=training_s + evaluation_s,
        longest_tokens=longest_tokens,
        longest_is=longest_source,
        needed_budget=least_budget,
        budgets=_budget_shares(shape, model, least_budget, ideal_per_s, outcome),
        binding=binding,
        reason=reason,
        # the best one, then the best of those that need nothing
        changes=sorted(changes, key=lambda fix: bool(fix.needs) and fix is not changes[0])[:2],
    )


# --- rates -----------------------------------------------------------------------------------------------


def queue_model(shape: RunShape, measured: Calibration, lengths: LengthDistribution) -> QueueModel:
    """Make the queue's model from a calibration; an unknown acceptance (too few groups) is assumed to be 1."""
    beside_tokens_per_s = measured.decode_beside_tokens_per_s
    slowdown = max(1.0, measured.decode_tokens_per_s / beside_tokens_per_s) if beside_tokens_per_s else 1.0
    acceptance = measured.accepted_groups / measured.groups if measured.groups >= LEAST_GROUPS else 1.0
    slots = min(shape.slots, kv_slots(shape, measured.prompt_tokens + lengths.mean_tokens))
    return QueueModel(
        **queue_shape(shape, slots=slots),
        length_at=lengths.quantile,
        group_correlation=measured.lengths.group_correlation,
        prompt_tokens=measured.prompt_tokens,
        decode_fixed_s=measured.decode_fixed_s,
        decode_request_s=measured.decode_request_s,
        beside=slowdown,
        yielded_share=shape.yielded_share,
        train_fixed_s=measured.train_fixed_s,
        train_token_s=measured.train_token_s,
        publish_s=measured.publish_s,
        apply_s=measured.apply_s,
        pause_s=measured.pause_s,
        verify_response_s=measured.verify_response_s,
        teach_response_s=measured.teach_response_s,
        acceptance=max(acceptance, 0.05),  # a run in which every group is filtered gives up; it has no rate
    )


def kv_slots(shape: RunShape, mean_sequence_tokens: float) -> int:
    """Return the mean number of requests whose KV fits into one replica, at least 1.

    Whole sequences are counted, which is conservative: a request half-way holds its prompt and half its response."""
    return max(1, math.floor(shape.kv_tokens / max(1.0, mean_sequence_tokens)))


def decoding_together(model: QueueModel) -> int:
    """Return the number of requests with a slot when the generator is full, over all replicas."""
    admitted_samples = model.groups_per_step * (model.budget + 1) * model.group_size
    return max(1, min(model.slots * model.replicas, model.concurrent_rollouts, admitted_samples))


def production_rate(model: QueueModel, mean_tokens: float) -> float:
    """Return the samples/s at full concurrency: concurrency / (mean tokens x time of a decode step).

    It assumes a trainer that always computes, on separate devices; replicas on shared devices count only while the
    generator has them."""
    concurrent_requests = decoding_together(model)
    step_s = model.decode_fixed_s + model.decode_request_s * concurrent_requests / model.replicas
    return concurrent_requests / (max(step_s, 1e-12) * model.beside * mean_tokens)


def consumption_rate(model: QueueModel, mean_tokens: float) -> float:
    """Return the samples/s that the trainer consumes if it never waits, publishing included."""
    sample_count = model.groups_per_step * model.group_size
    tokens = sample_count * (model.prompt_tokens + mean_tokens)
    step_s = model.train_fixed_s + tokens * model.train_token_s + model.publish_s / model.steps_per_publish
    return sample_count / max(step_s, 1e-12)


def ideal_rate(production: float, consumption: float, yielded_share: float) -> float:
    """Return the samples/s when only the rates of the two sides limit.

    While the trainer computes, ``yielded_share`` of the generator pauses. With x the share of the time in which it
    computes, consumption * x = production * (1 - yielded_share * x): the slower side's rate for a share of 0,
    1 / (1 / production + 1 / consumption) for 1, and the trainer's where the other replicas keep up with it.
    """
    if min(production, consumption) <= 0:
        return 0.0
    computing_share = min(1.0, production / (consumption + yielded_share * production))
    return consumption * computing_share


# --- the budget ------------------------------------------------------------------------------------------


def _longest(
    shape: RunShape, measured: Calibration, lengths: LengthDistribution
) -> tuple[int, Literal["limit", "p99"]]:
    """Return L_max: the p99 when it was observed and enough responses ended, else the limit."""
    summary = measured.lengths
    if summary.p99_seen and summary.finished >= 300:
        return lengths.quantile(0.99), "p99"
    return shape.max_response_tokens, "limit"


def _budget_shares(
    shape: RunShape, model: QueueModel, needed: int, ideal: float, outcome: QueueOutcome
) -> list[BudgetShare]:
    """Simulate the rates under other budgets: half, twice, and the needed one, beside the configured one."""
    budgets = {shape.budget, max(1, shape.budget // 2), max(1, 2 * shape.budget), needed}
    shares: list[BudgetShare] = []
    for budget in sorted(b for b in budgets if b >= shape.steps_per_publish - 1):
        budget_outcome = outcome if budget == shape.budget else simulate(msgspec.structs.replace(model, budget=budget))
        share = min(1.0, budget_outcome.samples_per_s / ideal)
        shares.append(BudgetShare(budget=budget, share=share, staleness_mean=budget_outcome.staleness_mean))
    return shares


# --- the binding constraint, and changes that would help -------------------------------------------------


_Candidate = tuple[str, str, Constraint, QueueModel, str]  # key, value, relieved constraint, changed model, needs


def _changes(
    shape: RunShape, model: QueueModel, lengths: LengthDistribution, needed: int, now: QueueOutcome
) -> list[Change]:
    """Simulate every candidate separately; return the worthwhile ones, the largest gain first."""
    worthwhile_changes: list[Change] = []
    for key, value_text, constraint, changed_model, needs in _candidates(shape, model, lengths, needed):
        gain = simulate(changed_model).samples_per_s / now.samples_per_s - 1.0
        if gain >= WORTH_IT:
            worthwhile_changes.append(Change(key=key, value=value_text, constraint=constraint, gain=gain, needs=needs))
    return sorted(worthwhile_changes, key=lambda change: -change.gain)


def token_s_with(model: QueueModel, ranks: int, more: int) -> float:
    """Return the seconds of training per token with ``more`` ranks (or fewer) instead of ``ranks``."""
    return model.train_token_s * rank_speed(ranks) / rank_speed(more)


def rank_speed(ranks: int) -> float:
    """Return the speed of ``ranks`` ranks relative to a single one."""
    return ranks * RANK_EFFICIENCY if ranks > 1 else 1.0


def _candidates(shape: RunShape, model: QueueModel, lengths: LengthDistribution, needed: int) -> Iterator[_Candidate]:
    with_ = partial(msgspec.structs.replace, model)
    device_needs = "" if shape.free_devices else "another device: all of this kind are in use"
    deeper_budget = max(needed, shape.budget + 1) if shape.budget < needed else 2 * shape.budget
    yield "queue.budget", str(deeper_budget), "admission", with_(budget=deeper_budget), ""
    rollout_count = shape.concurrent_rollouts + shape.slots * shape.replicas
    if model.slots < shape.slots:
        kv_tokens = shape.slots * shape.max_sequence_tokens
        yield "generator.kv_capacity_tokens", str(kv_tokens), "kv", with_(slots=shape.slots), "memory for the KV"
    else:
        larger_model = with_(slots=2 * shape.slots, concurrent_rollouts=rollout_count)
        yield "generator.slots", str(2 * shape.slots), "generator", larger_model, "memory for the KV"
    if not shape.yielded_replicas:
        replica_count = shape.replicas + 1
        larger_model = with_(replicas=replica_count, concurrent_rollouts=shape.concurrent_rollouts + shape.slots)
        yield "generator.devices", f"{replica_count} devices", "generator", larger_model, device_needs
        larger_model = with_(train_token_s=token_s_with(model, shape.ranks, shape.ranks + 1))
        yield "trainer.devices", f"{shape.ranks + 1} devices", "trainer", larger_model, device_needs
    if model.verify_response_s:
        worker_count = 2 * shape.verifiers
        yield "verifier.workers", str(worker_count), "verifier", with_(verifiers=worker_count), ""
    if model.teach_response_s:
        larger_model, needs = with_(teachers=2 * shape.teachers), "devices, or a faster server"
        yield "teachers", f"{larger_model.teachers} rollouts at once", "teacher", larger_model, needs
    p99 = lengths.quantile(0.99)
    if p99 < shape.max_response_tokens * 3 // 4:
        needs = "cutting 1 % of the responses: it changes what is learned"
        yield "rollout.max_response_tokens", str(p99), "admission", with_(length_at=lengths.capped(p99).quantile), needs


def binding_constraint(
    shape: RunShape,
    model: QueueModel,
    outcome: QueueOutcome,
    waits: WaitShares,
    gains: Sequence[tuple[Constraint, float]],
) -> tuple[Constraint, str]:
    """Return the binding constraint of a run, and a sentence that explains it.

    ``waits``: measured or predicted; ``gains``: (constraint, gain) of the changes that would relieve it. `balance_of`
    decides between trainer, environments, teachers and the rest; a trainer that hardly waits binds as well. For the
    rest it is the budget, when the trainer waits mostly for stragglers or slots stay empty for lack of credit; the
    teachers or the verifiers, when their relief gains most; "other", where both wait for something else; else the
    generator.
    """
    balance = balance_of(waits, shape.budget)
    waiting_text = f"the trainer would wait {waits.trainer:.0%} of the time"
    filled_text = f"{outcome.slots_filled:.0%} of the slots are filled"
    if balance == "training-bound" or waits.trainer < BUSY:
        return "trainer", f"{waiting_text}: it is what the others wait for"
    if balance == "environment-bound":
        spent_text = f"rollouts spend {waits.environment:.0%} of their time in their environments"
        return "environment", f"{waiting_text}, {filled_text}: {spent_text}"
    largest_gain = max((gain for _, gain in gains), default=0.0)
    relieving = {constraint for constraint, gain in gains if gain >= largest_gain > 0}
    if model.teach_response_s and (balance == "teacher-bound" or "teacher" in relieving):
        taught_per_s = model.teachers / model.teach_response_s
        return "teacher", f"{waiting_text}: the teachers score {taught_per_s:.3g} samples/s at most"
    if outcome.straggler_wait > waits.trainer / 2 or "admission" in relieving:
        stragglers_text = f", {outcome.straggler_wait:.0%} for the longest responses at the edge of the budget"
        return "admission", f"{waiting_text}{stragglers_text}; {filled_text}"
    if "verifier" in relieving:
        verified_per_s = shape.verifiers / model.verify_response_s
        return "verifier", f"{waiting_text}: the verifiers score {verified_per_s:.3g} samples/s at most"
    if balance in ("other-bound", "teacher-bound"):
        return "other", f"{waiting_text}, the generator {waits.generator:.0%}: neither is what the other waits for"
    if model.slots < shape.slots:
        return "kv", f"{waiting_text}: the KV cache holds about {model.slots} of {shape.slots} requests at once"
    if waits.yielded:
        return "generator", f"{waiting_text} while the generator has the devices: they take turns"
    return "generator", f"{waiting_text}, {filled_text}"
