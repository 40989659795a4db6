"""A discrete-event simulation of the queue between generator and trainer, under admission and the staleness budget.

Latencies come from the model. The groups that may open or form a batch are decided by the run's own rules
(``admission.credit``, ``staleness.select_batch``). Pure: no clock, and the same numbers for the same seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import msgspec

from headway.control.admission import credit
from headway.control.staleness import OpenGroup, OverduePolicy, select_batch
from headway.records.check_report import QueueOutcome

_ROUNDING = 1e-9  # tokens of work
# At the same moment, in this order
_EVENTS = {"applied": 0, "acted": 1, "verified": 2, "taught": 3, "trained": 4, "published": 5}
_MAX_ROLLOUTS = 8_000  # simulated, about: bounds the cost of a simulation
_LEAST_STEPS, _MOST_STEPS = 8, 60
_LARGEST_BATCH = 512  # samples; larger ones are simulated in proportion


class QueueDeadlock(ValueError):
    """The model reached a state from which nothing would be trained any more."""


class QueueShape(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a queue that the run's experiment and knobs set."""

    groups_per_step: int
    group_size: int  # of every group; where a curriculum adapts it, rollout.group_size or a ledger's mean
    budget: int
    overdue: OverduePolicy = "wait"
    steps_per_publish: int = 1
    slots: int  # of one replica
    replicas: int = 1
    concurrent_rollouts: int  # that may run or wait for a slot
    surplus_groups: int = 0  # open beyond admission: unfinished groups are discarded at a full batch; 0: they are kept
    open_groups: int | None = None  # most open at once, within what admission allows; None: all of it
    verifiers: int = 1
    teachers: int = 1  # rollouts that teachers outside of the trainer score at once


def queue_shape(shape: QueueShape, **changes: Any) -> dict[str, Any]:
    """Return the fields of ``shape`` that any QueueShape has, with ``changes``."""
    return {field: getattr(shape, field) for field in QueueShape.__struct_fields__} | changes


class QueueModel(QueueShape, frozen=True, kw_only=True):
    """Parameters of a run for the simulation. Times in seconds, lengths in tokens."""

    length_at: Callable[[float], int]  # quantile function of the response lengths
    group_correlation: float = 0.0  # of the lengths in a group (Gaussian copula)
    prompt_tokens: float = 0.0
    delay_s: float = 0.0  # time that a request occupies its slot before its first token
    environment_s: float = 0.0  # time of a rollout in tools and sandboxes, without a slot
    decode_fixed_s: float  # a decode step of one replica: fixed + its requests x request
    decode_request_s: float
    beside: float = 1.0  # factor on a decode step while the trainer computes
    yielded_share: float = 0.0  # share of the replicas that pause while the trainer computes
    train_fixed_s: float  # a training step: fixed + tokens x token
    train_token_s: float
    publish_s: float = 0.0
    apply_s: float = 0.0
    pause_s: float = 0.0
    verify_response_s: float = 0.0
    teach_response_s: float = 0.0  # of a rollout, one of the ``teachers``; 0: none scores rollouts
    acceptance: float = 1.0  # share of finished groups that may be trained


class _Group:
    """An open group of the simulation."""

    def __init__(self, index: int, admitted_version: int, size: int) -> None:
        self.index = index
        self.version = admitted_version  # once finished: of its oldest first token
        self.first = math.inf  # lowest version a member started under
        self.unfinished = size  # members not finished
        self.tokens = 0.0
        self.finished = False
        self.acting = False  # its members are with their tools


class _Simulation:
    """The simulation's state between two events.

    ``work``: tokens that a request running since the start would have gained."""

    def __init__(self, model: QueueModel, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.normal = NormalDist()
        self.now = self.work = self.paused_until_s = 0.0
        self.timers: list[tuple[float, int, int, str, list[_Group]]] = []
        self.running: list[tuple[float, int, _Group]] = []  # (work at its end, serial, group)
        self.waiting: deque[tuple[_Group, int]] = deque()  # members without a slot, with their lengths
        self.acting = 0  # members that are with their tools
        self.open: dict[int, _Group] = {}
        self.serial = self.admitted = self.finished = 0
        self.version = self.published = self.applied = 0
        self.busy = False  # the trainer computes
        self.publishing = self.updating = False
        self.missing = 0  # groups that must finish before a batch can form
        self.stalled = False  # a whole batch has finished, but older groups are due
        self.accepted_debt = 0.0
        self.verifier_free_s = [0.0] * model.verifiers
        self.teacher_free_s = [0.0] * model.teachers  # when each has scored all that is queued for it
        self.trained: list[int] = []  # staleness of each trained group
        self.trainer_wait_s = self.straggler_s = self.generator_idle_s = self.filled_s = self.teaching_s = 0.0

    # --- time -----------------------------------------------------------------------------------------------

    def step_s(self, running: int | None = None) -> float:
        """Return the seconds of a decode step of all running requests (or of ``running``), one token for each.

        It is inf while all replicas have yielded their devices."""
        model = self.model
        running = len(self.running) if running is None else running
        decode_s = model.decode_fixed_s + model.decode_request_s * running / model.replicas
        if not self.busy:
            return max(decode_s, 1e-12)
        working_share = 1.0 - model.yielded_share
        return max(decode_s, 1e-12) * model.beside / working_share if working_share else math.inf

    def advance(self) -> None:
        """Advance to the next event and process it. Raises QueueDeadlock where there is none."""
        due_s = self.timers[0][0] if self.timers else math.inf
        if self.running:
            resumed_s = max(self.now, self.paused_until_s)
            end_s = resumed_s + max(0.0, self.running[0][0] - self.work) * self.step_s()
            if end_s < due_s:
                self._elapse(end_s)
                self.work = max(self.work, self.running[0][0])
                return self._finish_members()
        if due_s == math.inf:
            raise QueueDeadlock("the simulated run is deadlocked: nothing runs and nothing is due")
        self._elapse(due_s)
        _, _, _, kind, groups = heapq.heappop(self.timers)
        getattr(self, f"_{kind}")(groups)

    def _elapse(self, until_s: float) -> None:
        elapsed_s = until_s - self.now
        if not self.busy and not self.publishing:
            self.trainer_wait_s += elapsed_s
            self.straggler_s += elapsed_s if self.stalled else 0.0
        is_standing = self.busy and self.model.yielded_share == 1.0
        if not self.running or is_standing:
            self.generator_idle_s += elapsed_s
        self.filled_s += elapsed_s * len(self.running)
        self.teaching_s += max(0.0, min(until_s, max(self.teacher_free_s)) - self.now)
        decoding_s = until_s - max(self.now, min(self.paused_until_s, until_s))
        if self.running and not is_standing:
            self.work += decoding_s / self.step_s()
        self.now = until_s

    def _schedule(self, seconds: float, kind: str, groups: list[_Group]) -> None:
        self.serial += 1
        heapq.heappush(self.timers, (self.now + seconds, _EVENTS[kind], self.serial, kind, groups))

    # --- generation -----------------------------------------------------------------------------------------

    def admit(self) -> None:
        model = self.model
        capacity = model.concurrent_rollouts - len(self.running) - len(self.waiting) - self.acting
        for _ in range(min(self._credit(), capacity // model.group_size) if capacity >= model.group_size else 0):
            group = _Group(self.admitted, self.applied, model.group_size)
            self.admitted += 1
            self.open[group.index] = group
            self._begin(group)
        while self.waiting and len(self.running) < model.slots * model.replicas:
            group, length = self.waiting.popleft()
            group.first = min(group.first, self.applied)
            group.tokens += model.prompt_tokens + length
            self.serial += 1
            # In tokens that it would have gained meanwhile in full slots: a single request would gain more, and be
            # charged for them at the rate of all that start after it.
            delay_tokens = model.delay_s / self.step_s(model.slots * model.replicas) if model.delay_s else 0.0
            heapq.heappush(self.running, (self.work + delay_tokens + length, self.serial, group))

    def _begin(self, group: _Group) -> None:
        """Start a group, whose members wait for slots.

        With tools the members first spend their whole environment time, as if the first token were sampled now."""
        if not self.model.environment_s:
            return self.waiting.extend((group, length) for length in self._lengths())
        group.first = self.applied
        group.acting = True
        self.acting += group.unfinished
        self._schedule(self.model.environment_s, "acted", [group])

    def _acted(self, groups: list[_Group]) -> None:
        for group in groups:
            if group.acting:  # else overdue
                group.acting = False
                self.acting -= group.unfinished
                self.waiting.extend((group, length) for length in self._lengths())

    def _credit(self) -> int:
        """Return the number of groups that may open now."""
        model = self.model
        allowed = credit(
            open_groups=len(self.open),
            completed_steps=self.version,
            applied_version=self.applied,
            groups_per_step=model.groups_per_step,
            budget=model.budget,
            surplus_groups=0 if self.busy else model.surplus_groups,
        )
        return allowed if model.open_groups is None else max(0, min(allowed, model.open_groups - len(self.open)))

    def _lengths(self) -> list[int]:
        model, draw_normal = self.model, self.random.normalvariate
        common_weight, member_weight = math.sqrt(model.group_correlation), math.sqrt(1.0 - model.group_correlation)
        shared_score = draw_normal(0.0, 1.0)
        scores = (common_weight * shared_score + member_weight * draw_normal(0.0, 1.0) for _ in range(model.group_size))
        return [model.length_at(min(self.normal.cdf(score), 1.0 - 1e-12)) for score in scores]

    def _finish_members(self) -> None:
        while self.running and self.running[0][0] <= self.work + _ROUNDING:
            group = heapq.heappop(self.running)[2]
            group.unfinished -= 1
            if not group.unfinished:
                self._verify(group)

    def _verify(self, group: _Group) -> None:
        start_s = max(self.now, heapq.heappop(self.verifier_free_s))
        end_s = start_s + self.model.verify_response_s * self.model.group_size
        heapq.heappush(self.verifier_free_s, end_s)
        self._schedule(end_s - self.now, "verified", [group])

    def _verified(self, groups: list[_Group]) -> None:
        if not self.model.teach_response_s:
            return self._taught(groups)
        for _ in range(self.model.group_size):
            end_s = max(self.now, heapq.heappop(self.teacher_free_s)) + self.model.teach_response_s
            heapq.heappush(self.teacher_free_s, end_s)
        self._schedule(max(self.teacher_free_s) - self.now, "taught", groups)

    def _taught(self, groups: list[_Group]) -> None:
        for group in groups:
            if group.index not in self.open:
                continue  # overdue
            self.accepted_debt += self.model.acceptance
            self.missing -= 1
            if self.accepted_debt < 1.0 - 1e-9:
                del self.open[group.index]
                continue
            self.accepted_debt -= 1.0
            group.finished, group.version = True, int(max(group.version, group.first))
            self.finished += 1

    # --- training -------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Start a step when the trainer is free and the budget allows a batch; return whether groups were removed."""
        model = self.model
        if self.busy or self.publishing or self.finished < model.groups_per_step or self.missing > 0:
            return False
        candidates = [
            OpenGroup(
                index=group.index,
                first_version=group.version,
                state="finished" if group.finished else "running",
                last_version=self.applied if group.finished else None,
            )
            for group in self.open.values()
        ]
        policy = "drop" if model.surplus_groups else model.overdue
        selection = select_batch(self.version, candidates, model.groups_per_step, model.budget, policy)
        for index in selection.overdue:
            self._end_overdue(self.open.pop(index))
        self.missing, self.stalled = selection.missing, not selection.groups
        if not selection.groups:
            return bool(selection.overdue)
        batch = [self.open[index] for index in selection.groups]
        if model.surplus_groups:
            for group in [group for group in self.open.values() if not group.finished]:
                self._end_overdue(self.open.pop(group.index))
        self.trained += [self.version - group.version for group in batch]
        self.busy = True
        tokens = sum(group.tokens for group in batch)
        self._schedule(model.train_fixed_s + tokens * model.train_token_s, "trained", batch)
        return True

    def _end_overdue(self, group: _Group) -> None:
        if group.finished:
            self.finished -= 1
            return
        if group.acting:
            group.acting = False
            self.acting -= group.unfinished
        self.running = [queued for queued in self.running if queued[2] is not group]
        heapq.heapify(self.running)
        self.waiting = deque(queued for queued in self.waiting if queued[0] is not group)

    def _trained(self, groups: list[_Group]) -> None:
        for group in groups:
            del self.open[group.index]
        self.finished -= len(groups)
        self.version += 1
        self.busy = False
        if self.version % self.model.steps_per_publish == 0:
            self.publishing = True
            if not self.updating:  # else: when the last version is in place
                self._schedule(self.model.publish_s, "published", [])

    def _published(self, _: list[_Group]) -> None:
        self.published, self.updating = self.version, True
        self.publishing = self.model.budget == 0  # synchronous: wait until it is applied
        self.paused_until_s = max(self.paused_until_s, self.now + self.model.pause_s)
        self._schedule(self.model.apply_s, "applied", [])

    def _applied(self, _: list[_Group]) -> None:
        self.applied, self.updating = self.published, False
        if self.publishing and self.model.budget == 0:
            self.publishing = False
        elif self.publishing:
            self._schedule(self.model.publish_s, "published", [])


def simulate(model: QueueModel, *, seed: int = 0, rollouts: int = _MAX_ROLLOUTS) -> QueueOutcome:
    """Simulate ``model`` until it is in steady state, then count over 8 to 60 steps, about ``rollouts`` rollouts.

    Batches of more than 512 samples are scaled down: fewer groups in fewer slots, each proportionally slower.
    Raises QueueDeadlock for a model under which the run would deadlock (a budget below steps_per_publish - 1).
    """
    scale, model = _scaled_down(model)
    step_rollouts = model.groups_per_step * model.group_size
    counted_steps = max(_LEAST_STEPS, min(_MOST_STEPS, int(rollouts * model.acceptance) // step_rollouts))
    warm_version = model.budget + max(2, counted_steps // 4)
    simulation = _Simulation(model, seed)
    _run_to(simulation, warm_version)
    warm_totals = _totals(simulation)
    warm_trained = len(simulation.trained)
    _run_to(simulation, warm_version + counted_steps)
    elapsed_s, waited_s, straggler_s, idle_s, filled_s, teaching_s = (
        total - warm_total for total, warm_total in zip(_totals(simulation), warm_totals, strict=True)
    )
    elapsed_s = max(elapsed_s, 1e-12)
    staleness_values = simulation.trained[warm_trained:]
    return QueueOutcome(
        samples_per_s=scale * counted_steps * step_rollouts / elapsed_s,
        trainer_wait=waited_s / elapsed_s,
        straggler_wait=straggler_s / elapsed_s,
        generator_wait=idle_s / elapsed_s,
        slots_filled=filled_s / elapsed_s / (model.slots * model.replicas),
        teaching=teaching_s / elapsed_s,
        staleness_mean=sum(staleness_values) / max(1, len(staleness_values)),
        staleness_max=max(staleness_values, default=0),
    )


def simulate_or_zero(model: QueueModel, *, seed: int = 0, rollouts: int = _MAX_ROLLOUTS) -> QueueOutcome:
    """Simulate; where the run would deadlock, return an outcome of rate 0 in which both sides always wait."""
    try:
        return simulate(model, seed=seed, rollouts=rollouts)
    except QueueDeadlock:
        return QueueOutcome(
            samples_per_s=0.0,
            trainer_wait=1.0,
            straggler_wait=0.0,
            generator_wait=1.0,
            slots_filled=0.0,
            staleness_mean=0.0,
            staleness_max=0,
        )


def _totals(simulation: _Simulation) -> tuple[float, ...]:
    wait_totals = (simulation.trainer_wait_s, simulation.straggler_s, simulation.generator_idle_s)
    return (simulation.now, *wait_totals, simulation.filled_s, simulation.teaching_s)


def _scaled_down(model: QueueModel) -> tuple[float, QueueModel]:
    """Return (factor, ``model`` with batch, slots and concurrency divided by it and times multiplied)."""
    target_scale = model.groups_per_step * model.group_size / _LARGEST_BATCH
    scaled_groups = max(1, round(model.groups_per_step / max(1.0, target_scale)))
    scale = model.groups_per_step / scaled_groups
    if scale <= 1.0 or model.slots / scale < 1.0:
        return 1.0, model
    scaled_slots = max(1, round(model.slots / scale))
    return scale, msgspec.structs.replace(
        model,
        groups_per_step=scaled_groups,
        slots=scaled_slots,
        concurrent_rollouts=max(model.group_size, round(model.concurrent_rollouts / scale)),
        surplus_groups=math.ceil(model.surplus_groups / scale),
        open_groups=None if model.open_groups is None else max(1, round(model.open_groups / scale)),
        decode_request_s=model.decode_request_s * model.slots / scaled_slots,
        train_token_s=model.train_token_s * scale,
        verify_response_s=model.verify_response_s * scale,
        teach_response_s=model.teach_response_s * scale,
    )


def _run_to(simulation: _Simulation, version: int) -> None:
    while simulation.version < version:
        simulation.admit()
        if simulation.train():
            simulation.admit()  # groups ended as overdue free credit
        simulation.advance()


def needed_budget(*, longest_tokens: float, concurrency: int, samples_per_step: int, mean_tokens: float) -> int:
    """Return the smallest eta under which ``wait`` does not stall on the longest response:

        eta >= L_max x concurrency / (samples_per_step x L_mean)

    While one response grows to L_max tokens, its neighbours in ``concurrency`` slots end L_max x concurrency / L_mean
    times on average: these samples make that many steps. It is an upper bound where fewer are trained (filters, a
    slower trainer). Raises ValueError for arguments that are not positive.
    """
    if min(longest_tokens, concurrency, samples_per_step, mean_tokens) <= 0:
        raise ValueError(
            f"longest {longest_tokens}, concurrency {concurrency}, samples per step {samples_per_step}, "
            f"mean {mean_tokens}: all must be positive"
        )
    return math.ceil(longest_tokens * concurrency / (samples_per_step * mean_tokens) - 1e-9)
