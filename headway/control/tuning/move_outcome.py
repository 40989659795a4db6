"""Compares a change of placement with its expectation: the rate after it, the one before, and the cost."""

from __future__ import annotations

from collections import deque

from headway.records.ledger import StepRecord
from headway.records.plan import ExecutedMove

MEASURED = 16  # steps that a rate is taken over, at most


class MoveOutcome:
    """Compares each move with its expectation when ``MEASURED`` steps are recorded after it, without the first of them,
    in which the queue of ``budget`` steps fills again. Pure: it sees the records, and the last move."""

    def __init__(self, budget: int, moved: ExecutedMove | None = None) -> None:
        self._filling = budget + 1
        self._moved = moved
        self._due: ExecutedMove | None = None
        self._records: deque[StepRecord] = deque(maxlen=MEASURED)

    def changes(self, record: StepRecord, moved: ExecutedMove | None) -> bool:
        """Note a step, and the run's last move; returns whether that has changed the placement since the last call."""
        self._records.append(record)
        before, self._moved = self._moved, moved
        if moved is None or moved is before or moved.placement != moved.planned.placement:
            return False
        self._due = moved
        return True

    def due(self) -> tuple[str, dict[str, float]] | None:
        """The comparison that the last step has completed, as an event's detail and data."""
        moved = self._due
        if moved is None or self._records[-1].step < moved.version + self._filling + MEASURED - 1:
            return None
        self._due, planned = None, moved.planned
        expected, measured = planned.rate * planned.gain, self.rate(moved.version + self._filling)
        detail = (
            f"{moved.placement}: {measured:.3g} samples/s, expected {expected:.3g}, before {planned.rate:.3g}; it took "
            f"{moved.cost_s:.1f} s, expected {planned.cost_s:.1f} s"
        )
        data = {"rate": planned.rate, "expected": expected, "measured": measured, "cost_s": moved.cost_s}
        return detail, {name: round(value, 3) for name, value in data.items()}

    def rate(self, first: int) -> float:
        """Trained samples/s over the last ``MEASURED`` steps, from step ``first`` on."""
        kept = [r for r in self._records if r.step >= first and not r.skipped]
        return sum(r.samples for r in kept) / max(1e-9, sum(r.step_s for r in kept))
