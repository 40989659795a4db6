"""Evaluates candidates for kernel tasks: compiles, checks and times them in sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from headway.kernels.backends import missing_for
from headway.kernels.cases import CandidateTrials, ReferenceMaker, TaskFault, TrialGroup, has_bfloat16, tensor_bytes
from headway.kernels.compiled_reference import COMPILE_S, NO_TIME, compile_reference, compiled_spec
from headway.kernels.devices import DeviceTable
from headway.kernels.faults import fault_of
from headway.kernels.gpu_targets import NOT_RUN, NOT_TIMED, judge_compilation
from headway.kernels.isolation import (
    GuestEnded,
    GuestError,
    GuestFailure,
    GuestProcess,
    TamperingDetected,
    guest_process,
    guest_spec,
    preload_settings,
)
from headway.kernels.operators import called_operator
from headway.kernels.tasks import resized_source
from headway.kernels.timing import NoTimeLeft, PairTimer, TimingResult, TimingSettings, measure_call_overhead
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask
from headway.records.sandbox import MIB, SandboxError
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.supervision import cancel_all, run_to_completion
from headway.sandbox.local.backend import LocalBackend

T = TypeVar("T")
SOURCE_BYTES = MIB
PRINTED_RESULT = re.compile(rb"(?i)[\"']?(correct\w*|passed|speed_?up|runtime|compiled)[\"']?\s*[:=]")
SourceCheck = Callable[[KernelSubmission], str]  # the tampering that a source shows before it runs, or ""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an evaluator on this machine."""

    concurrent: int = 4  # evaluations at once, timed or not
    memory_bytes: int = 2048 * MIB  # of a sandbox
    remembered: int = 4096  # cached evaluations
    values_bytes: int = 512 * MIB  # of cached trials: inputs and expected outputs
    timing: TimingSettings = TimingSettings()
    compare_compiled: bool = False  # whether a submission asks for it or not


class KernelEvaluator:
    """Evaluates submissions, several at once.

    Lifecycle: made -> *started* -> *closed*. Invariants: neither source runs in this process; the expected outputs
    exist in this process alone; an evaluation has ended its sandboxes when it returns. Equal submissions are evaluated
    once.
    """

    def __init__(
        self,
        settings: EvaluatorSettings | None = None,
        *,
        state: str | Path | None = None,
        check: SourceCheck = lambda submission: "",
        devices: DeviceTable | None = None,
    ) -> None:
        """``devices``: sets of cores to lease for timing; the machine's last core unless given."""
        self._settings = settings or EvaluatorSettings()
        self._backend = LocalBackend(state, run="kernels", settings=preload_settings())
        self._check = check
        self._evaluation_slots = asyncio.Semaphore(self._settings.concurrent)
        self._executor = ThreadPoolExecutor(2 * self._settings.concurrent + 2, "kernels")
        self._done: OrderedDict[bytes, KernelEvaluation] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[KernelEvaluation]] = {}
        self._waiters = Counter[bytes]()  # for those
        self._cached: OrderedDict[bytes, list[TrialGroup]] = OrderedDict()  # trials by a hash of their task
        self._trial_locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        # The time of each compiled reference against its eager one, or the reason why there is none.
        self._compiled: dict[tuple[bytes, tuple[int, ...]], TimingResult | str] = {}
        self._compiling = asyncio.Lock()  # a compiler at a time: two would disturb each other's times
        self._overhead_s: dict[tuple[int, ...], float] = {}
        self._devices = devices or DeviceTable.of_cores([f"cpu:{len(machine_cores()) - 1}"])
        self._free_cores = asyncio.Semaphore(self._devices.usable("cpu"))

    async def start(self) -> None:
        """Start the process that sandboxes come from: it imports torch. Raises SandboxError."""
        await self._backend.start()

    async def close(self) -> None:
        """End all evaluations and sandboxes."""
        await cancel_all(*self._running.values())
        await self._backend.close()
        await asyncio.to_thread(self._executor.shutdown)

    async def __aenter__(self) -> KernelEvaluator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # One evaluation for equal submissions.

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        """Evaluate a submission. Raises ConfigurationError for a submission that can't be evaluated, and for a task
        whose reference fails. An evaluation is cancelled when all its waiting callers are."""
        _require_valid(submission)
        if defect := _source_defect(submission.source):
            return KernelEvaluation(fault="syntax_error", text=f"the source {defect}")
        key = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(submission, device=""))).digest()
        if key in self._done:
            self._done.move_to_end(key)
            return msgspec.structs.replace(self._done[key], repeated=True)
        is_repeated = key in self._running
        if not is_repeated:
            self._running[key] = asyncio.create_task(self._evaluate(submission), name="kernel evaluation")
        evaluation_task = self._running[key]
        self._waiters[key] += 1
        try:
            evaluation = await asyncio.shield(evaluation_task)
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key], self._running[key]  # the next caller gets a new evaluation
                evaluation_task.cancel()  # if it isn't done
                await run_to_completion(asyncio.wait({evaluation_task}))
        may_change = evaluation.refused.startswith(("noise", "no time")) or evaluation.compiled_note.startswith(NO_TIME)
        if not (evaluation.infrastructure or may_change):  # else a repetition may give another result
            self._done[key] = evaluation
            if len(self._done) > self._settings.remembered:
                self._done.popitem(last=False)
        return msgspec.structs.replace(evaluation, repeated=is_repeated)

    async def _evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        began_s = time.monotonic()
        async with self._evaluation_slots:
            waited_s = time.monotonic() - began_s
            try:
                cheat = self._check(submission)
                evaluation = KernelEvaluation(cheat=cheat, text=cheat) if cheat else await self._judge(submission)
            except TaskFault as error:
                raise ConfigurationError(f"task {submission.task.name!r}: {error}") from error
            except SandboxError as error:
                evaluation = KernelEvaluation(infrastructure=str(error))
            except OSError as error:
                evaluation = KernelEvaluation(infrastructure=f"evaluator: {error}")
            return msgspec.structs.replace(evaluation, seconds={"wait": waited_s, **evaluation.seconds})

    # The steps.

    async def _judge(self, submission: KernelSubmission) -> KernelEvaluation:
        trial_groups, language = await self._trials(submission), submission.task.backend
        compiles_separately = language in ("triton", "cuda")  # it is compiled for a GPU that this machine lacks
        if language == "triton" and any(map(has_bfloat16, trial_groups)):
            raise TaskFault("back end 'triton' on a CPU: Triton's interpreter computes bfloat16 wrongly: use a GPU")
        until_s = time.monotonic() + submission.timeout_s  # the candidate's: the reference's trials don't count
        # The cores' lease ends after the guest, which may run on them until then.
        async with contextlib.AsyncExitStack() as leases:
            async with self._guest(until_s) as guest:
                verdict = await self._in_thread(judge_candidate, guest, submission, trial_groups)
                if submission.timed and verdict.correct and not compiles_separately:
                    verdict = await self._time(guest, submission, trial_groups[0], verdict, leases)
            if verdict.speedup is not None and (submission.compare_compiled or self._settings.compare_compiled):
                verdict = await self._compare_compiled(submission, trial_groups[0], verdict, guest.until_s)
        if not compiles_separately:
            return verdict
        since_s = time.monotonic()
        limits, left_s = guest_spec(1, self._settings.memory_bytes).limits, max(1.0, until_s - since_s)
        arguments = (language, submission.source, guest.launches, verdict, left_s)
        verdict = await judge_compilation(self._backend, limits, *arguments)
        refusal = NOT_TIMED if submission.timed and verdict.correct else NOT_RUN if language == "cuda" else ""
        seconds_by_step = {**verdict.seconds, "compile": time.monotonic() - since_s}
        return msgspec.structs.replace(verdict, refused=refusal, seconds=seconds_by_step)

    async def _trials(self, submission: KernelSubmission) -> list[TrialGroup]:
        """The task's trials, made by the first caller and cached. Raises TaskFault."""
        task, seed, trial_count = submission.task, submission.seed, submission.correct_trials
        task_key = hashlib.sha256(msgspec.json.encode([task.source, task.shapes, seed, trial_count])).digest()
        async with self._trial_locks.setdefault(task_key, asyncio.Lock()):
            if task_key not in self._cached:
                async with self._guest(time.monotonic() + submission.timeout_s) as guest:
                    self._cached[task_key] = await self._in_thread(_make_trials, guest, task, seed, trial_count)
        self._cached.move_to_end(task_key)
        trial_groups = self._cached[task_key]
        while len(self._cached) > 1 and sum(map(_trials_bytes, self._cached.values())) > self._settings.values_bytes:
            self._cached.popitem(last=False)
        return trial_groups

    async def _time(
        self,
        guest: GuestProcess,
        submission: KernelSubmission,
        group: TrialGroup,
        verdict: KernelEvaluation,
        leases: contextlib.AsyncExitStack,
    ) -> KernelEvaluation:
        since_s = time.monotonic()
        await leases.enter_async_context(self._free_cores)
        device = leases.enter_context(self._devices.lease("cpu", submission.device))
        leased_s = time.monotonic()
        guest.until_s += leased_s - since_s  # waiting for a device doesn't count
        try:
            timing = await self._measure(guest, submission, group, parse_device(device).core_ids())
        except TamperingDetected as error:
            return msgspec.structs.replace(verdict, cheat=str(error), text=str(error))
        except NoTimeLeft as error:
            return msgspec.structs.replace(verdict, device=device, refused=str(error))
        except (GuestError, GuestEnded) as error:
            fault, text, log = await self._in_thread(fault_of, error, guest)
            return msgspec.structs.replace(verdict, fault=fault, text=text, log=log)
        step_seconds = {**verdict.seconds, "lease": leased_s - since_s, "time": time.monotonic() - leased_s}
        return msgspec.structs.replace(verdict, device=device, seconds=step_seconds, **msgspec.structs.asdict(timing))

    async def _compare_compiled(
        self, submission: KernelSubmission, group: TrialGroup, verdict: KernelEvaluation, until_s: float
    ) -> KernelEvaluation:
        """Add the speed-up over the compiled reference to a timed evaluation, or a note why there is none; a failure
        changes no other field. The first caller waits for the compiler if ``until_s`` leaves time for it."""
        cores, since_s = parse_device(verdict.device).core_ids(), time.monotonic()
        key = (hashlib.sha256(submission.task.source.encode()).digest(), cores)
        async with self._compiling:
            left_s = until_s - time.monotonic()
            if key not in self._compiled:
                if left_s < 1.5 * COMPILE_S:
                    note = f"{NO_TIME}: it needs {1.5 * COMPILE_S:g} s, {max(left_s, 0):.0f} s were left"
                    return msgspec.structs.replace(verdict, compiled_note=note)
                self._compiled[key] = await self._time_compiled(submission, group, cores)
            compiled = self._compiled[key]
        verdict = msgspec.structs.replace(verdict, seconds={**verdict.seconds, "reference": time.monotonic() - since_s})
        if isinstance(compiled, str):
            return msgspec.structs.replace(verdict, compiled_note=f"torch.compile of the reference: {compiled}"[:300])
        speedup = (verdict.speedup or 0.0) / (compiled.speedup or 1.0)
        return msgspec.structs.replace(verdict, reference_compiled=compiled.timing, speedup_compiled=speedup)

    async def _time_compiled(
        self, submission: KernelSubmission, group: TrialGroup, cores: tuple[int, ...]
    ) -> TimingResult | str:
        """The compiled reference's time against the eager one's, in separate sandboxes; or the reason of a failure."""
        try:
            async with guest_process(self._backend, compiled_spec(self._cores), self._in_thread, COMPILE_S) as guest:
                await self._in_thread(compile_reference, guest, submission.task, group, submission.seed)
                guest.until_s = time.monotonic() + COMPILE_S / 2
                # Not judged: it calls the task's operators, and torch.compile replaces functions of torch.
                timing_result = await self._measure(guest, submission, group, cores, is_judged=False)
        except (GuestFailure, TaskFault, SandboxError, OSError) as error:
            return str(error)
        return timing_result.refused or timing_result

    async def _measure(
        self,
        candidate: GuestProcess,
        submission: KernelSubmission,
        group: TrialGroup,
        cores: tuple[int, ...],
        is_judged: bool = True,
    ) -> TimingResult:
        async with self._guest(candidate.until_s) as reference_guest:
            overhead_s, settings = await self._measure_overhead(cores), self._settings.timing
            timer_arguments = (candidate, reference_guest, submission, group, cores, overhead_s, settings, is_judged)
            return await self._in_thread((await self._in_thread(PairTimer, *timer_arguments)).measure)

    async def _measure_overhead(self, cores: tuple[int, ...]) -> float:
        """The time of an interval's requests and answers, without calls; measured once for each set of cores."""
        if cores not in self._overhead_s:
            async with self._guest(time.monotonic() + 60.0) as guest:
                self._overhead_s[cores] = await self._in_thread(measure_call_overhead, guest, cores)
        return self._overhead_s[cores]

    @contextlib.asynccontextmanager
    async def _guest(self, until_s: float) -> AsyncIterator[GuestProcess]:
        spec = guest_spec(self._cores, self._settings.memory_bytes)
        async with guest_process(self._backend, spec, self._in_thread, max(1.0, until_s - time.monotonic())) as guest:
            yield guest

    @property
    def _cores(self) -> int:
        """The number of cores that a candidate has."""
        return max(len(parse_device(name).core_ids()) for name in self._devices.names(("cpu",)))

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def judge_candidate(
    guest: GuestProcess, submission: KernelSubmission, groups: Sequence[TrialGroup]
) -> KernelEvaluation:
    """Compile a candidate and run its trials up to the first fault or tampering; one in CUDA is only made. Blocks."""
    began_s, is_run = time.monotonic(), submission.task.backend != "cuda"
    trials = CandidateTrials(guest, submission.task, submission.seed)
    compiled, fault, text, log = False, None, "", ""
    try:
        trials.note_replaced(guest.load("candidate", submission.source, confined=True))
        for group in groups:
            trials.make(group.arguments)
            compiled = True
            if not is_run:
                break
            trials.run(group)
        if operator_name := called_operator(submission.task, sorted(trials.operators)):
            raise TamperingDetected(f"it calls {operator_name}")
        trials.watch_idle()
        if trials.text and not trials.cheat and PRINTED_RESULT.search(guest.end()):
            raise TamperingDetected("it prints a line in the form of a result")
    except TamperingDetected as error:
        trials.cheat = str(error)
    except (GuestError, GuestEnded) as error:
        fault, text, log = fault_of(error, guest)
    return KernelEvaluation(
        compiled=compiled,
        passed=trials.passed,
        trials=sum(len(group.trials) for group in groups) if compiled and is_run else 0,
        fault=fault,
        cheat=trials.cheat,
        text=trials.cheat or text or trials.text,
        log=log,
        precision=trials.precision,
        seconds={"compile": guest.compile_s, "check": time.monotonic() - began_s - guest.compile_s},
    )


def _make_trials(guest: GuestProcess, task: KernelTask, seed: int, count: int) -> list[TrialGroup]:
    maker = ReferenceMaker(guest, seed)
    trial_groups = [maker.group("shape0", task.source, count, variants=True)]
    for shape_index, sizes in enumerate(task.shapes, start=1):
        trial_groups.append(maker.group(f"shape{shape_index}", resized_source(task.source, sizes), 2, variants=False))
    return trial_groups


def _require_valid(submission: KernelSubmission) -> None:
    backend = submission.task.backend
    if missing_text := missing_for(backend, gpus=False):
        raise ConfigurationError(f"back end {backend!r}: {missing_text}")
    if submission.device and not submission.device.startswith("cpu:"):
        raise ConfigurationError(
            f"device = {submission.device!r}: candidates aren't run on GPUs yet; valid: a set of cores, say 'cpu:2-3'"
        )
    for field in ("correct_trials", "timed_trials"):
        if not 1 <= getattr(submission, field) <= 10_000:
            raise ConfigurationError(f"{field} = {getattr(submission, field)}: valid: 1 to 10000")
    if submission.timeout_s <= 0:
        raise ConfigurationError(f"timeout_s = {submission.timeout_s}: valid: above 0")
    if defect := _source_defect(submission.task.source):
        raise ConfigurationError(f"task {submission.task.name!r}: its source {defect}")


def _source_defect(source: str) -> str:
    try:
        byte_count = len(source.encode())
    except UnicodeEncodeError:
        return "isn't UTF-8"
    return f"has {byte_count} bytes: at most {SOURCE_BYTES}" if byte_count > SOURCE_BYTES else ""


def _trials_bytes(groups: list[TrialGroup]) -> int:
    return sum(tensor_bytes(trial.inputs) + tensor_bytes(trial.expected) for group in groups for trial in group.trials)
