"""Trials of a candidate: inputs and expected outputs, which a task's reference makes and this process keeps; and what a
candidate's outputs for them come to."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.kernels.comparison import FLOATS, LEAST_ERROR, Array, Tensor, TensorShape, compare
from headway.kernels.isolation import Deception, GuestEnded, GuestError, GuestFailure, GuestProcess
from headway.records.kernels import KernelTask
from headway.records.sandbox import MIB

CHUNK_BYTES = 192 * MIB  # inputs and outputs of the calls of one request
MOST_BYTES = 512 * MIB  # outputs of one call
ALIGNMENT = 64
_SEALS = 0x1 | 0x2 | 0x4  # no further seals, no shrinking, no growing: or a guest could make reads here fail
ODD = (KeyError, TypeError, ValueError, OverflowError)  # of what a guest tells
_SAME = 0.01  # relative error of values that are equal but for rounding
LATE_S = 0.05  # how long a wrong output is watched
IDLE_S, IDLE_SHARE = 0.03, 0.1  # of CPU time, while nothing is asked for
STARVED_S = 2.0  # a busy thread that gets no core is watched for so long
# Structure stays what the task's own inputs have: zeros, order, symmetry. A factor, or None for ones.
VARIANTS: dict[str, float | None] = {"zeros": 0.0, "ones": None, "large": 16.0, "tiny": 2.0**-10, "negated": -1.0}


class TaskFault(Exception):
    """The reference itself fails: a fault of the task, whatever the candidate does."""


def task_fault(error: Exception, guest: GuestProcess) -> TaskFault:
    """The fault of a task whose reference has failed. Blocks. Raises SandboxError where its sandbox has failed."""
    if isinstance(error, GuestEnded) and not error.late:
        guest.wait_ended()
    return TaskFault(f"its reference fails: {error}")


class KernelTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a call, tensors and plain values, and the outputs expected."""

    name: str
    inputs: list[Any]
    expected: list[Tensor]

    @property
    def is_variant(self) -> bool:
        """Whether its inputs are others' with other values, rather than a seed's."""
        return self.name in VARIANTS

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(one.values()).all() for one in self.expected if one.is_float)


class TrialGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Trials of one setting of the task's sizes."""

    module: str  # the reference's, in its guest
    arguments: list[Any]  # of the class
    trials: list[KernelTrial]


def tensor_bytes(values: Sequence[Any]) -> int:
    return sum(one.shape.bytes + ALIGNMENT for one in values if isinstance(one, Tensor))


def has_bfloat16(group: TrialGroup) -> bool:
    """Whether an input or an expected output is of bfloat16."""
    values = [value for trial in group.trials for value in (*trial.inputs, *trial.expected)]
    return any(isinstance(one, Tensor) and one.shape.dtype == "bfloat16" for one in values)


class SharedCalls:
    """Arguments of calls, in memory that guests share: each tensor has a place in it, plain values are told. Guests may
    write to it, and that is looked for."""

    def __init__(self, calls: Sequence[Sequence[Any]]) -> None:
        """``calls``: with tensors of the shapes that are to be written."""
        size = 0

        def told(one: Any) -> Any:
            nonlocal size
            if not isinstance(one, Tensor):
                return one
            start, size = size, size - (-one.shape.bytes // ALIGNMENT) * ALIGNMENT
            return {"dtype": one.shape.dtype, "shape": list(one.shape.shape), "offset": start}

        self._told = [[told(one) for one in call] for call in calls]
        self._bytes = max(size, mmap.PAGESIZE)
        self._descriptor = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, self._bytes)
        fcntl.fcntl(self._descriptor, 1033, _SEALS)  # F_ADD_SEALS
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, self._bytes), np.uint8)

    def give(self, guest: GuestProcess) -> None:
        """Have a guest make the calls' arguments of it."""
        guest.call("prepare", descriptors=[self._descriptor], bytes=self._bytes, calls=self._told)

    def places(self, call: int, values: Sequence[Any]) -> Iterator[tuple[Array, Tensor]]:
        """The place of each tensor among a call's arguments."""
        for where, one in zip(self._told[call], values, strict=True):
            if isinstance(one, Tensor):
                at = where["offset"]
                yield Tensor(one.shape, self._memory[at : at + one.shape.bytes]).raw, one

    def write(self, call: int, values: Sequence[Any]) -> None:
        for place, one in self.places(call, values):
            place[...] = one.raw

    def is_untouched(self, call: int, values: Sequence[Any]) -> bool:
        """Whether a call's arguments still are ``values``."""
        return all(np.array_equal(_bits(place), _bits(one.raw)) for place, one in self.places(call, values))


def shared_calls(calls: Sequence[Sequence[Any]], guest: GuestProcess) -> SharedCalls:
    """Calls whose arguments are written, and given to a guest."""
    made = SharedCalls(calls)
    for number, values in enumerate(calls):
        made.write(number, values)
    made.give(guest)
    return made


def _bits(values: Array) -> Array:
    return values.reshape(-1).view(np.uint8)  # a NaN equals itself


def told_tensor(told: dict[str, Any]) -> tuple[TensorShape, int]:
    """Type, shape and address of a tensor that a guest tells. Raises errors of ODD."""
    return TensorShape(told["dtype"], tuple(map(int, told["shape"]))), int(told["address"])


def outputs_of(head: dict[str, Any], calls: int) -> list[list[tuple[TensorShape, int]]]:
    """Types, shapes and addresses of the outputs that a guest tells."""
    try:
        told = [[told_tensor(one) for one in parts] for parts in head["outputs"]]
    except ODD as error:
        raise GuestError(f"outputs can't be compared: {error}", "raised", "") from None
    if len(told) != calls:
        raise Deception("it forged an answer")
    return told


def names_of(head: dict[str, Any], key: str) -> list[str]:
    """Names that a guest tells, capped: ``operators`` of torch that it has called, functions that are ``patched``."""
    told = head.get(key, [])
    return [str(name)[:100] for name in told[:500]] if isinstance(told, list) else ["?"]


def replaced_in(head: dict[str, Any]) -> str:
    """The deception that a guest's answer shows, where it names replaced functions; "": it names none."""
    patched = names_of(head, "patched")
    return f"it replaced {', '.join(patched[:5])}" if patched else ""


def chunks(trials: Sequence[KernelTrial]) -> Iterator[list[KernelTrial]]:
    """Trials whose tensors fit into one request together."""
    chunk, size = list[KernelTrial](), 0
    for trial in trials:
        needed = tensor_bytes(trial.inputs) + tensor_bytes(trial.expected)
        if chunk and size + needed > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(trial)
        size += needed
    yield chunk


class ReferenceMaker:
    """Has a reference make the trials of its task, in a guest of its own."""

    def __init__(self, guest: GuestProcess, seed: int) -> None:
        self._guest = guest
        self._seed = seed

    def group(self, module: str, source: str, seeds: int, variants: bool) -> TrialGroup:
        """Raises TaskFault."""
        guest = self._guest
        try:
            guest.load(module, source, confined=False)
            arguments = guest.make(module, "Model", None, self._seed)["arguments"]
            trials = [
                self._run(module, f"seed {n}", self._inputs(module, n)) for n in range(self._seed, self._seed + seeds)
            ]
            inputs = trials[0].inputs
            if variants and trials[0].is_finite and any(isinstance(one, Tensor) and one.is_float for one in inputs):
                made = [self._run(module, name, varied(inputs, factor)) for name, factor in VARIANTS.items()]
                trials += [one for one in made if one.is_finite]  # outside of its domain there is nothing to compare
            return TrialGroup(module=module, arguments=arguments, trials=trials)
        except (GuestFailure, *ODD) as error:
            raise task_fault(error, guest) from error

    def _inputs(self, module: str, seed: int) -> list[Any]:
        head, _ = self._guest.call("inputs", module=module, seed=seed)

        def value(told: Any) -> Any:
            return self._read(*told_tensor(told)) if isinstance(told, dict) and "dtype" in told else told

        return [value(told) for told in head["inputs"]]

    def _run(self, module: str, name: str, inputs: list[Any]) -> KernelTrial:
        calls = shared_calls([inputs], self._guest)
        head, _ = self._guest.call("go", module=module, calls=1, record=False, brief=False)
        if not calls.is_untouched(0, inputs):
            raise TaskFault("its reference changes its inputs")
        (outputs,) = outputs_of(head, 1)
        return KernelTrial(name=name, inputs=inputs, expected=[self._read(*where) for where in outputs])

    def _read(self, shape: TensorShape, address: int) -> Tensor:
        if shape.bytes > MOST_BYTES:
            raise TaskFault(f"a tensor of {shape}: at most {MOST_BYTES >> 20} MiB")
        return Tensor(shape, self._guest.read(address, shape.bytes))


def varied(inputs: Sequence[Any], factor: float | None) -> list[Any]:
    """Inputs whose floating-point tensors have other values, zeros where they were."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_float:
            return value
        if factor is not None:
            return value.scaled(factor)
        return value.replaced(value.values() != 0)

    return [one(value) for value in inputs]


def _varied(one: Tensor) -> bool:
    return one.raw.size > 1 and bool(np.ptp(one.values()))


class CandidateTrials:
    """Runs a candidate on trials. Raises GuestError, GuestEnded and Deception, as calls of its guest do."""

    def __init__(self, guest: GuestProcess, task: KernelTask, seed: int) -> None:
        self._guest = guest
        self._task = task
        self._seed = seed
        self.passed = 0
        self.text = ""  # the first difference
        self.cheat = ""  # the first deception
        self.operators: set[str] = set()
        self.precision = ""  # where it is lower than the reference's
        self._error = 0.0  # the largest, relative
        self._places = Counter[int]()  # of a chunk's outputs, once a call: all are kept, so each call has its own

    def run(self, group: TrialGroup) -> None:
        """Run a group's trials, and record the operators of torch that they call."""
        for chunk in chunks(group.trials):
            self._run_chunk(chunk)

    def make(self, arguments: list[Any]) -> None:
        """Make the model for a group's sizes."""
        self.note_replaced(self._guest.make("candidate", "ModelNew", arguments, self._seed))

    def note_replaced(self, head: dict[str, Any]) -> None:
        """Take what the guest says about replaced functions."""
        self.cheat = self.cheat or replaced_in(head)

    def _run_chunk(self, chunk: list[KernelTrial]) -> None:
        guest = self._guest
        calls = shared_calls([trial.inputs for trial in chunk], guest)
        head, _ = guest.call("go", module="candidate", calls=len(chunk), record=True, brief=False)
        guest.freeze()
        try:
            self.note_replaced(head)
            self.operators.update(names_of(head, "operators"))
            every = outputs_of(head, len(chunk))
            self._places = Counter(address for outputs in every for address in {at for _, at in outputs})
            for number, (trial, outputs) in enumerate(zip(chunk, every, strict=True)):
                if not calls.is_untouched(number, trial.inputs):
                    self.cheat = self.cheat or "it changes its inputs"
                if self._compare(trial, outputs, chunk):
                    self.passed += 1
        finally:
            guest.thaw()

    def _compare(self, trial: KernelTrial, outputs: list[tuple[TensorShape, int]], chunk: list[KernelTrial]) -> bool:
        if len(outputs) != len(trial.expected):
            self.text = self.text or f"{len(outputs)} outputs, not {len(trial.expected)}"
            return False
        for wanted, (shape, address) in zip(trial.expected, outputs, strict=True):
            if shape != wanted.shape:
                self.text = self.text or f"{trial.name}: output of {shape}, not {wanted.shape}"
                return False
            found = Tensor(shape, self._guest.read(address, shape.bytes))
            compared = compare(wanted, found, self._task.tolerances, scaled=trial.is_variant, hollow=trial.is_variant)
            if compared.text:
                self.text = self.text or f"{trial.name}: {compared.text}"
                self.cheat = self.cheat or self._explain(trial, found, address, chunk)
                return False
            if not trial.is_variant:
                self._note_error(shape.dtype, compared.error)
        return True

    def _note_error(self, dtype: str, error: float) -> None:
        if dtype in FLOATS and error > max(self._error, LEAST_ERROR[dtype]):
            self.precision = f"relative error {error:.1e}: less precise than {dtype}"
        self._error = max(self._error, error)

    def _explain(self, trial: KernelTrial, found: Tensor, address: int, chunk: list[KernelTrial]) -> str:
        """Name the deception that a wrong output shows; "": it is just wrong. Trials of scaled inputs have outputs that
        honest mistakes hit as well: zeros, and those of negated inputs."""
        seeded = [] if trial.is_variant else [one for one in chunk if not one.is_variant]
        inputs = [value for value in trial.inputs if seeded and isinstance(value, Tensor)]
        if any(one.shape == found.shape and _varied(one) and np.array_equal(one.raw, found.raw) for one in inputs):
            return "it returns an input"
        others = [value for other in seeded if other is not trial for value in other.expected]
        if self._places[address] > 1 or any(self._equal(one, found) for one in others):
            return "it returns the output of another call"
        self._guest.thaw()
        time.sleep(LATE_S)  # in which a late write would show; this is a thread of its own
        self._guest.freeze()
        later = self._guest.read(address, found.shape.bytes)
        if not np.array_equal(later, _bits(found.raw)):
            return "its outputs change after it has answered"
        return ""

    def _equal(self, expected: Tensor, found: Tensor) -> bool:
        """Whether these are the same values, but for rounding."""
        if expected.shape != found.shape or not _varied(expected):
            return False
        compared = compare(expected, found, self._task.tolerances)
        return not compared.text and compared.error < _SAME

    def watch_idle(self) -> None:
        """Raise Deception if it computes while nothing is asked for, or has left a process. A thread that only waits
        for a core, beside other work, is watched until it has one."""
        if self._guest.others() > 0:
            raise Deception("it leaves processes running")
        time.sleep(0.005)
        before = self._guest.cpu_ns()
        until_s = time.monotonic() + STARVED_S
        while True:
            time.sleep(IDLE_S)
            if self._guest.cpu_ns() - before > IDLE_SHARE * IDLE_S * 1e9:
                raise Deception("it computes while nothing is asked for")
            if not self._guest.computes_beside() or time.monotonic() > until_s:
                return
