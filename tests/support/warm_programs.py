"""Commands that tests start, forked from a process that has imported their modules: a tenth of a second each, not five.

Such a command is a process of its own, child of the test's, with its own arguments, environment and output. It has a
fork server (`headway.runtime.fork_server`) from its start, so that its trainer, replicas and verifiers import
nothing either.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from typing import Any, cast

from headway.runtime import child, fork_server
from headway.runtime.devices import every_core
from headway.runtime.fork_server import LEARNING, SCORING, SERVERS, TENSORS, ForkedProcess, ForkServer, key_of
from headway.runtime.workers import added_environment

HEADWAY = "headway.cli.main"
MODULES = (*LEARNING, *SCORING, HEADWAY, "headway.orchestrator.train", "warm_programs")
FIXED = re.compile("PYTHON|LD_|MALLOC_|OPENBLAS_|MKL_")  # variables that are read before or as modules are imported
_own: list[tuple[ForkServer, dict[str, str]]] = []  # this process's server of MODULES, and its environment's fixed part


def start(program: str, *arguments: str, environment: dict[str, str], **how: Any) -> subprocess.Popen[str]:
    """Start ``python PROGRAM ARGUMENTS``, or ``headway ARGUMENTS``. ``how``: as of Popen."""
    return _WarmProcess([program, *arguments], env=environment, text=True, **how)


class _WarmProcess(subprocess.Popen[str]):
    def _execute_child(self, args: list[str], *more: Any) -> None:  # the one method of Popen that starts a process
        cwd, env, pipes = more[4], more[5], more[9:15]
        words = [json.dumps([str(cwd or ""), *args])]
        if (server := _server(env)) and (forked := server.fork("warm_programs", words, env, pipes[3], pipes[5])):
            self.pid = forked.pid
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        command = ["-m", *args] if args[0] == HEADWAY else args
        super()._execute_child([sys.executable, *command], *more)  # type: ignore[misc]


def _server(environment: dict[str, str]) -> ForkServer | None:
    """The server, if a program in this environment may come from it."""
    fixed = {name: value for name, value in environment.items() if FIXED.match(name)}
    if not _own or not _own[0][0].alive:
        added = added_environment("cpu:0", {})
        _own[:] = [(ForkServer(MODULES, os.environ | added), fixed)]
        if (other := SERVERS.pop(key_of(LEARNING, added), None)) is not None:
            other.end()
        SERVERS[key_of(LEARNING, added)] = _own[0][0]  # the test's own trainers and replicas come from it too
    server, its = _own[0]
    return server if fixed == its and server.imported.result() else None


def main(arguments: list[str]) -> int:
    """Be the program, in a process that was just forked."""
    errors, (cwd, program, *rest) = int(arguments[0]), json.loads(arguments[1])
    os.dup2(errors, 2)
    os.close(errors)
    if cwd:
        os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _fork_a_server()
    # As a new interpreter has them: this one's were opened as a server's.
    out, err = (io.BufferedWriter(io.FileIO(output, "w", closefd=False)) for output in (1, 2))
    sys.stdout = io.TextIOWrapper(out)
    sys.stderr = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)
    sys.argv = [program, *rest]
    if program == HEADWAY:
        return importlib.import_module(HEADWAY).main()
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")
    return 0


def _fork_a_server() -> None:
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
        sys.exit(fork_server.serve(theirs))
    theirs.close()
    server = _OwnServer(pid, ours)
    for modules, device in ((LEARNING, "cpu:0"), (TENSORS, "cpu:0"), (SCORING, every_core())):
        SERVERS[key_of(modules, added_environment(device, {}))] = server


class _OwnServer(ForkServer):
    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._take(cast("Any", _Child(pid)), sock)


class _Child(ForkedProcess):
    def poll(self) -> int | None:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = self.returncode is not None or os.waitid(os.P_PID, self.pid, options) is not None
        return self.wait() if ended else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
