"""Whether another plan pays within what is left of a run, given the measured cost of the switch; and which split of the
devices between generator and trainer would pay, which is recommended: the knobs can't reach it.

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

# Times its cost that a switch must save in what is left of the run: the gain is predicted, and the way back would cost
# as much again.
PAYBACK = 2.0


class Remainder(msgspec.Struct, frozen=True, kw_only=True):
    """The rest of a run, at its present rate."""

    steps: float
    step_s: float  # of one of them

    def pays(self, gain: float, switch_s: float, settling_steps: int = 0) -> bool:
        """Whether a rate of ``gain`` times the present one, from ``settling_steps`` on, saves more than a switch that
        costs the run ``switch_s``. Example: of 100 steps of 10 s, a gain of 1.25 saves 200 s; a switch may take 100."""
        return max(0.0, self.steps - settling_steps) * self.step_s * (1.0 - 1.0 / gain) > PAYBACK * switch_s

    def bears(self, share: float, switch_s: float, settling_steps: int = 0) -> bool:
        """Whether a switch that gains no rate shows at all, and costs at most ``share`` of the time that is left."""
        return self.steps > settling_steps and switch_s <= share * self.steps * self.step_s


def remainder(last: StepRecord, shape: RunShape, step_s: float) -> Remainder:
    """The rest of a run after the step ``last``: by steps or by the time limit, whichever comes first."""
    limit_s = math.inf if shape.time_limit_s is None else shape.time_limit_s
    steps = min(float(shape.steps - last.version), (limit_s - last.time_s) / step_s)
    return Remainder(steps=max(0.0, steps), step_s=step_s)


def switch_s(before: Knobs, after: Knobs, limits: ControlLimits, found: LedgerModel | None = None) -> float:
    """Seconds of the run that a change of the knobs costs at most: a verifier that starts takes a core meanwhile, and
    requests of replicas that go to rest are prefilled again elsewhere. The other knobs cost nothing."""
    started = limits.switch_s.get("verifier_workers", 0.0) if after.verifier_workers > before.verifier_workers else 0.0
    resting = len(after.resting) - len(before.resting)
    if found is None or resting <= 0:
        return started
    return started + resting * found.running * found.model.delay_s / (found.model.slots * found.model.replicas)


def split_that_pays(found: LedgerModel, limits: ControlLimits, left: Remainder) -> Recommendation | None:
    """The best other split of the devices, if even the gain less its error saves what the switch costs: the actors'
    start and a checkpoint, as measured, and a step's worth of generation until the queue is full again."""
    best = best_split(found, limits.shape, limits.splits)
    if best is None:
        return None
    least, cost_s = best.gain - best.error, limits.switch_s.get("devices", 0.0) + left.step_s
    return best if least >= LEAST_GAIN and left.pays(1.0 + least, cost_s) else None


def split_sentence(
    split: Recommendation, found: LedgerModel, limits: ControlLimits, left: Remainder, waits: str
) -> str:
    """Say what a split is, what it would gain, and why."""
    replicas, ranks = (json.loads(split.settings[key]) for key in ("generator.devices", "trainer.devices"))
    shared = len(set(replicas) & set(ranks))
    shape, rates = limits.shape, f"{split.useful_per_s:.3g} useful samples/s for {found.useful_per_s:.3g}"
    sharing = f", {shared} devices shared," if shared else ""
    return (
        f"{len(replicas)} replicas and {len(ranks)} trainer ranks{sharing} for {shape.replicas} and {shape.ranks}: "
        f"predicted {rates}, {split.gain:+.0%} ± {split.error:.0%} ({waits}); it would pay within the {left.steps:.0f} "
        f"steps that are left" + ("" if limits.moves else f", and needs {split.needs}")
    )
