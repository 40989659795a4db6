"""`headway train` of a policy in simulators: the procedure over `Simulate` and `Learn`, from its start to its summary.

A round is one fragment of every block. The simulators make rounds in order, each with the weights of the version at
which it was called; the learner's step k takes round k. Up to η further rounds are under way meanwhile (`Rounds`).
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headway.config.simulation import SimulatorExperiment
from headway.control.summaries import distribution
from headway.embodied.episodes import EpisodeWindow, interval_of, mean_of, successes_of
from headway.embodied.evaluation import Evaluated
from headway.embodied.rounds import COUNTS_FILE, FragmentCounts, Rounds
from headway.embodied.workers import Learn, LearnReport, Simulate
from headway.flow.run import Flow, run
from headway.records.errors import AccountingError, Interrupted, RunLocked, StepRefused
from headway.records.execution import WORKFLOW_FILE
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, RunSummary, StepRecord
from headway.runtime.clock import Clock, RealClock
from headway.runtime.epochs.register import epoch_renewal, take_epoch
from headway.runtime.run_directory import RunDirectory
from headway.runtime.supervision import until_interrupted
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.ledger import (
    EVENT_ACCOUNTING,
    EVENT_BEST,
    EVENT_COUNTED,
    EVENT_END,
    EVENT_RESUME,
    EVENT_START,
    Ledger,
    read_ledger,
    read_ledger_tail,
)
from headway.telemetry.summary import evaluations, summarise
from headway.trainer.checkpoints import (
    CheckpointState,
    begin_folder,
    checkpoint_path,
    commit_folder,
    keep_last,
    latest_valid,
    remove_leftovers,
)

MAX_SKIPPED = 5  # steps in a row that aren't finite, after which a run ends
RESTARTS = 3  # deaths of a worker in a row after which it is still started again
OnLine = Callable[[LedgerLine], None]


def train(
    experiment: SimulatorExperiment, *, resume: bool = False, take_over: bool = False, on_line: OnLine | None = None
) -> RunSummary:
    """Train the ``experiment``; returns the summary that RUN/summary.json holds. ``take_over``: see `take_epoch`.

    Raises Interrupted after Ctrl-C (once: train the rounds under way and write a checkpoint, all within
    ``run.stop_grace_s``; twice: stop at once); other HeadwayErrors name the cause of the end.
    """
    directory = RunDirectory(experiment.run.directory)
    former_config = directory.begin(experiment, resume=resume)
    placed = experiment.plans_itself
    plan: Any = "auto" if placed else {"simulate": experiment.simulator.devices, "learn": experiment.trainer.devices}
    options: dict[str, Any] = {"devices": experiment.devices, "items": experiment.simulator.blocks} if placed else {}
    session = _Session()
    options |= {"on_event": session.record_incident, "directory": directory.path, "resume": resume}
    options["cluster"] = experiment.cluster if experiment.cluster.address else None
    options["stall_s"] = 2 * experiment.simulator.step_timeout_s
    try:
        return run(_workflow, plan, experiment, directory, session, resume, take_over, on_line, **options)
    except RunLocked:  # by a process elsewhere: its folder stays as it was
        if former_config is not None:
            directory.store(former_config)
        raise
    except Exception as error:  # raised again; not after Ctrl-C, whose message names --resume
        if not (resume or session.has_begun or isinstance(error, Interrupted)):
            directory.withdraw()  # so that the same command starts from the beginning
        raise
    finally:
        directory.release()


class _Session:
    """The state of a run's process: whether a training step may have begun, and the open ledger."""

    has_begun = False
    ledger: Ledger | None = None

    def record_incident(self, event: EventRecord) -> None:
        """Record the death or restart of a worker in the run's ledger."""
        if self.ledger is not None and event.event.startswith(("simulate_", "learn_")):
            self.ledger.record(msgspec.structs.replace(event, time_s=self.ledger.time_s))

    def close(self) -> None:
        """Record no more: the ledger is about to be closed."""
        self.ledger = None


async def _workflow(
    flow: Flow,
    experiment: SimulatorExperiment,
    directory: RunDirectory,
    session: _Session,
    resume: bool,
    take_over: bool,
    on_line: OnLine | None,
) -> RunSummary:
    clock = RealClock()
    async with until_interrupted() as stopped, AsyncExitStack() as stack:
        report = partial(print, file=sys.stderr)
        disconnect_s = experiment.cluster.disconnect_timeout_s
        epoch = await take_epoch(directory.path, disconnect_s, clock, take_over=take_over, report=report)
        await stack.enter_async_context(epoch_renewal(epoch))
        remove_leftovers(directory.path)
        ledger = stack.enter_context(Ledger(directory.path, clock))
        if on_line is not None:
            ledger.subscribe(on_line)
        session.ledger = ledger
        stack.callback(session.close)
        training = Training(flow, experiment, directory, ledger, clock, stopped, epoch.require)
        try:
            exports = stack.enter_context(start_exports(experiment, directory, ledger, resume=resume))
            await training.start(resume)
            session.has_begun = True
        finally:
            if not (resume or session.has_begun):
                (directory.path / WORKFLOW_FILE).unlink(missing_ok=True)
        exports.announce()
        limiting = asyncio.create_task(_limit(stopped, experiment.run.stop_grace_s, asyncio.current_task()))
        stack.callback(limiting.cancel)
        await training.train()
        training.conclude()
        shutil.rmtree(training.scratch, ignore_errors=True)
        tail = read_ledger_tail(directory.path)
        summary = summarise(list(tail.lines.values()), tail.duration_s)
        directory.write_json(directory.summary, summary)
        if stopped.is_set():
            message = f"stopped at version {training.version}; continue with: headway train ... --resume"
            raise Interrupted(message)
        return summary
    raise Interrupted("stopped at once; continue with: headway train ... --resume")


async def _limit(stopped: asyncio.Event, grace_s: float, training: asyncio.Task[Any] | None) -> None:
    """Cancel ``training`` when ``grace_s`` have passed since the interruption."""
    await stopped.wait()
    await asyncio.sleep(grace_s)
    assert training is not None
    training.cancel()


def _admitted(line: LedgerLine) -> int:
    """The number of fragments that were admitted until a line of the ledger; 0: it has none."""
    if isinstance(line, StepRecord):
        return line.episodes.admitted if line.episodes else 0
    return int(line.data.get("admitted", 0)) if isinstance(line, EventRecord) else 0


class Training:
    """The state of a run in simulators.

    Lifecycle: ``start`` (workers, the newest checkpoint) -> ``train`` (to the last step, the time limit or an
    interruption) -> ``conclude`` (the accounting, the end)."""

    def __init__(
        self,
        flow: Flow,
        experiment: SimulatorExperiment,
        directory: RunDirectory,
        ledger: Ledger,
        clock: Clock,
        stopped: asyncio.Event,
        fence: Callable[[], None],
    ) -> None:
        """``stopped``: set when no further round may begin. ``fence``: raises EpochLost where another process has taken
        the run."""
        self._flow, self._experiment, self._directory = flow, experiment, directory
        self._ledger, self._clock, self._stopped, self._fence = ledger, clock, stopped, fence
        self._began_s = self._step_began_s = clock.now()
        self._cpu_s = time.process_time()
        self.scratch = directory.path / "workers"  # what this session's workers leave to their successors
        self._window = EpisodeWindow()
        self._checkpoint_s = 0.0  # of the checkpoint behind the last step
        self._skipped = 0  # steps in a row
        self._planned = 0  # rounds that begin with the next step
        self._reported_problems: set[str] = set()
        self._best_return = -float("inf")
        self.version = 0
        self.weights: Any = None

    async def start(self, resume: bool) -> None:
        """Start the workers and take up the newest checkpoint, if the run is resumed. Raises ConfigurationError for
        simulators or spaces that can't be used."""
        experiment, settings = self._experiment, self._experiment.simulator
        lines = read_ledger(self._directory.path) if resume else []
        checkpoint, counts = self._newest_checkpoint()
        if resume:
            counts = counts.resumed(max(map(_admitted, lines), default=0))
        self._best_return = max((line.reward_mean for line in evaluations(lines)), default=self._best_return)
        lives = counts.lives or (0,) * settings.blocks
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.simulate = await self._flow.workers(
            "simulate",
            Simulate,
            experiment,
            str(self.scratch / "lives"),
            lives,
            restarts=RESTARTS,
            most_workers=settings.blocks,
        )
        spaces, *_ = await self.simulate.spaces()
        learn = await self._flow.workers(
            "learn",
            Learn,
            experiment,
            spaces,
            str(self.scratch / "learner"),
            "" if checkpoint is None else str(checkpoint),
            restarts=RESTARTS,
            most_workers=1,
        )
        self.learn = learn.on(0)
        self.weights = await self.learn.weights()
        self.version = self.weights.version
        self.rounds = Rounds(settings.blocks, experiment.queue.budget, counts)
        self._lives, self._constructions = lives, counts.constructions
        self._plan_rounds()
        self._ledger.event(
            EVENT_RESUME if resume else EVENT_START,
            f"{settings.environment}, {settings.blocks} blocks of {settings.block_lanes} lanes, version {self.version}",
            step=self.version,
            admitted=self.rounds.admitted + self._planned * settings.blocks,
        )
        if resume:
            self._ledger.event(EVENT_COUNTED, "until now", step=self.version, **self.rounds.accounting.data)

    def _newest_checkpoint(self) -> tuple[Path | None, FragmentCounts]:
        checkpoint = latest_valid(
            self._directory.path, lambda error: self._ledger.event("checkpoint_corrupt", str(error))
        )
        if checkpoint is None:
            return None, FragmentCounts()
        return checkpoint, msgspec.json.decode((checkpoint / COUNTS_FILE).read_bytes(), type=FragmentCounts)

    async def train(self) -> None:
        """Train until no round is left; ends with a checkpoint."""
        experiment = self._experiment
        every_steps = experiment.evaluation.every_steps
        if every_steps and not self.version:
            await self._evaluate()
        self._step_began_s = self._clock.now()
        while self._planned or len(self.rounds):  # again only where steps were skipped
            async for _ in self._flow.steps(experiment.run.steps - self.version, start=self.rounds.ended):
                for _ in range(self._planned):
                    await self._begin_round()
                if not len(self.rounds):
                    break
                await self._step()
                is_last = not self._planned and not len(self.rounds)
                if every_steps and (self.version % every_steps == 0 or is_last) and not self._stopped.is_set():
                    await self._evaluate()
                if self.version % experiment.checkpoint.every_steps == 0 or is_last:
                    await self._checkpoint()

    def conclude(self) -> None:
        """Check the accounting, and record it and the end. Raises AccountingError."""
        accounting, problem = self.rounds.accounting, ""
        try:
            self.rounds.check()
        except AccountingError as error:
            problem = str(error)
        data = accounting.data | {"open": accounting.open_rollouts, "admitted": accounting.admitted}
        self._ledger.event(
            EVENT_ACCOUNTING, problem or "balanced", step=self.version, balanced=int(not problem), **data
        )
        if problem:
            raise AccountingError(problem)
        if not self._stopped.is_set():
            reason = "all steps" if self.version >= self._experiment.run.steps else "the time limit"
            self._ledger.event(EVENT_END, f"{reason}, at version {self.version}", step=self.version)

    def _plan_rounds(self) -> None:
        """Decide how many rounds begin with the next step: those that the budget allows, none when the run ends."""
        run_config = self._experiment.run
        limit_s = run_config.time_limit_s
        is_over = limit_s is not None and self._clock.now() - self._began_s >= limit_s
        is_ending = is_over or self._stopped.is_set()
        self._planned = 0 if is_ending else self.rounds.admissible(self.version, run_config.steps)

    async def _begin_round(self) -> None:
        """Call the simulators for one more round. Blocks are dealt in turn: each comes to the worker that has it."""
        number = self.rounds.next_number
        fragments = self._flow.channel(f"fragments of round {number}")
        blocks = self._flow.channel(f"blocks of round {number}", balance="round_robin", consumers=self.simulate)
        call = self.simulate.collect(self.weights, number, blocks, fragments)
        self.rounds.begin(self.version, fragments, call)
        await blocks.put_all(range(self.rounds.blocks))
        blocks.close()

    async def _step(self) -> None:
        """Train on the oldest round, and record the step."""
        oldest = self.rounds.oldest
        learning = self.learn.step(self.version, self.rounds.blocks, oldest.channel)
        await oldest.call
        oldest.channel.close()
        taken = self.rounds.take(self.version)
        report: LearnReport = await learning
        self._fence()
        is_skipped = report.weights.version == self.version
        self._skipped = self._skipped + 1 if is_skipped else 0
        self.rounds.end(taken, skipped=is_skipped)
        self.weights, self.version = report.weights, report.weights.version
        self._lives, self._constructions = report.lives, report.constructions
        self._plan_rounds()
        self._ledger.record(self._record(report, is_skipped))
        if self._skipped == MAX_SKIPPED:
            raise StepRefused(
                f"{MAX_SKIPPED} steps in a row weren't finite (version {self.version}): a lower trainer.learning_rate, "
                "or rewards and observations of a smaller scale (policy.normalize), may help"
            )

    def _record(self, report: LearnReport, skipped: bool) -> StepRecord:
        now_s, cpu_s = self._clock.now(), time.process_time()
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        orchestrator_cpu_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        checkpoint_s, self._checkpoint_s = self._checkpoint_s, 0.0
        step = self.version if skipped else self.version - 1
        blocks, settings = self.rounds.blocks, self._experiment.simulator
        endings, failures, _ = self.rounds.accounting.take_recent()
        is_shared = bool({*settings.devices} & {*self._experiment.trainer.devices})
        yielded = report.compute_s / step_s if is_shared else 0.0
        busy = report.simulate_s / (step_s * len(self.simulate))
        wait_s = step_s - report.compute_s - checkpoint_s
        return StepRecord(
            step=step,
            version=self.version,
            skipped=skipped,
            time_s=now_s - self._began_s,
            step_s=step_s,
            samples=blocks,
            groups=blocks,
            consumption_per_s=blocks / max(1e-9, step_s - wait_s),
            production_per_s=blocks / step_s,
            effective_production_per_s=blocks / step_s,
            trainer_wait_s=wait_s,
            trainer_compute_s=report.compute_s,
            checkpoint_s=checkpoint_s,
            trainer_wait_ratio=wait_s / step_s,
            generator_wait_ratio=max(0.0, 1.0 - busy - yielded),
            generator_yielded_ratio=yielded,
            orchestrator_cpu_s=orchestrator_cpu_s,
            open_groups=self.rounds.open_fragments,
            running_groups=self.rounds.open_fragments,
            admitted_rollouts=self._planned * blocks,
            trajectory_staleness=distribution((step - version, 1) for version in report.versions),
            endings=endings,
            failures=failures,
            metrics=report.metrics,
            episodes=self._window.add(
                report.episodes,
                cut=sum(report.lives) * settings.block_lanes,
                transitions=report.transitions,
                steps_per_s=report.transitions / step_s,
                simulate_s=report.simulate_s,
                device_wait_s=report.device_wait_s,
                constructions=report.constructions,
                rebuilt=sum(report.lives),
                admitted=self.rounds.admitted + self._planned * blocks,
            ),
        )

    async def _checkpoint(self) -> None:
        """Write a checkpoint of the present version, and remove old ones."""
        self._fence()
        began_s, path = self._clock.now(), checkpoint_path(self._directory.path, self.version)
        await self._save(path, {})
        self._ledger.event("checkpoint", str(path), step=self.version)
        keep_last(self._directory.path, self._experiment.checkpoint.keep_last)
        self._checkpoint_s = self._clock.now() - began_s

    async def _save(self, path: Path, metrics: dict[str, float]) -> None:
        """Write the learner and the counts of fragments into a folder, atomically."""
        scratch = begin_folder(path)
        try:
            await self.learn.save(self.version, str(scratch))
            counts = self.rounds.counts(self._lives, self._constructions)
            (scratch / COUNTS_FILE).write_bytes(msgspec.json.encode(counts))
            commit_folder(path, CheckpointState(version=self.version, metrics=metrics))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    async def _evaluate(self) -> None:
        """Evaluate the present version; keep it as the best if its mean return is higher than those before."""
        evaluation, began_s = self._experiment.evaluation, self._clock.now()
        video = str(self._directory.path / "videos" / f"step_{self.version:08d}.gif") if evaluation.video else ""
        shares: Sequence[Evaluated] = await self.simulate.evaluate(self.weights, video)
        episodes = [episode for share in shares for episode in share.episodes]
        returns, successes = [episode.reward for episode in episodes], successes_of(episodes)
        unfinished = sum(share.unfinished for share in shares)
        low, high = interval_of(successes) or (0.0, 0.0)
        now_s = self._clock.now()
        record = EvaluationRecord(
            split="validation",
            phase="during",
            step=self.version,
            first_version=self.version,
            last_version=self.version,
            held=True,
            tasks=len(episodes),
            samples=len(episodes),
            solve_rate=mean_of(successes),
            standard_error=(high - low) / 4,
            reward_mean=mean_of(returns),
            return_interval=interval_of(returns),
            length_mean=mean_of([float(episode.steps) for episode in episodes]),
            failed=unfinished,
            failure_cause="an episode doesn't end" if unfinished else "",
            duration_s=now_s - began_s,
            time_s=now_s - self._began_s,
        )
        self._ledger.record(record)
        self._step_began_s += now_s - began_s  # an evaluation is no part of a step
        for problem in {share.problem for share in shares} - {"", *self._reported_problems}:
            self._reported_problems.add(problem)
            self._ledger.event("no_video", problem, step=self.version)
        if record.reward_mean > self._best_return:
            self._best_return = record.reward_mean
            await self._save(self._directory.best, {"reward_mean": record.reward_mean})
            self._ledger.event(EVENT_BEST, step=self.version, version=self.version)
