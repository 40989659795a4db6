"""Defines the controller's knobs and their bounds, and searches simulated settings near the current one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import msgspec

from headway.config.control import KnobName
from headway.config.schema import Experiment
from headway.control.tuning.diagnosis import DeviceSplit, all_device_splits, device_splits
from headway.control.tuning.forecast import RunShape
from headway.control.tuning.ledger_model import LedgerModel, shape_of
from headway.control.tuning.queue_model import QueueModel, simulate_or_zero
from headway.records.check_report import QueueOutcome
from headway.records.control import Knobs

KNOBS: tuple[KnobName, ...] = get_args(KnobName)
LEAST_GAIN = 0.03  # in samples/s, relative: less is below the resolution of simulation and measurement
_FACTORS = (0.5, 1 / 1.5, 0.8, 1.25, 1.5, 2.0)
_CAREFUL = (0.8, 1.25)  # where the model is far from the measurement
_SMALL = ("steps_per_publish", "idle_replicas", "verifier_workers")  # changed by one at a time; the last also doubled
_VERIFYING = 0.5  # share of the verifiers' time: below, more of them change nothing, and half of them suffice
_FAR = 0.3  # |ln(simulated / measured)|
_ROLLOUTS = 1500  # of one simulation
_RESERVE = 1.1  # factor by which the generator and the verifiers are simulated slower than measured ...
_DRIFTING_RESERVE = 1.5  # ... while a drift may continue
_SCORING_TIMES = ("verify_response_s", "teach_response_s")
_GENERATOR_TIMES = ("decode_fixed_s", "decode_request_s", "delay_s", "environment_s", *_SCORING_TIMES)
_CLIMB = 0.01  # relative: least difference at which a simulated rate counts as higher


_MOST_VERIFIERS = 8  # that the controller may set, where cores and free memory suffice: rewards rarely need more


class ControlLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits within which the controller moves the knobs."""

    shape: RunShape
    most_concurrent: int
    largest_group: int  # rollouts; the lower bound of concurrent_rollouts
    most_open: int  # most that admission allows
    least_open: int
    most_steps_per_publish: int
    least_verifiers: int = 1  # as the experiment sets
    most_verifiers: int = 1
    splits: tuple[DeviceSplit, ...] = ()  # of the devices between generator and trainer, other than the run's
    can_change_devices: bool = False  # the run can change to one of them
    switch_s: dict[str, float] = {}  # measured: "verifier_workers", "devices"; absent: not known
    shared: tuple[int, ...] = ()  # replicas on the trainer's devices that may rest, as others remain to generate
    pinned: frozenset[KnobName] = frozenset()
    interval_steps: int = 2  # least number between two decisions, which are based on these; a single step is noise
    length_bias_limit: float = 0.1  # KS due to scheduling; beyond it no load is added
    tolerance: float = 0.01  # share of the rate traded for younger samples: within its measurement error

    @property
    def patience_steps(self) -> int:
        """Number of steps until an estimate or an effect is meaningful: until the queue was replaced once."""
        return max(self.interval_steps, 4, self.shape.budget + 1)

    def value(self, knobs: Knobs, name: KnobName) -> int:
        """Return a knob's value as a number; no limit on open groups becomes the most that admission allows."""
        if name == "open_groups":
            return self.most_open if knobs.open_groups is None else min(knobs.open_groups, self.most_open)
        return len(knobs.idle_replicas) if name == "idle_replicas" else getattr(knobs, name)

    def bounds(self, name: KnobName) -> tuple[int, int]:
        return {
            "open_groups": (self.least_open, self.most_open),
            "concurrent_rollouts": (self.largest_group, self.most_concurrent),
            "steps_per_publish": (1, self.most_steps_per_publish),
            "idle_replicas": (0, len(self.shared)),
            "verifier_workers": (self.least_verifiers, self.most_verifiers),
        }[name]

    def with_value(self, knobs: Knobs, name: KnobName, value: int) -> Knobs:
        """Return ``knobs`` with one of them set to ``value``, clamped to its bounds."""
        low, high = self.bounds(name)
        bounded = max(low, min(high, value))
        if name == "open_groups":
            return msgspec.structs.replace(knobs, open_groups=None if bounded >= self.most_open else bounded)
        if name == "idle_replicas":
            return msgspec.structs.replace(knobs, idle_replicas=self.shared[len(self.shared) - bounded :])
        return msgspec.structs.replace(knobs, **{name: bounded})

    def resumed(self, knobs: Knobs, first: Knobs, previous_settings: Mapping[KnobName, int]) -> Knobs:
        """Return the knobs of an earlier session under these limits.

        Pinned knobs are as the experiment sets them now (``first``), and so are those whose setting has changed since
        ``previous_settings`` (0: not known)."""
        for knob in KNOBS:
            has_changed = previous_settings.get(knob, 0) not in (0, self.value(first, knob))
            source_knobs = first if has_changed or knob in self.pinned else knobs
            knobs = self.with_value(knobs, knob, self.value(source_knobs, knob))
            if knob in self.pinned:
                knobs = msgspec.structs.replace(knobs, **{knob: getattr(first, knob)})
        return knobs


def first_knobs(experiment: Experiment) -> Knobs:
    """Return the knobs as the experiment sets them."""
    return Knobs(
        open_groups=experiment.open_groups,
        concurrent_rollouts=experiment.concurrent_rollouts,
        steps_per_publish=experiment.weights.steps_per_publish,
        verifier_workers=experiment.verifier.workers,
    )


def limits_of(experiment: Experiment, shared: Sequence[int] = (), *, same_kind: bool = False) -> ControlLimits:
    """Make the limits that an experiment sets. ``shared``: replicas on the trainer's devices.

    ``same_kind``: all devices are of one kind, so that each side can use the other's."""
    queue, control, verifier_count = experiment.queue, experiment.control, experiment.verifier.workers
    separate_replicas, can_change_devices = len(experiment.generator.devices) - len(shared), control.devices == "move"
    splits = device_splits(experiment) if same_kind and not shared else ()
    # A replica needn't rest where it can be removed.
    idle_replicas = () if can_change_devices else tuple(shared) if separate_replicas else tuple(shared)[1:]
    return ControlLimits(
        shape=shape_of(experiment, len(shared)),
        most_concurrent=experiment.concurrent_rollouts,
        largest_group=experiment.largest_group,
        most_open=queue.groups_per_step * (queue.budget + 1) + experiment.surplus_groups,
        least_open=queue.groups_per_step,
        most_steps_per_publish=max(experiment.weights.steps_per_publish, queue.budget + 1),
        least_verifiers=verifier_count,
        most_verifiers=max(verifier_count, _MOST_VERIFIERS),
        splits=all_device_splits(experiment) if can_change_devices else splits,
        can_change_devices=can_change_devices,
        shared=idle_replicas,
        pinned=frozenset(control.pin),
    )


Allowed = Callable[[KnobName, int, int], bool]  # whether a knob may go from one value to another


class Search:
    """A search over simulated settings near the current one."""

    def __init__(
        self, fitted: LedgerModel, present: Knobs, allowed: Allowed, limits: ControlLimits, *, drifting: bool = False
    ) -> None:
        """Prepare a search. ``drifting``: the estimate is of a regime that just began, whose drift may continue."""
        model, time_factor = fitted.model, _DRIFTING_RESERVE if drifting else _RESERVE
        slowed_times = {field: getattr(model, field) * time_factor for field in _GENERATOR_TIMES}
        self._model = msgspec.structs.replace(model, **slowed_times)
        self._present, self._limits, self._allowed = present, limits, allowed
        self._outcomes: dict[tuple[Knobs, int], QueueOutcome] = {}
        simulated_per_s = self.outcome(present).samples_per_s
        is_far = abs(math.log(max(simulated_per_s, 1e-9) / fitted.samples_per_s)) > _FAR and not drifting
        self._factors = _CAREFUL if is_far else _FACTORS
        events_s = fitted.model.publish_s + fitted.model.pause_s
        publishing_costs = events_s * fitted.samples_per_s > 0.02 * model.groups_per_step * model.group_size
        tries_publishing = publishing_costs or present.steps_per_publish > 1
        needless_knobs = set[KnobName]() if tries_publishing else {"steps_per_publish"}
        if self._verifying(present) < _VERIFYING:
            needless_knobs.add("verifier_workers")
        self._names: list[KnobName] = [field for field in KNOBS if field not in needless_knobs]

    def outcome(self, knobs: Knobs, seed: int = 0) -> QueueOutcome:
        if (knobs, seed) not in self._outcomes:
            model = with_knobs(self._model, knobs, self._limits.shape)
            self._outcomes[knobs, seed] = simulate_or_zero(model, seed=seed, rollouts=_ROLLOUTS)
        return self._outcomes[knobs, seed]

    def best(self) -> Knobs:
        """Climb by rate, one knob after the other; return the setting with the youngest samples at nearly that rate.

        Nearly: within the tolerance."""
        best_knobs = self._present
        for knob in self._names:
            least_gain = LEAST_GAIN if knob in _SMALL else _CLIMB
            higher = max(self._options(knob, best_knobs), key=self._rate, default=best_knobs)
            best_knobs = higher if self._rate(higher) > (1.0 + least_gain) * self._rate(best_knobs) else best_knobs
        enough_per_s = (1.0 - self._limits.tolerance) * self._rate(best_knobs)
        good_knobs = [best_knobs]
        for knob in KNOBS[:2]:
            good_knobs += [knobs for knobs in self._options(knob, best_knobs) if self._rate(knobs) >= enough_per_s]
        good_knobs.sort(key=lambda knobs: self.outcome(knobs).staleness_mean)
        return next(knobs for knobs in good_knobs if knobs == best_knobs or self._confirmed(knobs, best_knobs))

    def fewer_verifiers(self) -> Knobs:
        """Return the current setting with half of the verifier workers, if these would be idle half of their time."""
        present_knobs, knob = self._present, "verifier_workers"
        fewer_knobs = self._limits.with_value(present_knobs, knob, present_knobs.verifier_workers // 2)
        if not self._allowed(knob, present_knobs.verifier_workers, fewer_knobs.verifier_workers):
            return present_knobs
        suffices = self._verifying(fewer_knobs) < _VERIFYING and self._confirmed(fewer_knobs, present_knobs)
        return fewer_knobs if suffices else present_knobs

    def _verifying(self, knobs: Knobs) -> float:
        """Return the share of their time that the verifier workers would score, at the current rate."""
        scored_per_s = self._rate(self._present) / self._model.acceptance
        return scored_per_s * self._model.verify_response_s / knobs.verifier_workers

    def _confirmed(self, knobs: Knobs, top: Knobs) -> bool:
        """Return whether simulations with other random lengths confirm the rate."""
        rate_sum, best = (sum(self.outcome(setting, seed).samples_per_s for seed in (1, 2)) for setting in (knobs, top))
        return rate_sum >= (1.0 - self._limits.tolerance) * best

    def _rate(self, knobs: Knobs) -> float:
        return self.outcome(knobs).samples_per_s

    def _options(self, name: KnobName, around: Knobs) -> list[Knobs]:
        """Return settings with one knob changed, within the trust region, bounds and guards.

        The trust region is a factor of two around the knob's current value."""
        limits = self._limits
        present_value, centre = limits.value(self._present, name), limits.value(around, name)
        is_small = name in _SMALL
        neighbours = {centre - 1, centre + 1} if name != "verifier_workers" else {centre + 1, 2 * centre}
        candidate_values = neighbours if is_small else {round(centre * factor) for factor in self._factors}
        low, high = limits.bounds(name)
        values = {max(low, min(high, knob_value)) for knob_value in candidate_values}
        near = [v for v in sorted(values) if v != centre and (is_small or present_value <= 2 * v <= 4 * present_value)]
        kept_values = [v for v in near if v == present_value or self._allowed(name, present_value, v)]
        return [limits.with_value(around, name, knob_value) for knob_value in kept_values]


def with_knobs(model: QueueModel, knobs: Knobs, shape: RunShape) -> QueueModel:
    """Return ``model`` under other knobs."""
    awake_replicas = max(1, shape.replicas - len(knobs.idle_replicas))
    return msgspec.structs.replace(
        model,
        open_groups=knobs.open_groups,
        concurrent_rollouts=knobs.concurrent_rollouts,
        steps_per_publish=knobs.steps_per_publish,
        verifiers=knobs.verifier_workers,
        replicas=awake_replicas,
        yielded_share=max(0, shape.yielded_replicas - len(knobs.idle_replicas)) / awake_replicas,
    )
