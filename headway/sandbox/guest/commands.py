"""Runs the commands of a sandbox, in its first process. Standard library alone.

Each command leads a session of its own. It has ended when its process has, not when its pipes are closed: a daemon
that holds them open would make that wait endless. Output in the pipes at that time is read. A daemon's later output is
read during a short grace period, and discarded after that, so that the daemon neither blocks nor dies of it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

from headway.sandbox.guest import isolation, preload
from headway.sandbox.linux import kernel

GRACE_S = 0.1  # for output in pipes that another process still holds
READ_BYTES = 1 << 16
KILL_ROUNDS = 20
HELD_PIPES = 64  # most pipes of daemons whose output is discarded; beyond that the oldest is closed
COMMAND_NICENESS = 5  # init comes first when commands use all cores
ERROR = struct.Struct("=i")  # errno; 0: none
CANT_RUN, NOT_FOUND = 126, 127  # what shells return
ALL_PROCESSES = -1  # all processes but init, in one call, which none can outrun by forking


class RunningCommand:
    """A command that is running or has just ended.

    Lifecycle: *running* -> its process ended -> *drained* (all pipes at their end, or the grace period over) ->
    *reported*.
    """

    def __init__(self, number: int, request: dict[str, Any], stdin: bytes | None) -> None:
        self.number = number
        self.started_s = time.monotonic()
        self.timeout_s: float = request["timeout_s"]
        self.max_bytes: int = request["max_output_bytes"]
        self.stdin = stdin
        self.pid = -1
        # Shared with the child, which reports why it couldn't start the command; after execve it can't reach this.
        self.setup_error = mmap.mmap(-1, ERROR.size)
        self.others: set[int] = set()  # processes that were there before it
        self.overlapped = False  # by another command: what is newer than this one may be the other's
        self.kills_before = 0
        self.pipes: dict[int, bytearray] = {}  # of its output, open ones
        self.output: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.stdin_pipe = -1
        self.truncated = False
        self.timed_out = False
        self.status: int | None = None
        self.ended_s = 0.0

    def deadline_s(self) -> float:
        """Return the time at which `enforce` must check the command even without an event."""
        if self.status is not None:
            return self.ended_s + GRACE_S
        return float("inf") if self.timed_out else self.started_s + self.timeout_s

    def read(self, pipe: int) -> bool:
        """Read the pipe once. False: the pipe is at its end, or empty."""
        try:
            chunk = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            del self.pipes[pipe]
            os.close(pipe)
            return False
        output = self.pipes[pipe]
        free_bytes = self.max_bytes - len(output)
        output += chunk[:free_bytes]
        self.truncated |= len(chunk) > free_bytes
        return True

    def feed(self) -> None:
        """Write as much of the command's input as the pipe takes."""
        assert self.stdin is not None
        with contextlib.suppress(BlockingIOError):
            try:
                self.stdin = self.stdin[os.write(self.stdin_pipe, self.stdin[:READ_BYTES]) :]
            except BrokenPipeError:
                self.stdin = b""
        if not self.stdin:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin_pipe >= 0:
            os.close(self.stdin_pipe)
            self.stdin_pipe = -1

    def report(self, kills: int) -> tuple[dict[str, Any], bytes]:
        """Return head and body of the answer."""
        assert self.status is not None
        (errno_code,) = ERROR.unpack(self.setup_error)
        self.setup_error.close()
        if errno_code:
            return {"error": errno_code, "what": f"its process can't be made ready: {os.strerror(errno_code)}"}, b""
        exit_code = os.waitstatus_to_exitcode(self.status)
        out, err = self.output
        head = {
            "exit_code": exit_code if exit_code >= 0 else None,
            "signal": -exit_code if exit_code < 0 else None,
            "timed_out": self.timed_out,
            "oom": kills > self.kills_before,
            "truncated": self.truncated,
            "stdout_bytes": len(out),
            "duration_s": self.ended_s - self.started_s,
        }
        return head, bytes(out) + bytes(err)


class Commands:
    """All commands of a sandbox. Registers their open pipes with ``poll``, which the first process's loop waits on."""

    def __init__(
        self, poll: select.poll, prepare: Callable[[], None], kills: Callable[[], int], channel: int = -1
    ) -> None:
        self._poll = poll
        self._prepare = prepare
        self._kills = kills
        self._channel = channel  # input of the one function that may run as a command
        self._running: dict[int, RunningCommand] = {}  # by process
        self._by_pipe: dict[int, RunningCommand] = {}
        self._orphaned_pipes: list[int] = []  # pipes of reported commands, which other processes still write to
        self._stopped_s: float | None = None

    def start(self, number: int, request: dict[str, Any], stdin: bytes | None) -> None:
        if request["exclusive"]:
            self.kill_all()
        command = RunningCommand(number, request, stdin)
        command.others = _processes()
        command.kills_before = self._kills()
        for other in self._running.values():
            other.overlapped = command.overlapped = True
        self._spawn(command, request)
        self._running[command.pid] = command

    def _spawn(self, command: RunningCommand, request: dict[str, Any]) -> None:
        if "function" in request:
            if self._channel < 0:
                raise OSError(errno.EBADF, "no channel, or one that was used, for a function")
            stdin_fds, self._channel = (self._channel, -1), -1
        else:
            stdin_fds = os.pipe() if command.stdin else (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1)
        (out_read_fd, out_write_fd), (err_read_fd, err_write_fd) = os.pipe(), os.pipe()
        try:
            command.pid = os.fork()
        except OSError:
            for descriptor in (out_read_fd, err_read_fd, stdin_fds[1]):
                if descriptor >= 0:
                    os.close(descriptor)
            raise
        finally:
            if command.pid:  # or fork has failed: not in the child
                for descriptor in (stdin_fds[0], out_write_fd, err_write_fd):
                    os.close(descriptor)
        if command.pid == 0:
            _run_command(command, request, (stdin_fds[0], out_write_fd, err_write_fd), self._prepare)
        for pipe, output in zip((out_read_fd, err_read_fd), command.output, strict=True):
            os.set_blocking(pipe, False)
            command.pipes[pipe] = output
            self._by_pipe[pipe] = command
            self._poll.register(pipe, select.POLLIN)
        if command.stdin:
            command.stdin_pipe = stdin_fds[1]
            os.set_blocking(stdin_fds[1], False)
            self._by_pipe[stdin_fds[1]] = command
            self._poll.register(stdin_fds[1], select.POLLOUT)

    def ready(self, pipe: int) -> None:
        """Handle a pipe that can be read from or written to."""
        command = self._by_pipe.get(pipe)
        if command is None:
            if pipe in self._orphaned_pipes:
                self._discard_output(pipe)
        elif pipe == command.stdin_pipe:
            command.feed()
            if command.stdin_pipe < 0:
                self._unregister(pipe)
        else:
            command.read(pipe)
            if pipe not in command.pipes:
                self._unregister(pipe)

    def _discard_output(self, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(pipe, READ_BYTES):
                self._poll.unregister(pipe)
                self._orphaned_pipes.remove(pipe)
                os.close(pipe)

    def _unregister(self, pipe: int) -> None:
        self._by_pipe.pop(pipe, None)
        with contextlib.suppress(KeyError):
            self._poll.unregister(pipe)

    def reap(self) -> bool:
        """Reap processes that have ended, orphans too. False: no process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            kernel.remove_orphaned_objects(alone=not _processes())
            command = self._running.get(pid)
            if command is not None:
                command.status, command.ended_s = status, time.monotonic()
                for pipe in list(command.pipes):
                    self._drain(command, pipe)

    def _drain(self, command: RunningCommand, pipe: int) -> None:
        """Read the rest of a pipe, bounded, since a daemon may write as fast as this reads."""
        for _ in range(2 * (1 << 20) // READ_BYTES):  # as much as a pipe can be made to hold, and more
            if not command.read(pipe):
                break
        if pipe not in command.pipes:
            self._unregister(pipe)

    def done(self) -> list[RunningCommand]:
        """Remove and return the commands that can be reported."""
        now = time.monotonic()
        ended = [c for c in self._running.values() if c.status is not None and (not c.pipes or now >= c.deadline_s())]
        for command in ended:
            del self._running[command.pid]
            if command.stdin_pipe >= 0:
                self._unregister(command.stdin_pipe)
                command.close_stdin()
            for pipe in command.pipes:
                del self._by_pipe[pipe]  # still registered: its output is discarded from now on
                self._orphaned_pipes.append(pipe)
            while len(self._orphaned_pipes) > HELD_PIPES:
                oldest_pipe = self._orphaned_pipes.pop(0)
                self._poll.unregister(oldest_pipe)
                os.close(oldest_pipe)
        return ended

    def enforce(self) -> None:
        """Kill commands beyond their time limit."""
        if self._stopped_s is not None:
            return
        for command in list(self._running.values()):
            if command.status is None and time.monotonic() >= command.deadline_s():
                command.timed_out = True
                self._kill(command)

    def deadline_s(self) -> float:
        if self._stopped_s is not None:
            return float("inf")
        return min((command.deadline_s() for command in self._running.values()), default=float("inf"))

    def _kill(self, command: RunningCommand) -> None:
        """Kill a command and all processes it has started; those in other sessions are the ones newer than it."""
        _signal(-command.pid, signal.SIGKILL)  # the group that it leads
        _signal(command.pid, signal.SIGKILL)
        if command.overlapped:
            return
        if not command.others:
            _signal(ALL_PROCESSES, signal.SIGKILL)
            return
        for _ in range(KILL_ROUNDS):
            newer_pids = _processes() - command.others
            for pid in newer_pids:
                _signal(pid, signal.SIGKILL)
            if not newer_pids:
                return
            time.sleep(0.001)
            self.reap()
        _signal(ALL_PROCESSES, signal.SIGKILL)  # it forks faster than it can be followed

    def kill_all(self) -> None:
        """Kill all processes but init; running commands are reported as killed."""
        self.resume()
        _signal(ALL_PROCESSES, signal.SIGKILL)
        deadline_s = time.monotonic() + 2.0
        while self.reap() and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def stop(self) -> None:
        """Stop all processes and their time limits. Uses signals, not the freezer: frozen processes can't be killed and
        would outlive a killed owner."""
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()
            _signal(ALL_PROCESSES, signal.SIGSTOP)

    def resume(self) -> None:
        if self._stopped_s is not None:
            stopped_for_s = time.monotonic() - self._stopped_s
            self._stopped_s = None
            for command in self._running.values():
                command.timeout_s += stopped_for_s
            _signal(ALL_PROCESSES, signal.SIGCONT)

    @property
    def stopped(self) -> bool:
        return self._stopped_s is not None


def _run_command(
    command: RunningCommand, request: dict[str, Any], streams: tuple[int, int, int], prepare: Callable[[], None]
) -> None:
    """Execute the command in the child, or write the reason to its stderr. Earlier failures aren't the command's, and
    are reported to init. Never returns."""
    exit_code = CANT_RUN
    try:
        try:
            for target_fd, descriptor in enumerate(streams):
                os.dup2(descriptor, target_fd)  # another number: 0, 1 and 2 are taken
            os.setsid()
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(signal_number, signal.SIG_DFL)
            prepare()
        except Exception as error:
            ERROR.pack_into(command.setup_error, 0, getattr(error, "errno", None) or errno.EINVAL)
            os._exit(CANT_RUN)
        os.chdir(request["workdir"])
        if "function" in request:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its owner may read its memory, as a program's
            os.environ.clear()
            os.environ.update(request["environment"])
            exit_code = preload.call(request["function"])
            return
        os.execvpe(request["argv"][0], request["argv"], request["environment"])
    except OSError as error:
        exit_code = NOT_FOUND if error.errno == errno.ENOENT else CANT_RUN
        subject = os.fsdecode(error.filename or request["argv"][0])
        os.write(2, f"{subject}: {error.strerror}\n".encode(errors="replace"))
    except ValueError as error:
        bad_arguments = (f"argv[{position}]" for position, text in enumerate(request["argv"]) if "\0" in text)
        subject = next(bad_arguments, "a variable or the folder of the command")
        os.write(2, f"{subject} can't be passed to a program: {error}\n".encode(errors="replace"))
    finally:
        os._exit(exit_code)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}


def tasks() -> int:
    """Return the number of threads of all processes, which the limit of processes counts."""
    thread_count = 0
    for pid in _processes():
        with contextlib.suppress(OSError):
            thread_count += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return thread_count


def limits_of_commands(limits: dict[str, Any], memory_limited: bool, proc: int) -> Callable[[], None]:
    """Return a function that applies the limits to a command's own process before it executes the command."""

    def prepare() -> None:
        # A process can write to its /proc files only while it is dumpable, when others may inspect it. By now it is a
        # copy of init without init's descriptors, above all without the owner's.
        os.closerange(3, proc)
        os.closerange(proc + 1, 1 << 20)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        score_fd = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        os.write(score_fd, b"1000")  # before init, when memory is short
        os.close(score_fd)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        with contextlib.suppress(PermissionError):  # another process here has raised its niceness further meanwhile
            os.nice(COMMAND_NICENESS)
        isolation.restrict_command(limits, memory_limited)

    return prepare
