"""The evaluator's handle of a guest, which runs a reference or a candidate in its own sandbox: requests to it, and
inspection from outside.

Everything that a guest sends is treated as hostile. Outputs are read out of the process's memory while it is stopped,
and timed by this process's clock. Calls block; the evaluator makes them in its own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import io
import json
import os
import secrets
import signal
import socket
import struct
import sysconfig
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from headway.records.sandbox import MIB, Command, ExecResult, ResourceLimits, SandboxError, SandboxSpec
from headway.runtime.supervision import run_to_completion
from headway.sandbox.guest import wire
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.sandbox import LocalSandbox
from headway.sandbox.local.zygote_process import LocalSettings, Preload

FUNCTION = "headway.kernels.guest.program:serve"
COMPILES = 8  # of one evaluation
LAUNCHES = 64  # signatures of Triton launches of one evaluation
COMPILE_S = 60.0
LOG_BYTES = 1 << 16
LOG_CHARACTERS = 4000
STOPPED, ENDED = "T", "ZX"  # states of a process
GONE = (FileNotFoundError, ProcessLookupError)
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of this process or its machine
EXTRA_LIFETIME_S = 3600.0  # that a guest may live beyond its own time, as while it waits for a core
STOP_S = END_REPORT_S = 2.0  # until a signalled process is stopped; until a sandbox reports its end
COMPILER = ["g++", "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wl,-z,defs"]
# Memory that is freed stays with the process: else every output of a megabyte costs page faults in each interval.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
INTERPRETED = {"TRITON_INTERPRET": "1"}
Compile = Callable[[str], dict[str, Any]]  # a library's path, or the compiler's message


class GuestFailure(Exception):
    """A call of a guest has failed."""


class GuestEnded(GuestFailure):
    """The process has ended, or hasn't answered in time (``late``)."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class TamperingDetected(GuestFailure):
    """A guest did something that only a source with an intention to cheat does; the message names it."""


class GuestError(GuestFailure):
    """A request failed in the guest; ``kind``, as the guest reports it: syntax, compile or raised."""

    def __init__(self, text: str, kind: str, log: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.log = log


@contextlib.contextmanager
def _while_alive() -> Iterator[None]:
    """Raise GuestEnded for a system error that means that the process has ended, or its time is over; OSError if this
    process lacks a resource that the call needs."""
    try:
        yield
    except TimeoutError:
        raise GuestEnded("no answer in time", late=True) from None
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        raise GuestEnded("its process has ended") from None


def preload_settings() -> LocalSettings:
    """Settings of a backend whose sandboxes have imported torch, and Triton's interpreter if triton is installed."""
    lib_paths = [sysconfig.get_path(name) for name in ("purelib", "platlib", "include")]  # the last: for torch.compile
    folders = [path for path in lib_paths if os.path.isdir(path)]
    modules = ["numpy", "torch"]
    folders.append(os.path.dirname(torch_folder()))
    triton_spec = importlib.util.find_spec("triton")
    if triton_spec is not None:
        modules += ["headway.kernels.guest.triton_interpreter", "headway.kernels.guest.triton_compiler"]
        folders += [os.path.dirname(folder) for folder in triton_spec.submodule_search_locations or ()]
    preload = Preload(
        modules=(*modules, "headway.kernels.guest.program"),
        folders=tuple(dict.fromkeys(folders)),
        environment={**ONE_THREAD, **ALLOCATION, **INTERPRETED, "PYTHONHASHSEED": "0"},
    )
    return LocalSettings(spares=2, preload=preload, start_timeout_s=120.0)


def torch_folder() -> str:
    """Where torch is installed."""
    torch_spec = importlib.util.find_spec("torch")
    return next(iter((torch_spec and torch_spec.submodule_search_locations) or ()), "")


def guest_spec(cores: int, memory_bytes: int = 2048 * MIB) -> SandboxSpec:
    """The specification of a guest's sandbox."""
    environment = {**ONE_THREAD, **INTERPRETED, "OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "passive"}
    limits = ResourceLimits(memory_bytes=memory_bytes, disk_bytes=64 * MIB, processes=64, cpus=cores + 1.0)
    return SandboxSpec(limits=limits, environment=environment)


def _encodable(head: dict[str, Any]) -> dict[str, Any]:
    """A guest's head without lone surrogates, which no answer of the service could carry."""
    return json.loads(json.dumps(head, ensure_ascii=False).encode(errors="replace"))


def delay_ns(file: str = "/proc/thread-self/schedstat") -> int:
    """Time that a thread, by default this one, was ready to run and had no core; 0 if the kernel doesn't report it."""
    try:
        with open(file, "rb") as stat_file:
            return int(stat_file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class GuestProcess:
    """The handle of a guest that is ready for requests.

    Lifecycle: *running* <-> *stopped* (`freeze`, `thaw`), then *ended*, by `guest_process` or by itself; then calls
    raise GuestEnded. Not thread-safe.
    """

    def __init__(
        self, channel: socket.socket, running: asyncio.Task[ExecResult], compile_: Compile, until_s: float
    ) -> None:
        """Wait for the first message, which the kernel signs with the process's number here. Raises OSError."""
        self._channel = channel
        self._running = running
        self._compile = compile_
        self._frames = wire.FrameAssembler()
        self._received: list[tuple[dict[str, Any], bytes]] = []
        self.until_s = until_s  # time.monotonic() at which calls give up
        self._compiles = 0
        self.compile_s = 0.0
        self.launches: list[Any] = []  # signatures of Triton launches, as the guest reports them
        channel.settimeout(60.0)
        greeting, ancillary, _, _ = channel.recvmsg(4096, socket.CMSG_SPACE(12))
        if not greeting or not ancillary:
            raise OSError("the guest's process didn't start")
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        self.pid: int = struct.unpack("3i", ancillary[0][2])[0]
        self._handle = io.FileIO(os.pidfd_open(self.pid))
        self._memory = io.FileIO(f"/proc/{self.pid}/mem")
        self._clock = (~self.pid << 3) | 2  # the CPU time of all its threads

    def wait_ended(self) -> ExecResult | None:
        """Wait for the sandbox's report on the end of its process; None: no report within END_REPORT_S. Raises
        SandboxError if the sandbox itself has failed."""
        until_s = time.monotonic() + END_REPORT_S
        while not self._running.done():
            if time.monotonic() > until_s:
                return None
            time.sleep(0.02)
        try:
            return self._running.result()
        except SandboxError as error:
            if not error.failure.reward_valid:
                raise
            return ExecResult(exit_code=None, oom=bool(error.failure.evidence.get("oom_kills")), failure=error.failure)

    def end(self) -> bytes:
        """Make the guest exit by itself, and return the beginning of its output."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        exec_result = self.wait_ended()
        return b"" if exec_result is None else exec_result.stdout + exec_result.stderr

    def close(self) -> None:
        self._handle.close()
        self._memory.close()

    # Requests.

    def call(
        self, do: str, body: bytes = b"", descriptors: Sequence[int] = (), **more: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for its answer. Raises GuestError, GuestEnded, TamperingDetected."""
        return self.answer(self.ask(do, body, descriptors, **more))

    def load(self, module: str, source: str, *, confined: bool) -> dict[str, Any]:
        """Run a source as a module in the guest. ``confined``: the guest can no longer start processes."""
        return self.call("load", source.encode(), module=module, confined=confined)[0]

    def make(self, module: str, kind: str, arguments: Sequence[Any] | None, seed: int) -> dict[str, Any]:
        """Make a model of class ``kind`` of a loaded module; ``arguments`` None: those of ``get_init_inputs()``."""
        return self.call("make", module=module, kind=kind, arguments=arguments, seed=seed)[0]

    def ask(self, do: str, body: bytes = b"", descriptors: Sequence[int] = (), **more: Any) -> int:
        request_number = secrets.randbits(53)
        self._send(wire.frame({"do": do, "number": request_number, **more}, body), descriptors)
        return request_number

    @_while_alive()
    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self._channel.settimeout(self._left_s())
        sent_count = socket.send_fds(self._channel, [data], list(descriptors)) if descriptors else 0
        self._channel.sendall(data[sent_count:])

    def answer(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Wait for the answer to a request; meanwhile serve the guest's compile requests and note its launches. Raises
        GuestError if the request failed or launches have too many signatures, GuestEnded, and TamperingDetected for any
        other message, since then the source writes to the channel."""
        while True:
            head, body = self._next()
            if head.get("ask") == "compile":
                self._serve_compile(body)
            elif head.get("ask") == "launch":
                self.launches.append(head.get("launch"))
                if len(self.launches) > LAUNCHES:
                    raise GuestError(f"kernels launched with more than {LAUNCHES} signatures", "raised", "")
            elif head.get("number") != number or self._received:
                raise TamperingDetected("it wrote to the evaluator's channel")
            elif head.get("kind") == "output":  # an odd one, whose values could come later
                raise TamperingDetected(str(head.get("error"))[:1000])
            elif "error" in head:
                raise GuestError(str(head["error"])[:1000], str(head.get("kind")), str(head.get("log", ""))[:8000])
            else:
                return head, body

    def run_calls(self, module: str, calls: int) -> tuple[int, bytes]:
        """Run prepared calls in a stopped guest, and stop it when it answers. Returns the time until its answer in ns,
        and the addresses of the outputs."""
        request_number = self.ask("go", module=module, calls=calls, record=False, brief=True)
        since_ns = time.perf_counter_ns()
        self.thaw()
        _, packed_addresses = self.answer(request_number)
        took_ns = time.perf_counter_ns() - since_ns
        self.freeze()
        return took_ns, packed_addresses

    def _serve_compile(self, body: bytes) -> None:
        since_s = time.monotonic()
        self._compiles += 1
        answer = {"error": f"more than {COMPILES} libraries"}
        if self._compiles <= COMPILES:
            answer = self._compile(body.decode(errors="replace"))
        self.compile_s += time.monotonic() - since_s
        self._send(wire.frame(answer))

    @_while_alive()
    def _next(self) -> tuple[dict[str, Any], bytes]:
        try:
            while not self._received:
                self._channel.settimeout(self._left_s())
                chunk = self._channel.recv(1 << 20)
                if not chunk:
                    raise GuestEnded("its process has ended")
                self._received += ((_encodable(head), body) for head, body in self._frames.feed(chunk))
        except (wire.Malformed, RecursionError):
            raise TamperingDetected("it wrote to the evaluator's channel") from None
        return self._received.pop(0)

    def _left_s(self) -> float:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    # Inspection from outside.

    def freeze(self) -> None:
        """Stop the process; all its threads are stopped when this returns. Raises GuestEnded, and OSError if they
        aren't within STOP_S."""
        self._signal(signal.SIGSTOP)
        until_s = time.monotonic() + STOP_S
        while time.monotonic() < until_s:
            states = self._states()
            if states[:1] in ENDED:  # or there is none
                raise GuestEnded("its process has ended")
            if set(states) == {STOPPED}:
                return
        raise OSError(f"a process isn't stopped within {STOP_S:g} s")

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    @_while_alive()
    def _signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle.fileno(), number)

    def has_busy_threads(self) -> bool:
        """Whether a thread other than the first runs or waits for a core."""
        return "R" in self._states(beside=str(self.pid))

    def _states(self, beside: str = "") -> str:
        """The state letters of all threads but ``beside``."""
        states = ""
        for thread_id in self.threads():
            if thread_id == beside:
                continue
            with contextlib.suppress(*GONE), open(f"/proc/{self.pid}/task/{thread_id}/stat", "rb") as stat_file:
                states += stat_file.read().rpartition(b") ")[2][:1].decode()
        return states

    @_while_alive()
    def threads(self) -> list[str]:
        return os.listdir(f"/proc/{self.pid}/task")

    def read(self, address: int, count: int) -> np.ndarray[Any, Any]:
        """Read ``count`` bytes of the process's memory. Raises TamperingDetected if there is no such memory."""
        contents = np.empty(count, np.uint8)
        offset = 0
        with contextlib.suppress(OSError, OverflowError, ValueError):
            while offset < count:
                count_read = os.preadv(self._memory.fileno(), [memoryview(contents.data)[offset:]], address + offset)
                if count_read == 0:
                    break
                offset += count_read
        if offset < count:
            if self._states()[:1] in ENDED:
                raise GuestEnded("its process has ended")
            raise TamperingDetected("its outputs lie nowhere")
        return contents

    @_while_alive()
    def cpu_ns(self) -> int:
        """The CPU time of the process so far."""
        return time.clock_gettime_ns(self._clock)

    def delay_ns(self) -> int:
        """The time that its first thread has waited for a core so far."""
        return delay_ns(f"/proc/{self.pid}/schedstat")

    @_while_alive()
    def extra_processes(self) -> int:
        """The number of processes in its sandbox beside itself and the sandbox's first process."""
        return sum(name.isdigit() for name in os.listdir(f"/proc/{self.pid}/root/proc")) - 2

    def runs_outside(self, cores: Sequence[int]) -> bool:
        """Whether a thread of the guest may run on cores other than ``cores``."""
        allowed_cores = set(cores)
        for thread_id in self.threads():
            with contextlib.suppress(OSError):
                if not os.sched_getaffinity(int(thread_id)) <= allowed_cores:
                    return True
        return False

    def pin(self, cores: Sequence[int]) -> None:
        """Pin all threads of the guest to ``cores``, at ordinary priority where that is allowed."""
        for thread_id in self.threads():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread_id), cores)
                os.setpriority(os.PRIO_PROCESS, int(thread_id), 0)


@contextlib.asynccontextmanager
async def guest_process(
    backend: LocalBackend, spec: SandboxSpec, run: Callable[..., Any], timeout_s: float
) -> AsyncIterator[GuestProcess]:
    """Start a guest for the duration of the block; ``timeout_s`` limits all its calls together. ``run`` awaits a
    blocking function in a thread. Raises SandboxError, OSError."""
    sandbox = await backend.create(spec)
    loop, channel = asyncio.get_running_loop(), sandbox.channel
    assert channel is not None
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def compile_(source: str) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(_compile(sandbox, source), loop).result()

    limit_s = timeout_s + EXTRA_LIFETIME_S
    guest_task = asyncio.create_task(sandbox.run_function(FUNCTION, timeout_s=limit_s, max_output_bytes=LOG_BYTES))

    async def end() -> None:
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)  # ends a thread's wait for an answer
        await sandbox.terminate()
        await asyncio.gather(guest_task, return_exceptions=True)

    with contextlib.ExitStack() as stack:  # closed after the end: a thread may still read there after a cancellation
        try:
            guest: GuestProcess = await run(GuestProcess, channel, guest_task, compile_, time.monotonic() + timeout_s)
            yield stack.enter_context(contextlib.closing(guest))
        finally:
            await run_to_completion(end())


async def _compile(box: LocalSandbox, source: str) -> dict[str, Any]:
    """Compile C++ in the requesting guest's sandbox. Returns the library's path there, or the compiler's message.
    Raises SandboxError for an infrastructure failure."""
    base_path = f"/work/library-{secrets.token_hex(4)}"
    try:
        await box.write(f"{base_path}.cpp", source.encode(errors="replace"))
        command = Command(argv=[*COMPILER, "-o", f"{base_path}.so", f"{base_path}.cpp"], timeout_s=COMPILE_S)
        exec_result = await box.exec(command)
    except SandboxError as error:
        if error.failure.cause == "infrastructure":
            raise
        return {"error": str(error)}
    if exec_result.ok:
        return {"library": f"{base_path}.so"}
    if exec_result.exit_code is None:
        return {"error": f"the compiler ended by a limit: {exec_result.failure.message if exec_result.failure else ''}"}
    message = exec_result.stderr.decode(errors="replace").replace(f"{base_path}.cpp", "kernel.cpp")
    return {"error": message[:LOG_CHARACTERS]}
