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

import msgspec

from headway.kernels.backends import missing_for
from headway.kernels.compiled_reference import (
    COMPILE_S,
    NO_TIME,
    CompiledReferences,
    compile_reference,
    compiled_spec,
)
from headway.kernels.device_queries import core_devices
from headway.kernels.devices import DeviceTable
from headway.kernels.faults import fault_of_end, fault_of_error, first_line
from headway.kernels.isolation import (
    Deception,
    GuestEnded,
    GuestError,
    GuestProcess,
    guest_process,
    guest_spec,
    preload_settings,
)
from headway.kernels.operators import called_operator
from headway.kernels.tasks import resized_source
from headway.kernels.timing import EMPTY, RECORDED_SHARE, PairTimer, TimingResult, TimingSettings, measure_crossing
from headway.kernels.trials import CandidateTrials, ReferenceMaker, TaskFault, TrialGroup, has_bfloat16, tensor_bytes
from headway.kernels.triton_targets import NOT_TIMED, judge_compilation
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask
from headway.records.sandbox import MIB, SandboxError
from headway.runtime.devices import machine_cores, parse_device
from headway.sandbox.local.backend import LocalBackend

T = TypeVar("T")
SOURCE_BYTES = MIB
LOG_CHARACTERS = 4000
LEASE_S = 3600.0  # a candidate may wait for a core; who asks limits it
NO_CUDA = "back end 'cuda' needs a GPU and nvcc: install a CUDA toolkit on a machine that has one"
PRINTED_RESULT = re.compile(rb"(?i)[\"']?(correct\w*|passed|speed_?up|runtime|compiled)[\"']?\s*[:=]")
SourceCheck = Callable[[KernelSubmission], str]  # the deception that a source shows before it runs, or ""


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an evaluator on this machine."""

    concurrent: int = 4  # evaluations at once, timed or not
    timing_cores: tuple[tuple[int, ...], ...] = ()  # sets of cores, one for each timing at once; (): the last core
    memory_bytes: int = 2048 * MIB  # of a sandbox
    remembered: int = 4096  # results of evaluations
    values_bytes: int = 512 * MIB  # inputs and expected outputs of tasks that are kept
    timing: TimingSettings = TimingSettings()
    compare_compiled: bool = False  # whether a submission asks for it or not


class _Counts(msgspec.Struct):
    evaluations: int = 0
    repeated: int = 0
    compile_s: float = 0.0
    busy_s: float = 0.0


class KernelEvaluator:
    """Evaluates submissions, several at once.

    Lifecycle: made -> *started* -> *closed*. Invariants: neither source runs in this process; what is expected is
    nowhere else; an evaluation has ended its sandboxes when it returns. Equal submissions are evaluated once.
    """

    def __init__(
        self,
        settings: EvaluatorSettings | None = None,
        *,
        state: str | Path | None = None,
        check: SourceCheck = lambda submission: "",
        devices: DeviceTable | None = None,
    ) -> None:
        """``devices``: sets of cores to lease for timing, those of ``settings`` unless given."""
        self._settings = settings or EvaluatorSettings()
        self._backend = LocalBackend(state, run="kernels", settings=preload_settings())
        self._check = check
        self._places = asyncio.Semaphore(self._settings.concurrent)
        self._executor = ThreadPoolExecutor(2 * self._settings.concurrent + 2, "kernels")
        self._done: OrderedDict[bytes, KernelEvaluation] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[KernelEvaluation]] = {}
        self._waiters = Counter[bytes]()  # for those
        self._ending = set[asyncio.Task[KernelEvaluation]]()  # cancelled: nobody waits for them any longer
        self._values: OrderedDict[bytes, list[TrialGroup]] = OrderedDict()
        self._making: dict[bytes, asyncio.Lock] = {}
        self._compiled = CompiledReferences(self._time_compiled)
        self._crossing_s: dict[tuple[int, ...], float] = {}
        if devices is None:
            at = {core: index for index, core in enumerate(machine_cores())}  # a device's name has indices
            sets = self._settings.timing_cores or (machine_cores()[-1:],)
            names = [str(parse_device(f"cpu:{at[min(cores)]}-{at[max(cores)]}")) for cores in sets]
            devices = DeviceTable(core_devices(names), tuple, lambda name, detail: None)
        self._devices = devices
        self._free = asyncio.Semaphore(devices.usable("cpu"))
        self.counts = _Counts()

    async def start(self) -> None:
        """Start the process that sandboxes come from: it imports torch. Raises SandboxError."""
        await self._backend.start()

    async def close(self) -> None:
        """End all evaluations and sandboxes."""
        under_way = {*self._running.values(), *self._ending}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._backend.close()
        await asyncio.to_thread(self._executor.shutdown)

    async def __aenter__(self) -> KernelEvaluator:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # One evaluation for equal submissions.

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        """Evaluate a submission. Raises ConfigurationError for one that no evaluation can begin with, and for a task
        whose reference fails. When all who wait for an evaluation have left, it ends."""
        _require_valid(submission)
        if why := _unreadable(submission.source):
            return KernelEvaluation(fault="syntax_error", text=f"the source {why}")
        key = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(submission, device=""))).digest()
        self.counts.evaluations += 1
        if key in self._done:
            self._done.move_to_end(key)
            self.counts.repeated += 1
            return msgspec.structs.replace(self._done[key], repeated=True)
        repeated = key in self._running
        if not repeated:
            task = self._running[key] = asyncio.create_task(self._evaluate(submission), name="kernel evaluation")
            task.add_done_callback(lambda done: self._remember(key, done))
        self.counts.repeated += repeated
        running = self._running[key]
        self._waiters[key] += 1
        try:
            found = await asyncio.shield(running)
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]
                if not running.done():
                    del self._running[key]  # whoever asks next gets an evaluation of its own
                    self._ending.add(running)
                    running.cancel()
        return msgspec.structs.replace(found, repeated=repeated)

    def _remember(self, key: bytes, task: asyncio.Task[KernelEvaluation]) -> None:
        self._ending.discard(task)
        if self._running.get(key) is task:
            del self._running[key]
        if task.cancelled() or task.exception() is not None or task.result().infrastructure:
            return
        if task.result().refused.startswith("noise") or task.result().compiled_note.startswith(NO_TIME):
            return  # another time it may be quieter, or compiled
        self._done[key] = task.result()
        while len(self._done) > self._settings.remembered:
            self._done.popitem(last=False)

    async def _evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        began_s = time.monotonic()
        async with self._places:
            waited_s = time.monotonic() - began_s
            if cheat := self._check(submission):
                return KernelEvaluation(cheat=cheat, text=cheat, seconds={"wait": waited_s})
            try:
                found = await self._judge(submission)
            except TaskFault as error:
                raise ConfigurationError(f"task {submission.task.name!r}: {error}") from error
            except SandboxError as error:
                found = KernelEvaluation(infrastructure=str(error))
            except OSError as error:
                found = KernelEvaluation(infrastructure=f"evaluator: {error}")
            self.counts.busy_s += time.monotonic() - began_s - waited_s
            return msgspec.structs.replace(found, seconds={"wait": waited_s, **found.seconds})

    # The steps.

    async def _judge(self, submission: KernelSubmission) -> KernelEvaluation:
        groups = await self._trials(submission)
        if submission.task.backend == "triton" and any(map(has_bfloat16, groups)):
            raise TaskFault("back end 'triton' on a CPU: Triton's interpreter computes bfloat16 wrongly: use a GPU")
        until_s = time.monotonic() + submission.timeout_s  # the candidate's: the reference has had its own
        # Cores are given back behind the guest's end: until then it may run on them.
        async with contextlib.AsyncExitStack() as leases:
            async with self._guest(until_s, spare_s=LEASE_S if submission.timed else 0.0) as guest:
                judging = Judging(guest, submission, groups)
                await self._in_thread(judging.run)
                if judging.ended is not None:
                    await self._explain_end(guest, judging)
                if judging.is_wrong:
                    judging.take_output(await guest.end())
                self.counts.compile_s += guest.compile_s
                found = judging.evaluation()
                if submission.timed and found.correct and submission.task.backend != "triton":
                    found = await self._time(guest, submission, groups, found, until_s, leases)
            if found.speedup is not None and (submission.compare_compiled or self._settings.compare_compiled):
                found = await self._compiled.compare(submission, groups[0], found, guest.until_s)
        if submission.task.backend != "triton":
            return found
        since_s = time.monotonic()
        limits, left_s = guest_spec(1, self._settings.memory_bytes).limits, max(1.0, until_s - since_s)
        found = await judge_compilation(self._backend, limits, submission.source, guest.launches, found, left_s)
        self.counts.compile_s += (compile_s := time.monotonic() - since_s)
        refused = NOT_TIMED if submission.timed and found.correct else ""
        return msgspec.structs.replace(found, refused=refused, seconds={**found.seconds, "compile": compile_s})

    async def _time_compiled(
        self, submission: KernelSubmission, group: TrialGroup, cores: tuple[int, ...]
    ) -> TimingResult:
        """The compiled reference's time against the eager one's, each in a sandbox of its own."""
        async with guest_process(self._backend, compiled_spec(self._cores), self._in_thread, 2 * COMPILE_S) as compiled:
            compiled.until_s = time.monotonic() + COMPILE_S
            await self._in_thread(compile_reference, compiled, submission.task, group, submission.seed)
            compiled.until_s = time.monotonic() + COMPILE_S / 2
            async with self._guest(compiled.until_s) as eager:
                crossing_s = await self._crossing(cores)
                sides = (compiled, eager, submission, group, cores, crossing_s)
                return await self._in_thread(self._measure, *sides, 0.0)  # it does call the task's operators

    async def _explain_end(self, guest: GuestProcess, judging: Judging) -> None:
        """Wait for the sandbox's word on how the process ended."""
        assert judging.ended is not None
        for _ in range(100):
            if guest.result is not None or judging.ended.late:
                break
            await asyncio.sleep(0.02)
        judging.fault, judging.text = fault_of_end(judging.ended, guest.result)
        if guest.result is not None:
            judging.log = guest.result.stderr.decode(errors="replace")[-LOG_CHARACTERS:]

    async def _trials(self, submission: KernelSubmission) -> list[TrialGroup]:
        """The task's trials, made once. Raises TaskFault."""
        task, seed, count = submission.task, submission.seed, submission.correct_trials
        key = hashlib.sha256(msgspec.json.encode([task.source, task.shapes, seed, count])).digest()
        async with self._making.setdefault(key, asyncio.Lock()):
            if key not in self._values:
                until_s = time.monotonic() + submission.timeout_s
                try:
                    async with self._guest(until_s) as guest:
                        self._values[key] = await self._in_thread(self._make_trials, guest, task, seed, count)
                except BaseException:
                    self._making.pop(key, None)
                    raise
            self._values.move_to_end(key)
            groups = self._values[key]
        while len(self._values) > 1 and sum(map(_bytes, self._values.values())) > self._settings.values_bytes:
            oldest, _ = self._values.popitem(last=False)
            self._making.pop(oldest, None)
        return groups

    def _make_trials(self, guest: GuestProcess, task: KernelTask, seed: int, count: int) -> list[TrialGroup]:
        maker = ReferenceMaker(guest, seed)
        groups = [maker.group("shape0", task.source, count, variants=True)]
        for number, sizes in enumerate(task.shapes, start=1):
            groups.append(maker.group(f"shape{number}", resized_source(task.source, sizes), 2, variants=False))
        return groups

    async def _time(
        self,
        guest: GuestProcess,
        submission: KernelSubmission,
        groups: list[TrialGroup],
        found: KernelEvaluation,
        until_s: float,
        leases: contextlib.AsyncExitStack,
    ) -> KernelEvaluation:
        since_s = time.monotonic()
        await leases.enter_async_context(self._free)
        device = leases.enter_context(self._devices.lease("cpu", submission.device))
        cores = parse_device(device).core_ids()
        leased_s = time.monotonic()
        guest.until_s = until_s + leased_s - since_s  # waiting for a device doesn't count
        try:
            async with self._guest(guest.until_s) as reference:
                crossing_s = await self._crossing(cores)
                result = await self._in_thread(
                    self._measure, guest, reference, submission, groups[0], cores, crossing_s
                )
        except Deception as error:
            return msgspec.structs.replace(found, cheat=str(error), text=str(error))
        except (GuestError, GuestEnded) as error:
            if isinstance(error, GuestError):
                fault, text = fault_of_error(error), str(error)
            else:
                fault, text = fault_of_end(error, guest.result)
            return msgspec.structs.replace(found, fault=fault, text=text)
        return msgspec.structs.replace(
            found,
            device=device,
            timing=result.timing,
            reference=result.reference,
            speedup=None if result.refused else result.speedup,
            speedup_interval=result.interval,
            refused=result.refused,
            seconds={**found.seconds, "lease": leased_s - since_s, "time": time.monotonic() - leased_s},
        )

    def _measure(
        self,
        guest: GuestProcess,
        reference: GuestProcess,
        submission: KernelSubmission,
        group: TrialGroup,
        cores: tuple[int, ...],
        crossing_s: float,
        recorded_share: float = RECORDED_SHARE,
    ) -> TimingResult:
        try:
            reference.call("load", submission.task.source.encode(), module=group.module, confined=False)
            reference.make(group.module, "Model", group.arguments, submission.seed)
        except (Deception, GuestError, GuestEnded) as error:
            raise TaskFault(f"its reference fails: {error}") from error
        guest.make("candidate", "ModelNew", group.arguments, submission.seed)
        seeded = [trial for trial in group.trials if trial.name.startswith("seed")]
        timer = PairTimer(
            guest,
            reference,
            group.module,
            submission.task,
            seeded,
            cores=cores,
            crossing_s=crossing_s,
            settings=self._settings.timing,
            recorded_share=recorded_share,
        )
        return timer.measure(submission.timed_trials)

    async def _crossing(self, cores: tuple[int, ...]) -> float:
        """Time of an interval beside the calls, measured once for each set of cores."""
        if cores not in self._crossing_s:

            def measure(guest: GuestProcess) -> float:
                guest.call("load", EMPTY.encode(), module="candidate", confined=True)
                guest.make("candidate", "ModelNew", [], 0)
                return measure_crossing(guest, cores)

            async with self._guest(time.monotonic() + 60.0) as guest:
                self._crossing_s[cores] = await self._in_thread(measure, guest)
        return self._crossing_s[cores]

    @contextlib.asynccontextmanager
    async def _guest(self, until_s: float, *, spare_s: float = 0.0) -> AsyncIterator[GuestProcess]:
        spec = guest_spec(self._cores, self._settings.memory_bytes)
        timeout_s = max(1.0, until_s - time.monotonic())
        async with guest_process(self._backend, spec, self._in_thread, timeout_s, spare_s) as guest:
            yield guest

    @property
    def _cores(self) -> int:
        """Cores that a candidate has."""
        return max((len(cores) for cores in self._settings.timing_cores), default=1)

    @property
    def busy(self) -> bool:
        """Whether an evaluation runs or waits, or cores are leased."""
        leased = any(device["state"] == "leased" for device in self._devices.describe())
        return bool(self._running or self._ending) or leased

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


class Judging:
    """Compilation and trials of one candidate, in a thread."""

    def __init__(self, guest: GuestProcess, submission: KernelSubmission, groups: Sequence[TrialGroup]) -> None:
        self._guest = guest
        self._submission = submission
        self._groups = groups
        self._trials = CandidateTrials(guest, submission.task, submission.seed)
        self._compiled = False
        self._cheat = ""
        self.fault: Any = None
        self.text = self.log = ""
        self.ended: GuestEnded | None = None
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """Run to the first fault or deception, or to the end."""
        began_s = time.monotonic()
        try:
            source = self._submission.source.encode()
            head, _ = self._guest.call("load", source, module="candidate", confined=True)
            self._trials.note_patched(head)
            for group in self._groups:
                self._trials.make(group.arguments)
                self._compiled = True
                self._trials.run(group)
            if called := called_operator(self._submission.task, sorted(self._trials.result.operators)):
                raise Deception(f"it calls {called}")
            self._trials.watch_idle()
        except GuestError as error:
            if error.kind == "output":
                self._cheat = str(error)
                return
            self.fault = fault_of_error(error)
            self.text = first_line(str(error)) or str(error)
            self.log = error.log or str(error)
        except Deception as error:
            self._cheat = str(error)
        except GuestEnded as error:
            self.ended = error.with_traceback(None)  # whose frames hold the shared memory
        whole_s = time.monotonic() - began_s
        self._seconds = {"compile": self._guest.compile_s, "check": whole_s - self._guest.compile_s}

    @property
    def is_wrong(self) -> bool:
        """Whether values are wrong and nothing explains it yet."""
        result = self._trials.result
        return bool(result.text) and not (self._cheat or result.cheat or self.fault)

    def take_output(self, printed: bytes) -> None:
        """Look at what a candidate with wrong values has printed."""
        if PRINTED_RESULT.search(printed):
            self._cheat = "it prints what looks like a result"

    def evaluation(self) -> KernelEvaluation:
        result = self._trials.result
        cheat = self._cheat or result.cheat
        return KernelEvaluation(
            compiled=self._compiled,
            passed=result.passed,
            trials=sum(len(group.trials) for group in self._groups) if self._compiled else 0,
            fault=self.fault,
            cheat=cheat,
            text=cheat or self.text or result.text,
            log=self.log[:LOG_CHARACTERS],
            precision=result.precision,
            seconds=self._seconds,
        )


def _require_valid(submission: KernelSubmission) -> None:
    backend = submission.task.backend
    if backend == "cuda":
        raise ConfigurationError(NO_CUDA)
    if backend == "triton" and (missing := missing_for(backend, gpus=False)):
        raise ConfigurationError(f"back end 'triton': {missing}")
    if submission.device and not submission.device.startswith("cpu:"):
        raise ConfigurationError(
            f"device = {submission.device!r}: candidates aren't run on GPUs yet; valid: a set of cores, say 'cpu:2-3'"
        )
    for name in ("correct_trials", "timed_trials"):
        if not 1 <= getattr(submission, name) <= 10_000:
            raise ConfigurationError(f"{name} = {getattr(submission, name)}: valid: 1 to 10000")
    if submission.timeout_s <= 0:
        raise ConfigurationError(f"timeout_s = {submission.timeout_s}: valid: above 0")
    if why := _unreadable(submission.task.source):
        raise ConfigurationError(f"task {submission.task.name!r}: its source {why}")


def _unreadable(source: str) -> str:
    try:
        count = len(source.encode())
    except UnicodeEncodeError:
        return "isn't UTF-8"
    return f"has {count} bytes: at most {SOURCE_BYTES}" if count > SOURCE_BYTES else ""


def _bytes(groups: list[TrialGroup]) -> int:
    return sum(tensor_bytes(one.inputs) + tensor_bytes(one.expected) for group in groups for one in group.trials)
