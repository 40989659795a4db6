"""Workers forked from a process that has imported what they need: torch alone costs each 1.5 seconds of a core.

Started as ``python -m headway.runtime.fork_server DESCRIPTOR PARENT_PID MODULE...``. The server imports the modules,
starts no thread and computes nothing, and forks a process for each request. That process becomes its parent's own
child, as if the parent had started it: exit code, process group and death with the parent are the same, and the death
of the server doesn't reach it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from headway.runtime import child

MODEL_CODE = ("headway.trainer.service", "headway.generator.service")  # a trainer's modules and a replica's
VERIFIER_CODE = ("headway.rollout.verification.service",)  # a verifier's, which a response that hangs ends
TORCH_CODE = ("torch",)  # of a workflow's workers, where its script uses torch
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
# Of OpenMP, which reads them and the process's cores when it is loaded: before a forked worker is pinned to its own.
_BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
_MOST_SERVERS = 2  # of a process: each holds the memory of its modules
_IMPORT_S = 120.0  # for the modules
_FORK_S = 30.0  # for one process
_MESSAGE_BYTES = 1 << 20


class ForkedProcess:
    """A child of this process, with the part of `subprocess.Popen`'s interface that a worker's process needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        if self.returncode is None:
            try:
                wait_status = os.waitpid(self.pid, 0)[1]
            except ChildProcessError:  # another thread has waited for it: 0, as subprocess has it
                wait_status = 0
            self.returncode = os.waitstatus_to_exitcode(wait_status)
        return self.returncode


class ForkServer:
    """A fork server, as its parent sees it. Lifecycle: *importing* -> *ready* -> *dead*, which is final."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        """Start the process with this environment. Raises OSError."""
        with _adopting_orphans():
            pass  # raises OSError where this process couldn't adopt what the server forks
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-m",
            "headway.runtime.fork_server",
            str(theirs.fileno()),
            str(os.getpid()),
            *modules,
        ]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, process_group=0, **streams)
        self._adopt(process, ours)

    def _adopt(self, process: subprocess.Popen[Any], sock: socket.socket) -> None:
        self.imported: concurrent.futures.Future[bool] = concurrent.futures.Future()  # whether that went well
        self._process, self._socket = process, sock
        threading.Thread(target=self._await_imports, name="fork server's imports", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> bool:
        """Wait for its imports. False: they failed, or it has died."""
        return await asyncio.shield(asyncio.wrap_future(self.imported)) and self.alive

    def fork(
        self, program: str, arguments: Sequence[str], environment: dict[str, str], log: int, sock: int
    ) -> ForkedProcess | None:
        """Run ``PROGRAM.main([SOCK, *ARGUMENTS])`` in a child of this process, with the open descriptor ``sock``, and
        ``log`` as its output. None: the server has died, and nothing was started. A server that doesn't answer is
        killed first. Raises TimeoutError when it stays unknown even then whether a child was forked: that child must
        not meet a second worker on the same socket."""
        request = json.dumps([program, list(arguments), environment]).encode()
        try:
            with _adopting_orphans():
                socket.send_fds(self._socket, [request], [log, sock])
                try:
                    pid_bytes = self._socket.recv(8)
                except TimeoutError:
                    self._process.kill()
                    pid_bytes = self._socket.recv(8)  # of a child that it forked before; empty: there is none
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return None  # an environment that is too large; others may come from it
            if isinstance(error, TimeoutError):
                self.end()
                raise
            pid_bytes = b""
        except BaseException:
            self.end()  # its reply would be taken for that of the next request
            raise
        if not pid_bytes:
            self.end()
            return None
        return ForkedProcess(int.from_bytes(pid_bytes, sys.byteorder))

    def end(self) -> None:
        """Kill the server, unless it is dead; processes that were forked from it live on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _await_imports(self) -> None:
        try:
            self._socket.settimeout(_IMPORT_S)
            ready = bool(self._socket.recv(1))
            self._socket.settimeout(_FORK_S)
        except OSError:
            ready = False
        if not ready:
            self._process.kill()
        self.imported.set_result(ready)


SERVERS: dict[object, ForkServer] = {}  # of this process, by what `key_of` gives
_SERVERS_LOCK = threading.RLock()  # event loops in several threads would mix up servers, replies and adoptions


def key_of(modules: Sequence[str], added: dict[str, str]) -> object:
    """The key of a server: its parent, its modules, and the folders and variables with which it imports them."""
    return (os.getpid(), *modules, os.getcwd(), os.environ.get("PYTHONPATH"), *sorted(added.items()))


async def fork_server(modules: Sequence[str], added: dict[str, str]) -> ForkServer | None:
    """The server of this process that imports ``modules`` with the variables ``added``, started when there is none yet.
    None where it can't be started, for a third such set, and where a variable binds threads to cores."""
    with contextlib.suppress(OSError):  # starting the worker itself will say what is missing
        with _SERVERS_LOCK:
            key = key_of(modules, added)
            server = SERVERS.get(key)
            if server is not None and server.imported.done() and not server.imported.result():
                return None  # the imports would fail again
            full = len(set(SERVERS.values())) >= _MOST_SERVERS
            if server is None and (full or _BINDING & (os.environ.keys() | added.keys())):
                return None
            if server is None or not server.alive:
                server = SERVERS[key] = ForkServer(modules, os.environ | added)
        return server if await server.ready() else None


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Inside the block, descendants of this process whose parent ends become its children. Raises OSError where the
    kernel can't do that."""
    libc, previous_flag = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    with _SERVERS_LOCK:
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(previous_flag), 0, 0, 0)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
        try:
            yield
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, previous_flag.value, 0, 0, 0)


def serve(sock: socket.socket) -> int:
    """Serve fork requests until the parent closes the connection, then return 0. A forked process instead runs its
    program here and exits."""
    sock.send(b"r")  # ready
    while True:
        request_bytes, descriptors, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 2)
        if not descriptors:
            return 0
        if _fork_adopted(sock):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    sock.close()
    log_fd, connection_fd = descriptors
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    program, arguments, environment = json.loads(request_bytes)
    os.environ.clear()
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # else all that are forked here draw the same numbers
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    child.end_process(importlib.import_module(program).main([str(connection_fd), *arguments]))


def _fork_adopted(sock: socket.socket) -> bool:
    """Fork a process that the server's parent adopts. True in it, False in the server. Raises OSError when there is
    no process to be had: the server ends."""
    go_read_fd, go_write_fd = os.pipe()
    middle_pid = os.fork()
    if middle_pid:
        os.close(go_read_fd)
        os.waitpid(middle_pid, 0)
        os.write(go_write_fd, b"g")
        os.close(go_write_fd)
        return False
    if os.fork():
        os._exit(0)  # its child is an orphan now: the next ancestor that adopts orphans is the server's parent
    os.close(go_write_fd)
    os.setpgid(0, 0)
    if not os.read(go_read_fd, 1):
        os._exit(child.EXIT_PARENT_GONE)
    os.close(go_read_fd)
    sock.send(os.getpid().to_bytes(8, sys.byteorder))
    return True


def main(arguments: list[str]) -> int:
    """Run a server's process, from its command line to its exit code, or that of what is forked from it."""
    socket_fd, parent_pid, *modules = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    child.die_with_parent(int(parent_pid))
    for module in modules:
        importlib.import_module(module)
    if threading.active_count() > 1:  # a fork would have its locks, and not the thread
        return child.EXIT_FAILED
    gc.collect()
    gc.freeze()  # the collector would write to pages that are shared
    return serve(socket.socket(fileno=int(socket_fd)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
