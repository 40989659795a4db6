"""Compares a change of placement with its expectation: the rates after and before it, and the cost."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from headway.control.tuning.knob_search import LEAST_GAIN
from headway.control.tuning.run_figures import rate_of, relative_noise
from headway.records.ledger import StepRecord
from headway.records.plan import ExecutedMove

MEASURED = 16  # steps that a rate is taken over, at most
_SAME_LOAD = 1.1  # times the tokens per trained sample: beyond, the rate falls by itself


class PlanOutcome(NamedTuple):
    """The outcome of a move: measured and expected rates, and whether to revert it."""

    detail: str  # with ``data``: an event's
    data: dict[str, float]
    worse: bool  # slower than before the move, beyond noise: to be reverted


class MoveOutcome:
    """Compares each move with its expectation once ``MEASURED`` steps are recorded after it.

    The first steps after a move, in which the queue of ``budget`` steps fills again, are left out. Pure: its inputs are
    the records and the last move."""

    def __init__(self, budget: int, moved: ExecutedMove | None = None) -> None:
        self._filling = budget + 1
        self._moved = moved
        self._due: ExecutedMove | None = None
        self._load = 0.0  # before that move
        self._records: deque[StepRecord] = deque(maxlen=MEASURED)

    def changes(self, record: StepRecord, moved: ExecutedMove | None) -> bool:
        """Add a step and the run's last move; return whether the placement has changed since the last call."""
        self._records.append(record)
        previous_move, self._moved = self._moved, moved
        if moved is None or moved is previous_move or moved.placement != moved.planned.placement:
            return False
        self._due, self._load = moved, _load(list(self._records)[:-1])
        return True

    def due(self) -> PlanOutcome | None:
        """Return the comparison that the last step has completed, if any."""
        move = self._due
        if move is None or self._records[-1].step < move.version + self._filling + MEASURED - 1:
            return None
        self._due, plan = None, move.planned
        newer = [r for r in self._records if r.step >= move.version + self._filling and not r.skipped]
        expected, new_rate = plan.rate * plan.gain, rate_of(newer)
        noise = math.sqrt(2) * relative_noise(newer, new_rate) if new_rate else 0.0  # of a quotient of two such rates
        is_heavier = _load(newer) > _SAME_LOAD * self._load
        is_slower = bool(newer) and new_rate < plan.rate * (1 - max(LEAST_GAIN, 2 * noise))
        is_worse = is_slower and not is_heavier and not plan.reverts
        detail = (
            f"{move.placement}: {new_rate:.3g} samples/s, expected {expected:.3g}, before {plan.rate:.3g}; it took "
            f"{move.cost_s:.1f} s, expected {plan.cost_s:.1f} s"
        )
        figures = {"rate": plan.rate, "expected": expected, "measured": new_rate, "cost_s": move.cost_s}
        return PlanOutcome(detail, {key: round(figure, 3) for key, figure in figures.items()}, is_worse)

    def rate(self, first: int) -> float:
        """Return the trained samples/s over the last ``MEASURED`` steps, from step ``first`` on."""
        return rate_of([record for record in self._records if record.step >= first and not record.skipped])


def _load(records: list[StepRecord]) -> float:
    """Return the response tokens generated per trained sample."""
    return sum(sum(r.tokens.ended.values()) for r in records if r.tokens) / max(1, sum(r.samples for r in records))
