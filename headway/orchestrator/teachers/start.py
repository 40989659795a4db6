"""Starts the teachers of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from headway.config.external_models import TeacherConfig
from headway.config.schema import Experiment
from headway.orchestrator.teachers.checks import require_teachers
from headway.orchestrator.teachers.replicas import ReplicaTeacher
from headway.orchestrator.teachers.stage import TeacherStage
from headway.records.task import Task
from headway.runtime.clock import Clock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher
from headway.tokens.tokenizer import Tokenizer


async def start_teachers(
    experiment: Experiment,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    launcher: Launcher,
    clock: Clock,
    waits: Waits,
    on_event: EventCallback,
    stack: AsyncExitStack,
) -> TeacherStage | None:
    """Start the teachers that sources' rules name, which ``stack`` stops; None: none does. Raises ConfigurationError
    for one that can't teach this run, or a critic that can't read it, and WorkerDied."""
    require_teachers(experiment, tokenizer, tasks)
    if not experiment.used_teachers:
        return None
    logs = RunDirectory(experiment.run.directory).logs

    def make_replicas(name: str, teacher: TeacherConfig) -> ReplicaTeacher:
        return ReplicaTeacher(name, teacher, experiment, launcher, clock, on_event, logs)

    stage = TeacherStage(experiment, tokenizer, clock, waits, make_replicas)
    stack.push_async_callback(stage.stop)
    await stage.start()
    return stage
