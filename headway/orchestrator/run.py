"""Drives a run from its first version to its last: the four loops, the evaluations around them, an orderly end."""

from __future__ import annotations

import asyncio

from headway.buffer.audit import audit_file
from headway.orchestrator.collect_loop import CollectLoop
from headway.orchestrator.context import RunContext
from headway.orchestrator.control_loop import ControlLoop
from headway.orchestrator.dispatch_loop import DispatchLoop, Generated
from headway.orchestrator.evaluation import Evaluations
from headway.orchestrator.preflight.logprob_agreement import pictured_prompt, require_agreement, trainer_scores
from headway.orchestrator.recovery import (
    call_with_restart,
    reopen_groups,
    restart_trainer,
    restore_records,
    restore_trainer,
)
from headway.orchestrator.run_device_locks import TRAINER
from headway.orchestrator.stop_loop import StopLoop
from headway.orchestrator.train_loop import TrainLoop
from headway.records.errors import AccountingError, WorkerDied
from headway.records.ledger import StepRecord
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.supervision import supervise
from headway.telemetry.ledger import EVENT_ACCOUNTING, EVENT_COUNTED, EVENT_END, EVENT_RESUME, EVENT_START


class Run:
    """Drives the loops over a wired context.

    Lifecycle: ``begin`` (restore the state of a former process, held evaluation before) -> ``train`` (the four loops)
    -> ``conclude`` (checkpoint, held evaluation after, accounting). An interrupt ends ``train`` early: admission
    closes, running groups are finished and committed, or parked when the grace is half over, and ``conclude`` only
    checkpoints.

    Knows its actors by their Protocols alone, so the planner and the tests drive it with fakes under a virtual clock.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._generated: BoundedQueue[Generated] = BoundedQueue(capacity=1024, name="generated", clock=context.clock)
        self._completed: BoundedQueue[StepRecord] = BoundedQueue(capacity=64, name="completed", clock=context.clock)
        self._evaluations = Evaluations(context)
        self._dispatch = DispatchLoop(context, self._generated)
        self._collect = CollectLoop(context, self._generated)
        self._train = TrainLoop(context, self._completed, self._evaluations)
        self._control = ControlLoop(context, self._completed)
        self._stop = StopLoop(context, self._evaluations)

    def interrupt(self) -> None:
        """Close admission and end after the running step, with everything that runs finished or parked."""
        state = self.context.state
        state.interrupted = True
        state.draining = True
        state.changed.notify()

    async def begin(self, recorded: int | None = None, last: StepRecord | None = None, best: int | None = None) -> None:
        """Resume from checkpoint and batch log when there is one; publish; evaluate before the first step.

        ``recorded``: steps that the ledger holds; later ones that are completed are recorded now. None: all are.
        ``last``: the last step there, from whose knobs the controller continues. ``best``: the best version there.
        """
        run = self.context
        run.started_s = run.clock.now()
        is_resume = run.buffer.next_index > 0
        version = run.state.version = run.buffer.completed_steps
        start_event, start_s = EVENT_RESUME if is_resume else EVENT_START, round(run.start_s, 3)
        run.event(start_event, run.directory, start_s=start_s, **run.training_data)
        self._evaluations.record_best_again(best)
        reopen_groups(run)
        restore_records(run, version if recorded is None else min(recorded, version))
        if counts_text := ", ".join(f"{count:,} {ending}" for ending, count in run.state.accounting.endings.items()):
            run.event(EVENT_COUNTED, f"until now {counts_text}", **run.state.accounting.data)
        prompt = await pictured_prompt(run.experiment, run.prompts.pictures)
        try:
            replayed_steps, lost_samples = await restore_trainer(run, until=version)
            weights = await run.trainer.publish(version)
            scores = await trainer_scores(run.experiment, run.trainer, prompt)
            if run.memory is not None:
                await run.locks.evict(TRAINER)
            await run.generator.update_weights(weights)
            run.state.published_version = version
        except WorkerDied as death:
            run.died(death)
            replayed_steps, lost_samples = await restart_trainer(run, version), 0  # its event has them
            scores = await call_with_restart(run, lambda: trainer_scores(run.experiment, run.trainer, prompt), version)
        await require_agreement(run.experiment, run.generator, scores, version, run.event)
        if replayed_steps:
            lost = {"worker": "trainer", "lost_s": run.time_s(), "lost_samples": lost_samples} if lost_samples else {}
            run.event("restored", f"steps trained again: {replayed_steps}", replayed=replayed_steps, **lost)
        run.meter.applied_version = await run.generator.applied_version()
        run.state.resume_gate.set()
        await self._control.restore_knobs(last)
        if run.state.version == 0 and run.experiment.evaluation.before:
            for split in ("validation", "test"):
                await self._evaluations.evaluate_held(split, "before")

    async def train(self) -> None:
        """Run the four loops until the train loop ends."""
        run = self.context
        run.meter.restart_interval(await run.generator.statistics(), await run.sandboxes())
        await supervise(
            {
                "dispatch": self._dispatch.loop,
                "collect": self._collect.loop,
                "control": self._control.loop,
                "stop": self._stop.loop,
                "train": self._train_and_drain,
            },
            until="train",
        )

    async def _train_and_drain(self) -> None:
        run = self.context
        await self._train.loop()
        run.state.draining = True
        run.state.changed.notify()
        if run.state.interrupted:
            await self._dispatch.drained()
        await self._evaluations.finish()
        await self._control.flushed(self._train.completed_steps)

    async def conclude(self) -> None:
        """Write the last checkpoint and check the accounting at the end. In between, unless interrupted, evaluate the
        best weights, held, and make sure that ``best/`` has some."""
        run = self.context
        if run.buffer.recorder is not None:
            run.buffer.recorder.flush()  # or the last endings would show as open while it evaluates and stops
        await self._train.checkpoint()
        if not run.state.interrupted:
            evaluations, enabled = self._evaluations, run.experiment.evaluation.after
            await (evaluations.evaluate_after_training() if enabled else evaluations.keep_last_version())
        await self._check_accounting()
        if not run.state.interrupted:
            run.event(EVENT_END, f"{self._train.ended}, at version {run.state.version}")

    async def _check_accounting(self) -> None:
        """Check that every rollout is open (left at the end) or ended once, against the buffer's own count.
        Raises AccountingError when not, after the ledger has it."""
        run = self.context
        accounting = run.state.accounting
        problems = run.buffer.audit(await asyncio.to_thread(audit_file, run.buffer.path))
        try:
            accounting.check(**run.buffer.rollout_counts())
        except AccountingError as error:
            problems.append(str(error))
        run.event(
            EVENT_ACCOUNTING,
            "; ".join(problems) or "balanced",
            balanced=int(not problems),
            open=accounting.open_rollouts,
            admitted=accounting.admitted,
            **accounting.data,
        )
        if problems:
            raise AccountingError("the accounting doesn't balance: " + "; ".join(problems))
