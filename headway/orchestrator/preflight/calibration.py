"""Measures response lengths and rates for some seconds with the run's own workers and tasks, before it trains.

Nothing is written to the run's folder, and no weight on disk changes: the trainer trains, but only in its own memory.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution, group_correlation, length_distribution
from headway.control.summaries import quantile
from headway.control.tuning.forecast import LEAST_GROUPS
from headway.generator.client import GeneratorPool
from headway.orchestrator.nodes.machines import Machines, NodeCheck, open_machines
from headway.orchestrator.preflight.calibration_load import CalibrationLoad
from headway.orchestrator.preflight.capacity import exports_weights, peak_resident_bytes
from headway.orchestrator.preflight.logprob_agreement import require_agreement, trainer_scores
from headway.orchestrator.preflight.step_timing import StepTimes, time_steps
from headway.orchestrator.task_sets import named_verifiers
from headway.orchestrator.teachers.stage import TeacherStage
from headway.orchestrator.teachers.start import start_teachers
from headway.records.check_report import Calibration
from headway.records.errors import HeadwayError, Interrupted, NoProgress, WorkerDied
from headway.records.generation import EngineStatistics, GenerationRequest, SamplingParameters
from headway.records.task import Task
from headway.rollout.verification.client import VerifierPool
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import sharing
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits
from headway.runtime.supervision import cancel_all, handled_signals
from headway.tokens.tokenizer import Tokenizer
from headway.trainer.client import TrainerClient
from headway.weights.slots import reap

OnProgress = Callable[[str], None]
_Snapshot = tuple[float, list[EngineStatistics]]  # when, and the counters of each replica then

SECONDS = 10.0  # of measuring, the start of the workers not counted
_TIMEOUT_FACTOR = 6.0  # the calibration gives up when it takes so many times longer than planned
# Shares of the seconds: prompts alone, few requests, all requests, all requests beside the trainer; the rest is for the
# weights.
_PREFILL_SHARE, _FEW_SHARE, _ALL_SHARE, _BESIDE_SHARE = 0.06, 0.12, 0.36, 0.36
_TEACH_SHARE = 0.2  # on top of these, where teachers score rollouts


def calibrate(
    experiment: Experiment,
    tasks: Sequence[Task],
    *,
    seconds: float = SECONDS,
    on_progress: OnProgress = lambda text: None,
) -> tuple[Calibration, LengthDistribution]:
    """Start the run's workers, measure for about ``seconds`` on its training ``tasks``, stop them.

    The generator is measured alone, at few and at all its requests; then the trainer computes on responses as long as
    those seen while the generator continues, unless both are on the same devices: then one after the other.

    Raises WorkerDied or RemoteError when a worker fails, ConfigurationError for what it refuses, NoProgress when
    nothing could be measured in several times the seconds, Interrupted after Ctrl-C.
    """
    identity = f"check-{os.getpid()}"
    try:
        return asyncio.run(_calibrate(experiment, tasks, seconds, on_progress, identity))
    finally:
        reap(identity)  # of a trainer that was killed


async def _calibrate(
    experiment: Experiment, tasks: Sequence[Task], seconds: float, on_progress: OnProgress, identity: str
) -> tuple[Calibration, LengthDistribution]:
    async with _interruptible(), AsyncExitStack() as stack:
        machines_context = open_machines(experiment, RealClock(), run_id=identity, check=NodeCheck())
        machines = await stack.enter_async_context(machines_context)
        calibration = _CalibrationRun(machines.experiment, tasks, seconds, on_progress, identity, machines)
        await calibration.start(stack)
        try:
            async with asyncio.timeout(_TIMEOUT_FACTOR * seconds):
                return await calibration.measure()
        except TimeoutError:
            raise NoProgress(
                f"the calibration was stuck for {_TIMEOUT_FACTOR * seconds:.0f} s while it {calibration.doing}: this "
                "model is too slow for these devices, or --calibrate-s too short"
            ) from None


@asynccontextmanager
async def _interruptible() -> AsyncIterator[None]:
    """End the block with Interrupted at Ctrl-C or SIGTERM, its workers stopped in order; a second signal kills them."""
    task, was_signalled = asyncio.current_task(), False
    assert task is not None

    def on_signal() -> None:
        nonlocal was_signalled
        was_signalled = True
        task.cancel()

    try:
        with handled_signals(on_signal):
            yield
    except asyncio.CancelledError:
        if not was_signalled:
            raise
        raise Interrupted("the calibration was stopped; nothing is left of it") from None


class _CalibrationRun:
    """A calibration under way: its workers, and its measurements so far."""

    def __init__(
        self,
        experiment: Experiment,
        tasks: Sequence[Task],
        seconds: float,
        on_progress: OnProgress,
        identity: str,
        machines: Machines,
    ) -> None:
        self.doing = "started the workers"
        self._experiment = experiment
        self._seconds = seconds
        self._on_progress = on_progress
        self._clock: Clock = RealClock()
        self._tasks, self._launcher = tasks, machines.launcher
        self._teachers: TeacherStage | None = None
        launcher, bring_to = machines.launcher, machines.bring_to
        self._generator = GeneratorPool(launcher, experiment, self._clock, on_event=self._on_event, bring_to=bring_to)
        trainer_options = {"host_of": machines.host_of, "exports_weights": exports_weights(experiment)}
        self._trainer = TrainerClient(launcher, experiment, identity, **trainer_options)
        named_settings = named_verifiers(experiment, {"train": tasks})
        self._verifier = VerifierPool(launcher, experiment.verifier, self._clock, named=named_settings, retries=0)
        self._tokenizer = Tokenizer.of(experiment)
        self._load = CalibrationLoad(experiment, self._generator, self._verifier, self._tokenizer, tasks, self._clock)
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_s = 0.0

    async def start(self, stack: AsyncExitStack) -> None:
        self._report_phase("starts the workers")
        started_s = self._clock.now()
        for actor in (self._trainer, self._generator, self._verifier):
            stack.push_async_callback(actor.stop)
        await asyncio.gather(self._trainer.start(), self._generator.start(), self._verifier.start())
        run = self._experiment.run.model_copy(update={"directory": stack.enter_context(tempfile.TemporaryDirectory())})
        RunDirectory(run.directory).logs.mkdir()
        experiment, waits = self._experiment.model_copy(update={"run": run}), Waits(self._clock.now)
        settings = (self._tokenizer, self._tasks, self._launcher, self._clock, waits, self._on_event)
        self._teachers = await start_teachers(experiment, *settings, stack)
        self._start_s = self._clock.now() - started_s

    async def measure(self) -> tuple[Calibration, LengthDistribution]:
        """Run all measurements. Raises the cause of a worker's death, which ends them."""
        measure_task = asyncio.ensure_future(self._measure())
        try:
            await asyncio.wait([measure_task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                self._death.result()
            return await measure_task
        finally:
            await cancel_all(measure_task)
            self._death.cancel()

    def _on_event(self, name: str, detail: str, /, **data: object) -> None:
        """End the calibration when a replica dies, which its pool would restart."""
        if name in ("generator_died", "generator_lost") and not self._death.done():
            worker, _, death_cause = detail.partition(": ")
            self._death.set_exception(WorkerDied(worker, death_cause))

    def _on_load_ended(self, load: asyncio.Future[None]) -> None:
        """End the calibration with the load's error, such as a verifier that can't be restarted. A cancellation is
        none."""
        error = None if load.cancelled() else load.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None and not self._death.done():
            self._death.set_exception(error)

    def _report_phase(self, doing: str) -> None:
        self.doing = doing
        self._on_progress(doing)

    async def _measure(self) -> tuple[Calibration, LengthDistribution]:
        started_s, max_concurrent, load = self._clock.now(), self._experiment.concurrent_rollouts, self._load
        self._report_phase("compares trainer and engine")
        await self._compare(0)
        self._report_phase("computes prompts")
        prefill_tokens_per_s = await self._prefill()
        load_task = asyncio.ensure_future(load.run())
        load_task.add_done_callback(self._on_load_ended)
        try:
            self._report_phase("decodes a few responses")
            few_interval = await self._decode(max(1, max_concurrent // 8), _FEW_SHARE)
            self._report_phase("decodes at full concurrency")
            full_interval = await self._decode(max_concurrent, _ALL_SHARE)
            self._require_tokens(full_interval)
            beside_interval, step_times = await self._train()
            self._report_phase("publishes the weights")
            publish_s, apply_s, pause_s = await self._update(step_times.version)
            await self._compare(step_times.version)
            await load.stop()
            self._report_phase("verifies")
            verify_s = await self._verify()
            teach_s = await self._teach()
        finally:
            await cancel_all(load_task)
        lengths, prompt_lengths = self._lengths(), load.prompt_tokens or [1]
        complete_groups = load.groups if len(load.groups) >= LEAST_GROUPS else []
        decode_fixed_s, decode_request_s = decode_cost(few_interval, full_interval)
        calibration = Calibration(
            measured_s=self._clock.now() - started_s,
            start_s=self._start_s,
            at_once=beside_interval is not None,
            lengths=lengths.summary(group_correlation(complete_groups)),
            prompt_tokens=sum(prompt_lengths) / len(prompt_lengths),
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_running=full_interval.running,
            decode_tokens_per_s=full_interval.tokens_per_s,
            decode_beside_tokens_per_s=None if beside_interval is None else beside_interval.tokens_per_s,
            decode_fixed_s=decode_fixed_s,
            decode_request_s=decode_request_s,
            train_tokens_per_s=step_times.tokens_per_s,
            train_samples=step_times.samples,
            train_fixed_s=step_times.fixed_s,
            train_token_s=step_times.token_s,
            publish_s=publish_s,
            apply_s=apply_s,
            pause_s=pause_s,
            verify_response_s=verify_s,
            teach_response_s=teach_s,
            groups=len(load.groups),
            accepted_groups=load.accepted,
            failed_rollouts=len(load.failures),
            failure_cause=load.failures[0] if load.failures else "",
            resident_bytes=self._resident_bytes(),
        )
        return calibration, lengths

    async def _train(self) -> tuple[CalibrationInterval | None, StepTimes]:
        """Time training steps, and the generator's rate meanwhile; on shared devices the generator is at rest."""
        at_once = not shared_replicas(self._experiment)
        if not at_once:
            await self._load.stop()
        self._report_phase("trains beside it" if at_once else "trains, with the generator idle")
        first_snapshot = await self._snapshot()
        responses, seconds = self._load.responses, self._seconds * _BESIDE_SHARE
        step_times = await time_steps(self._trainer, self._experiment, responses, self._lengths(), self._clock, seconds)
        return _interval(first_snapshot, await self._snapshot()) if at_once else None, step_times

    # --- the generator --------------------------------------------------------------------------------------

    async def _prefill(self) -> float:
        """Measure prompt tokens/s on different prompts, with ever more requests at once while there is time."""
        deadline_s = self._clock.now() + self._seconds * _PREFILL_SHARE
        request_count, tokens_per_s, first_serial = len(self._experiment.generator.devices), 0.0, 0
        while True:
            prompts = [self._load.prompt(0) for _ in range(request_count)]
            started_s = self._clock.now()
            await asyncio.gather(*(self._one_token(ids, first_serial + i) for i, ids in enumerate(prompts)))
            elapsed_s, first_serial = max(1e-9, self._clock.now() - started_s), first_serial + request_count
            tokens_per_s = max(tokens_per_s, sum(map(len, prompts)) / elapsed_s)
            left_s = deadline_s - self._clock.now()
            if left_s < 2 * elapsed_s:
                return tokens_per_s
            request_count = min(2 * request_count, self._experiment.concurrent_rollouts)

    async def _one_token(self, prompt_ids: Sequence[int], serial: int) -> None:
        sampling = SamplingParameters(max_tokens=1, seed=serial)
        await self._generator.generate(
            GenerationRequest(request_id=f"prefill-{serial}", prompt_ids=prompt_ids, sampling=sampling)
        )

    async def _decode(self, limit: int, share: float) -> CalibrationInterval:
        """Run ``limit`` rollouts for a share of the seconds; the measurement begins after a fifth of it."""
        self._load.set_limit(limit)
        await self._clock.sleep(self._seconds * share / 5)
        first_snapshot = await self._snapshot()
        await self._clock.sleep(self._seconds * share * 4 / 5)
        return _interval(first_snapshot, await self._snapshot())

    async def _snapshot(self) -> _Snapshot:
        statistics = await self._generator.statistics()
        return self._clock.now(), statistics

    def _require_tokens(self, alone: CalibrationInterval) -> None:
        if alone.tokens_per_s > 0:
            return
        if self._load.failures:
            raise HeadwayError(f"every rollout of the calibration failed: {self._load.failures[0]}")
        raise NoProgress(
            f"the generator made no token in {self._seconds * _ALL_SHARE:.1f} s: this model is too slow for its "
            "devices, or --calibrate-s too short"
        )

    def _lengths(self) -> LengthDistribution:
        """Length distribution of all responses so far: ended, cut off, and still growing."""
        observations = [(tokens, True) for tokens in self._load.ended]
        observations += [(tokens, False) for tokens in (*self._load.cut, *self._generator.open_tokens())]
        return length_distribution(observations, self._experiment.rollout.max_response_tokens)

    # --- trainer, weights, verifier -------------------------------------------------------------------------

    async def _update(self, version: int) -> tuple[float, float, float]:
        """Publish a version and apply it while the generator works: seconds of both, and of its pause in the latter.
        The second time counts: the first pays for new memory."""
        publish_s = apply_s = pause_s = 0.0
        for _ in range(2):
            started_s = self._clock.now()
            weights = await self._trainer.publish(version)
            publish_s = self._clock.now() - started_s
            apply_reports = await self._generator.update_weights(weights)
            apply_s = self._clock.now() - started_s - publish_s
            pause_s = max(report.pause_s for report in apply_reports)
        return publish_s, apply_s, pause_s

    async def _compare(self, version: int) -> None:
        scores = await trainer_scores(self._experiment, self._trainer)
        await require_agreement(self._experiment, self._generator, scores, version, lambda name, detail, **data: None)

    async def _verify(self) -> float:
        """Seconds of a worker for each response; where no group ended completely, measured on a few responses that did.
        0 without any."""
        response_times = self._load.verify_response_s
        for task, texts in self._load.texts()[:1] if not response_times else ():
            started_s = self._clock.now()
            await self._verifier.verify(task, texts)
            response_times = [(self._clock.now() - started_s) / len(texts)]
        return quantile(response_times, 0.5)

    async def _teach(self) -> float:
        """Measure the seconds of a rollout at teachers outside of the trainer, one of those that they score at once,
        its share of the group's probe included; 0 without any. Raises HeadwayError for one that fails."""
        at_once = sum(teacher.at_once for teacher in self._experiment.used_teachers.values())
        if self._teachers is None or not at_once or not self._load.complete:
            return 0.0
        self._report_phase("has teachers score")
        groups, started_s, count = itertools.cycle(self._load.complete), self._clock.now(), 0
        concurrent_groups = 1 + math.ceil(at_once / self._experiment.rollout.group_size)
        while (elapsed_s := self._clock.now() - started_s) < self._seconds * _TEACH_SHARE:
            taken_groups = itertools.islice(groups, concurrent_groups)
            scored = await asyncio.gather(*(self._teachers.score(*group) for group in taken_groups))
            rollouts = list(itertools.chain(*scored))
            if failure := next((rollout.failure for rollout in rollouts if rollout.failure), None):
                raise HeadwayError(failure.cause)
            count += len(rollouts)
        return at_once * elapsed_s / count

    def _resident_bytes(self) -> dict[str, int]:
        pid_by_worker = {f"generator-{index}": pid for index, pid in enumerate(self._generator.pids)}
        pid_by_worker |= {worker.name: worker.pid for worker in self._trainer.workers}
        pid_by_worker["orchestrator"] = os.getpid()
        return {name: nbytes for name, pid in pid_by_worker.items() if (nbytes := peak_resident_bytes(pid)) is not None}


class CalibrationInterval:
    """Decoding rates of all replicas between two readings of their counters."""

    def __init__(self, elapsed_s: float, tokens: int, steps: int, busy_s: float, replicas: int) -> None:
        self.tokens_per_s = tokens / max(elapsed_s, 1e-9)
        self.running = replicas * tokens / steps if steps else 0.0
        self.requests = tokens / steps if steps else 0.0  # of each replica
        self.step_s = busy_s / steps if steps else 0.0


def _interval(first: _Snapshot, last: _Snapshot) -> CalibrationInterval:
    def growth(name: str) -> float:
        return sum(getattr(new, name) - getattr(old, name) for old, new in zip(first[1], last[1], strict=True))

    elapsed_s, replicas = last[0] - first[0], len(last[1])
    working_s = replicas * elapsed_s - growth("idle_s") - growth("paused_s")  # between two steps included
    return CalibrationInterval(
        elapsed_s, int(growth("generated_tokens")), int(growth("decode_steps")), working_s, replicas
    )


def decode_cost(few: CalibrationInterval, many: CalibrationInterval) -> tuple[float, float]:
    """Fit (fixed, per request) seconds of a replica's decode step from two levels of concurrency. Neither is negative,
    and the fit is exact at the higher level."""
    request_difference = many.requests - few.requests
    request_s = (many.step_s - few.step_s) / request_difference if request_difference > 1e-6 and few.step_s else 0.0
    request_s = min(max(0.0, request_s), many.step_s / many.requests)
    return max(0.0, many.step_s - request_s * many.requests), request_s


def shared_replicas(experiment: Experiment) -> int:
    """Count the generator's replicas on devices of the trainer: they pause in every training step."""
    return len(sharing(experiment.generator.devices, experiment.trainer.devices))
