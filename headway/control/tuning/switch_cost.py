"""Decides whether a change of plan amortizes within the rest of a run, given the measured cost of the switch.

It also finds a better split of the devices between generator and trainer, which the knobs can't reach, to recommend it.

Pure. The controller asks before it changes a knob; gains come from ``queue_model``, splits from ``diagnosis``.
"""

from __future__ import annotations

import json
import math

import msgspec

from headway.control.tuning.diagnosis import Recommendation, best_split
from headway.control.tuning.forecast import RunShape
from headway.control.tuning.knob_search import LEAST_GAIN, ControlLimits
from headway.control.tuning.ledger_model import LedgerModel
from headway.records.control import Knobs
from headway.records.ledger import StepRecord

# Factor on its cost that a switch must save in the rest of the run: the gain is only predicted, and reverting it would
# cost as much again.
PAYBACK = 2.0


class RemainingWork(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of a run, at its current rate."""

    steps: float
    step_s: float  # of one of them

    def amortizes(self, gain: float, switch_s: float, settling_steps: int = 0) -> bool:
        """Return whether ``gain`` times the current rate saves more than ``PAYBACK`` times the switch's cost.

        The switch costs the run ``switch_s``; the gain counts from ``settling_steps`` on. Example: of 100 steps of
        10 s, a gain of 1.25 saves 200 s; a switch may take 100."""
        return max(0.0, self.steps - settling_steps) * self.step_s * (1.0 - 1.0 / gain) > PAYBACK * switch_s

    def affords(self, share: float, switch_s: float, settling_steps: int = 0) -> bool:
        """Return whether a switch without a gain takes effect, at a cost of at most ``share`` of the remaining time."""
        return self.steps > settling_steps and switch_s <= share * self.steps * self.step_s


def remaining_work(last: StepRecord, shape: RunShape, step_s: float) -> RemainingWork:
    """Return the rest of a run after the step ``last``: by steps or by the time limit, whichever comes first."""
    limit_s = math.inf if shape.time_limit_s is None else shape.time_limit_s
    steps = min(float(shape.steps - last.version), (limit_s - last.time_s) / step_s)
    return RemainingWork(steps=max(0.0, steps), step_s=step_s)


def switch_s(old: Knobs, new: Knobs, limits: ControlLimits, fitted: LedgerModel | None = None) -> float:
    """Return the seconds of the run that a change of the knobs costs at most.

    A starting verifier takes a core meanwhile, and requests of replicas that start to rest are prefilled again
    elsewhere. The other knobs cost nothing."""
    start_s = limits.switch_s.get("verifier_workers", 0.0) if new.verifier_workers > old.verifier_workers else 0.0
    newly_idle = len(new.idle_replicas) - len(old.idle_replicas)
    if fitted is None or newly_idle <= 0:
        return start_s
    return start_s + newly_idle * fitted.running * fitted.model.delay_s / (fitted.model.slots * fitted.model.replicas)


def worthwhile_split(fitted: LedgerModel, limits: ControlLimits, remaining: RemainingWork) -> Recommendation | None:
    """Return the best other split of the devices, if even its gain less its error amortizes the switch.

    The switch costs the actors' start and a checkpoint, as measured, and a step of generation until the queue is full
    again."""
    split = best_split(fitted, limits.shape, limits.splits)
    if split is None:
        return None
    least_gain, cost_s = split.gain - split.error, limits.switch_s.get("devices", 0.0) + remaining.step_s
    return split if least_gain >= LEAST_GAIN and remaining.amortizes(1.0 + least_gain, cost_s) else None


def describe_split(
    split: Recommendation, fitted: LedgerModel, limits: ControlLimits, rest: RemainingWork, waits: str
) -> str:
    """Describe a split, its predicted gain, and the reason."""
    replicas, ranks = (json.loads(split.settings[key]) for key in ("generator.devices", "trainer.devices"))
    shared_count = len(set(replicas) & set(ranks))
    shape, rates = limits.shape, f"{split.useful_per_s:.3g} useful samples/s for {fitted.useful_per_s:.3g}"
    sharing = f", {shared_count} devices shared," if shared_count else ""
    return (
        f"{len(replicas)} replicas and {len(ranks)} trainer ranks{sharing} for {shape.replicas} and {shape.ranks}: "
        f"predicted {rates}, {split.gain:+.0%} ± {split.error:.0%} ({waits}); it would pay within the {rest.steps:.0f} "
        f"steps that are left" + ("" if limits.can_change_devices else f", and needs {split.needs}")
    )
