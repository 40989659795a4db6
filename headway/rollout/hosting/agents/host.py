"""The process that starts agents: each in a process group of its own, none outliving its rollout or the orchestrator.

The command is ``python -m headway.rollout.hosting.agents.host DESCRIPTOR MODULE:FUNCTION [SETTINGS]`` (``-`` in the
place of the function for commands). The host imports the user's module once; every rollout then costs a fork. With
SETTINGS (JSON) the function is called once with them and returns the agent. Requests and answers are lines of JSON over
the socket DESCRIPTOR:

    {"start": id, "argv": [...] or [], "task": {...}, "env": {...}, "log": [path, bytes], "reward": [url, key]}
        ->  {"id", "exit": code, "signal": n}
    {"stop": id, "grace_s": s}

An agent's exit ends its process group and all processes with its rollout's mark in their environment. The end of the
socket ends all agents, and the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import http.client
import inspect
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headway.rollout.hosting.agents.log import AgentLog
from headway.runtime.child import PR_SET_PDEATHSIG
from headway.runtime.hooks import is_infrastructure
from headway.runtime.imports import import_function

MARK = "HEADWAY_AGENT"  # names the rollout's processes in their environment
KEY = "environment.agent"
EX_TEMPFAIL = 75  # exit code of a temporary failure, worth a retry (sysexits.h)
_POLL_S = 0.02


class AgentHost:
    """The host's loop: reads requests and agents' output, reaps agents, kills those whose grace period is over."""

    def __init__(self, channel: socket.socket, function: Callable[..., Any] | None) -> None:
        self._channel = channel
        self._function = function
        self._pids: dict[str, int] = {}  # of running agents
        self._logs: dict[str, AgentLog] = {}  # of running agents
        self._selector = selectors.DefaultSelector()
        self._kill_at_s: dict[str, float] = {}
        self._unread = b""

    def run(self) -> None:
        """Serve requests until the other side closes the channel."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the orchestrator's to act on
        wake_reader, wake_writer = socket.socketpair()
        for wake_socket in (wake_reader, wake_writer):
            wake_socket.setblocking(False)
        signal.set_wakeup_fd(wake_writer.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with self._selector as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            try:
                while True:
                    ready_files = {key.fileobj for key, _ in selector.select(_POLL_S if self._kill_at_s else None)}
                    for log in self._logs.values():
                        if log.pipe in ready_files:
                            log.take()
                            if log.ended:
                                selector.unregister(log.pipe)
                    if wake_reader in ready_files:
                        with contextlib.suppress(BlockingIOError):
                            wake_reader.recv(4096)
                    if self._channel in ready_files and not self._read():
                        return
                    self._reap()
                    self._kill_late()
            finally:
                for agent_id in list(self._pids):
                    self._kill(agent_id, signal.SIGKILL)

    def _read(self) -> bool:
        """Handle the requests that have arrived; returns False where the other side closed the channel."""
        chunk = self._channel.recv(1 << 16)
        *request_lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in request_lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request)
            elif request["stop"] in self._pids:
                self._kill(request["stop"], signal.SIGTERM)
                self._kill_at_s[request["stop"]] = time.monotonic() + request["grace_s"]
        return bool(chunk)

    def _start(self, request: Mapping[str, Any]) -> None:
        agent_id: str = request["start"]
        log = None
        try:
            log = AgentLog(*request["log"])
            pid = os.fork()
        except OSError as error:
            if log is not None:
                log.close_output()
                log.close()
            self._send({"id": agent_id, "exit": 1, "signal": 0, "error": f"fork: {error}"})
            return
        if pid == 0:
            _run_child(request, self._function, log.output)
        log.close_output()
        self._logs[agent_id] = log
        self._selector.register(log.pipe, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does so too, so that neither has to wait
        self._pids[agent_id] = pid

    def _reap(self) -> None:
        for agent_id, pid in list(self._pids.items()):
            exit_info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exit_info is None:
                continue
            self._kill(agent_id, signal.SIGKILL)  # its remaining processes, before its number can be reused
            _, status = os.waitpid(pid, 0)
            del self._pids[agent_id]
            self._kill_at_s.pop(agent_id, None)
            log = self._logs.pop(agent_id)
            if not log.ended:
                self._selector.unregister(log.pipe)
            log.close()
            exit_code = os.waitstatus_to_exitcode(status)
            self._send({"id": agent_id, "exit": max(0, exit_code), "signal": max(0, -exit_code)})

    def _kill_late(self) -> None:
        for agent_id, due_s in list(self._kill_at_s.items()):
            if time.monotonic() >= due_s:
                del self._kill_at_s[agent_id]
                self._kill(agent_id, signal.SIGKILL)

    def _kill(self, agent: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pids[agent], number)
        if number == signal.SIGKILL:
            kill_marked(agent)

    def _send(self, answer: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(json.dumps(answer).encode() + b"\n")


def kill_marked(agent: str) -> None:
    """Kill all processes with an agent's mark, in any process group."""
    for pid in _marked(agent):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _marked(agent: str) -> Iterator[int]:
    mark = f"{MARK}={agent}".encode()
    for pid_text in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if pid_text.isdigit() and int(pid_text) != os.getpid():
            try:
                with open(f"/proc/{pid_text}/environ", "rb") as environ_file:
                    is_marked = mark in environ_file.read().split(b"\0")
            except OSError:
                continue
            if is_marked:
                yield int(pid_text)


def _run_child(request: Mapping[str, Any], function: Callable[..., Any] | None, output: int) -> None:
    """Run an agent in the forked child; never returns."""
    exit_code = 1
    try:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for signal_number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(signal_number, signal.SIG_DFL)
        null_fd = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null_fd, 0)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.closerange(3, 1 << 12)  # it inherits no connection of ours
        os.environ.update(request["env"])
        if request["argv"]:
            _execute(request["argv"])
        assert function is not None
        _call(function, request["task"], *request["reward"])
        exit_code = 0
    except SystemExit as system_exit:
        exit_code = system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None)
    except BaseException as error:  # the user's code, in a process of its own: its log has the cause
        traceback.print_exc()
        exit_code = EX_TEMPFAIL if is_infrastructure(error) else 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code & 0xFF)


def _execute(argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as shells do


def _call(function: Callable[..., Any], task: Mapping[str, Any], reward_url: str, reward_key: str) -> None:
    """Call the user's function, and post its return value, unless None, as the reward."""
    returned: Any = function(dict(task))
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    if returned is None:
        return
    reward = dict(returned) if isinstance(returned, Mapping) else {"reward": float(returned)}
    post_reward(reward_url, reward_key, reward)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def post_reward(url: str, key: str, reward: Mapping[str, Any]) -> None:
    """Post ``{"reward": ..., "solved": ...}`` to ``url``. Raises RuntimeError for a reward that isn't accepted."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", address.path, json.dumps(reward), headers)
    response = connection.getresponse()
    body = response.read().decode(errors="replace")
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"the reward {dict(reward)} was not taken: {body}")


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    function = None
    if sys.argv[2] != "-":
        try:
            function = import_function(sys.argv[2], KEY, (), asynchronous=True)
            if len(sys.argv) > 3:
                function = function(json.loads(sys.argv[3]))
        except Exception as error:  # sent, not raised: the parent process reports it
            channel.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
            return
    channel.sendall(b'{"ready": true}\n')
    AgentHost(channel, function).run()


if __name__ == "__main__":
    main()
