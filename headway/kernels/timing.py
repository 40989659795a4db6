"""Time of a candidate's calls against its reference's, by this process's clock.

Both run on the same cores in turn, for an interval of several calls each, and are stopped otherwise. Every call of an
interval has inputs that neither has seen before. When the answer comes the process is stopped at once, and outputs of
calls chosen at random are read: they have to be right by then. So what is lazy, cached or forged doesn't count.
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

from headway.kernels.comparison import Array, Tensor, TensorShape, compare
from headway.kernels.isolation import Deception, GuestEnded, GuestFailure, GuestProcess, delay_ns
from headway.kernels.operators import called_operator
from headway.kernels.trials import KernelTrial, SharedCalls, TrialGroup, names_of, replaced_in, task_fault, tensor_bytes
from headway.records.kernels import KernelSubmission, KernelTiming
from headway.records.sandbox import MIB

CROSSING_SHARE = 0.02  # of an interval, at most
CPU_SLACK = 1.05  # CPU time over cores x interval that clocks may be off by ...
CPU_SLACK_NS = 2_000_000  # ... beside this
MOST_CALLS = 4096  # of an interval
CHECKED = 2  # outputs read in each interval
RECORDED_SHARE = 0.5  # of the intervals, behind which calls of the candidate are recorded ...
RECORDED_CALLS = 256  # ... at most so many
EMPTY = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x\n"


class TimingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long intervals are, and when enough are measured."""

    interval_s: float = 0.008  # of the faster side, at least
    pairs: int = 9  # of intervals, at least
    most_pairs: int = 60
    most_s: float = 0.7  # until enough is measured or it is refused; more if the calls asked for need it
    width: float = 0.03  # of the 95 % interval of the ratio, relative, at which it is enough
    refused_width: float = 0.15  # beyond which a result is refused as noisy
    memory_bytes: int = 160 * MIB  # inputs and outputs of an interval
    flush_bytes: int = 8 * MIB  # touched between intervals


class TimingResult(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides' times and the speed-up with its 95 % interval, as an evaluation has them."""

    timing: KernelTiming
    reference: KernelTiming
    speedup: float | None  # None: refused
    speedup_interval: tuple[float, float]
    refused: str = ""


class NoTimeLeft(GuestFailure):
    """The evaluation's time is over in the reference's calls, which says nothing of the candidate."""


class _Side:
    def __init__(self, guest: GuestProcess, module: str) -> None:
        self.guest = guest
        self.module = module
        self.calls = 1
        self.intervals: list[float] = []  # seconds of a call
        self.cpu_ns = 0  # at the end of the last interval

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of the reference in the block as what they are: TaskFault, NoTimeLeft, OSError, SandboxError;
        the candidate's stay GuestFailure."""
        try:
            yield
        except GuestFailure as error:
            if self.module == "candidate":
                raise
            if isinstance(error, Deception):  # a crowded machine, rather than the task
                raise OSError(f"the reference can't be timed: {error}") from error
            if isinstance(error, GuestEnded) and error.late:
                raise NoTimeLeft("no time left to measure the speed-up") from error
            raise task_fault(error, self.guest) from error

    def timing(self) -> KernelTiming:
        times = np.asarray(self.intervals) * 1e3
        return KernelTiming(
            mean=float(times.mean()),
            std=float(times.std()),
            min=float(times.min()),
            max=float(times.max()),
            calls=self.calls * len(times),
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
        crossing_s: float,
        settings: TimingSettings,
        is_judged: bool,
    ) -> None:
        """``candidate``: with its source loaded. ``is_judged``: whether it may neither call the task's operators nor
        replace functions of torch, as torch.compile of the reference does."""
        self._is_judged = is_judged
        self._sides = (_Side(candidate, "candidate"), _Side(reference, group.module))
        self._submission = submission
        self._group = group
        self._trials = trials = [trial for trial in group.trials if not trial.is_variant]
        self._cores = cores
        self._crossing_s = crossing_s
        self._settings = settings
        self._random = np.random.default_rng(int.from_bytes(os.urandom(16)))
        self._fresh = FreshInputs(trials, self._random)
        self._flush = np.zeros(settings.flush_bytes, np.uint8)
        call_bytes = tensor_bytes(trials[0].inputs) + tensor_bytes(trials[0].expected)
        self._most_calls = max(1, settings.memory_bytes // max(1, call_bytes))

    def measure(self) -> TimingResult:
        """Raises GuestFailure for the candidate, TaskFault for the reference, NoTimeLeft, OSError and SandboxError."""
        self._make_models()
        sides, began_s, calls_wanted = self._sides, time.monotonic(), self._submission.timed_trials
        self._choose_calls()
        for side in sides:
            side.intervals.clear()
        certain = int(self._random.integers(self._settings.pairs))  # chance alone could record none
        while True:
            self._pair(len(sides[0].intervals))
            if self._is_judged and (len(sides[0].intervals) == certain + 1 or self._random.random() < RECORDED_SHARE):
                self._record_calls()
            pairs, result = len(sides[0].intervals), self._result()
            if pairs < self._settings.pairs or (pairs * sides[0].calls < calls_wanted and pairs < 4096):
                continue
            low, high = result.speedup_interval
            if high / low <= 1 + self._settings.width:
                return result
            if time.monotonic() - began_s > self._settings.most_s or pairs >= self._settings.most_pairs:
                if high / low > 1 + self._settings.refused_width:
                    refused = f"noise: the speed-up is between {low:.2f} and {high:.2f} after {pairs} intervals"
                    return msgspec.structs.replace(result, refused=refused, speedup=None)
                return result

    def _make_models(self) -> None:
        candidate, reference = self._sides
        task, arguments, seed = self._submission.task, self._group.arguments, self._submission.seed
        with reference.failures():
            reference.guest.load(reference.module, task.source, confined=False)
            reference.guest.make(reference.module, "Model", arguments, seed)
            reference.guest.pin(self._cores)
        self._require_own(candidate.guest.make(candidate.module, "ModelNew", arguments, seed))
        candidate.guest.pin(self._cores)

    def _require_own(self, head: dict[str, Any]) -> None:
        if self._is_judged and (replaced := replaced_in(head)):
            raise Deception(replaced)

    def _choose_calls(self) -> None:
        """Raise both sides' calls until an interval is long enough, or has all the memory it may."""
        target_s = max(self._settings.interval_s, self._crossing_s / CROSSING_SHARE)
        for _ in range(6):
            self._prepare(max(side.calls for side in self._sides))
            self._pair(0)  # memory for the outputs is had after it
            timed = zip(self._sides, self._pair(0), strict=True)
            wanted = [self._more_calls(side, took_s, target_s) for side, took_s in timed]
            if wanted == [side.calls for side in self._sides]:
                return
            for side, calls in zip(self._sides, wanted, strict=True):
                side.calls = calls
        self._prepare(max(side.calls for side in self._sides))

    def _more_calls(self, side: _Side, call_s: float, target_s: float) -> int:
        whole_s = call_s * side.calls + self._crossing_s
        if whole_s >= 0.8 * target_s:
            return side.calls
        return min(self._most_calls, MOST_CALLS, math.ceil(side.calls * min(16.0, target_s / whole_s)))

    def _result(self) -> TimingResult:
        candidate, reference = self._sides
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
        """Have both sides map memory for ``calls`` calls, and be stopped."""
        self._calls = SharedCalls([self._trials[0].inputs] * calls)
        for side in self._sides:
            with side.failures():
                side.guest.thaw()
                self._calls.give(side.guest)
                side.guest.freeze()
                side.cpu_ns = side.guest.cpu_ns()

    def _pair(self, number: int) -> tuple[float, float]:
        """An interval of each, in turn the one and the other first, on the same fresh inputs; seconds of a call."""
        candidate, reference = self._sides
        given = [self._fresh.draw() for _ in range(max(candidate.calls, reference.calls))]
        # Any call of the candidate may be checked: the reference makes those first, and others of the same.
        count = min(CHECKED, candidate.calls, reference.calls)
        checked: list[int] = self._random.choice(candidate.calls, count, False).tolist()
        others = [one for call, one in enumerate(given) if call not in checked]
        inputs = (given, [given[call] for call in checked] + others)
        took, addresses = [0.0, 0.0], [list[int](), list[int]()]
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            side = self._sides[at]
            self._write(inputs[at][: side.calls])
            self._flush += 1
            with side.failures():
                took[at], addresses[at] = self._interval(side)
            side.intervals.append(took[at])
            kept = (self._calls.is_untouched(call, self._fresh.inputs(*given[call])) for call in checked)
            if side is candidate and not all(kept):
                raise Deception("it changes its inputs in timed calls")
        for place, call in enumerate(checked):
            self._check(given[call][0], (call, place), addresses)
        return took[0], took[1]

    def _write(self, given: Sequence[tuple[KernelTrial, int]]) -> None:
        for call, (trial, start) in enumerate(given):
            self._fresh.write(self._calls, call, trial, start)

    def _record_calls(self) -> None:
        """Record calls that the candidate can't tell from an interval's first: a kernel replaced by torch's shows."""
        side = self._sides[0]
        calls = min(side.calls, RECORDED_CALLS, 1 << int(self._random.integers(side.calls.bit_length() + 1)))
        self._write([self._fresh.draw() for _ in range(calls)])
        side.guest.thaw()
        head, _ = side.guest.call("go", module=side.module, calls=calls, record=True, brief=False)
        side.guest.freeze()
        side.cpu_ns = side.guest.cpu_ns()
        self._require_own(head)
        if called := called_operator(self._submission.task, names_of(head, "operators")):
            raise Deception(f"it calls {called} once it is timed")

    def _interval(self, side: _Side) -> tuple[float, list[int]]:
        guest = side.guest
        delayed_ns = self._delayed_ns(guest)
        since_ns = time.perf_counter_ns()
        took_ns, data = guest.run_calls(side.module, side.calls)
        run_ns = time.perf_counter_ns() - since_ns  # until it was stopped, which may be later where cores are scarce
        used_ns = guest.cpu_ns() - side.cpu_ns
        side.cpu_ns += used_ns
        outputs = len(self._trials[0].expected) * side.calls
        if len(data) != 8 * outputs:
            raise Deception("it forged an answer")
        if guest.strays(self._cores):
            raise Deception("it leaves the cores it was given")
        if used_ns > CPU_SLACK * run_ns * len(self._cores) + CPU_SLACK_NS or guest.others() > 0:
            raise Deception("it computes on more than the cores it was given")
        delayed_ns = self._delayed_ns(guest) - delayed_ns
        took_ns = max(took_ns - delayed_ns, used_ns // len(self._cores))
        seconds = max(took_ns * 1e-9 - self._crossing_s, 1e-9) / side.calls
        return seconds, np.frombuffer(data, "<u8").tolist()

    def _delayed_ns(self, guest: GuestProcess) -> int:
        """The time that others' use of the cores has cost so far. On several cores only this process's own delay is
        known to be that: a source's threads can delay each other on purpose."""
        return delay_ns() + (guest.delay_ns() if len(self._cores) == 1 else 0)

    def _check(self, trial: KernelTrial, calls: tuple[int, int], addresses: list[list[int]]) -> None:
        """Compare the outputs of a call, which each side has made in a place of its own."""
        for at, wanted in enumerate(trial.expected):
            values: list[Tensor] = []
            for side, call, given in zip(self._sides, calls, addresses, strict=True):
                with side.failures():
                    raw = side.guest.read(given[call * len(trial.expected) + at], wanted.shape.bytes)
                values.append(Tensor(wanted.shape, raw))
            compared = compare(values[1], values[0], self._submission.task.tolerances, scaled=True)
            if compared.text:
                raise Deception(f"its outputs are wrong in timed calls: {compared.text}")


class FreshInputs:
    """Inputs that nobody has seen: a trial's, each value times a factor between 0.5 and 1.5. Zeros stay zeros and
    symmetric matrices symmetric. Whole numbers are those of one of the trials; where there are no others, they change
    places, but for zeros and where their order or symmetry is structure."""

    SPARE = 1 << 14  # places at which the factors may start

    def __init__(self, trials: Sequence[KernelTrial], random: np.random.Generator) -> None:
        self._trials = trials
        self._random = random
        most = max((one.raw.size for trial in trials for one in trial.inputs if isinstance(one, Tensor)), default=0)
        self._factors = (random.random(most + self.SPARE, np.float32) + np.float32(0.5)).astype(np.float32)
        self._by_type: dict[str, Array] = {"float32": self._factors, "bfloat16": self._factors}
        self._symmetric: dict[int, bool] = {}
        self._are_whole = not any(isinstance(one, Tensor) and one.is_float for one in trials[0].inputs)
        self._movable: dict[int, Array] = {}  # places of whole numbers

    def draw(self) -> tuple[KernelTrial, int]:
        return self._trials[int(self._random.integers(len(self._trials)))], int(self._random.integers(self.SPARE))

    def write(self, calls: SharedCalls, call: int, trial: KernelTrial, start: int) -> None:
        """Write a call's tensors to their places."""
        for place, one in calls.places(call, trial.inputs):
            if one.is_float and one.shape.dtype != "bfloat16" and not self._is_symmetric(one):
                np.multiply(one.raw, self._of(one, start), out=place)
            else:
                place[...] = self._one(one, start).raw

    def inputs(self, trial: KernelTrial, start: int) -> list[Any]:
        return [self._one(one, start) if isinstance(one, Tensor) else one for one in trial.inputs]

    def _one(self, one: Tensor, start: int) -> Tensor:
        if not one.is_float:
            return self._moved(one, start) if self._are_whole else one
        if self._is_symmetric(one):
            side = self._factors[start : start + one.shape.shape[0]]
            return one.scaled(side[:, None] * side[None, :])
        return one.scaled(self._of(one, start))

    def _moved(self, one: Tensor, start: int) -> Tensor:
        flat = one.raw.reshape(-1)
        if id(one) not in self._movable:
            rows = np.atleast_1d(one.raw)
            structured = bool(np.all(rows[..., :-1] <= rows[..., 1:])) or self._is_symmetric(one)
            self._movable[id(one)] = np.flatnonzero(flat[: 0 if structured else None])
        places = self._movable[id(one)]
        moved = flat.copy()
        moved[places] = np.roll(flat[places], start)
        return Tensor(one.shape, moved)

    def _of(self, one: Tensor, start: int) -> Array:
        dtype = one.shape.dtype
        if dtype not in self._by_type:
            self._by_type[dtype] = self._factors.astype(one.raw.dtype)
        return self._by_type[dtype][start : start + one.raw.size].reshape(one.shape.shape)

    def _is_symmetric(self, one: Tensor) -> bool:
        shape = one.shape.shape
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
            return False
        if id(one) not in self._symmetric:
            self._symmetric[id(one)] = np.array_equal(one.raw, one.raw.T)
        return self._symmetric[id(one)]


def measure_crossing(guest: GuestProcess, cores: Sequence[int], intervals: int = 60) -> float:
    """Seconds that an interval of one empty call takes: what is there beside the calls. Raises OSError."""
    took: list[float] = []
    try:
        guest.load("candidate", EMPTY, confined=True)
        guest.make("candidate", "ModelNew", [], 0)
        guest.pin(cores)
        SharedCalls([[Tensor(TensorShape("float32", (1,)), np.zeros(1, np.float32))]]).give(guest)
        guest.freeze()
        for _ in range(intervals):
            took_ns, _ = guest.run_calls("candidate", 1)
            took.append(took_ns * 1e-9)
    except GuestFailure as error:  # no candidate's: the source is ours
        raise OSError(f"an empty call can't be timed: {error}") from error
    return float(np.median(took[intervals // 4 :]))
