"""Time of a candidate's calls against its reference's, by this process's clock.

Both run on the same cores in turn, for an interval of several calls each, and are stopped otherwise. Every call of an
interval has inputs that neither has seen before. When the answer comes the process is stopped at once, and outputs of
calls chosen at random are read: they have to be right by then. So what is lazy, cached or forged doesn't count.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headway.kernels.comparison import Array, Tensor, TensorShape, compare
from headway.kernels.isolation import Deception, GuestFailure, GuestProcess, delay_ns
from headway.kernels.operators import called_operator
from headway.kernels.trials import KernelTrial, SharedCalls, TaskFault, TrialGroup, operators_of, tensor_bytes
from headway.records.kernels import KernelSubmission, KernelTiming
from headway.records.sandbox import MIB

CROSSING_SHARE = 0.02  # of an interval, at most
CPU_SLACK = 1.05  # CPU time over cores x interval that clocks may be off by ...
CPU_SLACK_NS = 2_000_000  # ... beside this
MOST_CALLS = 4096  # of an interval
CHECKED = 2  # outputs read in each interval
RECORDED_SHARE = 0.5  # of the intervals, behind which a call of the candidate is recorded
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


class _Side:
    def __init__(self, guest: GuestProcess, module: str) -> None:
        self.guest = guest
        self.module = module
        self.calls = 1
        self.intervals: list[float] = []  # seconds of a call
        self.cpu_ns = 0  # at the end of the last interval

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
        recorded_share: float,
    ) -> None:
        """``candidate``: with its source loaded. ``recorded_share``: of the intervals, those with a recorded call."""
        self._recorded_share = recorded_share
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
        """Raises GuestFailure for the candidate, TaskFault for the reference."""
        self._make_models()
        began_s, calls_wanted = time.monotonic(), self._submission.timed_trials
        sides = self._sides
        for side in sides:
            side.guest.pin(self._cores)
        self._choose_calls()
        for side in sides:
            side.intervals.clear()
        while True:
            self._pair(len(sides[0].intervals))
            if self._random.random() < self._recorded_share:
                self._record_call()
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
        try:
            reference.guest.load(reference.module, task.source, confined=False)
            reference.guest.make(reference.module, "Model", arguments, seed)
        except GuestFailure as error:
            raise TaskFault(f"its reference fails: {error}") from error
        candidate.guest.make(candidate.module, "ModelNew", arguments, seed)

    def _choose_calls(self) -> None:
        """Raise both sides' calls until an interval is long enough, or has all the memory it may."""
        target_s = max(self._settings.interval_s, self._crossing_s / CROSSING_SHARE)
        for _ in range(6):
            self._prepare(max(side.calls for side in self._sides))
            self._pair(0)  # memory for the outputs is had after it
            wanted = [
                self._more_calls(side, took_s, target_s)
                for side, took_s in zip(self._sides, self._pair(0), strict=True)
            ]
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
            side.guest.thaw()
            self._calls.give(side.guest)
            side.guest.freeze()
            side.cpu_ns = side.guest.cpu_ns()

    def _pair(self, number: int) -> tuple[float, float]:
        """An interval of each, in turn the one and the other first, on the same fresh inputs; seconds of a call."""
        calls = max(side.calls for side in self._sides)
        given = [self._fresh.draw() for _ in range(calls)]
        self._write(given)
        least = min(side.calls for side in self._sides)
        checked: list[int] = self._random.choice(least, min(CHECKED, least), False).tolist()
        order = (0, 1) if number % 2 == 0 else (1, 0)
        took = [0.0, 0.0]
        addresses: list[list[int]] = [[], []]
        for at in order:
            if at != order[0] and order[0] == 0:  # the reference gets these inputs whatever the candidate did to them
                for call in checked:
                    self._require_untouched(call, *given[call])
                self._write(given)
            self._flush += 1
            took[at], addresses[at] = self._interval(self._sides[at]) if at == 0 else self._reference_interval()
            self._sides[at].intervals.append(took[at])
        for call in checked:
            self._check(call, *given[call], addresses)
        return took[0], took[1]

    def _write(self, given: Sequence[tuple[KernelTrial, int]]) -> None:
        for call, (trial, start) in enumerate(given):
            self._fresh.write(self._calls, call, trial, start)

    def _record_call(self) -> None:
        """Record a call that the candidate can't tell from timed ones: a kernel replaced by torch's shows here."""
        side = self._sides[0]
        self._write([self._fresh.draw()])
        side.guest.thaw()
        head, _ = side.guest.call("go", module=side.module, calls=1, record=True, brief=False)
        side.guest.freeze()
        side.cpu_ns = side.guest.cpu_ns()
        if called := called_operator(self._submission.task, operators_of(head)):
            raise Deception(f"it calls {called} once it is timed")

    def _reference_interval(self) -> tuple[float, list[int]]:
        try:
            return self._interval(self._sides[1])
        except Deception as error:  # a crowded machine, rather than the task
            raise OSError(f"the reference can't be timed: {error}") from error
        except GuestFailure as error:
            raise TaskFault(f"its reference fails when it is timed: {error}") from error

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

    def _check(self, call: int, trial: KernelTrial, start: int, addresses: list[list[int]]) -> None:
        """Compare both sides' outputs of a call, and look whether its inputs are as they were."""
        self._require_untouched(call, trial, start)
        width = len(trial.expected)
        for at, wanted in enumerate(trial.expected):
            place = call * width + at
            found, expected = (
                Tensor(wanted.shape, side.guest.read(given[place], wanted.shape.bytes))
                for side, given in zip(self._sides, addresses, strict=True)
            )
            compared = compare(expected, found, self._submission.task.tolerances, scaled=True)
            if compared.text:
                raise Deception(f"its outputs are wrong in timed calls: {compared.text}")

    def _require_untouched(self, call: int, trial: KernelTrial, start: int) -> None:
        if not self._calls.is_untouched(call, self._fresh.inputs(trial, start)):
            raise Deception("it changes its inputs in timed calls")


class FreshInputs:
    """Inputs that nobody has seen: a trial's, each value times a factor between 0.5 and 1.5. Zeros stay zeros and
    symmetric matrices symmetric; whole numbers are those of one of the trials."""

    SPARE = 1 << 14  # places at which the factors may start

    def __init__(self, trials: Sequence[KernelTrial], random: np.random.Generator) -> None:
        self._trials = trials
        self._random = random
        most = max((one.raw.size for trial in trials for one in trial.inputs if isinstance(one, Tensor)), default=0)
        self._factors = (random.random(most + self.SPARE, np.float32) + np.float32(0.5)).astype(np.float32)
        self._by_type: dict[str, Array] = {"float32": self._factors, "bfloat16": self._factors}
        self._symmetric: dict[int, bool] = {}

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
            return one
        if self._is_symmetric(one):
            side = self._factors[start : start + one.shape.shape[0]]
            return one.scaled(side[:, None] * side[None, :])
        return one.scaled(self._of(one, start))

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
    """Seconds that an interval of one empty call takes: what is there beside the calls. ``guest``: with EMPTY loaded as
    its candidate."""
    guest.pin(cores)
    SharedCalls([[Tensor(TensorShape("float32", (1,)), np.zeros(1, np.float32))]]).give(guest)
    took: list[float] = []
    guest.freeze()
    for _ in range(intervals):
        took_ns, _ = guest.run_calls("candidate", 1)
        took.append(took_ns * 1e-9)
    return float(np.median(took[intervals // 4 :]))
