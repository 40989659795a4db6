"""Trials of a candidate: inputs and expected outputs, which a task's reference makes and this process keeps, and their
comparison with the candidate's outputs."""

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
from headway.kernels.isolation import GuestEnded, GuestError, GuestFailure, GuestProcess, TamperingDetected
from headway.records.kernels import KernelTask
from headway.records.sandbox import MIB

CHUNK_BYTES = 192 * MIB  # inputs and outputs of the calls of one request
MAX_OUTPUT_BYTES = 512 * MIB  # outputs of one call
ALIGNMENT = 64
_SEALS = 0x1 | 0x2 | 0x4  # no further seals, shrinking or growing, by which a guest could make reads here fail
MALFORMED = (KeyError, TypeError, ValueError, OverflowError)  # raised by a malformed report of a guest
_ROUNDING_ERROR = 0.01  # relative error of values that are equal but for rounding
LATE_S = 0.05  # how long a wrong output is watched for a late write
IDLE_S, IDLE_SHARE = 0.03, 0.1  # tolerated share of CPU time without a request
STARVED_S = 2.0  # how long a busy thread that gets no core is watched
# Variants keep the structure of the task's inputs: zeros, order, symmetry. A factor, or None for ones.
VARIANTS: dict[str, float | None] = {"zeros": 0.0, "ones": None, "large": 16.0, "tiny": 2.0**-10, "negated": -1.0}


class TaskFault(Exception):
    """The reference fails, which is a fault of the task and independent of the candidate."""


def task_fault(error: Exception, guest: GuestProcess) -> TaskFault:
    """The fault of a task whose reference has failed. Blocks. Raises SandboxError if its sandbox has failed."""
    if isinstance(error, GuestEnded) and not error.late:
        guest.wait_ended()
    return TaskFault(f"its reference fails: {error}")


class KernelTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a call, tensors and plain values, and the expected outputs."""

    name: str
    inputs: list[Any]
    expected: list[Tensor]

    @property
    def is_variant(self) -> bool:
        """Whether its inputs are a seeded trial's inputs with other values (VARIANTS)."""
        return self.name in VARIANTS

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(tensor.values()).all() for tensor in self.expected if tensor.is_float)


class TrialGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The trials of one shape of the task."""

    module: str  # the reference's, in its guest
    arguments: list[Any]  # of the class
    trials: list[KernelTrial]


def tensor_bytes(values: Sequence[Any]) -> int:
    return sum(tensor.shape.bytes + ALIGNMENT for tensor in values if isinstance(tensor, Tensor))


def has_bfloat16(group: TrialGroup) -> bool:
    """Whether an input or an expected output is of bfloat16."""
    operands = [operand for trial in group.trials for operand in (*trial.inputs, *trial.expected)]
    return any(isinstance(tensor, Tensor) and tensor.shape.dtype == "bfloat16" for tensor in operands)


class SharedCalls:
    """Arguments of calls, in memory that guests share. Each tensor has an offset in it; plain values are sent in the
    request. Guests can write to the memory, which `is_untouched` detects."""

    def __init__(self, calls: Sequence[Sequence[Any]]) -> None:
        """``calls``: arguments whose tensors have the shapes to be written."""
        total_bytes = 0

        def describe(argument: Any) -> Any:
            nonlocal total_bytes
            if not isinstance(argument, Tensor):
                return argument
            offset, total_bytes = total_bytes, total_bytes - (-argument.shape.bytes // ALIGNMENT) * ALIGNMENT
            return {"dtype": argument.shape.dtype, "shape": list(argument.shape.shape), "offset": offset}

        self._descriptions = [[describe(argument) for argument in call] for call in calls]
        self._bytes = max(total_bytes, mmap.PAGESIZE)
        self._descriptor = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, self._bytes)
        fcntl.fcntl(self._descriptor, 1033, _SEALS)  # F_ADD_SEALS
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, self._bytes), np.uint8)

    def send_to(self, guest: GuestProcess) -> None:
        """Make the guest prepare the calls' arguments from this memory."""
        guest.call("prepare", descriptors=[self._descriptor], bytes=self._bytes, calls=self._descriptions)

    def tensor_views(self, call: int, values: Sequence[Any]) -> Iterator[tuple[Array, Tensor]]:
        """The memory of each tensor among a call's arguments, and the tensor of ``values`` for it."""
        for description, argument in zip(self._descriptions[call], values, strict=True):
            if isinstance(argument, Tensor):
                offset = description["offset"]
                yield Tensor(argument.shape, self._memory[offset : offset + argument.shape.bytes]).raw, argument

    def write(self, call: int, values: Sequence[Any]) -> None:
        for destination, source in self.tensor_views(call, values):
            destination[...] = source.raw

    def is_untouched(self, call: int, values: Sequence[Any]) -> bool:
        """Whether a call's arguments in memory still equal ``values``."""
        return all(np.array_equal(_bits(view), _bits(arg.raw)) for view, arg in self.tensor_views(call, values))


def shared_calls(calls: Sequence[Sequence[Any]], guest: GuestProcess) -> SharedCalls:
    """Write calls' arguments to shared memory, and make a guest prepare them."""
    shared = SharedCalls(calls)
    for call_index, arguments in enumerate(calls):
        shared.write(call_index, arguments)
    shared.send_to(guest)
    return shared


def _bits(values: Array) -> Array:
    return values.reshape(-1).view(np.uint8)  # a NaN equals itself


def parse_tensor(report: dict[str, Any]) -> tuple[TensorShape, int]:
    """Type, shape and address of a tensor, from a guest's report. Raises MALFORMED."""
    return TensorShape(report["dtype"], tuple(map(int, report["shape"]))), int(report["address"])


def outputs_of(head: dict[str, Any], calls: int) -> list[list[tuple[TensorShape, int]]]:
    """Types, shapes and addresses of outputs, by call, from a guest's report."""
    try:
        outputs = [[parse_tensor(report) for report in reports] for reports in head["outputs"]]
    except MALFORMED as error:
        raise GuestError(f"outputs can't be compared: {error}", "raised", "") from None
    if len(outputs) != calls:
        raise TamperingDetected("it forged an answer")
    return outputs


def names_of(head: dict[str, Any], key: str) -> list[str]:
    """Names in a guest's answer, capped; ``key``: torch ``operators`` that it called, or ``patched`` functions."""
    names = head.get(key, [])
    return [str(name)[:100] for name in names[:500]] if isinstance(names, list) else ["?"]


def replaced_in(head: dict[str, Any]) -> str:
    """The tampering that a guest's answer reports: replaced functions; "": none."""
    patched_names = names_of(head, "patched")
    return f"it replaced {', '.join(patched_names[:5])}" if patched_names else ""


def chunks(trials: Sequence[KernelTrial]) -> Iterator[list[KernelTrial]]:
    """Split trials into chunks whose tensors fit into one request."""
    chunk, chunk_bytes = list[KernelTrial](), 0
    for trial in trials:
        trial_bytes = tensor_bytes(trial.inputs) + tensor_bytes(trial.expected)
        if chunk and chunk_bytes + trial_bytes > CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(trial)
        chunk_bytes += trial_bytes
    yield chunk


class ReferenceMaker:
    """Makes the trials of a task by running its reference in a separate guest."""

    def __init__(self, guest: GuestProcess, seed: int) -> None:
        self._guest = guest
        self._seed = seed

    def group(self, module: str, source: str, seeds: int, variants: bool) -> TrialGroup:
        """Make the trials of one shape. Raises TaskFault."""
        guest = self._guest
        try:
            guest.load(module, source, confined=False)
            arguments = guest.make(module, "Model", None, self._seed)["arguments"]
            trials = [
                self._run(module, f"seed {n}", self._inputs(module, n)) for n in range(self._seed, self._seed + seeds)
            ]
            inputs = trials[0].inputs
            if variants and trials[0].is_finite and any(isinstance(arg, Tensor) and arg.is_float for arg in inputs):
                varied = [self._run(module, name, variant_inputs(inputs, factor)) for name, factor in VARIANTS.items()]
                trials += [trial for trial in varied if trial.is_finite]  # others are outside of the reference's domain
            return TrialGroup(module=module, arguments=arguments, trials=trials)
        except (GuestFailure, *MALFORMED) as error:
            raise task_fault(error, guest) from error

    def _inputs(self, module: str, seed: int) -> list[Any]:
        answer_head, _ = self._guest.call("inputs", module=module, seed=seed)

        def parse_argument(spec: Any) -> Any:
            return self._read(*parse_tensor(spec)) if isinstance(spec, dict) and "dtype" in spec else spec

        return [parse_argument(spec) for spec in answer_head["inputs"]]

    def _run(self, module: str, name: str, inputs: list[Any]) -> KernelTrial:
        shared = shared_calls([inputs], self._guest)
        answer_head, _ = self._guest.call("go", module=module, calls=1, record=False, brief=False)
        if not shared.is_untouched(0, inputs):
            raise TaskFault("its reference changes its inputs")
        (outputs,) = outputs_of(answer_head, 1)
        return KernelTrial(name=name, inputs=inputs, expected=[self._read(*output) for output in outputs])

    def _read(self, shape: TensorShape, address: int) -> Tensor:
        if shape.bytes > MAX_OUTPUT_BYTES:
            raise TaskFault(f"a tensor of {shape}: at most {MAX_OUTPUT_BYTES >> 20} MiB")
        return Tensor(shape, self._guest.read(address, shape.bytes))


def variant_inputs(inputs: Sequence[Any], factor: float | None) -> list[Any]:
    """The inputs with floating-point tensors multiplied by ``factor``; None: every value but 0 becomes 1."""

    def vary(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or not argument.is_float:
            return argument
        if factor is not None:
            return argument.scaled(factor)
        return argument.replaced(argument.values() != 0)

    return [vary(argument) for argument in inputs]


def _varies(tensor: Tensor) -> bool:
    return tensor.raw.size > 1 and bool(np.ptp(tensor.values()))


class CandidateTrials:
    """Runs a candidate on trials. Raises GuestError, GuestEnded and TamperingDetected, as calls of its guest do."""

    def __init__(self, guest: GuestProcess, task: KernelTask, seed: int) -> None:
        self._guest = guest
        self._task = task
        self._seed = seed
        self.passed = 0
        self.text = ""  # the first difference
        self.cheat = ""  # the first tampering
        self.operators: set[str] = set()
        self.precision = ""  # a note, if it is lower than the reference's
        self._error = 0.0  # the largest, relative
        self._address_counts = Counter[int]()  # of a chunk's outputs: all are kept, so each call has its own addresses

    def run(self, group: TrialGroup) -> None:
        """Run a group's trials, and record the operators of torch that they call."""
        for chunk in chunks(group.trials):
            self._run_chunk(chunk)

    def make(self, arguments: list[Any]) -> None:
        """Make the model for a group's sizes."""
        self.note_replaced(self._guest.make("candidate", "ModelNew", arguments, self._seed))

    def note_replaced(self, head: dict[str, Any]) -> None:
        """Record functions that the guest reports as replaced."""
        self.cheat = self.cheat or replaced_in(head)

    def _run_chunk(self, chunk: list[KernelTrial]) -> None:
        guest = self._guest
        shared = shared_calls([trial.inputs for trial in chunk], guest)
        answer_head, _ = guest.call("go", module="candidate", calls=len(chunk), record=True, brief=False)
        guest.freeze()
        try:
            self.note_replaced(answer_head)
            self.operators.update(names_of(answer_head, "operators"))
            call_outputs = outputs_of(answer_head, len(chunk))
            self._address_counts = Counter(address for outputs in call_outputs for address in {a for _, a in outputs})
            for call_index, (trial, outputs) in enumerate(zip(chunk, call_outputs, strict=True)):
                if not shared.is_untouched(call_index, trial.inputs):
                    self.cheat = self.cheat or "it changes its inputs"
                if self._compare(trial, outputs, chunk):
                    self.passed += 1
        finally:
            guest.thaw()

    def _compare(self, trial: KernelTrial, outputs: list[tuple[TensorShape, int]], chunk: list[KernelTrial]) -> bool:
        if len(outputs) != len(trial.expected):
            self.text = self.text or f"{len(outputs)} outputs, not {len(trial.expected)}"
            return False
        for expected, (shape, address) in zip(trial.expected, outputs, strict=True):
            if shape != expected.shape:
                self.text = self.text or f"{trial.name}: output of {shape}, not {expected.shape}"
                return False
            actual = Tensor(shape, self._guest.read(address, shape.bytes))
            outcome = compare(expected, actual, self._task.tolerances, scaled=trial.is_variant, hollow=trial.is_variant)
            if outcome.text:
                self.text = self.text or f"{trial.name}: {outcome.text}"
                self.cheat = self.cheat or self._explain(trial, actual, address, chunk)
                return False
            if not trial.is_variant:
                self._note_error(shape.dtype, outcome.error)
        return True

    def _note_error(self, dtype: str, error: float) -> None:
        if dtype in FLOATS and error > max(self._error, LEAST_ERROR[dtype]):
            self.precision = f"relative error {error:.1e}: less precise than {dtype}"
        self._error = max(self._error, error)

    def _explain(self, trial: KernelTrial, actual: Tensor, address: int, chunk: list[KernelTrial]) -> str:
        """Name the tampering that a wrong output shows; "": the output is merely wrong. Variants are excluded, because
        an honest mistake can hit their outputs too: zeros, and those of negated inputs."""
        seeded_trials = [] if trial.is_variant else [peer for peer in chunk if not peer.is_variant]
        tensors = [arg for arg in trial.inputs if seeded_trials and isinstance(arg, Tensor)]
        if any(arg.shape == actual.shape and _varies(arg) and np.array_equal(arg.raw, actual.raw) for arg in tensors):
            return "it returns an input"
        other_outputs = [tensor for peer in seeded_trials if peer is not trial for tensor in peer.expected]
        if self._address_counts[address] > 1 or any(self._equal(tensor, actual) for tensor in other_outputs):
            return "it returns the output of another call"
        self._guest.thaw()
        time.sleep(LATE_S)  # in which a late write would show; this is a thread of its own
        self._guest.freeze()
        later_bytes = self._guest.read(address, actual.shape.bytes)
        if not np.array_equal(later_bytes, _bits(actual.raw)):
            return "its outputs change after it has answered"
        return ""

    def _equal(self, expected: Tensor, actual: Tensor) -> bool:
        """Whether the values are equal up to rounding."""
        if expected.shape != actual.shape or not _varies(expected):
            return False
        comparison = compare(expected, actual, self._task.tolerances)
        return not comparison.text and comparison.error < _ROUNDING_ERROR

    def watch_idle(self) -> None:
        """Raise TamperingDetected if the candidate computes without a request, or has left a process. A thread that
        waits for a core, because the machine is busy, is watched until it has one."""
        if self._guest.extra_processes() > 0:
            raise TamperingDetected("it leaves processes running")
        time.sleep(0.005)
        cpu_before_ns = self._guest.cpu_ns()
        until_s = time.monotonic() + STARVED_S
        while True:
            time.sleep(IDLE_S)
            if self._guest.cpu_ns() - cpu_before_ns > IDLE_SHARE * IDLE_S * 1e9:
                raise TamperingDetected("it computes between calls")
            if not self._guest.has_busy_threads() or time.monotonic() > until_s:
                return
