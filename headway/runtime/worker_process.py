"""The operating system's side of a worker: its process, here or on a node, and its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from headway.runtime.fork_server import ForkedProcess, ForkServer
from headway.runtime.stalls.stacks import dump_of
from headway.runtime.stalls.watchdog import timeout_stack

EXIT_POLL_S = 0.05  # only where the kernel gives no process descriptors
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 1 << 16  # holds the stacks of all threads that a watchdog writes


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The end of a worker's process."""

    code: int | None  # as of `subprocess`: negative for a signal; None: unknown, its machine is gone
    output: str = ""  # the last lines that it wrote
    reason: str = ""  # of the end, where something else than the process knows it

    def __str__(self) -> str:
        if self.code is None:
            return self.reason
        return (
            f"killed by {_signal_name(-self.code)} ({-self.code})" if self.code < 0 else f"exited with code {self.code}"
        )


class WorkerProcess(Protocol):
    """A worker's process, on this machine or on a node."""

    @property
    def pid(self) -> int: ...

    @property
    def reachable(self) -> bool:
        """Whether its machine gives signs of life: silence of the worker counts only then."""
        ...

    @property
    def clock_offset_s(self) -> float:
        """Seconds to be added to its machine's monotonic clock to get this one's."""
        ...

    def watch(self, on_exit: Callable[[ProcessExit], None]) -> None:
        """Call ``on_exit`` once when the process has ended; the children that it left are killed first."""
        ...

    def kill(self) -> bool:
        """Kill the process and its children. False when it has ended already."""
        ...

    async def inspect(self) -> tuple[bool, str]:
        """Whether a signal has stopped it, else the stacks of its threads as faulthandler writes them: that works
        while the interpreter's lock is held. "" where they can't be had."""
        ...


class ChildProcess:
    """A process of this machine, child of this one; its output goes to a log."""

    reachable = True
    clock_offset_s = 0.0

    def __init__(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        log: str | Path | None,
        descriptor: int,
        server: ForkServer | None = None,
    ) -> None:
        """Start ``headway.runtime.child DESCRIPTOR ARGUMENTS`` with the open ``descriptor``, from ``server`` where it
        lives. ``log``: its output is appended there; None: kept only for the report of its end. Raises OSError, with
        nothing left open."""
        self._on_exit: Callable[[ProcessExit], None] | None = None
        self._log, self._log_start = _open_log(log)
        try:
            forked_process = server and server.fork(
                "headway.runtime.child", arguments, environment, self._log.fileno(), descriptor
            )
            self._process: ForkedProcess | subprocess.Popen[bytes] = forked_process or subprocess.Popen(
                [sys.executable, "-m", "headway.runtime.child", str(descriptor), *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,  # kill() reaches its children too; Ctrl-C does not reach it
            )
        except BaseException:
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_exit: Callable[[ProcessExit], None]) -> None:
        """See :meth:`WorkerProcess.watch`. Needs a running event loop."""
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # an old kernel, or a sandbox that forbids it
            self._descriptor = -1
            self._poll()
        else:
            self._loop.add_reader(self._descriptor, self._ended)

    def kill(self) -> bool:
        """See :meth:`WorkerProcess.kill`."""
        if self._process.returncode is not None:
            return False  # reaped: its id may be another process's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return True

    async def inspect(self) -> tuple[bool, str]:
        """See :meth:`WorkerProcess.inspect`. The stacks stand in its log as well."""
        if self._process.returncode is not None:
            return False, ""
        log_fd = os.dup(self._log.fileno())  # which may have no name, and is closed when the process ends
        try:
            return await asyncio.to_thread(dump_of, self.pid, Path(f"/proc/self/fd/{log_fd}"))
        finally:
            os.close(log_fd)

    def _poll(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._loop.call_later(EXIT_POLL_S, self._poll)
        else:
            self._ended()

    def _ended(self) -> None:
        """Report the end of the process, which is not reaped yet."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
        self.kill()  # kills the children it left; its own id isn't reused before it is reaped
        code = self._process.wait()
        output = self._log_tail()
        self._log.close()
        assert self._on_exit is not None
        self._on_exit(ProcessExit(code=code, output=output))

    def _log_tail(self) -> str:
        """The last lines that this process wrote, or the stack of the work that hung; the log may have the output of
        predecessors."""
        log_end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start, log_end - LOG_TAIL_BYTES))
        text = self._log.read().decode(errors="replace")
        return timeout_stack(text) or "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


def _open_log(path: str | Path | None) -> tuple[IO[bytes], int]:
    """Open the log to append and read; return it and its size so far. An unnamed temporary file without a path."""
    if path is None:
        return tempfile.TemporaryFile("a+b"), 0
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Not in a `with`: the worker writes to it, and the cause of its death is read from it when it has ended.
    log_file = open(path, "a+b")  # noqa: SIM115
    return log_file, log_file.seek(0, os.SEEK_END)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal"
