"""The stop loop: bounds how long an interrupted run takes to end."""

from __future__ import annotations

import asyncio
import contextlib

from headway.orchestrator.context import RunContext
from headway.orchestrator.evaluation import Evaluations

_FINISH_SHARE = 1 / 2  # of the grace: running groups may finish until then
_PARK_SHARE = 1 / 8  # of the grace: the longest that parking takes
_STOP_WORKERS_S = 20.0  # the end of the grace, in which workers that don't answer are killed; a quarter at most


def longest_drain_s(grace_s: float) -> float:
    """Seconds from an interrupt to the immediate stop, so that all workers have ended when ``grace_s`` is over. At
    least an eighth of the grace remains for the checkpoint after the parking."""
    return grace_s - min(_STOP_WORKERS_S, grace_s / 4)


class StopLoop:
    """Parks what an interrupted run can't finish in time.

    Lifecycle: *finishing* for half of ``run.stop_grace_s`` -> *suspending* for an eighth at most (rollouts are parked
    with their tokens; a validation is cancelled) -> *suspended* (complete responses whose group isn't committed are
    parked as well; the run ends without waiting for more). The resumed run generates the other rollouts again.

    Consumes: nothing.
    Waits for: an interrupt, then the clock.
    Unblocked by: `Run.interrupt`.
    """

    def __init__(self, run: RunContext, evaluations: Evaluations) -> None:
        self._run = run
        self._evaluations = evaluations

    async def loop(self) -> None:
        """Runs until cancelled."""
        run, state = self._run, self._run.state
        grace_s = run.experiment.run.stop_grace_s
        while not state.interrupted:
            await state.changed.wait(state.changed.count, lambda: state.interrupted)
        await run.clock.sleep(_FINISH_SHARE * grace_s)
        self._evaluations.cancel()
        group_count, earlier_parkings = len(state.running), state.parkings
        run.parking.suspend(run.rollouts)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARK_SHARE * grace_s):
                while state.running_rollouts:
                    await state.changed.wait(state.changed.count)
        is_single_turn = run.experiment.environment.name == run.experiment.hooks.rollout == "single_turn"
        kept = run.parking.park_generated(run.tokenizer.stop_ids) if is_single_turn else 0
        parked = state.parkings - earlier_parkings
        run.event("parked", f"{group_count} unfinished groups for the resumed run", rollouts=parked, complete=kept)
        state.suspended = True
        state.changed.notify()
        await asyncio.Event().wait()
