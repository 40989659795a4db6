"""Resume: checkpoint c, then the logged batches c, c+1, ... again, without generating (DESIGN rule 8)."""

from __future__ import annotations

from headway.orchestrator.batches import build_batch
from headway.orchestrator.context import RunContext
from headway.orchestrator.state import RunningGroup
from headway.records.errors import CheckpointCorrupt
from headway.trainer.checkpoints import latest_valid, set_aside


async def restore_trainer(run: RunContext, until: int) -> int:
    """Bring a fresh trainer to version ``until``: newest valid checkpoint, then replay; returns the number
    of replayed steps. Raises CheckpointCorrupt or BufferCorrupt when they don't lead there."""
    checkpoint = latest_valid(run.directory, on_corrupt=lambda error: run.event("checkpoint_corrupt", str(error)))
    version = 0
    if checkpoint is not None:
        version = await run.trainer.load_checkpoint(str(checkpoint))
        set_aside(run.directory, newer_than=checkpoint)
    replayed = 0
    for logged in run.buffer.batches_since(version):
        if version >= until:
            break
        report = await run.trainer.train_step(
            build_batch(logged.step, logged.groups, run.experiment.algorithm.advantage)
        )
        if report.skipped:
            raise CheckpointCorrupt(f"step {logged.step} trained before but is skipped in the replay: {report.reason}")
        version = report.version
        replayed += 1
    if version != until:
        raise CheckpointCorrupt(f"checkpoints and batch log lead to version {version}, the run was at {until}")
    return replayed


def reopen_groups(run: RunContext) -> None:
    """Put every group that has not ended back where it was: finished ones wait for the trainer, unfinished
    ones are generated again (under the same sampling keys)."""
    state = run.state
    for record in run.buffer.open_groups():
        finished = record.finished
        if finished is None:
            state.running[record.group.index] = RunningGroup(group=record.group, unfinished=record.group.size)
        else:
            state.finished[record.group.index] = finished
            state.finished_at_s[record.group.index] = run.clock.now()
    state.books = run.buffer.books()
    run.meter.length_bias = run.buffer.length_bias(run.experiment.queue.groups_per_step)
    state.admitted = run.buffer.next_index
    state.version = run.buffer.completed_steps
    run.tasks.seek(run.buffer.cursor_position)
