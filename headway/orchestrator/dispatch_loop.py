"""The dispatch loop: admission -> rollouts."""

from __future__ import annotations

import asyncio

from headway.control.admission import credit
from headway.control.stalls import LOOPS
from headway.orchestrator.context import RunContext
from headway.orchestrator.group_timeout import generate_in_time
from headway.orchestrator.state import RunningGroup
from headway.records.rollout import Failure, Group, Rollout
from headway.runtime.bounded_queue import BoundedQueue

Generated = tuple[Group, tuple[Rollout, ...]]


class DispatchLoop:
    """Opens groups while admission (rule 1) allows it and the group fits the concurrency of rollouts.

    Consumes: admission credit (control), tasks and group sizes (task selection), concurrency.
    Waits for: a change of the shared state.
    Unblocked by: the train loop (a step completes), collect (a group ends or leaves the generator),
    weight updates (the applied version rises).
    """

    def __init__(self, run: RunContext, generated: BoundedQueue[Generated]) -> None:
        self._run = run
        self._generated = generated
        self._tasks = asyncio.TaskGroup()
        self._next_size = 1  # attempts of the next group, which must be free before it opens

    async def loop(self) -> None:
        """Runs until cancelled, which also cancels every member's generation."""
        state = self._run.state
        async with self._tasks:
            for running_group in list(state.running.values()):  # reopened by a resume
                self._start(running_group)
            while True:
                change_count = state.changed.count
                # The version that admission counts with is the one the group's deadline counts from.
                applied_version = await self._run.generator.applied_version()
                group_credit = 0 if state.draining else self._credit(applied_version)
                opened_count = 0
                while opened_count < group_credit and self._fits() and self._ready():
                    self._open(applied_version)
                    opened_count += 1
                if not opened_count and group_credit > 0 and self._fits() and not self._ready():
                    await self._run.prompts.prepare(self._run.task_selector.peek().task)
                elif not opened_count:
                    await state.changed.wait(change_count)

    async def drained(self) -> None:
        """Wait until every running group is verified and committed (admission is closed), or the run is suspended."""
        state = self._run.state
        while state.running and not state.suspended:
            await state.changed.wait(state.changed.count)

    def _credit(self, applied_version: int) -> int:
        """Groups that may open now: Eq. 3, the limit on open groups, and the steps left to train."""
        run = self._run
        experiment, state = run.experiment, run.state
        if run.parking.engine_is_kept_empty:
            return 0
        # Surplus that will be discarded may be open only until the batch is full: later it would be a step too old.
        surplus_groups = 0 if state.training else experiment.surplus_groups
        budget_credit = credit(
            open_groups=state.open_groups,
            completed_steps=state.version,
            applied_version=applied_version,
            groups_per_step=experiment.queue.groups_per_step,
            budget=experiment.queue.budget,
            surplus_groups=surplus_groups,
        )
        open_limit = state.knobs.open_groups
        limit_credit = budget_credit if open_limit is None else open_limit - state.open_groups
        # No step would train a group beyond those of the remaining steps.
        remaining_groups = experiment.queue.groups_per_step * (experiment.run.steps - state.version)
        steps_credit = remaining_groups + surplus_groups - state.open_groups
        return max(0, min(budget_credit, limit_credit, steps_credit))

    def _fits(self) -> bool:
        """Whether the next group, whose size its task determines, fits within the concurrency of rollouts."""
        self._next_size = self._run.task_selector.peek().size
        return self._free_rollouts() >= self._next_size or not self._run.state.running_rollouts

    def _free_rollouts(self) -> int:
        return self._run.state.knobs.concurrent_rollouts - self._run.state.running_rollouts

    def _ready(self) -> bool:
        """Whether the next task's prompt can be made without waiting for a process."""
        prompt_maker = self._run.prompts
        return prompt_maker.pictures is None or prompt_maker.ready(self._run.task_selector.peek().task)

    def _open(self, applied_version: int) -> None:
        run = self._run
        state = run.state
        task, size, draw = run.task_selector.take()
        group = Group(
            index=state.admitted,
            **run.prompts.of(task),
            size=size,
            admitted_version=applied_version,
            admitted_s=run.clock.now(),
        )
        run.buffer.admit(group, draw=draw)
        state.accounting.admit(group.index, group.size)
        run.meter.admitted(group)
        state.admitted += 1
        running_group = RunningGroup(group=group, unfinished=group.size)
        state.open_group(running_group)
        self._start(running_group)

    def _start(self, entry: RunningGroup) -> None:
        entry.runner = self._tasks.create_task(self._generate(entry), name=f"group-{entry.group.index}")

    async def _generate(self, entry: RunningGroup) -> None:
        """Generate all members of a group. A member's failure is data and never cancels its siblings."""

        async def generate_member(position: int) -> Rollout:
            if (gate := self._run.parking.begin(entry.group.index)) is not None:
                await gate
            parked = entry.partials.pop(position, None)
            # without its parked episode the rollout starts from the beginning, in a new environment
            if parked is not None and parked.episode is not None and self._run.parking.resumption(parked) == "restart":
                parked = None
            rollout = await self._run.rollouts.generate_member(entry.group, position, parked)
            self._run.state.member_done(entry)
            is_complete = rollout.finish_reason in ("stop", "length")
            entry.lengths[position] = rollout.response_tokens, is_complete
            entry.generated[position] = rollout
            if self._free_rollouts() >= self._next_size:  # with fewer, no group can start
                self._run.state.changed.notify()
            return rollout if pruning is None else await pruning.finished(entry.group, rollout)

        def stop(position: int, failure: Failure) -> None:
            self._run.rollouts.stop(entry.group.index, position, failure)

        pruning = self._run.pruning
        limits, clock = self._run.experiment.queue, self._run.clock
        try:
            rollouts = await generate_in_time(entry.group, generate_member, stop, limits, clock)
        finally:
            if pruning is not None:
                pruning.forget(entry.group.index)
        with self._run.waits.on("the collect loop", LOOPS, f"group {entry.group.index}"):
            await self._generated.put((entry.group, rollouts))
