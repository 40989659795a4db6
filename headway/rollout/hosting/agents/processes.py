"""The orchestrator's client for agents' processes: starts them, waits for them, stops them, returns their output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, WorkerDied
from headway.rollout.hosting.agents.host import MARK, kill_marked
from headway.runtime.scratch import ScratchFolder
from headway.runtime.worker_slots import OutageReporter
from headway.runtime.workers import EventCallback

_HOST = "headway.rollout.hosting.agents.host"
_START_S = 120.0  # time for the import of the user's module
_STOP_S = 10.0  # in addition to the grace period
_HOST_LOG = "host.log"
_MAX_LOGS = 256
_TAIL_BYTES = 4000
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How an agent's process ended."""

    code: int
    signal: int = 0  # that killed it; 0: none did
    error: str = ""  # why it couldn't be started
    tail: str = ""  # the end of its log

    @property
    def well(self) -> bool:
        return not (self.code or self.signal or self.error)


class AgentProcesses:
    """Starts agents through a host process (rollout/hosting/agents/host.py), which is started with the first agent.

    The host's death ends its agents; the next agent starts another host.
    """

    def __init__(
        self,
        function: str = "",
        settings: Mapping[str, Any] | None = None,
        *,
        logs: Path | None = None,
        log_bytes: int = 1_000_000,
        grace_s: float = 2.0,
        on_event: EventCallback = lambda name, detail, /, **data: None,
    ) -> None:
        """``function``: the agents' module:function, "" where they are commands. ``settings`` (JSON types): the
        function makes the agent of them. ``logs``: the folder of their output, of each the first ``log_bytes`` and a
        few of the last; None: a temporary one. ``grace_s``: between SIGTERM and SIGKILL. ``on_event`` receives deaths
        and restarts of the host."""
        self._function = function
        self._settings = () if settings is None else (json.dumps(settings),)
        self._grace_s = grace_s
        self._folder = ScratchFolder("headway-agents-")
        self._scratch = self._folder.path
        self._logs = logs or self._scratch / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._log_bytes = log_bytes
        earlier_logs = (path for path in self._logs.glob("*.log") if path.name != _HOST_LOG)  # of a run that is resumed
        self._log_files = deque(sorted(earlier_logs, key=lambda path: path.stat().st_mtime))
        self._numbers = itertools.count()
        self._host: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._reporter = OutageReporter("agents", on_event, time.monotonic, lambda: len(self._exits))
        self._stopping = False
        self._exits: dict[str, asyncio.Future[Exit]] = {}

    async def start(self) -> None:
        """Start the host. Raises ConfigurationError for a function that can't be imported."""
        async with self._starting:
            if self._writer is None:
                if self._listening is not None:  # the former host's death is reported first
                    await asyncio.wait((self._listening,), timeout=_STOP_S)
                await self._start_host()

    async def run(
        self,
        name: str,
        argv: Sequence[str],
        task: Mapping[str, Any],
        env: Mapping[str, str],
        scratch: Path,
        reward: tuple[str, str] = ("", ""),
    ) -> Exit:
        """Run an agent to its end: the command ``argv``, or, where that is empty, the function on ``task``, whose
        return value is posted as the ``reward`` (address, and a key that its subprocesses don't inherit). Cancellation
        stops the agent; none of its processes is left when this returns. Raises ConfigurationError as `start`,
        WorkerDied when the host dies."""
        await self.start()
        agent_id = f"{os.getpid()}-{next(self._numbers)}-{name}"
        log_path = self._log(name)
        exit_future = self._exits[agent_id] = asyncio.get_running_loop().create_future()
        marked_env = {**env, MARK: agent_id}
        try:
            request = {"argv": list(argv), "task": task, "env": marked_env, "log": [str(log_path), self._log_bytes]}
            await self._send({"start": agent_id, "reward": reward, **request})
            agent_exit = await asyncio.shield(exit_future)
        except asyncio.CancelledError:
            await self._stop(agent_id, exit_future)
            raise
        finally:
            self._exits.pop(agent_id, None)
            shutil.rmtree(scratch, ignore_errors=True)
        return Exit(code=agent_exit.code, signal=agent_exit.signal, error=agent_exit.error, tail=_tail(log_path))

    def scratch(self, name: str) -> Path:
        """Return a new scratch folder for one agent."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._scratch))

    async def stop(self) -> None:
        """End the host and all its agents."""
        self._stopping = True
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            await asyncio.wait((self._listening,), timeout=_START_S)
        self._folder.remove()

    async def _stop(self, agent: str, ended: asyncio.Future[Exit]) -> None:
        with contextlib.suppress(WorkerDied, ConnectionError, TimeoutError):
            await self._send({"stop": agent, "grace_s": self._grace_s})
            async with asyncio.timeout(self._grace_s + _STOP_S):  # the host kills it by then, or is stuck itself
                await asyncio.shield(ended)

    async def _start_host(self) -> None:
        parent_socket, host_socket = socket.socketpair()
        with host_socket, (self._logs / _HOST_LOG).open("ab") as log_file:
            socket_fd = host_socket.fileno()
            host = subprocess.Popen(  # noqa: ASYNC220  (once)
                [sys.executable, "-m", _HOST, str(socket_fd), self._function or "-", *self._settings],
                pass_fds=(socket_fd,),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=parent_socket, limit=_MAX_LINE_BYTES)
        try:
            await self._ready(reader)
        except BaseException:  # cancellation too: the next call starts another host
            writer.close()
            host.kill()
            host.wait()
            raise
        self._listening = asyncio.create_task(self._listen(reader, host), name="agents")
        if self._host is not None:
            self._reporter.restarted()
        self._host, self._writer = host, writer

    async def _ready(self, reader: asyncio.StreamReader) -> None:
        """Wait until the host is ready. Raises ConfigurationError with the reason where it can't be started."""
        try:
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
        except TimeoutError:
            raise ConfigurationError(
                f"environment.agent = {self._function!r}: not imported in {_START_S:g} s"
            ) from None
        first_message = json.loads(line or b'{"error": "the host of agents ended at its start"}')
        if "error" in first_message:
            raise ConfigurationError(first_message["error"])

    async def _listen(self, reader: asyncio.StreamReader, host: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                reply = json.loads(line)
                future = self._exits.get(reply.pop("id"))
                if future is not None and not future.done():
                    future.set_result(Exit(code=reply["exit"], signal=reply["signal"], error=reply.get("error", "")))
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        exit_code = await asyncio.to_thread(host.wait)
        reason = f"the host of agents ended with {exit_code}"
        for agent_id, future in self._exits.items():
            if not future.done():
                kill_marked(agent_id)
                future.set_exception(WorkerDied("agents", reason))
        if not self._stopping:
            self._reporter.died(WorkerDied("agents", reason))

    async def _send(self, request: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise WorkerDied("agents", "the host of agents is gone")
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()

    def _log(self, name: str) -> Path:
        """Return the file for an agent's output, and delete the oldest files beyond the limit."""
        path = self._logs / f"{name}.log"
        if path not in self._log_files:
            self._log_files.append(path)
        while len(self._log_files) > _MAX_LOGS:
            self._log_files.popleft().unlink(missing_ok=True)
        return path


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as log_file:
            log_file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return log_file.read().decode(errors="replace")
    except OSError:
        return ""
