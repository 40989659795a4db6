"""`headway train` of a policy in simulators: the procedure over `Simulate` and `Learn`, from its start to its summary.

A round is one fragment of every block. The simulators make rounds in order, each with the weights of the version at
which it was called; the learner's step k takes round k. Up to η further rounds are under way meanwhile (`Rounds`).
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from headway.config.simulation import SimulatorExperiment
from headway.control.summaries import distribution
from headway.embodied.episodes import WINDOW, statistics_of
from headway.embodied.records import EpisodeEnd, PolicyWeights
from headway.embodied.rounds import COUNTS_FILE, FragmentCounts, Rounds
from headway.embodied.workers import Learn, LearnReport, Simulate
from headway.flow.run import Flow, run
from headway.records.errors import AccountingError, Interrupted, RunLocked, StepRefused
from headway.records.execution import ExecutionPlan, StagePlacement
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, RunSummary, StepRecord
from headway.runtime.clock import RealClock
from headway.runtime.epochs.register import epoch_renewal, take_epoch
from headway.runtime.run_directory import RunDirectory
from headway.runtime.supervision import until_interrupted
from headway.telemetry import ledger
from headway.telemetry.exporters.exporters import start_exports
from headway.telemetry.summary import evaluations, summarise
from headway.trainer import checkpoints

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
    training = Training(experiment, directory, resume)
    plan: Any = plan_of(experiment)
    options: dict[str, Any] = {"on_event": training.record_incident, "directory": directory.path, "resume": True}
    options["cluster"] = experiment.cluster if experiment.cluster.address else None
    options["stall_s"] = 2 * experiment.simulator.step_timeout_s
    if experiment.plans_itself:
        plan = "auto"
        options |= {"devices": experiment.devices, "items": experiment.simulator.blocks}
    with directory.held(experiment, resume=resume):
        try:
            return run(training.workflow, plan, take_over, on_line, **options)
        except Exception as error:  # raised again; not after Ctrl-C, whose message names --resume
            if not (resume or training.has_begun or isinstance(error, (Interrupted, RunLocked))):
                directory.withdraw()  # so that the same command starts from the beginning
            raise


def plan_of(experiment: SimulatorExperiment) -> ExecutionPlan:
    """The plan by which the run's workflow begins, unless it plans itself."""
    devices = {"simulate": experiment.simulator.devices, "learn": experiment.trainer.devices}
    return ExecutionPlan(stages={name: StagePlacement(devices=names) for name, names in devices.items()})


def _admitted(line: LedgerLine) -> int:
    """The number of fragments that were admitted until a line of the ledger; 0: it has none."""
    if isinstance(line, StepRecord):
        return line.episodes.admitted if line.episodes else 0
    return int(line.data.get("admitted", 0)) if isinstance(line, EventRecord) else 0


class Training:
    """The state of a run in simulators.

    Lifecycle of its `workflow`: start (workers, the newest checkpoint) -> train (to the last step, the time limit or an
    interruption) -> conclude (the accounting, the end)."""

    def __init__(self, experiment: SimulatorExperiment, directory: RunDirectory, resume: bool) -> None:
        self._experiment, self._directory, self._resume = experiment, directory, resume
        self.has_begun = False  # a training step may have
        self._scratch = directory.path / "workers"  # what this session's workers leave to their successors
        self._clock = RealClock()
        self._began_s = self._step_began_s = self._clock.now()
        self._cpu_s = time.process_time()
        self._ledger: ledger.Ledger
        self._is_recording = False  # the ledger is open
        self._episodes = deque[EpisodeEnd](maxlen=WINDOW)
        self._checkpoint_s = 0.0  # of the checkpoint behind the last step
        self._skipped = 0  # steps in a row
        self._planned = 0  # rounds that begin with the next step
        self._reported_problems = {""}
        self._best_return = -math.inf

    async def workflow(self, flow: Flow, take_over: bool, on_line: OnLine | None) -> RunSummary:
        """Run from its start to its end."""
        experiment, directory = self._experiment, self._directory
        async with until_interrupted(experiment.run.stop_grace_s) as self._stopped, AsyncExitStack() as stack:
            disconnect_s = experiment.cluster.disconnect_timeout_s
            epoch = await take_epoch(directory.path, disconnect_s, self._clock, take_over=take_over)
            await stack.enter_async_context(epoch_renewal(epoch))
            self._require_epoch = epoch.require
            checkpoints.remove_leftovers(directory.path)
            self._ledger = stack.enter_context(ledger.Ledger(directory.path, self._clock))
            if on_line is not None:
                self._ledger.subscribe(on_line)
            self._is_recording = True
            stack.callback(setattr, self, "_is_recording", False)
            exports = stack.enter_context(start_exports(experiment, directory, self._ledger, resume=self._resume))
            await self._start(flow)
            self.has_begun = True
            exports.announce()
            await self._train(flow)
            self._conclude()
            shutil.rmtree(self._scratch, ignore_errors=True)
            tail = ledger.read_ledger_tail(directory.path)
            summary = summarise(list(tail.lines.values()), tail.duration_s)
            directory.write_json(directory.summary, summary)
            if self._stopped.is_set():
                raise Interrupted(f"stopped at version {self.version}; continue with: headway train ... --resume")
            return summary
        raise Interrupted("stopped at once; continue with: headway train ... --resume")

    def record_incident(self, event: EventRecord) -> None:
        """Record the death or restart of a worker in the run's ledger."""
        if self._is_recording and event.event.startswith(("simulate_", "learn_")):
            self._ledger.record(msgspec.structs.replace(event, time_s=self._ledger.time_s))

    async def _start(self, flow: Flow) -> None:
        """Start the workers and take up the newest checkpoint, if the run is resumed. Raises ConfigurationError for
        simulators or spaces that can't be used."""
        experiment, settings = self._experiment, self._experiment.simulator
        path, lines = self._directory.path, ledger.read_ledger(self._directory.path)
        checkpoint = checkpoints.latest_valid(path, lambda error: self._ledger.event("checkpoint_corrupt", str(error)))
        counts = FragmentCounts(lives=(0,) * settings.blocks)
        if checkpoint is not None:
            counts = msgspec.json.decode((checkpoint / COUNTS_FILE).read_bytes(), type=FragmentCounts)
        if self._resume:
            counts = counts.resumed(max(map(_admitted, lines), default=0))
        self._best_return = max((line.reward_mean for line in evaluations(lines)), default=self._best_return)
        self._lives = counts.lives
        shutil.rmtree(self._scratch, ignore_errors=True)
        folders = [str(self._scratch / "lives"), str(self._scratch / "learner")]
        self._simulate = await flow.workers(
            "simulate", Simulate, experiment, folders[0], self._lives, restarts=RESTARTS, most_workers=settings.blocks
        )
        [(spaces, _, _), *_] = reports = await self._simulate.spaces()
        arguments = experiment, spaces, folders[1], "" if checkpoint is None else str(checkpoint)
        self._learn = (await flow.workers("learn", Learn, *arguments, restarts=RESTARTS, most_workers=1)).on(0)
        self._weights: PolicyWeights = await self._learn.weights()
        self._rounds = Rounds(settings.blocks, experiment.queue.budget, counts)
        self._plan_rounds()
        self._ledger.event(
            ledger.EVENT_RESUME if self._resume else ledger.EVENT_START,
            f"{settings.environment}, {settings.blocks} blocks of {settings.block_lanes} lanes, version {self.version}",
            step=self.version,
            admitted=self._rounds.admitted + self._planned * settings.blocks,
            worker_bytes=max(idle_bytes for _, idle_bytes, _ in reports),
            lane_bytes=sum(present_bytes - idle_bytes for _, idle_bytes, present_bytes in reports) // settings.lanes,
        )
        if self._resume:
            self._ledger.event(ledger.EVENT_COUNTED, "until now", step=self.version, **self._rounds.accounting.data)

    @property
    def version(self) -> int:
        """The version of the present weights."""
        return self._weights.version

    async def _train(self, flow: Flow) -> None:
        """Train until no round is left; ends with a checkpoint."""
        experiment = self._experiment
        every_steps = experiment.evaluation.every_steps
        if every_steps and not self.version:
            await self._evaluate()
        self._step_began_s = self._clock.now()
        while self._planned or len(self._rounds):  # again only where steps were skipped
            async for _ in flow.steps(experiment.run.steps - self.version, start=self._rounds.ended):
                for _ in range(self._planned):
                    await self._begin_round(flow)
                if not len(self._rounds):
                    break
                await self._step()
                is_last = not self._planned and not len(self._rounds)
                if every_steps and (self.version % every_steps == 0 or is_last) and not self._stopped.is_set():
                    await self._evaluate()
                if self.version % experiment.checkpoint.every_steps == 0 or is_last:
                    await self._checkpoint()

    def _conclude(self) -> None:
        """Check the accounting, and record it and the end. Raises AccountingError."""
        accounting, step = self._rounds.accounting, self.version
        data = accounting.data | {"open": accounting.open_rollouts, "admitted": accounting.admitted}
        try:
            self._rounds.check()
        except AccountingError as error:
            self._ledger.event(ledger.EVENT_ACCOUNTING, str(error), step=step, balanced=0, **data)
            raise
        self._ledger.event(ledger.EVENT_ACCOUNTING, "balanced", step=step, balanced=1, **data)
        if not self._stopped.is_set():
            reason = "all steps" if self.version >= self._experiment.run.steps else "the time limit"
            self._ledger.event(ledger.EVENT_END, f"{reason}, at version {self.version}", step=self.version)

    def _plan_rounds(self) -> None:
        """Decide how many rounds begin with the next step: none at the run's end, by time only after a first step."""
        run_config = self._experiment.run
        limit_s = math.inf if run_config.time_limit_s is None else run_config.time_limit_s
        is_ending = self._stopped.is_set() or (self.has_begun and self._clock.now() - self._began_s >= limit_s)
        self._planned = 0 if is_ending else self._rounds.admissible(self.version, run_config.steps)

    async def _begin_round(self, flow: Flow) -> None:
        """Call the simulators for one more round. Blocks are dealt in turn: each comes to the worker that has it."""
        number = self._rounds.next_number
        fragments = flow.channel(f"fragments of round {number}")
        blocks = flow.channel(f"blocks of round {number}", balance="round_robin", consumers=self._simulate)
        call = self._simulate.collect(self._weights, number, blocks, fragments)
        self._rounds.begin(self.version, fragments, call)
        await blocks.put_all(range(self._rounds.blocks))
        blocks.close()

    async def _step(self) -> None:
        """Train on the oldest round, and record the step."""
        oldest, version = self._rounds.under_way[0], self.version
        learning = self._learn.step(version, self._rounds.blocks, oldest.channel)
        await oldest.call
        oldest.channel.close()
        self._rounds.take(version)
        report: LearnReport = await learning
        self._require_epoch()
        self._weights, is_skipped = report.weights, report.weights.version == version
        self._skipped = self._skipped + 1 if is_skipped else 0
        self._rounds.end(oldest, skipped=is_skipped)
        self._lives = report.lives
        self._plan_rounds()
        self._ledger.record(self._record(version, report))
        if self._skipped == MAX_SKIPPED:
            raise StepRefused(
                f"{MAX_SKIPPED} steps in a row weren't finite (version {version}): try a lower trainer.learning_rate"
            )

    def _record(self, step: int, report: LearnReport) -> StepRecord:
        now_s, cpu_s = self._clock.now(), time.process_time()
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        orchestrator_cpu_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        checkpoint_s, self._checkpoint_s = self._checkpoint_s, 0.0
        blocks, settings = self._rounds.blocks, self._experiment.simulator
        endings, _, _ = self._rounds.accounting.take_recent()
        is_shared = bool({*settings.devices} & {*self._experiment.trainer.devices})
        yielded = report.compute_s / step_s if is_shared else 0.0
        busy = report.counts["simulate_s"] / (step_s * len(self._simulate))
        wait_s = step_s - report.compute_s - checkpoint_s
        self._episodes.extend(report.episodes)
        return StepRecord(
            step=step,
            version=self.version,
            skipped=step == self.version,
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
            open_groups=self._rounds.open_fragments,
            running_groups=self._rounds.open_fragments,
            trajectory_staleness=distribution((step - version, 1) for version in report.versions),
            endings=endings,
            metrics=report.metrics,
            episodes=statistics_of(
                self._episodes,
                episodes=len(report.episodes),
                cut=sum(report.lives) * settings.block_lanes,
                steps_per_s=report.counts["transitions"] / step_s,
                **report.counts,
                admitted=self._rounds.admitted + self._planned * blocks,
            ),
        )

    async def _checkpoint(self) -> None:
        """Write a checkpoint of the present version, and remove old ones."""
        self._require_epoch()
        began_s, path = self._clock.now(), checkpoints.checkpoint_path(self._directory.path, self.version)
        await self._save(path, {})
        self._ledger.event("checkpoint", str(path), step=self.version)
        checkpoints.keep_last(self._directory.path, self._experiment.checkpoint.keep_last)
        self._checkpoint_s = self._clock.now() - began_s

    async def _save(self, path: Path, metrics: dict[str, float]) -> None:
        """Write the learner and the counts of fragments into a folder, atomically."""
        scratch = checkpoints.begin_folder(path)
        await self._learn.save(self.version, str(scratch))
        (scratch / COUNTS_FILE).write_bytes(msgspec.json.encode(self._rounds.counts(self._lives)))
        checkpoints.commit_folder(path, checkpoints.CheckpointState(version=self.version, metrics=metrics))

    async def _evaluate(self) -> None:
        """Evaluate the present version; keep it as the best if its mean return is higher than those before."""
        began_s, video = self._clock.now(), self._directory.path / "videos" / f"step_{self.version:08d}.gif"
        video_file = str(video) if self._experiment.evaluation.video else ""
        shares: list[tuple[list[EpisodeEnd], str]] = await self._simulate.evaluate(self._weights, video_file)
        ends = [end for share, _ in shares for end in share]
        statistics, unfinished = statistics_of(ends), self._experiment.evaluation.episodes - len(ends)
        low, high = statistics.success_interval or (0.0, 0.0)
        now_s = self._clock.now()
        record = EvaluationRecord(
            split="validation",
            phase="during",
            step=self.version,
            first_version=self.version,
            last_version=self.version,
            held=True,
            tasks=len(ends),
            samples=len(ends),
            solve_rate=statistics.success_rate,
            standard_error=(high - low) / 4,
            reward_mean=statistics.return_mean,
            return_interval=statistics.return_interval,
            length_mean=statistics.length_mean,
            failed=unfinished,
            failure_cause="an episode doesn't end" if unfinished else "",
            duration_s=now_s - began_s,
            time_s=now_s - self._began_s,
        )
        self._ledger.record(record)
        self._step_began_s += now_s - began_s  # an evaluation is no part of a step
        for problem in {problem for _, problem in shares} - self._reported_problems:
            self._reported_problems.add(problem)
            self._ledger.event("no_video", problem, step=self.version)
        if record.reward_mean > self._best_return:
            self._best_return = record.reward_mean
            await self._save(self._directory.best, {"reward_mean": record.reward_mean})
            self._ledger.event(ledger.EVENT_BEST, step=self.version, version=self.version)
