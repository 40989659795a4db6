"""The program of a guest, in which a reference or a candidate runs in its own sandbox. It makes models, calls them on
inputs in shared memory, and reports the addresses of their outputs, which the evaluator reads from outside.

Its answers aren't trusted, since the source runs in the same process. It imports the standard library and preloaded
torch alone.
"""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import socket
import struct
import sys
import traceback
import types
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.kernels.guest import confinement, extension_recorder, integrity
from headway.sandbox.guest import wire

LOG_CHARACTERS = 4000
_INTERPRETER = "headway.kernels.guest.triton_interpreter"
# These calls make torch import its lazy modules that every task uses, once in the zygote rather than in each sandbox.
torch.manual_seed(0)
with torch.no_grad():
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
Head = dict[str, Any]


class GuestRefusal(Exception):
    """The compiler refused a source (``kind`` compile, with the compiler's message), or an output is no plain tensor,
    so that its values could be computed after the answer (``kind`` output)."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Program:
    """The guest's request loop; each answer carries its request's number."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = wire.FrameAssembler()
        self._received: list[tuple[Head, bytes]] = []
        self._modules: dict[str, types.ModuleType] = {}
        self._models: dict[str, Any] = {}
        self._memory: mmap.mmap | None = None
        self._arguments: list[tuple[Any, ...]] = []
        self._outputs: list[tuple[torch.Tensor, ...]] = []
        if recorder := getattr(sys.modules.get(_INTERPRETER), "RECORDER", None):
            recorder.on_launch = self._report_launch
        self._ids_at_start = integrity.callable_ids()

    def serve(self) -> None:
        """Answer requests until the channel ends."""
        self._send({"ready": True})
        while True:
            head, body, descriptors = self._receive()
            answer_head, answer_body = self._answer(head, body, descriptors)
            self._send({"number": head["number"], **answer_head}, answer_body)

    def _answer(self, head: Head, body: bytes, descriptors: list[int]) -> tuple[Head, bytes]:
        try:
            if head["do"] == "go":
                return self._go(head)
            if descriptors:
                self._memory = mmap.mmap(descriptors[0], head["bytes"])
                os.close(descriptors[0])
            return getattr(self, f"_{head['do']}")(head, body) or {}, b""
        except GuestRefusal as error:
            return {"error": str(error)[:LOG_CHARACTERS], "kind": error.kind}, b""
        except SyntaxError as error:
            position_text = f"line {error.lineno}: " if error.lineno else ""
            return {"error": f"{position_text}{error.msg}", "kind": "syntax", "log": _trace(error)}, b""
        except BaseException as error:
            origin = _first_cause(error)
            return {"error": f"{type(origin).__name__}: {origin}"[:1000], "kind": "raised", "log": _trace(error)}, b""

    # Requests.

    def _load(self, head: Head, body: bytes) -> Head:
        """Run a source as a module that has `load_cpp` among its globals."""
        if head["confined"]:  # a candidate: the compiler of a reference needs the real module
            extension_recorder.install(self._report_launch)
            confinement.forbid_processes()
        module_name = head["module"]
        module = types.ModuleType(module_name)
        module.__dict__["load_cpp"] = self._load_cpp
        sys.modules[module_name] = module
        path = f"/work/{module_name}.py"  # tracebacks and kernels' compilers look into it
        with open(path, "wb") as file:
            file.write(body)
        module.__file__ = path
        try:
            code = compile(body.decode(), path, "exec")
        except ValueError as error:  # a NUL in it
            raise SyntaxError(str(error)) from None
        exec(code, module.__dict__)
        self._modules[module_name] = module
        return self._patched()

    def _make(self, head: Head, body: bytes) -> Head:
        """Make a model of a module's class, after seeding the random numbers as KernelBench does."""
        module = self._modules[head["module"]]
        if not hasattr(module, head["kind"]):
            raise AttributeError(f"no class {head['kind']} in the source")
        torch.manual_seed(head["seed"])
        arguments = head["arguments"]
        if arguments is None:
            arguments = [encoded(argument) for argument in module.get_init_inputs()]
        torch.manual_seed(head["seed"])
        self._models[head["module"]] = getattr(module, head["kind"])(*map(decoded, arguments))
        return {"arguments": arguments, **self._patched()}

    def _inputs(self, head: Head, body: bytes) -> Head:
        """Make inputs for a seed; their tensors stay at the reported addresses until the next request."""
        torch.manual_seed(head["seed"])
        inputs = list(self._modules[head["module"]].get_inputs())
        self._outputs = [tuple(arg.detach().contiguous() for arg in inputs if isinstance(arg, torch.Tensor))]
        kept = iter(self._outputs[0])
        return {"inputs": [report_of(next(kept)) if isinstance(arg, torch.Tensor) else encoded(arg) for arg in inputs]}

    def _prepare(self, head: Head, body: bytes) -> None:
        """Make the calls' arguments as views of the shared memory, which the evaluator fills."""
        self._arguments = [tuple(self._argument(spec) for spec in call) for call in head["calls"]]
        self._outputs = []
        gc.collect()

    def _argument(self, spec: Any) -> Any:
        if not (isinstance(spec, dict) and "dtype" in spec):
            return decoded(spec)
        assert self._memory is not None
        dtype = getattr(torch, spec["dtype"])
        if not (count := math.prod(spec["shape"])):
            return torch.empty(spec["shape"], dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=spec["offset"]).view(spec["shape"])

    def _go(self, head: Head) -> tuple[Head, bytes]:
        """Call a model on the first ``calls`` prepared arguments. ``brief``: report only the addresses of the outputs,
        which is nearly free."""
        model, call_arguments = self._models[head["module"]], self._arguments[: head["calls"]]
        self._outputs = []
        with torch.no_grad(), OperatorRecorder() if head["record"] else contextlib.nullcontext() as recorder:
            self._outputs = [_flat(model(*arguments)) for arguments in call_arguments]
        addresses = [output.data_ptr() for call_outputs in self._outputs for output in call_outputs]
        packed = struct.pack(f"<{len(addresses)}Q", *addresses)
        if head["brief"]:
            return {}, packed
        outputs = [[report_of(output) for output in call_outputs] for call_outputs in self._outputs]
        return {"outputs": outputs, "operators": sorted(recorder.names) if recorder else [], **self._patched()}, packed

    def _patched(self) -> Head:
        replaced_names = integrity.replaced_names(self._ids_at_start)
        return {"patched": replaced_names} if replaced_names else {}

    # The channel.

    def _report_launch(self, launch: Head) -> None:
        """Report a Triton kernel's launch, or an extension in CUDA, to be compiled."""
        self._send({"ask": "launch", "launch": launch})

    def _load_cpp(self, source: str) -> Any:
        """Compile C++ with a C interface, with OpenMP, and load it as a ctypes library."""
        import ctypes

        self._send({"ask": "compile"}, source.encode())
        answer_head, _, _ = self._receive()
        if "error" in answer_head:
            raise GuestRefusal("compile", answer_head["error"])
        return ctypes.CDLL(answer_head["library"])

    def _send(self, head: Head, body: bytes = b"") -> None:
        self._channel.sendall(wire.frame(head, body))

    def _receive(self) -> tuple[Head, bytes, list[int]]:
        descriptors = list[int]()
        while not self._received:
            chunk, new_descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 1)
            if not chunk:
                _flush_and_exit()
            descriptors += new_descriptors
            self._received += self._frames.feed(chunk)
        return *self._received.pop(0), descriptors


class OperatorRecorder(TorchDispatchMode):
    """Records the names of torch operators that run. A hostile source could disable it; it checks honest ones."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping dynamo would import it first, which takes a second

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def _flat(output: Any) -> tuple[torch.Tensor, ...]:
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise GuestRefusal("output", f"output of type {type(tensor).__name__}: only plain tensors can be compared")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            placement_text = f"{tensor.layout} on {tensor.device}"
            raise GuestRefusal("output", f"output of layout {placement_text}: only dense tensors of the device")
    return tuple(tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors)


def report_of(tensor: torch.Tensor) -> Head:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "address": tensor.data_ptr(),
    }


def encoded(value: Any) -> Any:
    """A plain value in its JSON form, with tuples marked. Raises TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [encoded(part) for part in value]}
    if isinstance(value, list):
        return [encoded(part) for part in value]
    raise TypeError(f"an input of type {type(value).__name__}: tensors, numbers, text, lists and tuples of them")


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(decoded(part) for part in value["tuple"])
    return [decoded(part) for part in value] if isinstance(value, list) else value


def _flush_and_exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _first_cause(error: BaseException) -> BaseException:
    """The original error, which Triton's interpreter wraps once for each function of a kernel."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-LOG_CHARACTERS:]


def serve() -> None:
    """The entry point in the sandbox; standard input is the channel."""
    channel = socket.socket(fileno=os.dup(0))
    null_fd = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    gc.enable()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    Program(channel).serve()
