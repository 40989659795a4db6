"""What a change of placement came to: the rate after it, beside the one before and the one that was expected."""

from __future__ import annotations

from collections import deque

from headway.orchestrator.context import RunContext
from headway.records.ledger import StepRecord
from headway.records.plan import ExecutedMove
from headway.telemetry.ledger import EVENT_PLAN_OUTCOME

MEASURED = 16  # steps that a rate is taken over, at most


class MoveOutcome:
    """Compares a move with its expectation once ``MEASURED`` steps are recorded after it, without the first of them,
    in which the queue fills again."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._moved = run.state.moved
        self._due: ExecutedMove | None = None
        self._records: deque[StepRecord] = deque(maxlen=MEASURED)

    def after(self, record: StepRecord) -> bool:
        """Note a step; returns whether the run is in another placement since the one before."""
        self._records.append(record)
        before, self._moved = self._moved, self._run.state.moved
        moved = self._moved
        if moved is not None and moved is not before:
            self._due = moved
            return moved.placement == moved.planned.placement
        if self._due is not None and record.step >= self._first(self._due) + MEASURED - 1:
            self._say(self._due)
            self._due = None
        return False

    def rate(self, first: int) -> float:
        """Trained samples/s over the last ``MEASURED`` steps, from step ``first`` on."""
        kept = [r for r in self._records if r.step >= first and not r.skipped]
        return sum(r.samples for r in kept) / max(1e-9, sum(r.step_s for r in kept))

    def _first(self, moved: ExecutedMove) -> int:
        return moved.version + self._run.experiment.queue.budget + 1

    def _say(self, moved: ExecutedMove) -> None:
        planned, measured = moved.planned, self.rate(self._first(moved))
        expected = planned.rate * (planned.gain if moved.placement == planned.placement else 1.0)
        detail = (
            f"{moved.placement}: {measured:.3g} samples/s, expected {expected:.3g}, before {planned.rate:.3g}; it took "
            f"{moved.cost_s:.1f} s, expected {planned.cost_s:.1f} s"
        )
        data = {"rate": planned.rate, "expected": expected, "measured": measured, "cost_s": moved.cost_s}
        self._run.event(EVENT_PLAN_OUTCOME, detail, **{name: round(value, 3) for name, value in data.items()})
