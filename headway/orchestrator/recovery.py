"""Resumes a run: loads checkpoint c, then trains on the logged batches c, c+1, ... again (DESIGN rule 8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from headway.algorithms.groups.batches import build_batch
from headway.orchestrator.context import RunContext
from headway.orchestrator.run_device_locks import TRAINER
from headway.orchestrator.state import RunningGroup
from headway.records.clients import Trainer
from headway.records.errors import CheckpointCorrupt, MicroBatchesHalved, WorkerDied
from headway.records.training import StepReport, TrainBatch
from headway.tasks.drawn_demonstrations import demonstrations_of
from headway.trainer.checkpoints import latest_valid, rename_corrupt

MAX_RESTARTS = 3  # of a trainer, for each call
REPLAY_REPORT_EVERY_S = 10.0

Result = TypeVar("Result")


async def call_with_restart(run: RunContext, call: Callable[[], Awaitable[Result]], version: int) -> Result:
    """Return the result of a ``call`` to the trainer. When the trainer dies meanwhile, a new one is brought to
    ``version`` and the call repeated. Raises WorkerDied when it dies more than ``MAX_RESTARTS`` times."""
    call_in_turn = call if run.memory is None else lambda: trainer_turn(run, call)
    for _ in range(MAX_RESTARTS):
        try:
            if run.state.trainer_death is not None:
                raise run.state.trainer_death
            return await call_in_turn()
        except WorkerDied as death:
            run.died(death)
            await restart_trainer(run, version)
    return await call_in_turn()


async def trainer_turn(run: RunContext, call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of a ``call`` to the trainer, which has its devices to itself meanwhile. With `run.offload` one
    turn may span several calls: the train loop ends it, or an error here."""
    keeps_turn = run.memory is not None and run.state.training
    if run.memory is not None and not run.locks.holds(TRAINER):
        await run.state.finish_update()  # it may need replicas that are offloaded in the turn
    # The turn ends before a dead trainer is replaced: an update may wait for replicas that are paused meanwhile.
    try:
        if not run.locks.holds(TRAINER):
            requested_s = run.clock.now()
            await run.locks.acquire(TRAINER)
            run.meter.device_waited(run.clock.now() - requested_s)
        returned = await call()
    except BaseException:
        await run.locks.end(TRAINER)
        raise
    if not keeps_turn:
        await run.locks.end(TRAINER)
    return returned


async def restart_trainer(run: RunContext, version: int, *, moved: bool = False) -> int:
    """Start a new trainer at ``version`` and apply its published weights; returns the number of replayed steps.
    ``moved``: the old one was stopped for a new placement, it hasn't died. Raises WorkerDied when the new one dies
    ``MAX_RESTARTS`` times."""
    died_s = run.clock.now()
    await run.state.finish_update()
    await run.state.finish_checkpoint()
    if run.memory is not None and run.locks.holds(TRAINER):  # it died between two parts of a batch
        await run.locks.end(TRAINER)
    for remaining_attempts in reversed(range(MAX_RESTARTS)):
        # With run.offload it starts in a turn of its own: else trainer and replicas would share the devices' memory.
        device_turn = nullcontext() if run.memory is None else run.locks.turn(TRAINER, load=False)
        try:
            async with device_turn:
                await run.trainer.restart()
                replayed_steps, lost_samples = await restore_trainer(run, until=version)
                weights = await run.trainer.publish(version)
        except WorkerDied as death:
            run.died(death)
            if not remaining_attempts:
                raise
        else:
            run.state.trainer_death = None
            await run.generator.update_weights(weights)
            run.state.published_version = version
            if not moved:
                loss_fields = {"worker": "trainer", "lost_s": run.clock.now() - died_s, "lost_samples": lost_samples}
                run.event("trainer_restored", f"version {version}", replayed=replayed_steps, **loss_fields)
            return replayed_steps
    raise AssertionError("unreachable")


async def accumulate(trainer: Trainer, parts: Sequence[TrainBatch]) -> None:
    """Have the trainer compute the gradients of the ``parts`` of its next step that it lacks. After a restart, or once
    its micro-batches were halved, it lacks all."""
    while trainer.accumulated_parts < len(parts):
        with suppress(MicroBatchesHalved):
            await trainer.forward_backward(parts[trainer.accumulated_parts])


async def train_on(trainer: Trainer, parts: Sequence[TrainBatch]) -> StepReport:
    """Have the trainer take a step on its batch, in one call where it has one part."""
    if len(parts) == 1:
        return await trainer.train_step(parts[0])
    await accumulate(trainer, parts)
    return await trainer.optim_step()


async def restore_trainer(run: RunContext, until: int) -> tuple[int, int]:
    """Bring a fresh trainer to version ``until``: load the newest valid checkpoint, then replay logged batches. Returns
    the numbers of replayed steps and samples. Raises CheckpointCorrupt or BufferCorrupt when they don't lead there."""
    checkpoint = latest_valid(run.directory, on_corrupt=lambda error: run.event("checkpoint_corrupt", str(error)))
    version = 0
    if checkpoint is not None:
        version = await run.trainer.load_checkpoint(str(checkpoint))
        rename_corrupt(run.directory, newer_than=checkpoint)
    steps = sample_count = 0
    started_s = reported_s = run.clock.now()
    for replay in run.buffer.batches_since(version):
        if version >= until:
            break
        demonstrations = demonstrations_of(run.demonstrations, replay.demonstrations)
        batch_parts = [build_batch(replay.step, part, run.experiment, demonstrations) for part in replay.parts]
        report = await train_on(run.trainer, batch_parts)
        if report.skipped:
            raise CheckpointCorrupt(f"step {replay.step} trained before but is skipped in the replay: {report.reason}")
        version = report.version
        steps += 1
        sample_count += sum(len(batch.samples) for batch in batch_parts)
        if (now_s := run.clock.now()) - reported_s >= REPLAY_REPORT_EVERY_S:
            reported_s, left_s = now_s, (now_s - started_s) / steps * (until - version)
            run.event("replaying", f"{steps} of {steps + until - version} steps again; {left_s:.0f} s left")
    if version != until:
        raise CheckpointCorrupt(f"checkpoints and batch log lead to version {version}, the run was at {until}")
    return steps, sample_count


def restore_records(run: RunContext, recorded: int) -> None:
    """Record the completed steps, from step ``recorded`` on, that the ledger lacks. A kill came between a step's commit
    and its line, or the ledger was cut or removed. Steps whose payloads have been released stay unrecorded."""
    restored = 0
    if (gap := min(run.buffer.released_version, run.buffer.completed_steps) - recorded) > 0:
        detail = (
            f"ledger.jsonl lacks the steps from {recorded} on (was it removed, or cut?): training continues from the "
        )
        run.event("ledger_incomplete", f"{detail}buffer; times and rates of {gap} steps are lost", steps=gap)
    for logged_batch in run.buffer.batches_since(max(recorded, run.buffer.released_version)):
        if logged_batch.outcome == "trained":
            run.record(run.meter.lost_step(logged_batch, run.time_s()))
            restored += 1
    if restored:
        run.event("records_restored", f"of {restored} completed steps whose own lines the ledger lacks", steps=restored)


def reopen_groups(run: RunContext) -> None:
    """Restore every group that hasn't ended. Finished groups wait for the trainer; members of the others resume from
    their parked tokens, or are generated again (under the same sampling keys)."""
    state = run.state
    for open_record in run.buffer.open_groups():
        finished = open_record.finished
        if finished is None:
            begun_versions = [parked.first_version for parked in open_record.parked if parked.first_version >= 0]
            running = RunningGroup(
                group=open_record.group,
                unfinished=open_record.group.size,
                # tokens that weren't parked are generated again, under the version published next
                oldest_version=min([run.buffer.completed_steps, *begun_versions]),
                partials={parked.member: parked for parked in open_record.parked},
            )
            state.open_group(running)
        else:
            state.finish_group(finished, run.clock.now())
    run.parking.reopen([parked for running in state.running.values() for parked in running.partials.values()])
    state.accounting = run.buffer.accounting()
    run.meter.length_bias = run.buffer.length_bias(run.experiment.queue.groups_per_step)
    state.admitted = run.buffer.next_index
    run.task_selector.restore(run.buffer)
