"""The control loop: ledger -> knobs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

import msgspec

from headway.config.control import KnobName
from headway.config.schema import Experiment
from headway.control.tuning.controller import Action, ControllerState, Decision, decide, found_nothing, set_at
from headway.control.tuning.knob_search import ControlLimits, limits_of
from headway.control.tuning.move_outcome import MoveOutcome
from headway.orchestrator.actors.moves import planned_move
from headway.orchestrator.context import RunContext
from headway.orchestrator.state import Signal
from headway.records.control import Knobs
from headway.records.errors import WorkerDied
from headway.records.ledger import StepRecord
from headway.records.plan import RunPlacement
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.devices import alike, sharing
from headway.telemetry.ledger import EVENT_CONTROL, EVENT_PLAN_OUTCOME

_LOOK_SHARE = 0.02  # of one core's time, at most, goes into looks at the model
_RECORDS = 40  # kept for the controller: its window, and room for skipped steps


class ControlLoop:
    """Writes each step's record; then the controller sets the knobs, or advises, as ``control.mode`` says.

    Consumes: the records of completed steps (train loop's queue); adds the engines' and the sandboxes' statistics.
    Waits for: the engines' and sandboxes' statistics; never for the controller's model, which is asked elsewhere.
    Unblocked by: the train loop.

    The knobs change in one assignment between two awaits; dispatch and train read them at their next decision. Rule 1
    doesn't depend on them: a knob only takes away from what admission allows.
    """

    def __init__(self, run: RunContext, completed: BoundedQueue[StepRecord]) -> None:
        self._run = run
        self._completed = completed
        self._written = 0
        self._flushed = Signal()
        self._rates = RateControl(run)

    async def go_on_from(self, last: StepRecord | None) -> None:
        """Set the knobs that were in effect at the last step of the process before, where the controller sets them."""
        if last is not None:
            await self._rates.go_on_from(last)

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                record = await self._write(await self._completed.get())
                self._written += 1
                self._flushed.notify()
                await self._rates.after(record)
        finally:
            self._rates.stop_looking()

    async def flushed(self, steps: int) -> None:
        """Wait until the records of ``steps`` completed steps are written."""
        while self._written < steps:
            await self._flushed.wait(self._flushed.count)

    async def _write(self, record: StepRecord) -> StepRecord:
        run = self._run
        engines, sandboxes = await asyncio.gather(run.generator.statistics(), run.sandboxes())
        whole = run.meter.with_engines(record, engines, run.generator.routing(), sandboxes)
        run.record(msgspec.structs.replace(whole, nodes=tuple(run.nodes())))
        return whole


class RateControl:
    """Runs the controller after each step, applies its decisions, and records them in the ledger."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._mode = run.experiment.control.mode
        self._limits = _limits_in(run.experiment)
        self._outcome = MoveOutcome(run.experiment.queue.budget)
        self._state: ControllerState | None = None
        self._records: deque[StepRecord] = deque(maxlen=_RECORDS)
        self._advised = run.state.knobs
        self._looking: asyncio.Task[tuple[Decision, float]] | None = None
        self._looking_from: ControllerState | None = None  # what it was asked about
        self._look_from_s = 0.0

    async def go_on_from(self, last: StepRecord) -> None:
        """Set the knobs of the former process's ``last`` step, within today's limits; where the experiment's value has
        changed since, start from that. Estimates of the queue are lost."""
        flow = last.flow
        if self._mode != "act" or not flow.concurrent_rollouts:
            return
        knobs = Knobs(
            open_groups=flow.open_groups or None,
            concurrent_rollouts=flow.concurrent_rollouts,
            steps_per_publish=flow.steps_per_publish,
            resting=self._limits.shared[len(self._limits.shared) - flow.resting :],
            verifier_workers=flow.verifier_workers,
        )
        before: dict[KnobName, int] = {
            "concurrent_rollouts": flow.configured_concurrent_rollouts,
            "steps_per_publish": flow.configured_steps_per_publish,
            "verifier_workers": flow.configured_verifier_workers,
        }
        await self._set(self._limits.resumed(knobs, self._run.state.knobs, before))

    async def after(self, record: StepRecord) -> None:
        """Decide after ``record``."""
        run = self._run
        if self._mode == "off" or run.state.draining:
            return
        self._records.append(record)
        if self._outcome.changes(record, run.state.moved):
            self.stop_looking()  # the knobs, and what was learnt of them, were of another placement
            self._limits, self._state, self._advised = _limits_in(run.experiment), None, run.state.knobs
        if (outcome := self._outcome.due()) is not None:
            run.event(EVENT_PLAN_OUTCOME, outcome.detail, **outcome.data)
            if outcome.worse and run.state.moved is not None:
                self._revert_move(run.state.moved.before, outcome.data)
        if self._state is None:
            moved_at = run.state.moved.version if run.state.moved else 0
            filled = max(record.step, moved_at) + run.experiment.queue.budget + 1  # before, the queue was filling
            reverted = run.state.moved is not None and run.state.moved.planned.reverts  # no other move before a drift
            self._state = ControllerState(
                knobs=run.state.knobs, regime_step=filled, decided_step=filled, recommended=reverted
            )
        limits = self._limits_now()
        decision = self._seen(record.version) or decide(
            self._state, tuple(self._records), limits, look=run.look is None
        )
        rested = run.clock.now() >= self._look_from_s
        if decision.due and rested and self._looking is None and run.look is not None:
            self._looking_from = decision.state
            self._looking = asyncio.create_task(run.look(decision.state, tuple(self._records), limits))
        self._state = decision.state
        if self._mode == "advise":
            for action in decision.actions:
                if action.kind == "recommended":
                    self._say(action)
            self._advise(decision.actions)
            return
        for action in decision.actions:
            self._say(action)
            if action.kind == "move":
                cost_s, rate = limits.switch_s["devices"], self._outcome.rate(self._state.regime_step)
                run.state.wanted_move = planned_move(action.settings, action.predicted, rate, cost_s)
        await self._set(decision.state.knobs)

    def _revert_move(self, before: RunPlacement, found: Mapping[str, float]) -> None:
        """Go back to the placement before a move that ``found`` shows to be worse."""
        ratio = found["measured"] / max(found["rate"], 1e-3)  # rounded to so much
        reason = f"back to {before}: the rate is {ratio:.2f} of what it was before the move"
        self._say(Action(kind="rollback", reason=reason, measured=ratio, settings=before.settings))
        planned = planned_move(before.settings, 1 / max(ratio, 1e-3), found["measured"], found["cost_s"])
        self._run.state.wanted_move = msgspec.structs.replace(planned, reverts=True)

    def _limits_now(self) -> ControlLimits:
        """The limits with what this machine has room for, and what switches cost, as measured so far: another split
        needs a checkpoint and all actors' start."""
        run, limits = self._run, self._limits
        room = max(limits.least_verifiers, min(limits.most_verifiers, run.verifier.most_workers()))
        restart_s = run.start_s + max(record.checkpoint_s for record in self._records)
        moved_s = run.state.moved.cost_s if run.state.moved else restart_s
        costs = {"verifier_workers": run.verifier.start_s, "devices": moved_s}
        return msgspec.structs.replace(limits, most_verifiers=room, switch_s=costs)

    def stop_looking(self) -> None:
        """Cancel the look under way."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _seen(self, version: int) -> Decision | None:
        """The decision of a finished look, to be set at ``version``; None: none finished, or its state is outdated."""
        if self._looking is None or not self._looking.done():
            return None
        ended, self._looking = self._looking, None
        try:
            found, cpu_s = ended.result()
        except WorkerDied as death:
            self._run.died(death)
            assert self._state is not None
            return Decision(state=found_nothing(self._state, version))  # asked again, ever later
        self._look_from_s = self._run.clock.now() + cpu_s / _LOOK_SHARE
        return set_at(found, version) if self._looking_from is self._state else None

    async def _set(self, knobs: Knobs) -> None:
        """Make these the run's knobs."""
        state = self._run.state
        if knobs == state.knobs:
            return
        rested = knobs.resting != state.knobs.resting
        if knobs.verifier_workers != state.knobs.verifier_workers:
            self._run.verifier.set_workers(knobs.verifier_workers)
        state.knobs = knobs
        state.changed.notify()
        if rested:
            await self._run.generator.rest_replicas(knobs.resting)

    def _advise(self, actions: tuple[Action, ...]) -> None:
        """Report what would be set, once, and keep the knobs as they are."""
        assert self._state is not None
        wanted, present = self._state.knobs, self._run.state.knobs
        if wanted == present:
            return
        self._state = msgspec.structs.replace(self._state, knobs=present, trial=None, turns={}, directions={})
        if wanted == self._advised:
            return
        self._advised = wanted
        for action in actions:
            self._say(action)

    def _say(self, action: Action) -> None:
        data = {"kind": action.kind, "mode": self._mode, "predicted": action.predicted, "measured": action.measured}
        data |= action.settings
        if not action.knob:
            self._run.event(EVENT_CONTROL, f"{action.kind}: {action.reason}", **data)
            return
        change = f"{action.knob} {action.old} -> {action.new}"
        self._run.event(
            EVENT_CONTROL, f"{change}: {action.reason}", knob=action.knob, old=action.old, new=action.new, **data
        )


def _limits_in(experiment: Experiment) -> ControlLimits:
    devices, ranks = experiment.generator.devices, experiment.trainer.devices
    return limits_of(experiment, sharing(devices, ranks), alike=alike([*devices, *ranks]))
