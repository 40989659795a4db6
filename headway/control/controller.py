"""Matching the two rates while the run goes on: which knobs to set, and why.

Pure: ``decide`` gets the controller's state and the run's last records and gives both the next state and what to do. The
aim is *trained samples with non-zero advantage per second* within the staleness budget (admission keeps it whatever the
knobs are) and the length-bias limit; of settings whose rate is within 1 % of the best, the one with the younger samples.

Each decision looks at the records since the last one and does the first of these that applies:

1. *Drift.* What the queue is made of (lengths, acceptance, cost of a token on either side, verification) differs from
   the records before: those are forgotten, and so is what was learnt about the knobs.
2. *Measured effect.* The last change has had time to show. When the rate fell by more than noise and below what was
   predicted, it is taken back, and its direction isn't tried again in this regime.
3. *Reflex.* The trainer starves while the limit on open groups keeps slots empty: the limit rises, by half or twofold.
4. *Model.* After a budget's worth of steps ``ledger_model`` estimates the queue and ``queue_model`` simulates the
   neighbouring settings, with a generator a tenth slower than measured: the reserve against bursts. The best one is taken
   if it gains enough; twice as much for every time a knob has turned round in this regime. While nothing is found it
   looks ever more seldom.

Guards hold whatever the model says: while the trainer starves for want of groups nothing is lowered, while finished groups
pile up nothing is raised, and a value at which the trainer starved is not gone back to.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Literal, get_args

import msgspec

from headway.config.control import KnobName
from headway.config.schema import Experiment
from headway.control.forecast import RunShape
from headway.control.ledger_model import (
    LedgerModel,
    decode_line,
    decode_point,
    estimate,
    relative_noise,
    shape_of,
    training_s,
    usable,
)
from headway.control.length_bias import ks_statistic
from headway.control.queue_model import QueueModel, simulate
from headway.records.control import Knobs
from headway.records.ledger import StepRecord
from headway.records.planning import QueueOutcome

KNOBS: tuple[KnobName, ...] = get_args(KnobName)
WINDOW = 16  # records that an estimate is made from, at most
LEAST_GAIN = 0.03  # in samples/s, relative: less is within what simulation and measurement can tell apart
LEAST_YOUNGER = 0.1  # versions of mean staleness ...
LEAST_YOUNGER_SHARE = 0.05  # ... and relative
STARVES, FULL = 0.05, 0.02  # shares of the time the trainer waits for want of groups
_FACTORS = (0.5, 1 / 1.5, 0.8, 1.25, 1.5, 2.0)
_CAREFUL = (0.8, 1.25)  # where the model is far from what was measured
_FAR = 0.3  # |ln(simulated / measured)|
_ROLLOUTS = 1500  # of one simulation
_RESERVE = 1.1  # the generator is taken to be so much slower than measured
_CLIMB = 0.01  # relative: a simulated rate counts as higher
_RATE_DIFFERS = 0.2  # |ln|: worth another look
_MOST_RESTS = 3  # doublings of the time between two looks
_DRIFT = 1.25  # factor
_DRIFT_Z = 4.0
_RECENT = 3  # steps that must differ from those before
_LENGTHS_DIFFER, _LENGTHS_DIFFER_Z = 0.2, 2.5  # KS statistic, and in its scale (p < 1e-5)

Kind = Literal["set", "rollback", "measured", "drift"]


class ControlLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Within what the controller moves."""

    shape: RunShape
    most_concurrent: int
    least_concurrent: int
    most_open: int  # what admission allows at best
    least_open: int
    most_steps_per_publish: int
    shared: tuple[int, ...] = ()  # replicas on the trainer's devices, where others are left to generate
    pinned: frozenset[KnobName] = frozenset()
    interval_steps: int = 2
    length_bias_limit: float = 0.1
    tolerance: float = 0.01

    @property
    def patience_steps(self) -> int:
        """Steps until an estimate or a measured effect is worth something: until the queue has turned over."""
        return max(self.interval_steps, 4, self.shape.budget + 1)

    def value(self, knobs: Knobs, name: KnobName) -> int:
        """As a number: no limit on open groups is as many as admission allows."""
        if name == "open_groups":
            return self.most_open if knobs.open_groups is None else min(knobs.open_groups, self.most_open)
        return len(knobs.resting) if name == "resting" else getattr(knobs, name)

    def bounds(self, name: KnobName) -> tuple[int, int]:
        return {
            "open_groups": (self.least_open, self.most_open),
            "concurrent_rollouts": (self.least_concurrent, self.most_concurrent),
            "steps_per_publish": (1, self.most_steps_per_publish),
            "resting": (0, len(self.shared)),
        }[name]

    def with_value(self, knobs: Knobs, name: KnobName, value: int) -> Knobs:
        """``knobs`` with one set, kept within its bounds."""
        low, high = self.bounds(name)
        kept = max(low, min(high, value))
        if name == "open_groups":
            return msgspec.structs.replace(knobs, open_groups=None if kept >= self.most_open else kept)
        if name == "resting":
            return msgspec.structs.replace(knobs, resting=self.shared[len(self.shared) - kept :])
        if name == "concurrent_rollouts":
            return msgspec.structs.replace(knobs, concurrent_rollouts=kept)
        return msgspec.structs.replace(knobs, steps_per_publish=kept)

    def clamped(self, knobs: Knobs, first: Knobs) -> Knobs:
        """Knobs of an earlier session under these limits; pinned ones as the experiment sets them (``first``)."""
        for name in KNOBS:
            source = first if name in self.pinned else knobs
            knobs = self.with_value(knobs, name, self.value(source, name))
            if name in self.pinned:
                knobs = msgspec.structs.replace(knobs, **{name: getattr(first, name)})
        return knobs


def limits_of(experiment: Experiment, shared: Sequence[int] = ()) -> ControlLimits:
    """What the experiment allows. ``shared``: replicas on the trainer's devices."""
    queue, control = experiment.queue, experiment.control
    apart = len(experiment.generator.devices) - len(shared)
    return ControlLimits(
        shape=shape_of(experiment, len(shared)),
        most_concurrent=experiment.concurrent_rollouts,
        least_concurrent=experiment.rollout.group_size,
        most_open=queue.groups_per_step * (queue.budget + 1) + experiment.surplus_groups,
        least_open=queue.groups_per_step,
        most_steps_per_publish=max(
            experiment.weights.steps_per_publish, min(control.max_steps_per_publish, queue.budget + 1)
        ),
        shared=tuple(shared) if apart else tuple(shared)[1:],
        pinned=frozenset(control.pin),
        interval_steps=control.interval_steps,
        length_bias_limit=control.length_bias_limit,
        tolerance=control.staleness_tolerance,
    )


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing the controller did or found: a line of its log."""

    kind: Kind
    reason: str
    knob: KnobName | Literal[""] = ""
    old: int = 0  # open_groups: what admission allows at best stands for no limit
    new: int = 0
    predicted: float = 0.0  # rate after / rate before; 0: not predicted
    measured: float = 0.0  # ... as it turned out; 0: not yet


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose effect is being measured."""

    before: Knobs
    version: int  # from which on it is in effect
    predicted: float  # rate after / rate before
    rate: float  # before, samples/s
    noise: float  # its standard error, relative


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller remembers.

    Lifecycle: a *regime* begins with the run and at each drift; within it floors only rise, refused directions stay
    refused, and each turn of a knob makes the next one dearer. That is why it comes to rest on stationary inputs.
    """

    knobs: Knobs
    regime_step: int = 0  # records of earlier steps are of another regime
    decided_step: int = 0  # version at the last change
    trial: Trial | None = None
    floors: dict[str, int] = {}  # knob -> value at which the trainer starved
    refused: tuple[tuple[str, int], ...] = ()  # (knob, direction) that turned out worse
    directions: dict[str, int] = {}  # knob -> its last direction
    turns: dict[str, int] = {}  # knob -> how often it turned round
    rests: int = 0  # looks at the model in a row that found nothing
    looked_step: int = 0  # version at the last of them, and the rate then
    looked_rate: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The next state (its ``knobs`` are to be set) and what to say about it."""

    state: ControllerState
    actions: tuple[Action, ...] = ()


def decide(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Decision:
    """What to do after the last of ``records``, the run's own in their order (some dozen are enough)."""
    every = usable(records)
    actions: list[Action] = []
    drifted = _drift([r for r in every if r.step >= state.regime_step][-WINDOW - _RECENT :])
    if drifted is not None:
        step, reason = drifted
        state = ControllerState(knobs=state.knobs, regime_step=step, decided_step=step)
        actions.append(Action(kind="drift", reason=reason))
    window = [r for r in every if r.step >= state.regime_step][-WINDOW:]
    since = [r for r in window if r.step >= state.decided_step]
    if len(since) < limits.interval_steps:
        return Decision(state=state, actions=tuple(actions))
    now = _evidence(since[-limits.interval_steps :], limits)
    lately = _evidence(since[-2 * limits.patience_steps :], limits)
    for next_, evidence in ((_measured, now), (_reflex, now), (_by_model, lately)):
        decision = next_(state, window, evidence, limits)
        if decision is not None:
            state = decision.state
            actions += decision.actions
            if decision.state.decided_step > window[-1].step:  # changed something
                break
    return Decision(state=state, actions=tuple(actions))


# --- what the last steps show ----------------------------------------------------------------------------


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps since the last decision."""

    wait: float  # share of the time the trainer waited
    lack: float  # ... of it for want of finished groups, not for stragglers
    idle: float  # share of the time the replicas had nothing to do
    stock: float  # groups left in the buffer after a batch was taken, in batches
    in_generation: float  # rollouts between admission and last token
    preempted: bool
    bias: float  # length bias that scheduling causes, KS

    @property
    def starving(self) -> bool:
        """The trainer waits for groups that nobody is late with."""
        return self.lack >= STARVES and self.lack >= self.wait / 2 and self.stock < 1 and not self.preempted

    @property
    def glut(self) -> bool:
        """The trainer doesn't wait, and the generator does or its groups pile up."""
        return self.wait < FULL and (self.idle > STARVES or self.stock >= 1)


def _evidence(records: Sequence[StepRecord], limits: ControlLimits) -> Evidence:
    seconds = sum(r.step_s for r in records)
    wait = sum(r.trainer_wait_s for r in records) / seconds
    return Evidence(
        wait=wait,
        lack=max(0.0, wait - sum(r.flow.straggler_wait_s for r in records) / seconds),
        idle=sum(r.generator_wait_ratio * r.step_s for r in records) / seconds,
        stock=fmean(r.buffered_groups for r in records) / limits.shape.groups_per_step,
        in_generation=sum(r.flow.generating_s for r in records) / seconds,
        preempted=any(r.flow.preemptions for r in records),
        bias=records[-1].length_bias_scheduling_ks,
    )


def _allowed(state: ControllerState, evidence: Evidence, limits: ControlLimits) -> Callable[[KnobName, int, int], bool]:
    """Whether a knob may go from one value to another: the guards."""

    def allowed(name: KnobName, old: int, new: int) -> bool:
        up = new > old
        if name in limits.pinned or (name, 1 if up else -1) in state.refused:
            return False
        if not up and new <= state.floors.get(name, 0):
            return False
        if name == "steps_per_publish":
            return True
        if name == "resting":
            up = not up
        if up:
            return not evidence.glut and evidence.bias <= limits.length_bias_limit
        return not evidence.starving

    return allowed


# --- drift -----------------------------------------------------------------------------------------------

_COSTS: dict[str, Callable[[StepRecord], float]] = {
    "training time per token": lambda r: training_s(r) / r.flow.trained_tokens if r.flow.trained_tokens else 0.0,
    "training time per sample": lambda r: training_s(r) / r.samples,
    "verification of a response": lambda r: r.verify_s / r.flow.responses if r.flow.responses else 0.0,
}


def _drift(records: Sequence[StepRecord]) -> tuple[int, str] | None:
    """(first step of a new regime, what changed) when the last records are not like those before."""
    recent, before = records[-_RECENT:], records[:-_RECENT]
    if len(before) < 4:
        return None
    changes = {name: _change(signal, before, recent) for name, signal in _COSTS.items()}
    # What a step costs may go with its tokens or with its samples: a dearer trainer shows in both.
    trainer = [changes.pop("training time per token"), changes.pop("training time per sample")]
    changes["training time"] = min(trainer, key=abs) if trainer[0] * trainer[1] > 0 else 0.0
    changes["time of a decode step"] = _change(_decode_cost(before), before, recent)
    for name, change in changes.items():
        if change:
            return recent[0].step, f"{name}: {math.exp(change):.2f} times what it was"
    reason = _length_drift(before, recent) or _acceptance_drift(before, recent)
    return (recent[0].step, reason) if reason else None


def _change(signal: Callable[[StepRecord], float], before: Sequence[StepRecord], recent: Sequence[StepRecord]) -> float:
    """Logarithm of the factor by which a signal has changed; 0 where that isn't beyond doubt."""
    then = [math.log(value) for r in before if (value := signal(r)) > 0]
    now = [math.log(value) for r in recent if (value := signal(r)) > 0]
    if len(then) < 4 or len(now) < len(recent):
        return 0.0
    change = fmean(now) - fmean(then)
    error = max(0.05, stdev(then)) * math.sqrt(1 / len(now) + 1 / len(then))
    certain = _DRIFT_Z * (1.5 if len(then) < 8 else 1.0)  # few values: their spread is hardly known
    alike = all((value - fmean(then)) * change > 0 for value in now)
    return change if abs(change) > math.log(_DRIFT) and abs(change) > certain * error and alike else 0.0


def _decode_cost(before: Sequence[StepRecord]) -> Callable[[StepRecord], float]:
    """Time of a decode step over what it was ``before`` with as many requests."""
    line, _ = decode_line(before)

    def cost(record: StepRecord) -> float:
        point = decode_point(record)
        expected = line.fixed + line.slope * point[0] if point else 0.0
        return point[1] / expected if point and expected > 0 else 0.0

    return cost


def _length_drift(before: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    """Two-sample Kolmogorov-Smirnov over the response lengths, those of a group counted as half as many."""
    then, now = (Counter[int]() for _ in range(2))
    for records, lengths in ((before, then), (recent, now)):
        for record in records:
            lengths.update({int(end): count for end, count in record.length_histogram.items()})
    if min(then.total(), now.total()) < 20:
        return ""
    distance = ks_statistic(then, now)
    error = math.sqrt(2 / then.total() + 2 / now.total())
    if distance < _LENGTHS_DIFFER or distance < _LENGTHS_DIFFER_Z * error:
        return ""
    means = [sum(end * count for end, count in lengths.items()) / lengths.total() for lengths in (now, then)]
    return f"response length: {means[0] / means[1]:.2f} times what it was (KS {distance:.2f})"


def _acceptance_drift(before: Sequence[StepRecord], recent: Sequence[StepRecord]) -> str:
    groups = sum(r.flow.finished_groups for r in before), sum(r.flow.finished_groups for r in recent)
    if not all(groups):
        return ""
    accepted = sum(r.flow.accepted_groups for r in before), sum(r.flow.accepted_groups for r in recent)
    then, now = accepted[0] / groups[0], accepted[1] / groups[1]
    pooled = (sum(accepted) + 1) / (sum(groups) + 2)
    error = math.sqrt(pooled * (1 - pooled) * (1 / groups[0] + 1 / groups[1]))
    if abs(now - then) > 0.15 and abs(now - then) > _DRIFT_Z * error:
        return f"groups that can be trained: {now:.0%}, before {then:.0%}"
    return ""


# --- the three ways to act -------------------------------------------------------------------------------


def _measured(
    state: ControllerState, window: Sequence[StepRecord], evidence: Evidence, limits: ControlLimits
) -> Decision | None:
    """The effect of the last change, once it shows; taken back when it is worse than noise and prediction."""
    trial = state.trial
    if trial is None:
        return None
    after = [r for r in window if r.step >= trial.version + _settling(window)]
    if len(after) < limits.patience_steps:
        return None
    seconds = sum(r.step_s for r in after)
    rate = sum(r.samples for r in after) / seconds
    spread = relative_noise(window, sum(r.samples for r in window) / sum(r.step_s for r in window))
    noise = math.hypot(trial.noise, max(relative_noise(after, rate), spread * math.sqrt(len(window) / len(after))))
    ratio = rate / trial.rate
    done = msgspec.structs.replace(state, trial=None)
    said = Action(
        kind="measured",
        reason=f"{rate:.3g} samples/s over {len(after)} steps, {trial.rate:.3g} before (± {noise:.0%})",
        predicted=trial.predicted,
        measured=ratio,
    )
    if ratio > 1.0 - max(LEAST_GAIN, 2 * noise) or ratio > trial.predicted - 2 * noise:
        return Decision(state=done, actions=(said,))
    back = [name for name in KNOBS if limits.value(trial.before, name) != limits.value(state.knobs, name)]
    refused = tuple(
        (name, 1 if limits.value(state.knobs, name) > limits.value(trial.before, name) else -1) for name in back
    )
    actions = [
        Action(
            kind="rollback",
            reason=f"the rate fell to {ratio:.2f} of what it was, {trial.predicted:.2f} was predicted",
            knob=name,
            old=limits.value(state.knobs, name),
            new=limits.value(trial.before, name),
            predicted=trial.predicted,
            measured=ratio,
        )
        for name in back
    ]
    done = msgspec.structs.replace(
        done,
        knobs=trial.before,
        decided_step=window[-1].version,
        refused=tuple(dict.fromkeys((*state.refused, *refused))),
    )
    return Decision(state=done, actions=(said, *actions))


def _settling(window: Sequence[StepRecord]) -> int:
    """Steps until the groups that were open at a change are mostly trained."""
    return min(3, 1 + round(window[-1].trajectory_staleness.mean))


def _reflex(
    state: ControllerState, window: Sequence[StepRecord], evidence: Evidence, limits: ControlLimits
) -> Decision | None:
    """Let more groups open at once where the trainer starves and the limit keeps slots empty."""
    knobs, name = state.knobs, "open_groups"
    room = evidence.in_generation < 0.9 * (knobs.concurrent_rollouts - limits.shape.group_size + 1)
    if knobs.open_groups is None or not evidence.starving or not room:
        return None
    old = limits.value(knobs, name)
    new = math.ceil(old * (2.0 if evidence.lack >= 4 * STARVES else 1.5))
    if not _allowed(state, evidence, limits)(name, old, new):
        return None
    reason = (
        f"the trainer waits {evidence.lack:.0%} of the time for groups, and {evidence.in_generation:.0f} of "
        f"{knobs.concurrent_rollouts} rollouts are being generated: open groups are what is short"
    )
    target = limits.with_value(knobs, name, new)
    floors = {**state.floors, name: max(old, state.floors.get(name, 0))}
    return _set(msgspec.structs.replace(state, floors=floors), target, window, limits, reason, 0.0)


def _by_model(
    state: ControllerState, window: Sequence[StepRecord], evidence: Evidence, limits: ControlLimits
) -> Decision | None:
    """The neighbouring setting that the model likes best, when it is better by enough."""
    if state.trial is not None or limits.pinned == frozenset(KNOBS):
        return None
    looked = max(state.looked_step, state.decided_step, state.regime_step)
    waited = window[-1].version - looked
    rate = sum(r.samples for r in window[-limits.patience_steps :]) / sum(
        r.step_s for r in window[-limits.patience_steps :]
    )
    if waited < limits.patience_steps or (waited < limits.patience_steps << state.rests and _as_then(state, rate)):
        return None
    idle = msgspec.structs.replace(
        state, rests=min(_MOST_RESTS, state.rests + 1), looked_step=window[-1].version, looked_rate=rate
    )
    found = estimate(window, limits.shape)
    if found is None:
        return None
    search = _Search(found, state, evidence, limits)
    target = search.best()
    if target == state.knobs:
        return Decision(state=idle)
    now, then = search.outcome(state.knobs), search.outcome(target)
    gain = then.samples_per_s / now.samples_per_s
    younger = now.staleness_mean - then.staleness_mean
    strict = 2.0 ** max((_turns(state, name, target, limits) for name in KNOBS), default=0)
    worth = gain >= 1.0 + LEAST_GAIN * strict
    settled = len(window) >= min(WINDOW, 2 * limits.patience_steps)  # younger samples can wait for a better estimate
    fresh = settled and younger >= strict * max(LEAST_YOUNGER, LEAST_YOUNGER_SHARE * now.staleness_mean)
    if not worth and not (fresh and gain >= 1.0 - limits.tolerance - 1e-9):
        return Decision(state=idle)
    useful = found.samples_per_s * found.useful_share
    reason = f"predicted {useful * gain:.3g} useful samples/s for {useful:.3g}"
    reason += f", mean staleness {then.staleness_mean:.1f} for {now.staleness_mean:.1f}"
    reason += f" (the trainer waits {evidence.wait:.0%}, the generator {evidence.idle:.0%})"
    return _set(state, target, window, limits, reason, gain, found)


def _as_then(state: ControllerState, rate: float) -> bool:
    """Whether the rate is about what it was at the last look."""
    return not state.looked_rate or abs(math.log(rate / state.looked_rate)) < _RATE_DIFFERS


def _set(
    state: ControllerState,
    target: Knobs,
    window: Sequence[StepRecord],
    limits: ControlLimits,
    reason: str,
    predicted: float,
    found: LedgerModel | None = None,
) -> Decision:
    version = window[-1].version
    actions: list[Action] = []
    turns, directions = dict(state.turns), dict(state.directions)
    for name in KNOBS:
        old, new = limits.value(state.knobs, name), limits.value(target, name)
        if old == new:
            continue
        turns[name] = _turns(state, name, target, limits)
        directions[name] = 1 if new > old else -1
        actions.append(Action(kind="set", reason=reason, knob=name, old=old, new=new, predicted=predicted))
    trial = None
    if found is not None:
        trial = Trial(
            before=state.knobs, version=version, predicted=predicted, rate=found.samples_per_s, noise=found.noise
        )
    after = msgspec.structs.replace(
        state, knobs=target, decided_step=version, trial=trial, turns=turns, directions=directions, rests=0
    )
    return Decision(state=after, actions=tuple(actions))


def _turns(state: ControllerState, name: KnobName, target: Knobs, limits: ControlLimits) -> int:
    """How often the knob will have turned round."""
    before = state.turns.get(name, 0)
    step = limits.value(target, name) - limits.value(state.knobs, name)
    return before + (step * state.directions.get(name, 0) < 0)


class _Search:
    """Settings around the present one, simulated."""

    def __init__(self, found: LedgerModel, state: ControllerState, evidence: Evidence, limits: ControlLimits) -> None:
        model = found.model
        self._model = msgspec.structs.replace(
            model,
            decode_fixed_s=model.decode_fixed_s * _RESERVE,
            decode_request_s=model.decode_request_s * _RESERVE,
            delay_s=model.delay_s * _RESERVE,
        )
        self._state, self._limits = state, limits
        self._allowed = _allowed(state, evidence, limits)
        self._outcomes: dict[Knobs, QueueOutcome] = {}
        now = self.outcome(state.knobs).samples_per_s
        self._factors = _CAREFUL if abs(math.log(max(now, 1e-9) / found.samples_per_s)) > _FAR else _FACTORS
        events_s = found.model.publish_s + found.model.pause_s
        seldom = events_s * found.samples_per_s > 0.02 * limits.shape.samples_per_step
        publishing = seldom or state.knobs.steps_per_publish > 1
        self._names = [name for name in KNOBS if publishing or name != "steps_per_publish"]

    def outcome(self, knobs: Knobs) -> QueueOutcome:
        if knobs not in self._outcomes:
            self._outcomes[knobs] = simulate(self._with(knobs), rollouts=_ROLLOUTS)
        return self._outcomes[knobs]

    def best(self) -> Knobs:
        """Climb by rate, one knob after the other, then take the youngest within the tolerance around that."""
        top = self._state.knobs
        for name in self._names:
            step = LEAST_GAIN if name in ("steps_per_publish", "resting") else _CLIMB
            higher = max(self._options(name, top), key=self._rate, default=top)
            top = higher if self._rate(higher) > (1.0 + step) * self._rate(top) else top
        enough = (1.0 - self._limits.tolerance) * self._rate(top)
        good = [top]
        for name in KNOBS[:2]:
            good += [knobs for knobs in self._options(name, top) if self._rate(knobs) >= enough]
        good.sort(key=lambda knobs: self.outcome(knobs).staleness_mean)
        return next(knobs for knobs in good if knobs == top or self._confirmed(knobs, top))

    def _confirmed(self, knobs: Knobs, top: Knobs) -> bool:
        """Whether other random lengths say the same of the rate."""
        rates = [
            [simulate(self._with(one), seed=seed, rollouts=_ROLLOUTS).samples_per_s for seed in (1, 2)]
            for one in (knobs, top)
        ]
        return sum(rates[0]) >= (1.0 - self._limits.tolerance) * sum(rates[1])

    def _with(self, knobs: Knobs) -> QueueModel:
        return with_knobs(self._model, knobs, self._limits.shape)

    def _rate(self, knobs: Knobs) -> float:
        return self.outcome(knobs).samples_per_s

    def _options(self, name: KnobName, around: Knobs) -> list[Knobs]:
        """One knob moved, within the trust region (twofold from where it is now), its bounds and the guards."""
        limits = self._limits
        present, centre = limits.value(self._state.knobs, name), limits.value(around, name)
        small = name in ("steps_per_publish", "resting")
        if small:
            wanted = {centre - 1, centre + 1}
        else:
            wanted = {round(centre * factor) for factor in self._factors}
        low, high = limits.bounds(name)
        found = {max(low, min(high, value)) for value in wanted}
        near = [v for v in sorted(found) if v != centre and (small or present <= 2 * v <= 4 * present)]
        kept = [v for v in near if self._fits(name, v)]
        return [limits.with_value(around, name, value) for value in kept]

    def _fits(self, name: KnobName, value: int) -> bool:
        present = self._limits.value(self._state.knobs, name)
        return value == present or self._allowed(name, present, value)


def with_knobs(model: QueueModel, knobs: Knobs, shape: RunShape) -> QueueModel:
    """``model`` under other knobs."""
    awake = max(1, shape.replicas - len(knobs.resting))
    return msgspec.structs.replace(
        model,
        open_groups=knobs.open_groups,
        concurrent_rollouts=knobs.concurrent_rollouts,
        steps_per_publish=knobs.steps_per_publish,
        replicas=awake,
        lent_share=max(0, shape.lent_replicas - len(knobs.resting)) / awake,
    )
