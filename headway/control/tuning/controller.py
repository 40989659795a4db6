"""The controller matches production and consumption during a run: it decides which knobs to set, and why.

Pure: ``decide`` takes the controller's state and the run's last records, and returns the next state and the actions.
The aim is *trained samples with non-zero advantage per second* within the staleness budget (admission keeps it for any
knobs) and the length-bias limit; of settings whose rate is within 1 % of the best it takes the one with the
youngest samples.

Each decision reads the records since the last one and takes the first of these actions that applies:

1. *Drift.* The queue's parameters (lengths, acceptance, cost of a token on either side, verification) differ from
   earlier records: these are dropped, and so is the knowledge about the knobs.
2. *Measured effect.* The last change has had time to take effect. When the rate fell by more than noise and below the
   prediction, the change is reverted, and its direction isn't tried again in this regime.
3. *Reflex.* The trainer starves while all verifiers score, or while the limit on open groups keeps slots empty, or the
   one on concurrent rollouts keeps groups waiting: that number is raised, by half or doubled.
4. *Model.* After a budget's worth of steps ``ledger_model`` estimates the queue and ``queue_model`` simulates the
   neighbouring settings, with a generator a tenth slower than measured: the reserve against bursts. The best one is
   taken if it gains enough; the required gain doubles with every reversal of a knob in this regime. While nothing is
   found, searches become rarer, half of the verifier workers are stopped where they hardly score, and, once a regime,
   another split of the devices is *recommended* where it would amortize (``switch_cost``). With ``control.devices =
   "move"`` the run changes to it before any knob: knobs depend on the placement, and are searched again after it.

A search that finds nothing after ``WINDOW`` records of one setting *settles* the plan: these records are the reference,
and nothing is searched or changed until the last few steps, or the last ``SLOWLY`` where the change was gradual, differ
from them significantly, in the queue's parameters or in the trainer's wait for groups: that is a drift.

A change must amortize within the remaining steps, the cost of the switch included (``switch_cost``): near its end a run
keeps its knobs. Guards apply to any prediction: while the trainer starves for lack of groups no load is removed
(open groups, concurrent rollouts, replicas that generate, verifier workers), while finished groups pile up none is
added, and no knob returns to a value at which the trainer starved. The publish interval is no load: the guards don't
apply to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

import msgspec

from headway.config.control import KnobName
from headway.control.tuning.diagnosis import Recommendation
from headway.control.tuning.drift import RECENT, SLOWLY, find_drift
from headway.control.tuning.knob_search import KNOBS, LEAST_GAIN, Allowed, ControlLimits, Search
from headway.control.tuning.ledger_model import LedgerModel, estimate
from headway.control.tuning.run_figures import rate_of, relative_noise, usable
from headway.control.tuning.switch_cost import RemainingWork, describe_split, remaining_work, switch_s, worthwhile_split
from headway.records.control import Knobs
from headway.records.ledger import StepRecord

WINDOW = 16  # records that an estimate is made from, at most
LEAST_YOUNGER = 0.1  # versions of mean staleness ...
LEAST_YOUNGER_SHARE = 0.05  # ... and relative
STARVES, FULL = 0.05, 0.02  # shares of the time the trainer waits for lack of groups
# Least share of the time the generator is idle at which groups waiting in the queue are traded for younger samples.
# Where both sides are about as fast these groups are the reserve against fluctuations of either, which the model lacks:
# it assumes that equal steps take equally long.
LEAST_SPARE = 0.1
_ALL_SCORE = 0.9  # share of the time the verifiers score that counts as all, as some passes between two groups
_STARVED_Z = 4.0  # standard errors by which the trainer must wait longer than when the plan was settled
_RATE_DIFFERS = 0.2  # |ln|: worth another search
_MOST_RESTS = 3  # doublings of the time between two searches

Kind = Literal["set", "rollback", "measured", "drift", "recommended", "move"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the controller's log: a change it made, or a finding."""

    kind: Kind
    reason: str
    knob: KnobName | Literal[""] = ""
    old: int = 0  # open_groups: no limit is reported as the most that admission allows
    new: int = 0
    predicted: float = 0.0  # rate after / rate before; 0: not predicted
    measured: float = 0.0  # ... as measured; 0: not yet
    settings: dict[str, str] = {}  # recommended, move: key of the experiment -> value as TOML


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose effect is being measured."""

    previous_knobs: Knobs
    version: int  # first version under the change
    predicted: float  # rate after / rate before
    rate: float  # before, samples/s
    noise: float  # its standard error, relative


class ControllerState(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's memory.

    Lifecycle: a *regime* starts with the run and at each drift; within it floors only rise, refused directions stay
    refused, and each reversal of a knob raises the gain required of the next. So it converges on stationary inputs.
    """

    knobs: Knobs
    regime_step: int = 0  # records of earlier steps are of another regime
    decided_step: int = 0  # version at the last change
    trial: Trial | None = None
    floors: dict[str, int] = {}  # knob -> highest value at which the trainer starved
    refused: tuple[tuple[str, int], ...] = ()  # (knob, direction) whose effect was worse
    directions: dict[str, int] = {}  # knob -> its last direction
    turns: dict[str, int] = {}  # knob -> number of reversals
    rests: int = 0  # consecutive searches that found nothing
    searched_step: int = 0  # version at the last of them, and the rate then
    searched_rate: float = 0.0
    drifted: bool = False  # the regime began with a drift, which may continue
    reference: tuple[StepRecord, ...] = ()  # records on which the plan was settled
    recommended: bool = False  # a split of the devices was recommended in this regime


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The next state (whose ``knobs`` are to be set) and the log lines of the decision."""

    state: ControllerState
    actions: tuple[Action, ...] = ()
    due: bool = False  # it is time to ask the model, which ``ask_model`` forbade


def decide(
    state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits, *, ask_model: bool = True
) -> Decision:
    """Decide the actions after the last of ``records``, the run's records in order (some dozen are enough).

    ``ask_model``: whether the model may be simulated, which takes a tenth of a second or more; all else takes half a
    millisecond."""
    usable_records = usable(records)
    actions: list[Action] = []
    regime_records = [record for record in usable_records if record.step >= state.regime_step]
    reference_drift = _drift_from_reference(state.reference, regime_records, limits)
    drift = reference_drift if state.reference else find_drift(regime_records[-WINDOW - RECENT :])
    if drift is not None:
        step, reason = drift
        state = ControllerState(knobs=state.knobs, regime_step=step, decided_step=step, drifted=True)
        actions.append(Action(kind="drift", reason=reason))
    elif state.reference:
        return Decision(state=state)
    window = [record for record in usable_records if record.step >= state.regime_step][-WINDOW:]
    records_since = [record for record in window if record.step >= state.decided_step]
    if len(records_since) < limits.interval_steps:
        return Decision(state=state, actions=tuple(actions))
    evidence = _evidence(records_since[-limits.interval_steps :], limits)
    for decide_by_rule in (_measure_effect, _reflex):
        if (decision := decide_by_rule(state, window, evidence, limits)) is not None:
            state = decision.state
            actions += decision.actions
            if state.decided_step > window[-1].step:  # changed something
                return Decision(state=state, actions=tuple(actions))
    is_due = _due(state, window, limits)
    if is_due and ask_model:
        recent_evidence = _evidence(records_since[-2 * limits.patience_steps :], limits)
        if (decision := _by_model(state, window, recent_evidence, limits)) is not None:
            state = decision.state
            actions += decision.actions
    return Decision(state=state, actions=tuple(actions), due=is_due and not ask_model)


def backed_off(state: ControllerState, version: int) -> ControllerState:
    """Return the state after a search that found nothing: the next one comes later."""
    return msgspec.structs.replace(state, rests=min(_MOST_RESTS, state.rests + 1), searched_step=version)


def effective_at(decision: Decision, version: int) -> Decision:
    """Return ``decision`` dated to ``version``, at which its knobs take effect: it was made from older records."""
    state = decision.state
    if not any(action.kind == "set" for action in decision.actions):
        return decision
    trial = msgspec.structs.replace(state.trial, version=version) if state.trial else None
    return msgspec.structs.replace(decision, state=msgspec.structs.replace(state, decided_step=version, trial=trial))


def _drift_from_reference(
    reference: Sequence[StepRecord], regime: Sequence[StepRecord], limits: ControlLimits
) -> tuple[int, str] | None:
    """Compare the last records with those on which the plan was settled; return as ``find_drift``."""
    newer = [record for record in regime if reference and record.step > reference[-1].step]
    for count in (RECENT, SLOWLY):
        drift = find_drift([*reference, *newer[-count:]], count) if len(newer) >= count else None
        if drift is not None:
            return drift
    if len(newer) < SLOWLY:
        return None
    lately, lacks = _evidence(newer[-SLOWLY:], limits), [_evidence([record], limits).lack for record in reference]
    lack_error = max(STARVES, stdev(lacks)) * math.sqrt(1 / SLOWLY + 1 / len(lacks))
    if not lately.starving or lately.lack - fmean(lacks) < _STARVED_Z * lack_error:
        return None
    return newer[-SLOWLY].step, f"the trainer waits {lately.lack:.0%} of the time for groups, before {fmean(lacks):.0%}"


# --- evidence of the last steps --------------------------------------------------------------------------


class ControllerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps since the last decision."""

    wait: float  # share of the time the trainer waited
    lack: float  # ... for lack of finished groups, not for stragglers or its devices
    idle: float  # share of the time the replicas were idle
    stock: float  # groups in the buffer after a batch was taken, in batches
    in_generation: float  # rollouts between admission and last token
    verifying: float  # share of the time the verifier workers score
    preempted: bool
    bias: float  # length bias that scheduling causes, KS

    @property
    def starving(self) -> bool:
        """True when the trainer waits for lack of groups, rather than for stragglers."""
        return self.lack >= STARVES and self.lack >= self.wait / 2 and self.stock < 1 and not self.preempted

    @property
    def glut(self) -> bool:
        """True when the trainer doesn't wait while the generator does or finished groups accumulate."""
        return self.wait < FULL and (self.idle > STARVES or self.stock >= 1)


def _evidence(records: Sequence[StepRecord], limits: ControlLimits) -> ControllerEvidence:
    seconds = sum(r.step_s for r in records)
    wait_share = sum(r.trainer_wait_s for r in records) / seconds
    return ControllerEvidence(
        wait=wait_share,
        lack=max(0.0, wait_share - sum(r.flow.straggler_wait_s + r.flow.device_wait_s for r in records) / seconds),
        idle=sum(r.generator_wait_ratio * r.step_s for r in records) / seconds,
        stock=fmean(r.buffered_groups for r in records) / limits.shape.groups_per_step,
        in_generation=sum(r.flow.generating_s for r in records) / seconds,
        verifying=sum(r.verify_s / max(1, r.flow.verifier_workers) for r in records) / seconds,
        preempted=any(r.flow.preemptions for r in records),
        bias=length_bias.scheduling_ks if (length_bias := records[-1].length_bias) else 0.0,
    )


def _allowed(
    state: ControllerState, evidence: ControllerEvidence, limits: ControlLimits, *, drifting: bool = False
) -> Allowed:
    """Make the guards: a function that returns whether a knob may change from one value to another."""

    def is_allowed(name: KnobName, old: int, new: int) -> bool:
        is_raise = new > old
        if name in limits.pinned or (name, 1 if is_raise else -1) in state.refused:
            return False
        if not is_raise and new <= state.floors.get(name, 0):
            return False
        if name == "steps_per_publish":
            return True
        if name == "idle_replicas":
            is_raise = not is_raise
        if is_raise:
            return not evidence.glut and evidence.bias <= limits.length_bias_limit
        return not evidence.starving and not drifting

    return is_allowed


# --- the three kinds of action ---------------------------------------------------------------------------


def _measure_effect(
    state: ControllerState, window: Sequence[StepRecord], evidence: ControllerEvidence, limits: ControlLimits
) -> Decision | None:
    """Report the effect of the last change once it is measurable; revert it when the rate fell by more than noise."""
    trial = state.trial
    if trial is None:
        return None
    newer = [record for record in window if record.step >= trial.version + _settling(window)]
    if len(newer) < limits.patience_steps:
        return None
    per_s = rate_of(newer)
    spread = relative_noise(window, rate_of(window))
    noise = math.hypot(trial.noise, max(relative_noise(newer, per_s), spread * math.sqrt(len(window) / len(newer))))
    rate_ratio = per_s / trial.rate
    next_state = msgspec.structs.replace(state, trial=None)
    effect = Action(
        kind="measured",
        reason=f"{per_s:.3g} samples/s over {len(newer)} steps, {trial.rate:.3g} before (± {noise:.0%})",
        predicted=trial.predicted,
        measured=rate_ratio,
    )
    if rate_ratio > 1.0 - max(LEAST_GAIN, 2 * noise) or rate_ratio > trial.predicted - 2 * noise:
        return Decision(state=next_state, actions=(effect,))
    is_allowed, actions = _allowed(state, evidence, limits), [effect]
    knobs, refused = state.knobs, dict.fromkeys(state.refused)
    reason = f"the rate fell to {rate_ratio:.2f} of what it was, {trial.predicted:.2f} was predicted"
    for knob in KNOBS:
        current, previous = limits.value(state.knobs, knob), limits.value(trial.previous_knobs, knob)
        if previous != current and is_allowed(knob, current, previous):
            knobs = limits.with_value(knobs, knob, previous)
            refused[knob, 1 if current > previous else -1] = None
            undo = msgspec.structs.replace(effect, kind="rollback", reason=reason, knob=knob, old=current, new=previous)
            actions.append(undo)
    if len(actions) > 1:
        version = window[-1].version
        next_state = msgspec.structs.replace(next_state, knobs=knobs, decided_step=version, refused=tuple(refused))
    return Decision(state=next_state, actions=tuple(actions))


def _settling(window: Sequence[StepRecord]) -> int:
    """Return the number of steps until most groups that were open at a change are trained."""
    return min(3, 1 + round(window[-1].trajectory_staleness.mean))


def _reflex(
    state: ControllerState, window: Sequence[StepRecord], evidence: ControllerEvidence, limits: ControlLimits
) -> Decision | None:
    """Raise the knob on which a starving trainer waits.

    It is the number of verifier workers where all of them score; else the limit on open groups where fewer rollouts are
    generated than may run at once; else the limit on concurrent rollouts."""
    knobs = state.knobs
    if not evidence.starving:
        return None
    is_scoring = evidence.verifying >= _ALL_SCORE
    below_concurrency = evidence.in_generation < 0.9 * (knobs.concurrent_rollouts - limits.largest_group + 1)
    knob: KnobName = "verifier_workers" if is_scoring else "open_groups" if below_concurrency else "concurrent_rollouts"
    slot_count = limits.shape.slots * (limits.shape.replicas - len(knobs.idle_replicas))
    is_filled = knobs.concurrent_rollouts >= slot_count + limits.largest_group and evidence.idle < STARVES
    if knob == "concurrent_rollouts" and is_filled:
        return None  # more would only wait for slots
    old_value, (_, upper_bound) = limits.value(knobs, knob), limits.bounds(knob)
    new_value = min(upper_bound, math.ceil(old_value * (2.0 if evidence.lack >= 4 * STARVES else 1.5)))
    if new_value == old_value or not _allowed(state, evidence, limits)(knob, old_value, new_value):
        return None
    target_knobs = limits.with_value(knobs, knob, new_value)
    remaining, cost_s = _rest(window, limits), switch_s(knobs, target_knobs, limits)
    if not remaining.amortizes(1.0 / (1.0 - min(0.9, evidence.lack)), cost_s, _settling(window)):
        return None
    generating_text = f"{evidence.in_generation:.0f} of {knobs.concurrent_rollouts} rollouts are being generated"
    observation = f"the verifiers score {evidence.verifying:.0%} of it" if is_scoring else generating_text
    short = "verifier workers are" if is_scoring else "open groups are" if below_concurrency else "rollouts at once are"
    reason = f"the trainer waits {evidence.lack:.0%} of the time for groups, and {observation}: {short} what is short"
    floors = {**state.floors, knob: max(old_value, state.floors.get(knob, 0))}
    return _set(msgspec.structs.replace(state, floors=floors), target_knobs, window, limits, reason, 0.0)


def _due(state: ControllerState, window: Sequence[StepRecord], limits: ControlLimits) -> bool:
    """Return whether enough steps have passed since the last search of the model.

    The number doubles after each search that found nothing, unless the rate has changed."""
    if state.trial is not None or limits.pinned == frozenset(KNOBS):
        return False
    patience_steps = limits.patience_steps
    waited_steps = window[-1].version - max(state.searched_step, state.decided_step, state.regime_step)
    if waited_steps < patience_steps:
        return False
    rate = rate_of(window[-patience_steps:])
    has_changed = bool(state.searched_rate) and abs(math.log(rate / state.searched_rate)) >= _RATE_DIFFERS
    return waited_steps >= patience_steps << state.rests or has_changed


def _rest(window: Sequence[StepRecord], limits: ControlLimits) -> RemainingWork:
    return remaining_work(window[-1], limits.shape, sum(record.step_s for record in window) / len(window))


def _by_model(
    state: ControllerState, window: Sequence[StepRecord], evidence: ControllerEvidence, limits: ControlLimits
) -> Decision | None:
    """Set the neighbouring setting with the best predicted rate, or halve the verifier workers, where worthwhile.

    Else recommend a worthwhile split of the devices."""
    idle_state = msgspec.structs.replace(
        backed_off(state, window[-1].version), searched_rate=rate_of(window[-limits.patience_steps :])
    )
    fitted = estimate(window, limits.shape)
    if fitted is None:
        return None
    is_drifting = state.drifted and len(window) < WINDOW
    # a change without a gain waits for a better estimate, and until a drift has ended
    stable = len(window) >= min(WINDOW, 2 * limits.patience_steps) and not is_drifting
    remaining = _rest(window, limits)
    wants_split = stable and not state.recommended
    if wants_split and limits.can_change_devices and (split := worthwhile_split(fitted, limits, remaining)) is not None:
        return _change_devices("move", split, fitted, idle_state, evidence, limits, remaining)
    is_allowed = _allowed(state, evidence, limits, drifting=is_drifting)
    search = Search(fitted, state.knobs, is_allowed, limits, drifting=is_drifting)
    for target in (search.best(), search.fewer_verifiers() if stable else state.knobs):
        if target == state.knobs:
            continue
        if (decision := _set_if_better(target, search, fitted, state, window, evidence, limits, stable)) is not None:
            return decision
    if len(window) == WINDOW and window[0].step >= state.decided_step:
        idle_state = msgspec.structs.replace(idle_state, reference=tuple(window))
    if not wants_split or limits.can_change_devices or (split := worthwhile_split(fitted, limits, remaining)) is None:
        return Decision(state=idle_state)
    return _change_devices("recommended", split, fitted, idle_state, evidence, limits, remaining)


def _change_devices(
    kind: Kind,
    split: Recommendation,
    fitted: LedgerModel,
    state: ControllerState,
    evidence: ControllerEvidence,
    limits: ControlLimits,
    rest: RemainingWork,
) -> Decision:
    """Recommend another split of the devices, or have the run change to it."""
    waits_text = f"the trainer waits {evidence.wait:.0%}, the generator {evidence.idle:.0%}"
    reason = describe_split(split, fitted, limits, rest, waits_text)
    action = Action(kind=kind, reason=reason, predicted=1.0 + split.gain, settings=split.settings)
    return Decision(state=msgspec.structs.replace(state, recommended=True), actions=(action,))


def _set_if_better(
    target: Knobs,
    search: Search,
    fitted: LedgerModel,
    state: ControllerState,
    window: Sequence[StepRecord],
    evidence: ControllerEvidence,
    limits: ControlLimits,
    settled: bool,
) -> Decision | None:
    """Set ``target`` if it is better by enough and amortizes within the remaining steps."""
    now, then = search.outcome(state.knobs), search.outcome(target)
    gain = then.samples_per_s / now.samples_per_s
    younger_by = now.staleness_mean - then.staleness_mean
    strictness = 2.0 ** max((_reversals(state, knob, target, limits) for knob in KNOBS), default=0)
    work, cost_s, delay = _rest(window, limits), switch_s(state.knobs, target, limits, fitted), _settling(window)
    is_worthwhile = gain >= 1.0 + LEAST_GAIN * strictness and work.amortizes(gain, cost_s, delay)
    # a replica that yields its device pauses, and so never shows as idle
    has_spare = evidence.idle >= LEAST_SPARE or fitted.model.yielded_share > 0
    is_fresher = has_spare and younger_by >= strictness * max(LEAST_YOUNGER, LEAST_YOUNGER_SHARE * now.staleness_mean)
    has_fewer_verifiers = target.verifier_workers < state.knobs.verifier_workers
    is_free = gain >= 1.0 - limits.tolerance - 1e-9 and work.affords(limits.tolerance, cost_s, delay)
    if not is_worthwhile and not (settled and (is_fresher or has_fewer_verifiers) and is_free):
        return None
    reason = (
        f"predicted {fitted.useful_per_s * gain:.3g} useful samples/s for {fitted.useful_per_s:.3g}, mean staleness "
        f"{then.staleness_mean:.1f} for {now.staleness_mean:.1f} (the trainer waits {evidence.wait:.0%}, the generator "
        f"{evidence.idle:.0%})"
    )
    drifting = state.drifted and len(window) < WINDOW  # then the rate may fall by itself: no effect could be measured
    return _set(state, target, window, limits, reason, gain, None if drifting else fitted)


def _set(
    state: ControllerState,
    target: Knobs,
    window: Sequence[StepRecord],
    limits: ControlLimits,
    reason: str,
    predicted: float,
    fitted: LedgerModel | None = None,
) -> Decision:
    version = window[-1].version
    actions: list[Action] = []
    reversal_counts, directions = dict(state.turns), dict(state.directions)
    for knob in KNOBS:
        old_value, new_value = limits.value(state.knobs, knob), limits.value(target, knob)
        if old_value == new_value:
            continue
        reversal_counts[knob] = _reversals(state, knob, target, limits)
        directions[knob] = 1 if new_value > old_value else -1
        actions.append(Action(kind="set", reason=reason, knob=knob, old=old_value, new=new_value, predicted=predicted))
    trial = None
    if fitted is not None:
        trial = Trial(
            previous_knobs=state.knobs,
            version=version,
            predicted=predicted,
            rate=fitted.samples_per_s,
            noise=fitted.noise,
        )
    new_state = msgspec.structs.replace(
        state, knobs=target, decided_step=version, trial=trial, turns=reversal_counts, directions=directions, rests=0
    )
    return Decision(state=new_state, actions=tuple(actions))


def _reversals(state: ControllerState, name: KnobName, target: Knobs, limits: ControlLimits) -> int:
    """Return the number of reversals of the knob, the change to ``target`` included."""
    previous_count = state.turns.get(name, 0)
    change = limits.value(target, name) - limits.value(state.knobs, name)
    return previous_count + (change * state.directions.get(name, 0) < 0)
