"""The train loop: buffer -> trainer -> publish."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from headway.algorithms.groups.batches import build_batch, useful_samples
from headway.buffer.readers import read_pixels
from headway.control.staleness import NextPart, Selection
from headway.control.stalls import LOOPS
from headway.orchestrator.actors.placement_changer import PlacementChanger
from headway.orchestrator.context import RunContext
from headway.orchestrator.evaluation import Evaluations, end_reason
from headway.orchestrator.group_endings import end_finished, end_running
from headway.orchestrator.preflight.logprob_agreement import pictured_prompt, require_agreement, trainer_scores
from headway.orchestrator.recovery import accumulate, call_with_restart, train_on, trainer_turn
from headway.orchestrator.run_device_locks import TRAINER
from headway.orchestrator.state import RunningGroup
from headway.records.errors import NoProgress, WorkerDied
from headway.records.generation import ProbeScores, PublishedWeights
from headway.records.ledger import StepRecord
from headway.records.rollout import Batch, Ending, FinishedGroup, LoggedDemonstrations, Sample
from headway.records.training import MAX_CONSECUTIVE_SKIPS, SKIPPED_VALUE_UPDATES, StepReport, TrainBatch
from headway.runtime.bounded_queue import BoundedQueue
from headway.tasks.drawn_demonstrations import demonstrations_of
from headway.telemetry.rollouts.recorder import EVENT_ROLLOUTS_ENDED
from headway.trainer.checkpoints import checkpoint_path, find_checkpoints, version_of

Result = TypeVar("Result")
_KEPT_SAMPLES = 2  # of each step, for trackers: text takes space, and few are read
_SURPLUS = "surplus: a batch was full"
_DAMAGED = "a replica's weights were damaged when it was sampled"
_MEMBER = re.compile(r"(?!evaluation-).*?(\d+)-\d+\.\d+\.\d+")  # a rollout's request, of `TurnSampler`: its group


class BatchPart(NamedTuple):
    """A part of a step's batch, or the whole, that is committed to the buffer."""

    groups: list[FinishedGroup]
    batch: TrainBatch  # of these groups


class TrainLoop:
    """Forms batches under the budget, trains on them, publishes the versions.

    Consumes: finished groups (buffer).
    Waits for: a feasible batch (rule 2), the trainer, and, before the next publish, the last update.
    Unblocked by: collect (a group is finished), dispatch never.
    """

    def __init__(self, run: RunContext, completed: BoundedQueue[StepRecord], evaluations: Evaluations) -> None:
        self._run = run
        self._completed = completed
        self._evaluations = evaluations
        self._placement_changer = PlacementChanger(run, self.ensure_checkpoint)
        self._updates = asyncio.TaskGroup()
        self._compared = False  # trainer and engines, after an update that changed the weights
        self.ended = ""  # why
        self.completed_steps = 0  # by this process, skipped ones included
        self._halved = ""  # which micro-batches the trainer says that it halved

    async def loop(self) -> None:
        """Returns after the last step, the time limit, the target solve rate or an interrupt."""
        async with self._updates:
            pending_batch = self._run.buffer.pending_batch()
            # Groups committed before a kill form this step, unchanged.
            parts = (
                []
                if pending_batch is None
                else [self._part(list(part), pending_batch.demonstrations) for part in pending_batch.parts]
            )
            while await self._form_batch(parts):
                await self._step(parts)
                parts = []
                if not self._end_reason():
                    await self._placement_changer.apply_planned()
            self.ended = self._end_reason()

    def _end_reason(self) -> str:
        """The reason for which the run is over; "" while it isn't."""
        run = self._run
        if reason := end_reason(run.experiment, run.state.version, self._evaluations.best_solve_rate):
            return reason
        limit_s = run.experiment.run.time_limit_s
        if limit_s is not None and run.time_s() >= limit_s:
            return f"run.time_limit_s = {limit_s:g} have passed"
        return "interrupted" if run.state.interrupted else ""

    def _part(self, groups: list[FinishedGroup], logged: LoggedDemonstrations | None) -> BatchPart:
        run = self._run
        demonstrations = demonstrations_of(run.demonstrations, logged)
        return BatchPart(groups, build_batch(run.state.version, groups, run.experiment, demonstrations))

    async def _form_batch(self, parts: list[BatchPart]) -> bool:
        """Fill up and commit the batch of the next step. With ``queue.groups_per_part`` it comes in several ``parts``:
        the trainer computes on one while the next are generated. Returns False when the run drains first; what is
        committed by then stays pending."""
        run, queue = self._run, self._run.experiment.queue
        for group in (group for part in parts for group in part.groups):
            run.state.batch_group(group.group.index)
        while (remaining_groups := queue.groups_per_step - sum(len(part.groups) for part in parts)) > 0:
            if parts:
                await self._compute(lambda: accumulate(run.trainer, [part.batch for part in parts]))
            part_groups = min(queue.groups_per_part or remaining_groups, remaining_groups)
            with run.waits.on("a batch", LOOPS, "the train loop"):
                groups = await self._next_part(NextPart(groups=part_groups, remaining=remaining_groups - part_groups))
            if groups is None:
                return False
            # Membership and order are durable before they are trained on (rule 8).
            indices = tuple(group.group.index for group in groups)
            drawn = None if run.demonstrations is None else run.demonstrations.draw(run.state.version)
            batch = Batch(step=run.state.version, groups=indices, demonstrations=drawn)
            run.buffer.commit_batch(batch, further=bool(parts))
            for index in indices:
                run.state.batch_group(index)
            parts.append(self._part(groups, drawn))
            await run.replicated()
        return True

    async def _next_part(self, part: NextPart) -> list[FinishedGroup] | None:
        """Wait for a part of a batch, or a whole one, that rule 2 allows; None when the run drains first."""
        run = self._run
        queue = run.experiment.queue
        discards_surplus = queue.surplus == "discard" and not part.remaining
        started_s = run.clock.now()
        while not self._end_reason():
            change_count = run.state.changed.count
            is_due = run.state.selectable.due(run.state.version, part)
            selection = run.state.selectable.select(run.state.version, part) if is_due else Selection()
            for index in selection.overdue:
                if discards_surplus and selection.groups:
                    self._end(index, "discarded", _SURPLUS)
                else:
                    self._end(index, "overdue", f"over the budget of {queue.budget} steps at step {run.state.version}")
            if selection.groups:
                run.meter.waited(run.clock.now() - started_s)
                return [run.state.finished[index] for index in sorted(selection.groups)]
            if not selection.overdue:
                checked_s, has_stalled = run.clock.now(), run.state.selectable.finished >= part.groups
                await self._wait(change_count, part)
                if has_stalled:
                    run.meter.straggled(run.clock.now() - checked_s)
        return None

    def _wake_in_s(self) -> float | None:
        """Seconds until the time limit passes; None: there is none."""
        limit_s = self._run.experiment.run.time_limit_s
        return None if limit_s is None else max(0.0, limit_s - self._run.time_s())

    async def _wait(self, mark: int, part: NextPart) -> None:
        """Wait until the state changes or a deadline passes."""
        limit_s, changed = self._wake_in_s(), self._run.state.changed
        if limit_s is None:
            await changed.wait(mark, lambda: self._due(part))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await changed.wait(mark)

    def _due(self, part: NextPart) -> bool:
        """Whether the run is over, a batch can be formed, or a group is overdue."""
        return bool(self._end_reason()) or self._run.state.selectable.due(self._run.state.version, part)

    def _end(self, index: int, ending: Ending, reason: str) -> None:
        """End an open group that will not be trained."""
        run = self._run
        group = run.state.close_group(index)
        run.parking.forget(index)
        if isinstance(group, RunningGroup):
            end_running(run, group, ending, reason)
        else:
            end_finished(run, group, ending, reason)
            run.buffer.end_group(index, ending, reason)
        run.state.changed.notify()

    def _settle_surplus(self) -> None:
        """Discard or park the groups still generating when a batch is full, as ``queue.surplus`` demands."""
        run = self._run
        if run.experiment.queue.surplus == "discard":
            for index in list(run.state.running):
                self._end(index, "discarded", _SURPLUS)
        elif run.experiment.queue.surplus == "park":
            run.parking.park_all(run.rollouts)

    async def _step(self, parts: list[BatchPart]) -> None:
        run = self._run
        state = run.state
        state.training = True
        step, groups = state.version, [group for part in parts for group in part.groups]
        self._settle_surplus()
        report = await self._compute(lambda: train_on(run.trainer, [part.batch for part in parts]))
        samples = _with_advantages([sample for part in parts for sample in part.batch.samples], report)
        run.buffer.complete_step(step, "skipped" if report.skipped else "trained", report.reason)
        ending = "discarded" if report.skipped else "trained"
        for group in groups:
            state.close_group(group.group.index)
            end_finished(run, group, ending, report.reason if report.skipped else "step")
        self._keep_samples(step, samples, ending)
        state.version = report.version
        # The record's interval ends here, with the step; no await stands between its commit and this line.
        record = run.meter.close_step(
            report=report,
            trained=[] if report.skipped else groups,
            state=state,
            buffer_capacity_groups=run.buffer.statistics().capacity,
            time_s=run.time_s(),
            useful_samples=0 if report.skipped else useful_samples(samples, run.experiment.rules),
        )
        if not report.skipped and parts[0].batch.demonstrations:
            record = msgspec.structs.replace(record, demonstrations=len(parts[0].batch.demonstrations))
        if report.unrecorded:
            run.event(EVENT_ROLLOUTS_ENDED, report.unrecorded)
        if report.metrics.get(SKIPPED_VALUE_UPDATES):
            run.event("value_update_skipped", report.reason)
        if report.halved != self._halved:
            self._halved = report.halved
            run.event("micro_batches_halved", report.halved)
        self.completed_steps += 1
        with run.waits.on("the control loop", LOOPS, "the train loop"):
            await self._completed.put(record)
        self._require_steps(report)
        if not report.skipped:
            await self._publish_if_due()
            await self._checkpoint_if_due()
        if run.memory is not None:
            await run.locks.end(TRAINER)
            await self._applied()
        state.training = False
        run.parking.open_gate()
        state.changed.notify()

    async def _compute(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Run a ``call`` that trains, and return its result. The trainer has shared devices to itself meanwhile."""
        run = self._run
        call_in_turn = call if run.memory is not None else lambda: trainer_turn(run, call)
        return await call_with_restart(run, call_in_turn, run.state.version)

    def _require_steps(self, report: StepReport) -> None:
        """Raise NoProgress after ``MAX_CONSECUTIVE_SKIPS`` skipped steps in a row."""
        run, state = self._run, self._run.state
        if not report.skipped:
            state.skipped_steps = 0
            return
        run.event("step_skipped", report.reason)
        state.skipped_steps += 1
        if state.skipped_steps >= MAX_CONSECUTIVE_SKIPS:
            raise NoProgress(
                f"{MAX_CONSECUTIVE_SKIPS} steps in a row were skipped, the last one because: {report.reason}"
            )

    def _keep_samples(self, step: int, samples: Sequence[Sample], ending: Ending) -> None:
        for sample in samples[:_KEPT_SAMPLES]:
            self._run.keep_sample(sample_line(self._run, step, sample, ending))

    async def _publish_if_due(self) -> None:
        run = self._run
        version = run.state.version
        if version - run.state.published_version < run.state.knobs.steps_per_publish:
            return
        requested_s = run.clock.now()
        await run.state.finish_update()
        started_s = run.clock.now()
        run.meter.update_waited(started_s - requested_s)
        scores = [] if self._compared else await call_with_restart(run, self._scores, version)
        started_s = run.clock.now()
        await call_with_restart(run, lambda: run.trainer.begin_publish(version), version)
        weights = None  # yet: it is published beside the next step, which needs a budget that doesn't wait for it
        if run.memory is not None or scores or run.experiment.queue.budget < run.state.knobs.steps_per_publish:
            weights = await self._published(version)
        run.meter.published(run.clock.now() - started_s)
        run.state.published_version = version
        if has_candidate := await self._evaluations.save_candidate_if_due():
            weights = weights or await self._published(version)
        work = self._publish_and_apply(version) if weights is None else self._apply(weights, has_candidate, scores)
        run.state.update = self._updates.create_task(work, name=f"update-{version}")
        if run.memory is None:
            await self._applied()

    async def _published(self, version: int) -> PublishedWeights:
        return await call_with_restart(self._run, lambda: self._run.trainer.publish(version), version)

    async def _publish_and_apply(self, version: int) -> None:
        """Publish a version whose snapshot is taken, and apply it. If the trainer dies meanwhile, it is replaced before
        its next call, and the new one publishes it."""
        try:
            weights = await self._run.trainer.publish(version)
        except WorkerDied as death:
            self._run.state.trainer_death = death
            return
        await self._apply(weights, candidate=False, scores=[])

    async def _applied(self) -> None:
        """With ``queue.budget = 0``, wait until the version just published is applied: nothing is generated before."""
        run, published_s = self._run, self._run.clock.now()
        if run.experiment.queue.budget == 0:
            await run.state.finish_update()
            run.meter.update_waited(run.clock.now() - published_s)

    async def _scores(self) -> list[ProbeScores]:
        run = self._run
        probe_prompt = await pictured_prompt(run.experiment, run.prompts.pictures)  # held since the run's begin
        return await trainer_scores(run.experiment, run.trainer, probe_prompt)

    async def _apply(self, weights: PublishedWeights, candidate: bool, scores: list[ProbeScores]) -> None:
        """Apply a version on every replica, in flight; parked rollouts resume once it is in place. ``scores``: of the
        trainer, which the replicas must agree with."""
        run = self._run
        started_s = run.clock.now()
        run.state.resume_gate.clear()
        run.state.applying = True
        try:
            reports = await run.generator.update_weights(weights, leave_slow=run.experiment.queue.budget > 0)
        finally:
            run.state.applying = False
            self._discard_damaged()
            run.parking.open_gate()
        run.meter.applied_version = await run.generator.applied_version()
        run.meter.applied(run.clock.now() - started_s, reports, weights)
        run.state.changed.notify()
        is_compared = await require_agreement(run.experiment, run.generator, scores, weights.version, run.event)
        self._compared = self._compared or is_compared
        if candidate:
            self._evaluations.start(weights.version, self._updates)

    def _discard_damaged(self) -> None:
        """End the open groups of which a replica may have sampled a part from damaged weights. Of those that are in a
        committed batch it is too late."""
        matches = map(_MEMBER.fullmatch, self._run.generator.take_voided())
        for index in sorted({int(match[1]) for match in matches if match is not None}):
            if index in self._run.state.selectable:
                self._end(index, "discarded", _DAMAGED)

    async def _checkpoint_if_due(self) -> None:
        if self._run.state.version % self._run.experiment.checkpoint.every_steps == 0:
            await self.checkpoint(beside=self._run.memory is None)

    async def ensure_checkpoint(self) -> None:
        """Return when there is a checkpoint of the present version."""
        await self._run.state.finish_checkpoint()
        if not checkpoint_path(self._run.directory, self._run.state.version).exists():
            await self.checkpoint()

    async def checkpoint(self, *, beside: bool = False) -> None:
        """Write a checkpoint of the present version, then release the payloads that the oldest kept one covers.
        ``beside``: from a copy of the trainer's state, beside the next steps."""
        run = self._run
        version, started_s = run.state.version, run.clock.now()
        await run.state.finish_checkpoint()
        run.buffer.make_durable()  # no checkpoint is ever ahead of the log
        await run.replicated()
        saved = str(checkpoint_path(run.directory, version)), run.buffer.consumed()
        save = partial(run.trainer.save_checkpoint, *saved, run.buffer.make_durable)
        if beside:
            await call_with_restart(run, lambda: run.trainer.begin_checkpoint(*saved), version)
            work = self._complete_checkpoint(save, version, started_s)
            run.state.checkpoint = self._updates.create_task(work, name=f"checkpoint-{version}")
        else:
            await call_with_restart(run, save, version)
            self._release_covered(version, started_s)
        run.meter.checkpointed(run.clock.now() - started_s)

    async def _complete_checkpoint(self, save: Callable[[], Awaitable[Any]], version: int, started_s: float) -> None:
        """Write the checkpoint whose state is copied. If the trainer dies meanwhile, the one before stays, and the
        trainer is replaced before its next call."""
        try:
            await save()
        except WorkerDied as death:
            self._run.state.trainer_death = death
            return
        self._release_covered(version, started_s)

    def _release_covered(self, version: int, started_s: float) -> None:
        """Release the payloads that the oldest kept checkpoint covers, now that the one of ``version`` is durable."""
        run, kept_folders = self._run, find_checkpoints(self._run.directory)
        if kept_folders:
            run.buffer.release_covered(version_of(kept_folders[0]))
            if run.prompts.pictures is not None:
                run.prompts.pictures.remove_unneeded(read_pixels(run.buffer.path))
        seconds = run.clock.now() - started_s
        run.state.checkpoint_s = max(run.state.checkpoint_s, seconds)
        run.event("checkpoint", f"version {version}", seconds=round(seconds, 3))


def _with_advantages(samples: list[Sample], report: StepReport) -> list[Sample]:
    """With a critic, ``samples`` with the advantages that the trainer made of their rewards."""
    return [
        msgspec.structs.replace(sample, advantage=advantage, rewards=())
        for sample, advantage in zip(samples, report.sample_advantages, strict=False)  # demonstrations follow
    ] or samples


def sample_line(run: RunContext, step: int, sample: Sample, ending: Ending) -> dict[str, object]:
    """A row of the trackers' tables."""
    rollout = sample.rollout
    return {
        "step": step,
        "group": rollout.group,
        "member": rollout.member,
        "prompt": run.tokenizer.decode(rollout.prompt_ids),
        "response": run.tokenizer.decode(rollout.response_ids),
        "reward": rollout.reward,
        "solved": rollout.solved,
        "advantage": None if sample.rewards else sample.advantage,
        "versions": [[span.version, span.tokens] for span in rollout.versions],
        "finish_reason": rollout.finish_reason,
        "pruned": None if rollout.pruned is None else msgspec.to_builtins(rollout.pruned),
        "ending": ending,
    }
