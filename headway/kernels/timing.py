"""Timing of a candidate's calls against its reference's, by this process's clock.

Both run on the same cores in turn, each for an interval of several calls, and are stopped otherwise. Every call of an
interval has inputs that neither has seen before. The process is stopped as soon as it answers, and outputs of randomly
chosen calls are read, which must be right by then. Lazy, cached or forged results therefore don't count.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.kernels.cases import KernelTrial, SharedCalls, TrialGroup, names_of, replaced_in, task_fault, tensor_bytes
from headway.kernels.comparison import Array, Tensor, TensorShape, compare
from headway.kernels.isolation import GuestEnded, GuestFailure, GuestProcess, TamperingDetected, delay_ns
from headway.kernels.operators import called_operator
from headway.records.kernels import KernelSubmission, KernelTiming
from headway.records.sandbox import MIB

MAX_OVERHEAD_SHARE = 0.02  # of an interval, at most
CPU_SLACK = 1.05  # tolerated CPU time over cores x interval, for inaccurate clocks ...
CPU_SLACK_NS = 2_000_000  # ... plus this
MAX_CALLS = 4096  # of an interval
CHECKED = 2  # outputs read in each interval
RECORDED_SHARE = 0.5  # of the intervals, after which calls of the candidate are recorded
RECORDED_CALLS = 256  # recorded after an interval, at most
EMPTY = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x\n"


class TimingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of intervals, and the conditions under which a measurement ends."""

    interval_s: float = 0.008  # of the faster of the two, at least
    pairs: int = 9  # of intervals, at least
    most_pairs: int = 60
    most_s: float = 0.7  # until enough is measured or it is refused; more if the calls asked for need it
    width: float = 0.03  # relative, of the ratio's 95 % interval, at which a measurement ends
    refused_width: float = 0.15  # beyond which a result is refused as noisy
    memory_bytes: int = 160 * MIB  # inputs and outputs of an interval
    flush_bytes: int = 8 * MIB  # touched between intervals


class TimingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Times of candidate and reference, and the speed-up with its 95 % interval; the fields are KernelEvaluation's."""

    timing: KernelTiming
    reference: KernelTiming
    speedup: float | None  # None: refused
    speedup_interval: tuple[float, float]
    refused: str = ""


class NoTimeLeft(GuestFailure):
    """The evaluation's time ended in the reference's calls, which is no evidence on the candidate."""


class _Runner:
    def __init__(self, guest: GuestProcess, module: str) -> None:
        self.guest = guest
        self.module = module
        self.calls = 1
        self.intervals: list[float] = []  # seconds of a call
        self.cpu_ns = 0  # at the end of the last interval

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Convert the reference's failures in the block to TaskFault, NoTimeLeft, OSError or SandboxError; the
        candidate's stay GuestFailure."""
        try:
            yield
        except GuestFailure as error:
            if self.module == "candidate":
                raise
            if isinstance(error, TamperingDetected):  # a crowded machine, rather than the task
                raise OSError(f"the reference can't be timed: {error}") from error
            if isinstance(error, GuestEnded) and error.late:
                raise NoTimeLeft("no time left to measure the speed-up") from error
            raise task_fault(error, self.guest) from error

    def timing(self) -> KernelTiming:
        times_ms = np.asarray(self.intervals) * 1e3
        return KernelTiming(
            mean=float(times_ms.mean()),
            std=float(times_ms.std()),
            min=float(times_ms.min()),
            max=float(times_ms.max()),
            calls=self.calls * len(times_ms),
        )


class PairTimer:
    """Times a candidate against its reference on leased cores."""

    def __init__(
        self,
        candidate: GuestProcess,
        reference: GuestProcess,
        submission: KernelSubmission,
        group: TrialGroup,
        cores: Sequence[int],
        overhead_s: float,
        settings: TimingSettings,
        is_judged: bool,
    ) -> None:
        """``candidate``: its guest, with the source loaded. ``is_judged``: calling the task's operators or replacing
        functions of torch is tampering; False for torch.compile of the reference, which does both."""
        self._is_judged = is_judged
        self._runners = (_Runner(candidate, "candidate"), _Runner(reference, group.module))
        self._submission = submission
        self._group = group
        self._trials = trials = [trial for trial in group.trials if not trial.is_variant]
        self._cores = cores
        self._overhead_s = overhead_s
        self._settings = settings
        self._random = np.random.default_rng(int.from_bytes(os.urandom(16)))
        self._fresh = FreshInputs(trials, self._random)
        self._flush = np.zeros(settings.flush_bytes, np.uint8)
        call_bytes = tensor_bytes(trials[0].inputs) + tensor_bytes(trials[0].expected)
        self._max_calls = max(1, settings.memory_bytes // max(1, call_bytes))

    def measure(self) -> TimingResult:
        """Measure the speed-up. Raises GuestFailure for the candidate, TaskFault for the reference, NoTimeLeft, OSError
        and SandboxError."""
        self._make_models()
        runners, began_s, min_calls = self._runners, time.monotonic(), self._submission.timed_trials
        self._choose_calls()
        for runner in runners:
            runner.intervals.clear()
        recorded_index = int(self._random.integers(self._settings.pairs))  # so that at least one interval is recorded
        while True:
            self._time_pair(len(runners[0].intervals))
            if self._is_judged and (
                len(runners[0].intervals) == recorded_index + 1 or self._random.random() < RECORDED_SHARE
            ):
                self._record_calls()
            pair_count, timing_result = len(runners[0].intervals), self._result()
            if pair_count < self._settings.pairs or (pair_count * runners[0].calls < min_calls and pair_count < 4096):
                continue
            low, high = timing_result.speedup_interval
            if high / low <= 1 + self._settings.width:
                return timing_result
            if time.monotonic() - began_s > self._settings.most_s or pair_count >= self._settings.most_pairs:
                if high / low > 1 + self._settings.refused_width:
                    refusal = f"noise: the speed-up is between {low:.2f} and {high:.2f} after {pair_count} intervals"
                    return msgspec.structs.replace(timing_result, refused=refusal, speedup=None)
                return timing_result

    def _make_models(self) -> None:
        candidate, reference = self._runners
        task, arguments, seed = self._submission.task, self._group.arguments, self._submission.seed
        with reference.failures():
            reference.guest.load(reference.module, task.source, confined=False)
            reference.guest.make(reference.module, "Model", arguments, seed)
            reference.guest.pin(self._cores)
        self._require_unreplaced(candidate.guest.make(candidate.module, "ModelNew", arguments, seed))
        candidate.guest.pin(self._cores)

    def _require_unreplaced(self, head: dict[str, Any]) -> None:
        if self._is_judged and (replaced := replaced_in(head)):
            raise TamperingDetected(replaced)

    def _choose_calls(self) -> None:
        """Raise both runners' calls until an interval is long enough, or reaches its memory limit."""
        target_s = max(self._settings.interval_s, self._overhead_s / MAX_OVERHEAD_SHARE)
        for _ in range(6):
            self._prepare(max(runner.calls for runner in self._runners))
            self._time_pair(0)  # a warm-up, which allocates the memory for outputs
            runner_times = zip(self._runners, self._time_pair(0), strict=True)
            calls_by_runner = [self._more_calls(runner, call_s, target_s) for runner, call_s in runner_times]
            if calls_by_runner == [runner.calls for runner in self._runners]:
                return
            for runner, calls in zip(self._runners, calls_by_runner, strict=True):
                runner.calls = calls
        self._prepare(max(runner.calls for runner in self._runners))

    def _more_calls(self, runner: _Runner, call_s: float, target_s: float) -> int:
        interval_s = call_s * runner.calls + self._overhead_s
        if interval_s >= 0.8 * target_s:
            return runner.calls
        return min(self._max_calls, MAX_CALLS, math.ceil(runner.calls * min(16.0, target_s / interval_s)))

    def _result(self) -> TimingResult:
        candidate, reference = self._runners
        ratios = np.sort(np.asarray(reference.intervals) / np.asarray(candidate.intervals))
        count = len(ratios)
        rank = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))  # the median's interval by order statistics
        return TimingResult(
            timing=candidate.timing(),
            reference=reference.timing(),
            speedup=float(np.median(ratios)),
            speedup_interval=(float(ratios[rank]), float(ratios[count - 1 - rank])),
        )

    def _prepare(self, calls: int) -> None:
        """Make both runners map memory for ``calls`` calls, and stop them."""
        self._calls = SharedCalls([self._trials[0].inputs] * calls)
        for runner in self._runners:
            with runner.failures():
                runner.guest.thaw()
                self._calls.send_to(runner.guest)
                runner.guest.freeze()
                runner.cpu_ns = runner.guest.cpu_ns()

    def _time_pair(self, number: int) -> tuple[float, float]:
        """Time an interval of each runner on the same fresh inputs, alternating which runs first; seconds per call."""
        candidate, reference = self._runners
        draws = [self._fresh.draw() for _ in range(max(candidate.calls, reference.calls))]
        # The reference makes the checked calls first, since it may make fewer calls than the candidate.
        checked_count = min(CHECKED, candidate.calls, reference.calls)
        checked_calls: list[int] = self._random.choice(candidate.calls, checked_count, False).tolist()
        unchecked_draws = [draw for call, draw in enumerate(draws) if call not in checked_calls]
        runner_draws = (draws, [draws[call] for call in checked_calls] + unchecked_draws)
        call_times_s, addresses = [0.0, 0.0], [list[int](), list[int]()]
        for runner_index in (0, 1) if number % 2 == 0 else (1, 0):
            runner = self._runners[runner_index]
            self._write(runner_draws[runner_index][: runner.calls])
            self._flush += 1
            with runner.failures():
                call_times_s[runner_index], addresses[runner_index] = self._interval(runner)
            runner.intervals.append(call_times_s[runner_index])
            unchanged = (self._calls.is_untouched(call, self._fresh.inputs(*draws[call])) for call in checked_calls)
            if runner is candidate and not all(unchanged):
                raise TamperingDetected("it changes its inputs in timed calls")
        for reference_call, call in enumerate(checked_calls):
            self._check(draws[call][0], (call, reference_call), addresses)
        return call_times_s[0], call_times_s[1]

    def _write(self, draws: Sequence[tuple[KernelTrial, int]]) -> None:
        for call, (trial, start) in enumerate(draws):
            self._fresh.write(self._calls, call, trial, start)

    def _record_calls(self) -> None:
        """Record the operators of calls that look like an interval's first calls to the candidate, which reveals a
        kernel that is replaced by torch's."""
        runner = self._runners[0]
        call_count = min(runner.calls, RECORDED_CALLS, 1 << int(self._random.integers(runner.calls.bit_length() + 1)))
        self._write([self._fresh.draw() for _ in range(call_count)])
        runner.guest.thaw()
        answer_head, _ = runner.guest.call("go", module=runner.module, calls=call_count, record=True, brief=False)
        runner.guest.freeze()
        runner.cpu_ns = runner.guest.cpu_ns()
        self._require_unreplaced(answer_head)
        if operator_name := called_operator(self._submission.task, names_of(answer_head, "operators")):
            raise TamperingDetected(f"it calls {operator_name} once it is timed")

    def _interval(self, runner: _Runner) -> tuple[float, list[int]]:
        guest = runner.guest
        delayed_before_ns = self._delayed_ns(guest)
        since_ns = time.perf_counter_ns()
        took_ns, packed_addresses = guest.run_calls(runner.module, runner.calls)
        run_ns = time.perf_counter_ns() - since_ns  # until it was stopped, which may be later where cores are scarce
        cpu_ns = guest.cpu_ns() - runner.cpu_ns
        runner.cpu_ns += cpu_ns
        output_count = len(self._trials[0].expected) * runner.calls
        if len(packed_addresses) != 8 * output_count:
            raise TamperingDetected("it forged an answer")
        if guest.runs_outside(self._cores):
            raise TamperingDetected("it leaves the cores it was given")
        if cpu_ns > CPU_SLACK * run_ns * len(self._cores) + CPU_SLACK_NS or guest.extra_processes() > 0:
            raise TamperingDetected("it computes on more than the cores it was given")
        delayed_ns = self._delayed_ns(guest) - delayed_before_ns
        took_ns = max(took_ns - delayed_ns, cpu_ns // len(self._cores))
        call_s = max(took_ns * 1e-9 - self._overhead_s, 1e-9) / runner.calls
        return call_s, np.frombuffer(packed_addresses, "<u8").tolist()

    def _delayed_ns(self, guest: GuestProcess) -> int:
        """The time lost so far to other processes on the cores. On several cores it includes only this process's delay,
        because a source's threads can delay each other on purpose."""
        return delay_ns() + (guest.delay_ns() if len(self._cores) == 1 else 0)

    def _check(self, trial: KernelTrial, calls: tuple[int, int], addresses: list[list[int]]) -> None:
        """Compare both runners' outputs of a call of ``trial``. ``calls``: its index in each runner's interval."""
        for output_index, expected in enumerate(trial.expected):
            outputs: list[Tensor] = []
            for runner, call, runner_addresses in zip(self._runners, calls, addresses, strict=True):
                with runner.failures():
                    address = runner_addresses[call * len(trial.expected) + output_index]
                    outputs.append(Tensor(expected.shape, runner.guest.read(address, expected.shape.bytes)))
            comparison = compare(outputs[1], outputs[0], self._submission.task.tolerances, scaled=True)
            if comparison.text:
                raise TamperingDetected(f"its outputs are wrong in timed calls: {comparison.text}")


class FreshInputs:
    """Inputs that no guest has seen: a trial's inputs, each value times a factor between 0.5 and 1.5. Zeros stay zeros
    and symmetric matrices symmetric. Integers are those of one of the trials. If a task has only integer inputs, their
    nonzero values are rotated, except in sorted or symmetric tensors."""

    SPARE = 1 << 14  # positions at which the factors may start

    def __init__(self, trials: Sequence[KernelTrial], random: np.random.Generator) -> None:
        self._trials = trials
        self._random = random
        max_size = max((arg.raw.size for trial in trials for arg in trial.inputs if isinstance(arg, Tensor)), default=0)
        self._factors = (random.random(max_size + self.SPARE, np.float32) + np.float32(0.5)).astype(np.float32)
        self._by_type: dict[str, Array] = {"float32": self._factors, "bfloat16": self._factors}
        self._symmetric: dict[int, bool] = {}
        self._are_integers = not any(isinstance(arg, Tensor) and arg.is_float for arg in trials[0].inputs)
        self._permutable: dict[int, Array] = {}  # positions of nonzero integers, by tensor

    def draw(self) -> tuple[KernelTrial, int]:
        return self._trials[int(self._random.integers(len(self._trials)))], int(self._random.integers(self.SPARE))

    def write(self, calls: SharedCalls, call: int, trial: KernelTrial, start: int) -> None:
        """Write a call's tensors to the shared memory."""
        for destination, tensor in calls.tensor_views(call, trial.inputs):
            if tensor.is_float and tensor.shape.dtype != "bfloat16" and not self._is_symmetric(tensor):
                np.multiply(tensor.raw, self._factors_of(tensor, start), out=destination)
            else:
                destination[...] = self._scaled(tensor, start).raw

    def inputs(self, trial: KernelTrial, start: int) -> list[Any]:
        return [self._scaled(arg, start) if isinstance(arg, Tensor) else arg for arg in trial.inputs]

    def _scaled(self, tensor: Tensor, start: int) -> Tensor:
        if not tensor.is_float:
            return self._permuted(tensor, start) if self._are_integers else tensor
        if self._is_symmetric(tensor):
            factors = self._factors[start : start + tensor.shape.shape[0]]
            return tensor.scaled(factors[:, None] * factors[None, :])
        return tensor.scaled(self._factors_of(tensor, start))

    def _permuted(self, tensor: Tensor, start: int) -> Tensor:
        flat_values = tensor.raw.reshape(-1)
        if id(tensor) not in self._permutable:
            rows = np.atleast_1d(tensor.raw)
            is_structured = bool(np.all(rows[..., :-1] <= rows[..., 1:])) or self._is_symmetric(tensor)
            self._permutable[id(tensor)] = np.flatnonzero(flat_values[: 0 if is_structured else None])
        positions = self._permutable[id(tensor)]
        permuted_values = flat_values.copy()
        permuted_values[positions] = np.roll(flat_values[positions], start)
        return Tensor(tensor.shape, permuted_values)

    def _factors_of(self, tensor: Tensor, start: int) -> Array:
        dtype = tensor.shape.dtype
        if dtype not in self._by_type:
            self._by_type[dtype] = self._factors.astype(tensor.raw.dtype)
        return self._by_type[dtype][start : start + tensor.raw.size].reshape(tensor.shape.shape)

    def _is_symmetric(self, tensor: Tensor) -> bool:
        shape = tensor.shape.shape
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
            return False
        if id(tensor) not in self._symmetric:
            self._symmetric[id(tensor)] = np.array_equal(tensor.raw, tensor.raw.T)
        return self._symmetric[id(tensor)]


def measure_call_overhead(guest: GuestProcess, cores: Sequence[int], intervals: int = 60) -> float:
    """Seconds of an interval with one empty call: the overhead beside the calls. Raises OSError."""
    times_s: list[float] = []
    try:
        guest.load("candidate", EMPTY, confined=True)
        guest.make("candidate", "ModelNew", [], 0)
        guest.pin(cores)
        SharedCalls([[Tensor(TensorShape("float32", (1,)), np.zeros(1, np.float32))]]).send_to(guest)
        guest.freeze()
        for _ in range(intervals):
            took_ns, _ = guest.run_calls("candidate", 1)
            times_s.append(took_ns * 1e-9)
    except GuestFailure as error:  # no candidate is to blame: the source is EMPTY
        raise OSError(f"an empty call can't be timed: {error}") from error
    return float(np.median(times_s[intervals // 4 :]))
