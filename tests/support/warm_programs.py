"""Commands that tests start, forked from a process that has imported their modules: a tenth of a second each, not five.

Such a command is a process of its own, child of the test's, with its own arguments, environment and output. It has a
fork server (`headway.runtime.fork_server`) from its start, so that its trainer, replicas and verifiers import
nothing either; the workers of a node's agent come from it too. How fast matrices are multiplied, a trainer measures for
a moment alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from headway.runtime import child, fork_server
from headway.runtime.devices import every_core
from headway.runtime.fork_server import (
    MODEL_CODE,
    SERVERS,
    TORCH_CODE,
    VERIFIER_CODE,
    ForkedProcess,
    ForkServer,
    key_of,
)
from headway.runtime.workers import added_environment

HEADWAY = "headway.cli.main"
SERVER = "a server"  # instead of a program: a fork server with more modules
MODULES = (
    *MODEL_CODE,
    *VERIFIER_CODE,
    HEADWAY,
    "headway.orchestrator.train",
    "headway.orchestrator.jobs.evaluate",
    "headway.orchestrator.preflight.check",
    "headway.rollout.hosting.service",
    "headway.runtime.nodes.agent",
    "headway.services.serve",
    "headway.services.watch.app",
    "warm_programs",
    "pyarrow.compute",
    *(["pandas"] if importlib.util.find_spec("pandas") else []),  # pyarrow imports it at the first array, where it can
)
# Variables that are read before or as modules are imported; of PYTHONPATH what is forked follows its own.
FIXED = re.compile("PYTHON(?!PATH$)|LD_|MALLOC_|OPENBLAS_|MKL_")
CLONE_NEWNET = 0x40000000
PEAK_S = 0.03
_own: dict[
    tuple[str, ...], tuple[ForkServer, dict[str, str]]
] = {}  # by `_more`: a server, its environment's fixed part
_more: tuple[str, ...] = ()  # modules that programs need beside `MODULES`


def start(
    program: str, *arguments: str, environment: dict[str, str], namespace: str = "", **how: Any
) -> subprocess.Popen[str]:
    """Start ``python PROGRAM ARGUMENTS``, or ``headway ARGUMENTS``, in a network namespace if one is given. ``how``: as
    of Popen."""
    return _WarmProcess([namespace, program, *arguments], env=environment, text=True, **how)


@contextmanager
def importing(*modules: str) -> Iterator[None]:
    """Inside the block, programs are forked from a process that has imported these modules too."""
    global _more
    before, _more = _more, modules
    begin()
    try:
        yield
    finally:
        if _more in _own:
            _own.pop(_more)[0].end()
        _more = before


class _WarmProcess(subprocess.Popen[str]):
    def _execute_child(self, args: list[str], *more: Any) -> None:  # the one method of Popen that starts a process
        cwd, env, pipes = more[4], more[5], more[9:15]
        words = [json.dumps([str(cwd or ""), *args])]
        if (server := _server(env)) and (forked := server.fork("warm_programs", words, env, pipes[3], pipes[5])):
            self.pid = forked.pid
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        namespace, *program = args
        command = [sys.executable, *(["-m"] if program[0] == HEADWAY else []), *program]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        super()._execute_child(command, *more)  # type: ignore[misc]


def _server(environment: dict[str, str]) -> ForkServer | None:
    """The server, if a program in this environment may come from it."""
    begin()
    server, its = _own[_more]
    return server if _fixed(environment) == its and server.imported.result() else None


def begin() -> None:
    """Start the server unless it lives; the test's own trainers, replicas and verifiers come from it too."""
    for more in dict.fromkeys(((), _more)):
        if more not in _own or not _own[more][0].alive:
            environment = os.environ | added_environment("cpu:0", {})
            server = _forked_server(more, environment) if more else ForkServer(MODULES, environment)
            _own[more] = (server, _fixed(dict(os.environ)))
            if not more:
                _share(server)


def _forked_server(more: tuple[str, ...], environment: dict[str, str]) -> ForkServer:
    """A server with ``more`` modules, forked from the one without."""
    first, _ = _own[()]
    assert first.imported.result(), "the server without them has imported its modules"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull, "w") as nothing:
        words = [json.dumps(["", "", SERVER, *more])]
        forked = first.fork("warm_programs", words, environment, nothing.fileno(), theirs.fileno())
    assert forked, "the server without them lives"
    return _OwnServer(forked.pid, ours)


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if FIXED.match(name)}


def _share(server: ForkServer) -> None:
    """Have this process's workers of every kind come from the server."""
    for modules, device in ((MODEL_CODE, "cpu:0"), (TORCH_CODE, "cpu:0"), (VERIFIER_CODE, every_core())):
        key = key_of(modules, added_environment(device, {}))
        if (other := SERVERS.pop(key, None)) is not None:
            other.end()
        SERVERS[key] = server


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


_PATHS_AT_IMPORT = _paths()


def main(arguments: list[str]) -> int:
    """Be the program, in a process that was just forked."""
    errors, (cwd, namespace, program, *rest) = int(arguments[0]), json.loads(arguments[1])
    if program == SERVER:
        child.die_with_parent(os.getppid())
        for module in rest:
            importlib.import_module(module)
        return fork_server.serve(socket.socket(fileno=errors))
    os.dup2(errors, 2)
    os.close(errors)
    if cwd:
        os.chdir(cwd)
    if (paths := _paths()) != _PATHS_AT_IMPORT:
        sys.path[:] = [*paths, *(path for path in sys.path if path not in _PATHS_AT_IMPORT)]
    if namespace:
        _enter(namespace)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("headway.trainer.peak_flops").LIMIT_S = PEAK_S
    server = _fork_a_server()
    # As a new interpreter has them: this one's were opened as a server's.
    out, err = (io.BufferedWriter(io.FileIO(output, "w", closefd=False)) for output in (1, 2))
    sys.stdout = io.TextIOWrapper(out)
    sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)
    sys.argv = [program, *rest]
    if rest[:1] == ["node"]:
        agent = importlib.import_module("headway.runtime.nodes.agent")
        agent.start_child = partial(agent.start_child, server=server)
    if program == HEADWAY:
        return importlib.import_module(HEADWAY).main()
    sys.path.insert(0, os.path.dirname(program))
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        return end.code or 0
    return 0


def _enter(namespace: str) -> None:
    """Enter a network namespace of `ip netns`."""
    with (Path("/var/run/netns") / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {namespace}")


def _fork_a_server() -> ForkServer:
    """Fork this process as its own fork server, while it has done nothing yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child.die_with_parent(parent)
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.close(nothing)
        child.end_process(fork_server.serve(theirs))
    theirs.close()
    server = _OwnServer(pid, ours)
    _share(server)
    return server


class _OwnServer(ForkServer):
    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._adopt(cast("Any", _Child(pid)), sock)


class _Child(ForkedProcess):
    def poll(self) -> int | None:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = self.returncode is not None or os.waitid(os.P_PID, self.pid, options) is not None
        return self.wait() if ended else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
