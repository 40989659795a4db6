"""The control loop: ledger -> knobs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

import msgspec

from headway.config.control import KnobName
from headway.control.tuning.controller import Action, ControllerState, Decision, backed_off, decide, effective_at
from headway.control.tuning.knob_search import ControlLimits, limits_of
from headway.control.tuning.placement_outcome import MoveOutcome
from headway.orchestrator.actors.placement_changer import planned_move
from headway.orchestrator.context import RunContext
from headway.orchestrator.preflight.capacity import fitting_splits
from headway.orchestrator.state import Signal
from headway.records.control import Knobs
from headway.records.errors import WorkerDied
from headway.records.ledger import StepRecord
from headway.records.plan import RunPlacement
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.devices import interchangeable, sharing
from headway.runtime.nodes.gpus import read_machine
from headway.telemetry.ledger import EVENT_CONTROL, EVENT_PLAN_OUTCOME

_QUERY_SHARE = 0.02  # of one core's time, at most, for queries of the controller's model
_RECORDS = 40  # kept for the controller: its window, and some for skipped steps


class ControlLoop:
    """Writes each step's record; then the controller sets the knobs, or advises, according to ``control.mode``.

    Consumes: the records of completed steps (train loop's queue); adds the engines' and the sandboxes' statistics.
    Waits for: the engines' and sandboxes' statistics; never for the controller's model, which runs in another process.
    Unblocked by: the train loop.

    The knobs change in one assignment between two awaits; dispatch and train read them at their next decision. Rule 1
    doesn't depend on them: a knob only reduces what admission allows.
    """

    def __init__(self, run: RunContext, completed: BoundedQueue[StepRecord]) -> None:
        self._run = run
        self._completed = completed
        self._written = 0
        self._flushed = Signal()
        self._rates = RateControl(run)

    async def restore_knobs(self, last: StepRecord | None) -> None:
        """Set the knobs of the former process's ``last`` step, where the controller sets them."""
        if last is not None:
            await self._rates.restore_knobs(last)

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                record = await self._write(await self._completed.get())
                self._written += 1
                self._flushed.notify()
                await self._rates.after(record)
        finally:
            self._rates.cancel_query()

    async def flushed(self, steps: int) -> None:
        """Wait until the records of ``steps`` completed steps are written."""
        while self._written < steps:
            await self._flushed.wait(self._flushed.count)

    async def _write(self, record: StepRecord) -> StepRecord:
        run = self._run
        engines, sandboxes = await asyncio.gather(run.generator.statistics(), run.sandboxes())
        complete_record = run.meter.with_engines(record, engines, run.generator.routing(), sandboxes)
        teaching = None if run.teachers is None else run.teachers.take_statistics()
        complete_record = msgspec.structs.replace(complete_record, teaching=teaching)
        run.record(msgspec.structs.replace(complete_record, nodes=tuple(run.nodes())))
        return complete_record


class RateControl:
    """Runs the controller after each step, applies its decisions, and records them in the ledger."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._mode = run.experiment.control.mode
        self._limits = self._present_limits()
        self._outcome = MoveOutcome(run.experiment.queue.budget)
        self._state: ControllerState | None = None
        self._records: deque[StepRecord] = deque(maxlen=_RECORDS)
        self._advised = run.state.knobs
        self._query: asyncio.Task[tuple[Decision, float]] | None = None
        self._queried_state: ControllerState | None = None  # the query's argument
        self._next_query_s = 0.0

    async def restore_knobs(self, last: StepRecord) -> None:
        """Set the knobs of the former process's ``last`` step, within today's limits. A knob whose value in the
        experiment has changed since starts from that value. Estimates of the queue are lost."""
        last_flow = last.flow
        if self._mode != "act" or not last_flow.concurrent_rollouts:
            return
        knobs = Knobs(
            open_groups=last_flow.open_groups or None,
            concurrent_rollouts=last_flow.concurrent_rollouts,
            steps_per_publish=last_flow.steps_per_publish,
            idle_replicas=self._limits.shared[len(self._limits.shared) - last_flow.idle_replicas :],
            verifier_workers=last_flow.verifier_workers,
        )
        former_configuration: dict[KnobName, int] = {
            "concurrent_rollouts": last_flow.configured_concurrent_rollouts,
            "steps_per_publish": last_flow.configured_steps_per_publish,
            "verifier_workers": last_flow.configured_verifier_workers,
        }
        await self._set(self._limits.resumed(knobs, self._run.state.knobs, former_configuration))

    async def after(self, record: StepRecord) -> None:
        """Decide on the knobs after the step of ``record``."""
        run = self._run
        if self._mode == "off" or run.state.draining:
            return
        self._records.append(record)
        if self._outcome.changes(record, run.state.moved):
            self.cancel_query()  # the knobs and their measurements were of another placement
            self._limits, self._state, self._advised = self._present_limits(), None, run.state.knobs
        if (outcome := self._outcome.due()) is not None:
            run.event(EVENT_PLAN_OUTCOME, outcome.detail, **outcome.data)
            if outcome.worse and run.state.moved is not None:
                self._revert_move(run.state.moved.previous, outcome.data)
        if self._state is None:
            moved_at = run.state.moved.version if run.state.moved else 0
            filled_step = max(record.step, moved_at) + run.experiment.queue.budget + 1  # before, the queue was filling
            reverted = run.state.moved is not None and run.state.moved.planned.reverts  # no other move before a drift
            self._state = ControllerState(
                knobs=run.state.knobs, regime_step=filled_step, decided_step=filled_step, recommended=reverted
            )
        limits = self._limits_now()
        decision = self._query_decision(record.version) or decide(
            self._state, tuple(self._records), limits, ask_model=run.controller is None
        )
        query_allowed = run.clock.now() >= self._next_query_s
        if decision.due and query_allowed and self._query is None and run.controller is not None:
            self._queried_state = decision.state
            self._query = asyncio.create_task(run.controller(decision.state, tuple(self._records), limits))
        self._state = decision.state
        if self._mode == "advise":
            for action in decision.actions:
                if action.kind == "recommended":
                    self._record_action(action)
            self._advise(decision.actions)
            return
        for action in decision.actions:
            self._record_action(action)
            if action.kind == "move":
                cost_s, rate = limits.switch_s["devices"], self._outcome.rate(self._state.regime_step)
                run.state.pending_move = planned_move(action.settings, action.predicted, rate, cost_s)
        await self._set(decision.state.knobs)

    def _revert_move(self, previous: RunPlacement, figures: Mapping[str, float]) -> None:
        """Plan the return to the ``previous`` placement after a move whose ``figures`` show a lower rate."""
        rate_ratio = figures["measured"] / max(figures["rate"], 1e-3)  # figures are rounded to 0.001
        reason = f"back to {previous}: the rate is {rate_ratio:.2f} of what it was before the move"
        self._record_action(Action(kind="rollback", reason=reason, measured=rate_ratio, settings=previous.settings))
        return_move = planned_move(previous.settings, 1 / max(rate_ratio, 1e-3), figures["measured"], figures["cost_s"])
        self._run.state.pending_move = msgspec.structs.replace(return_move, reverts=True)

    def _present_limits(self) -> ControlLimits:
        """The limits of the run's present placement. Of others a live run keeps those whose devices have the memory."""
        experiment, is_live = self._run.experiment, self._run.worker_pools is not None
        devices, ranks = experiment.generator.devices, experiment.trainer.devices
        limits = limits_of(experiment, sharing(devices, ranks), same_kind=interchangeable([*devices, *ranks]))
        fitting = (
            fitting_splits(experiment, limits.splits, read_machine()) if is_live and limits.splits else limits.splits
        )
        return msgspec.structs.replace(limits, splits=fitting)

    def _limits_now(self) -> ControlLimits:
        """The limits with the machine's capacity for verifiers, and the costs of switches measured so far. Until one is
        measured, a change of placement costs a checkpoint and the start of all actors."""
        run, limits = self._run, self._limits
        worker_limit = max(limits.least_verifiers, min(limits.most_verifiers, run.verifier.max_workers()))
        restart_s = run.start_s + run.state.checkpoint_s
        move_cost_s = run.state.moved.cost_s if run.state.moved else restart_s
        switch_costs = {"verifier_workers": run.verifier.start_s, "devices": move_cost_s}
        return msgspec.structs.replace(limits, most_verifiers=worker_limit, switch_s=switch_costs)

    def cancel_query(self) -> None:
        """Cancel the query under way."""
        if self._query is not None:
            self._query.cancel()
            self._query = None

    def _query_decision(self, version: int) -> Decision | None:
        """The decision of a finished query, to be set at ``version``. None: none has finished, or its state is
        outdated."""
        if self._query is None or not self._query.done():
            return None
        query_task, self._query = self._query, None
        try:
            decision, cpu_s = query_task.result()
        except WorkerDied as death:
            self._run.died(death)
            assert self._state is not None
            return Decision(state=backed_off(self._state, version))  # queried again, at growing intervals
        self._next_query_s = self._run.clock.now() + cpu_s / _QUERY_SHARE
        return effective_at(decision, version) if self._queried_state is self._state else None

    async def _set(self, knobs: Knobs) -> None:
        """Set the run's knobs to ``knobs``."""
        state = self._run.state
        if knobs == state.knobs:
            return
        idles_others = knobs.idle_replicas != state.knobs.idle_replicas
        if knobs.verifier_workers != state.knobs.verifier_workers:
            self._run.verifier.set_workers(knobs.verifier_workers)
        state.knobs = knobs
        state.changed.notify()
        if idles_others:
            await self._run.generator.idle_replicas(knobs.idle_replicas)

    def _advise(self, actions: tuple[Action, ...]) -> None:
        """Report the knobs that would be set, once, and keep the present ones."""
        assert self._state is not None
        advised_knobs, present_knobs = self._state.knobs, self._run.state.knobs
        if advised_knobs == present_knobs:
            return
        self._state = msgspec.structs.replace(self._state, knobs=present_knobs, trial=None, turns={}, directions={})
        if advised_knobs == self._advised:
            return
        self._advised = advised_knobs
        for action in actions:
            self._record_action(action)

    def _record_action(self, action: Action) -> None:
        fields = {"kind": action.kind, "mode": self._mode, "predicted": action.predicted, "measured": action.measured}
        fields |= action.settings
        if not action.knob:
            self._run.event(EVENT_CONTROL, f"{action.kind}: {action.reason}", **fields)
            return
        change_text = f"{action.knob} {action.old} -> {action.new}"
        self._run.event(
            EVENT_CONTROL, f"{change_text}: {action.reason}", knob=action.knob, old=action.old, new=action.new, **fields
        )
