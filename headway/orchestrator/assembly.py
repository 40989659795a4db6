"""Assembles a run from its actors, real ones or fakes; no other module knows how the parts are connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from headway.algorithms.advantages import resolve as resolve_advantage
from headway.buffer.replication import AccountingReplica
from headway.buffer.store import GroupBuffer
from headway.config.schema import Experiment
from headway.control.staleness import OpenGroups
from headway.control.tuning.knob_search import first_knobs
from headway.models.hf.prompts import PictureClient, PromptMaker
from headway.models.routing import replayed_routing
from headway.orchestrator.context import Decide, RunContext, WorkerPools, no_copy, no_sandboxes
from headway.orchestrator.parking import Parking
from headway.orchestrator.pruning import Pruner
from headway.orchestrator.run import Run
from headway.orchestrator.run_device_locks import RunMemory, open_locks, require_offload
from headway.orchestrator.state import RunState
from headway.orchestrator.step_metrics import StepMetrics
from headway.orchestrator.task_selection import make_task_selector
from headway.orchestrator.task_sets import training_data, training_weights
from headway.records.clients import Generator, PromptCodec, RolloutMaker, TeacherScores, Trainer, Verifier, Watch
from headway.records.ledger import LedgerLine
from headway.records.node import NodeConditions
from headway.records.rollout import Group
from headway.records.task import Task
from headway.records.trace import TraceLine
from headway.rollout.makers.environment import Environments
from headway.rollout.makers.select import MultiTurnHost, make_rollouts
from headway.rollout.makers.turn_sampler import Generate, TurnSampler
from headway.runtime.clock import Clock
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.telemetry.rollouts.recorder import RolloutRecorder

WrapGenerate = Callable[[Generate], Generate]

_MOST_RESUMES = 2  # after these parkings a rollout runs uninterrupted: its tokens get ever older


@dataclass(kw_only=True)
class Actors:
    """Everything a run needs from outside. Actors may start before or after ``assemble``, but before ``Run.begin``."""

    generator: Generator
    trainer: Trainer
    verifier: Verifier
    tokenizer: PromptCodec
    teachers: TeacherScores | None = None  # None: no rule has any
    pictures: PictureClient | None = None  # None: no task has any
    train_tasks: Sequence[Task]
    evaluation_tasks: Mapping[str, list[Task]] = field(default_factory=dict)  # split -> tasks
    demonstrations: Demonstrations | None = None  # see RunContext
    record: Callable[[LedgerLine], None]  # the ledger
    keep_sample: Callable[[dict[str, object]], None] = lambda line: None  # for trackers' tables
    recorder: RolloutRecorder | None = None  # of all rollouts
    observe: Callable[[TraceLine], None] | None = None  # receives the trace
    cpu_s: Callable[[], float] = time.process_time  # CPU seconds of this process, for the ledger
    rollouts: Callable[[TurnSampler], RolloutMaker] | None = None  # None: as the experiment configures
    host: MultiTurnHost | None = None  # of agents, environments or outside workers, by environment.name
    wrap_generate: WrapGenerate | None = None  # put between rollouts and generator (a benchmark sets lengths there)
    controller: Decide | None = None  # see RunContext
    nodes: Callable[[], Iterable[NodeConditions]] = tuple  # see RunContext
    worker_pools: WorkerPools | None = None  # see RunContext
    shared: Collection[int] | None = None  # replicas on devices of the trainer; None: as the experiment places them
    waits: Waits | None = None  # where calls of the actors are registered


def assemble(
    experiment: Experiment,
    actors: Actors,
    clock: Clock,
    buffer_path: Path,
    stack: ExitStack | AsyncExitStack,
    fence: Callable[[], None] = lambda: None,
    copy: AccountingReplica | None = None,
) -> Run:
    """Assemble a run over ``actors``; ``stack`` closes it. ``fence`` guards the buffer's commits, ``copy`` isn't
    started yet. Raises ConfigurationError for an unknown advantage: the first batch would be too late."""
    for rule in experiment.rules.algorithms:
        resolve_advantage(rule.advantage)
    queue = experiment.queue
    policy = "drop" if queue.surplus == "discard" else queue.overdue  # no batch waits for surplus that is discarded
    selectable = OpenGroups(
        queue.groups_per_step, queue.budget, policy, in_order=experiment.run.deterministic and not queue.budget
    )
    state = RunState(clock=clock, knobs=first_knobs(experiment), selectable=selectable)
    generate = (actors.wrap_generate or (lambda plain: plain))(actors.generator.generate)
    capacity = queue.groups_per_step * (queue.budget + 1) + experiment.surplus_groups
    buffer = GroupBuffer(buffer_path, capacity, clock, fence, None if copy is None else copy.journal, actors.recorder)
    stack.enter_context(closing(buffer))
    selector = make_task_selector(experiment, actors.train_tasks, training_weights(experiment))
    parking = Parking(state, buffer, queue, RunDirectory(experiment.run.directory).sandboxes)

    def watch_of(group: Group, member: int) -> Watch | None:
        return None if context.pruning is None else context.pruning.watch_of(group, member)

    sampler = TurnSampler(
        generate,
        actors.tokenizer,
        experiment.rollout,
        clock,
        run_seed=experiment.run.seed,
        max_resumes=_MOST_RESUMES,
        resume_gate=parking.wait,
        begin_gate=parking.begin,
        requests=actors.generator,
        watch_of=watch_of,
        routing=replayed_routing(experiment),
        kept_sets=experiment.kept_sets,
    )
    made = actors.rollouts(sampler) if actors.rollouts else make_rollouts(experiment, sampler, actors.host, buffer.park)
    waits = actors.waits or Waits(clock.now)
    meter = StepMetrics(experiment, clock, observe=actors.observe, curriculum=selector.take_step, cpu_s=actors.cpu_s)
    memory = _memory(experiment, actors, meter, lambda name, detail, /, **data: context.event(name, detail, **data))
    context = RunContext(
        experiment=experiment,
        clock=clock,
        state=state,
        generator=actors.generator,
        trainer=actors.trainer,
        verifier=actors.verifier,
        teachers=actors.teachers,
        buffer=buffer,
        task_selector=selector,
        tokenizer=actors.tokenizer,
        prompts=PromptMaker(actors.tokenizer, experiment.model.template, actors.pictures),
        rollouts=made,
        parking=parking,
        waits=waits,
        locks=open_locks(experiment, actors.generator, clock, waits, actors.shared, memory),
        memory=memory,
        meter=meter,
        record=actors.record,
        keep_sample=actors.keep_sample,
        directory=experiment.run.directory,
        training_data=training_data(actors.train_tasks, actors.demonstrations),
        evaluation_tasks=dict(actors.evaluation_tasks),
        demonstrations=actors.demonstrations,
        started_s=clock.now(),
        controller=actors.controller,
        replicated=no_copy if copy is None else copy.reached,
        nodes=actors.nodes,
        worker_pools=actors.worker_pools,
        sandboxes=actors.host.pool.sandboxes if isinstance(actors.host, Environments) else no_sandboxes,
    )
    context.pruning = Pruner(context) if experiment.pruning.kinds else None
    return Run(context)


def _memory(experiment: Experiment, actors: Actors, meter: StepMetrics, on_event: EventCallback) -> RunMemory | None:
    require_offload(experiment)
    pools = actors.worker_pools
    if pools is None or not experiment.run.offload:
        return None
    return RunMemory(pools.generator, pools.trainer, meter, on_event)
