"""`headway train`: starts the processes of a run, drives it to its end, and cleans up after any failure."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headway.buffer.replication import AccountingReplica
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.models.hf.prompts import open_pictures
from headway.orchestrator.actors.controller_process import ControllerProcess
from headway.orchestrator.actors.environments import open_multi_turn_host
from headway.orchestrator.actors.placement_changer import require_movable
from headway.orchestrator.assembly import Actors, WrapGenerate, assemble
from headway.orchestrator.context import RunContext, WorkerPools
from headway.orchestrator.evaluation import end_reason
from headway.orchestrator.jobs.model_card import write_run_card
from headway.orchestrator.nodes.machines import open_machines
from headway.orchestrator.preflight.capacity import exports_weights
from headway.orchestrator.preflight.references import leave_out_unproved
from headway.orchestrator.queue_snapshots import recording_snapshots
from headway.orchestrator.run import Run
from headway.orchestrator.run_device_locks import join_replica
from headway.orchestrator.stalls.alert_watch import AlertSettings, watching_alerts
from headway.orchestrator.stalls.watch import WatchSettings, watching_stalls
from headway.orchestrator.stop_loop import longest_drain_s
from headway.orchestrator.task_sets import changed_data, load_task_sets, named_verifiers
from headway.orchestrator.teachers.start import start_teachers
from headway.records.errors import HeadwayError, Interrupted
from headway.records.ledger import LedgerLine, RunSummary
from headway.records.task import Task
from headway.records.trace import QueueSnapshot, TraceLine, WorkerState
from headway.rollout.hosting.client import EnvironmentPool
from headway.rollout.makers.environment import Environments
from headway.rollout.verification.client import VerifierPool
from headway.runtime.clock import Clock, RealClock
from headway.runtime.epochs.register import HeldEpoch, epoch_renewal, take_epoch
from headway.runtime.garbage_collection import short_collections
from headway.runtime.run_directory import RunDirectory, with_saved_placement
from headway.runtime.stalls.waits import Waits
from headway.runtime.supervision import INTERRUPTS, handled_signals
from headway.runtime.workers import Launcher
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.ledger import EVENT_END, Ledger, read_ledger, read_ledger_tail
from headway.telemetry.rollouts.recorder import RolloutRecorder
from headway.telemetry.summary import best_version, evaluations, is_finished, last_live_step, recorded_steps, summarise
from headway.telemetry.trace_file import TraceFile
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.checkpoints import remove_leftovers
from headway.trainer.client import TrainerClient
from headway.weights.slots import reap

STALLS = WatchSettings()
ALERTS = AlertSettings()
OnLine = Callable[[LedgerLine], None]
_SIGNALS = (*INTERRUPTS, signal.SIGUSR1)  # Slurm sends the last one before a time limit


def train(
    experiment: Experiment, *, resume: bool = False, take_over: bool = False, on_line: OnLine | None = None
) -> RunSummary:
    """Train the ``experiment``; returns the summary that RUN/summary.json holds. ``take_over``: the former process of
    the run has ended, although nothing shows it (see `take_epoch`).

    Raises Interrupted after Ctrl-C (once: finish the step and the running groups, checkpoint, all within
    ``run.stop_grace_s``; twice: stop at once); the run can be resumed in both cases. Other HeadwayErrors name the cause
    of the end.
    """
    directory = RunDirectory(experiment.run.directory)
    with directory.held(experiment, resume=resume):
        return asyncio.run(_train(experiment, directory, resume, take_over, on_line))


def run_identity(directory: str | Path) -> str:
    """Compute the name of a run's shared memory. Every process that resumes the run gets the same one, so that it finds
    leftovers."""
    return hashlib.blake2b(str(Path(directory).resolve()).encode(), digest_size=6).hexdigest()


async def _train(
    experiment: Experiment, directory: RunDirectory, resume: bool, take_over: bool, on_line: OnLine | None
) -> RunSummary:
    clock = RealClock()
    async with _interruptible() as interrupts, AsyncExitStack() as stack:
        epoch = await take_epoch(directory.path, experiment.cluster.disconnect_timeout_s, clock, take_over=take_over)
        await stack.enter_async_context(epoch_renewal(epoch))
        identity = run_identity(directory.path)
        remove_leftovers(directory.path)  # from here on no other process uses the folder
        reap(identity)
        stack.callback(reap, identity)  # of a trainer that was killed
        ledger = stack.enter_context(Ledger(directory.path, clock))
        if on_line is not None:
            ledger.subscribe(on_line)
        ledger_lines = read_ledger(directory.path)
        if resume and (reason := _end_reason(experiment, ledger_lines)):
            ledger.event(EVENT_END, reason, step=recorded_steps(ledger_lines))
            return await _summarise(directory, ledger)
        try:
            observers = start_observers(experiment, directory, ledger, clock, stack, resume=resume)
            run = await wire(experiment, directory, ledger, clock, stack, observers=observers, epoch=epoch)
            interrupts.run = run
        # Raised again: the folder is only withdrawn when a verifier can't be imported or a device is missing, so that
        # the same command starts from the beginning. Not after Ctrl-C, whose message names --resume.
        except Exception:
            if not resume:
                directory.withdraw()
            raise
        stall_watch = watching_stalls(run.context, directory, interrupts.stop, STALLS)
        await stack.enter_async_context(stall_watch)
        await stack.enter_async_context(watching_alerts(run.context, directory.path, ledger, ledger_lines, ALERTS))
        observers.announce()
        await run.begin(recorded_steps(ledger_lines), last_live_step(ledger_lines), best_version(ledger_lines))
        for key, change_text in changed_data(run.context.training_data, ledger_lines).items() if resume else ():
            run.context.event(f"{key.partition('.')[0]}_changed", change_text)
        await run.train()
        await run.conclude()
        summary = await _summarise(directory, ledger)
        if run.context.state.interrupted:
            raise Interrupted(
                f"stopped at version {run.context.state.version}; continue with: headway train ... --resume"
            )
        return summary


def _end_reason(experiment: Experiment, lines: Sequence[LedgerLine]) -> str:
    """Explain why a finished run has no step left as configured now, and which option continues it. "" where it has."""
    validations = [record for record in evaluations(lines) if record.split == "validation" and record.phase != "before"]
    solve_rates = [evaluation.solve_rate for evaluation in validations if not evaluation.mostly_failed]
    reason = end_reason(experiment, recorded_steps(lines), max(solve_rates, default=-1.0)) if is_finished(lines) else ""
    option_text = "--evaluation.stop_at_solve_rate=…, or none," if "stop_at" in reason else "--run.steps=…"
    return reason and f"{reason} already, nothing was trained; a larger {option_text} continues it"


async def _summarise(directory: RunDirectory, ledger: Ledger) -> RunSummary:
    """Compute the summary of a run, and write it to the run's folder and the best model's card."""
    ledger_tail = read_ledger_tail(directory.path)
    summary = summarise(list(ledger_tail.lines.values()), ledger_tail.duration_s)
    directory.write_json(directory.summary, summary)
    if directory.best.is_dir():
        try:
            await asyncio.to_thread(write_run_card, directory.best, directory.path)
        except HeadwayError as error:  # the weights are written, and matter more than their card
            ledger.event("model_card_failed", str(error))
    return summary


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Observers of a run beside its ledger; the run waits for none of them."""

    observe: Callable[[TraceLine], None] | None = None  # receives the trace
    sample: Callable[[dict[str, object]], None] = lambda row: None  # receives rollouts for trackers' tables
    recorder: RolloutRecorder | None = None  # of all rollouts
    announce: Callable[[], None] = lambda: None  # records the addresses of the views in the ledger


def start_observers(
    experiment: Experiment,
    directory: RunDirectory,
    ledger: Ledger,
    clock: Clock,
    stack: AsyncExitStack,
    *,
    resume: bool = False,
) -> Observers:
    """Start the trackers, `/metrics`, the trace and the record that ``experiment`` asks for; ``stack`` ends them.
    Raises ConfigurationError when one can't be started."""
    exports = stack.enter_context(start_exports(experiment, directory, ledger, resume=resume))
    trace = None
    if experiment.ledger.trace:
        trace = stack.enter_context(TraceFile(directory.path, clock, time.time(), on_failure=ledger.event))
        ledger.subscribe(trace.on_line)

    recorder = RolloutRecorder(directory.path, experiment.ledger, clock, ledger.event)
    stack.enter_context(closing(recorder))

    def observe(line: TraceLine) -> None:
        if trace is not None:
            trace.write(line)
        if isinstance(line, QueueSnapshot):
            exports.snapshot(line)

    is_observed = trace is not None or exports.wants_snapshots
    return Observers(
        observe=observe if is_observed else None, sample=exports.sample, recorder=recorder, announce=exports.announce
    )


@dataclass
class _Interrupts:
    """Handles Ctrl-C, SIGTERM and SIGUSR1: the first drains, the second stops at once, as does the end of the grace.
    Before there is a run the first stops."""

    task: asyncio.Task[Any]
    run: Run | None = None
    stopping: bool = False
    reason: str = ""

    def on_signal(self) -> None:
        if self.run is None or self.run.context.state.interrupted:
            return self.stop()
        grace_s = self.run.context.experiment.run.stop_grace_s
        self.run.context.event("interrupt", f"finishing running work within {grace_s:g} s; once more stops at once")
        self.run.interrupt()
        self.task.get_loop().call_later(longest_drain_s(grace_s), self._expire)

    def _expire(self) -> None:
        if self.run is not None and not self.task.done():
            self.run.context.event("interrupt", "run.stop_grace_s is nearly over: stopping at once")
            self.stop()

    def stop(self, reason: str = "stopped at once") -> None:
        self.stopping, self.reason = True, reason
        self.task.cancel()


@asynccontextmanager
async def _interruptible() -> AsyncIterator[_Interrupts]:
    """Handle the signals of the block, the starting and stopping of workers included."""
    task = asyncio.current_task()
    assert task is not None
    interrupts = _Interrupts(task)
    try:
        with handled_signals(interrupts.on_signal, _SIGNALS):
            yield interrupts
    except asyncio.CancelledError:
        if not interrupts.stopping:
            raise
        raise Interrupted(f"{interrupts.reason}; continue with: headway train ... --resume") from None


class _WorkerEvents:
    """The `EventCallback` of a run's workers, which records events in the run's ledger. Events from before the run are
    recorded when it begins."""

    def __init__(self) -> None:
        self._early: list[Callable[[RunContext], None]] = []
        self._context: RunContext | None = None

    def __call__(self, name: str, detail: str, /, **fields: Any) -> None:
        if self._context is None:
            self._early.append(lambda context: context.event(name, detail, **fields))
        else:
            self._context.event(name, detail, **fields)

    def begin(self, context: RunContext) -> None:
        self._context = context
        for record in self._early:
            record(context)


def _open_tokenizer(
    experiment: Experiment, directory: RunDirectory, events: _WorkerEvents
) -> tuple[Tokenizer, Demonstrations | None]:
    """The tokenizer, and the demonstrations that it encodes."""
    tokenizer = Tokenizer.of(experiment, directory.started())
    if tokenizer.added_stops:
        events("stop_tokens_added", tokenizer.added_text)
    return tokenizer, Demonstrations.read(experiment, tokenizer)


async def wire(
    experiment: Experiment,
    directory: RunDirectory,
    ledger: Ledger,
    clock: Clock,
    stack: AsyncExitStack,
    wrap_generate: WrapGenerate | None = None,
    observers: Observers = Observers(),
    epoch: HeldEpoch | None = None,
) -> Run:
    """Start every actor of the run; ``stack`` stops them in reverse order. ``wrap_generate``: see `Actors`."""
    task_sets = load_task_sets(experiment)
    await stack.enter_async_context(short_collections(clock))  # rollouts are short-lived: few old objects die
    events, identity, waits = _WorkerEvents(), run_identity(directory.path), Waits(clock.now)
    epoch_number, folder = 1 if epoch is None else epoch.number, directory.path
    machines = await stack.enter_async_context(
        open_machines(experiment, clock, events, epoch=epoch_number, run_id=identity, key_folder=folder, waits=waits)
    )
    launcher, configured_experiment = machines.launcher, machines.experiment
    require_movable(configured_experiment)
    experiment = with_saved_placement(configured_experiment, directory)
    host = await stack.enter_async_context(open_multi_turn_host(experiment, launcher, clock, events, directory, waits))
    options: dict[str, Any] = {"configured": configured_experiment, "log_directory": directory.logs}
    options |= {"host_of": machines.host_of, "exports_weights": exports_weights(experiment)}
    trainer = TrainerClient(launcher, experiment, identity, **options)
    generator = GeneratorPool(
        launcher, experiment, clock, on_event=events, log_directory=directory.logs, bring_to=machines.bring_to
    )
    verifier = await _start_verifier(
        experiment, task_sets, launcher, clock, stack, directory, observers.observe, events
    )
    task_sets = await leave_out_unproved(experiment, task_sets, verifier, events, directory.left_out)
    controller = ControllerProcess(launcher, clock, directory.logs)
    pictures = open_pictures(experiment, task_sets, launcher, clock, events)
    tokenizer, demonstrations = _open_tokenizer(experiment, directory, events)
    learned = (experiment, tokenizer, task_sets["train"])
    teachers = await start_teachers(*learned, launcher, clock, waits, events, stack)
    actors = Actors(
        generator=generator,
        trainer=trainer,
        verifier=verifier,
        tokenizer=tokenizer,
        teachers=teachers,
        demonstrations=demonstrations,
        pictures=pictures,
        train_tasks=task_sets.pop("train"),
        evaluation_tasks=task_sets,
        record=ledger.record,
        keep_sample=observers.sample,
        recorder=observers.recorder,
        observe=observers.observe,
        host=host,
        wrap_generate=wrap_generate,
        controller=controller,
        waits=waits,
        nodes=machines.conditions,
        worker_pools=WorkerPools(generator=generator, trainer=trainer, configured=configured_experiment),
    )
    fence = (lambda: None) if epoch is None else epoch.require
    buffer_path, copy_location = directory.buffer, experiment.cluster.replicate_to
    replicas = [AccountingReplica(launcher, clock, copy_location, buffer_path, events)] if copy_location else []
    run = assemble(experiment, actors, clock, buffer_path, stack, fence, *replicas)
    events.begin(run.context)
    for actor in (trainer, generator, controller, *([] if pictures is None else [pictures]), *replicas):
        stack.push_async_callback(actor.stop)
    began_s = clock.now()
    await asyncio.gather(*(actor.start() for actor in (trainer, generator, *replicas)))
    run.context.start_s = clock.now() - began_s
    machines.take_offers(lambda device: join_replica(run.context.locks, generator, run.context.memory, device))
    run.context.meter.peak_flops_per_s = await trainer.measure_peak()
    if (observe := observers.observe) is not None:
        environment_pools = [host.pool] if isinstance(host, Environments) else []
        list_states = partial(_worker_states, generator, trainer, verifier, *environment_pools)
        recording = recording_snapshots(run.context, observe, generator.activity, list_states, machines.conditions)
        await stack.enter_async_context(recording)
    return run


async def _start_verifier(
    experiment: Experiment,
    task_sets: Mapping[str, Sequence[Task]],
    launcher: Launcher,
    clock: Clock,
    stack: AsyncExitStack,
    directory: RunDirectory,
    observe: Callable[[TraceLine], None] | None,
    events: _WorkerEvents,
) -> VerifierPool:
    verifier = VerifierPool(
        launcher,
        experiment.verifier,
        clock,
        named=named_verifiers(experiment, task_sets),
        log_folder=directory.logs,
        retries=experiment.rollout.retries,
        observe=observe,
        on_event=events,
    )
    stack.push_async_callback(verifier.stop)
    await verifier.start()
    return verifier


def _worker_states(*pools: GeneratorPool | TrainerClient | VerifierPool | EnvironmentPool) -> list[WorkerState]:
    return [state for pool in pools for state in pool.worker_states]
