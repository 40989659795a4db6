"""Agents' processes as the orchestrator sees them: started, waited for, stopped, with what they said."""

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, WorkerDied
from headway.rollout.hosting.agents.host import MARK, kill_marked
from headway.runtime.scratch import ScratchFolder

_HOST = "headway.rollout.hosting.agents.host"
_START_S = 120.0  # the user's module is imported
_STOP_S = 10.0  # beside the grace
_HOST_LOG = "host.log"
_KEPT_LOGS = 256
_TAIL_BYTES = 4000
_MOST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How an agent's process ended."""

    code: int
    signal: int = 0  # that killed it; 0: none did
    error: str = ""  # why it never began
    tail: str = ""  # the end of its log

    @property
    def well(self) -> bool:
        return not (self.code or self.signal or self.error)


class AgentProcesses:
    """Starts agents through a host process (rollout/hosting/agents/host.py), which is started with the first of them.

    The host's death ends the agents it ran; with the next one it is started anew.
    """

    def __init__(
        self,
        function: str = "",
        settings: Mapping[str, Any] | None = None,
        *,
        logs: Path | None = None,
        log_bytes: int = 1_000_000,
        grace_s: float = 2.0,
    ) -> None:
        """``function``: module:function that agents are, "" where they are commands. ``settings`` (JSON types): it
        makes the agent out of them. ``logs``: the folder of their output, of each the first ``log_bytes`` and a few of
        the last; None: one that goes with this object.
        ``grace_s``: between SIGTERM and SIGKILL."""
        self._function = function
        self._settings = () if settings is None else (json.dumps(settings),)
        self._grace_s = grace_s
        self._folder = ScratchFolder("headway-agents-")
        self._scratch = self._folder.path
        self._logs = logs or self._scratch / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._log_bytes = log_bytes
        earlier = (path for path in self._logs.glob("*.log") if path.name != _HOST_LOG)  # of a run that is resumed
        self._kept = deque(sorted(earlier, key=lambda path: path.stat().st_mtime))
        self._numbers = itertools.count()
        self._host: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._exits: dict[str, asyncio.Future[Exit]] = {}

    async def start(self) -> None:
        """Start the host. Raises ConfigurationError for a function that can't be imported."""
        async with self._starting:
            if self._writer is None:
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
        """Run an agent to its end: a command, or with ``argv`` empty the function on ``task``, what it returns being
        posted as the ``reward`` (address, and a key that nothing it starts inherits). Being cancelled stops it; in any
        case nothing of it runs on when this returns. Raises ConfigurationError as `start`, WorkerDied when the host
        dies."""
        await self.start()
        agent = f"{os.getpid()}-{next(self._numbers)}-{name}"
        log = self._log(name)
        ended = self._exits[agent] = asyncio.get_running_loop().create_future()
        marked = {**env, MARK: agent}
        try:
            request = {"argv": list(argv), "task": task, "env": marked, "log": [str(log), self._log_bytes]}
            await self._tell({"start": agent, "reward": reward, **request})
            exit = await asyncio.shield(ended)
        except asyncio.CancelledError:
            await self._stop(agent, ended)
            raise
        finally:
            self._exits.pop(agent, None)
            shutil.rmtree(scratch, ignore_errors=True)
        return Exit(code=exit.code, signal=exit.signal, error=exit.error, tail=_tail(log))

    def scratch(self, name: str) -> Path:
        """A new folder of an agent's own."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._scratch))

    async def stop(self) -> None:
        """End the host, and all that it runs."""
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            await asyncio.wait((self._listening,), timeout=_START_S)
        self._folder.remove()

    async def _stop(self, agent: str, ended: asyncio.Future[Exit]) -> None:
        with contextlib.suppress(WorkerDied, ConnectionError, TimeoutError):
            await self._tell({"stop": agent, "grace_s": self._grace_s})
            async with asyncio.timeout(self._grace_s + _STOP_S):  # the host kills it by then, or is stuck itself
                await asyncio.shield(ended)

    async def _start_host(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, (self._logs / _HOST_LOG).open("ab") as output:
            descriptor = theirs.fileno()
            host = subprocess.Popen(  # noqa: ASYNC220  (once)
                [sys.executable, "-m", _HOST, str(descriptor), self._function or "-", *self._settings],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MOST_LINE)
        try:
            await self._ready(reader)
        except BaseException:  # cancelled, too: the next one begins anew
            writer.close()
            host.kill()
            host.wait()
            raise
        self._host, self._writer = host, writer
        self._listening = asyncio.create_task(self._listen(reader, host), name="agents")

    async def _ready(self, reader: asyncio.StreamReader) -> None:
        """Wait until the host is ready. Raises ConfigurationError saying why it never will be."""
        try:
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
        except TimeoutError:
            raise ConfigurationError(
                f"environment.agent = {self._function!r}: not imported in {_START_S:g} s"
            ) from None
        first = json.loads(line or b'{"error": "the host of agents ended at its start"}')
        if "error" in first:
            raise ConfigurationError(first["error"])

    async def _listen(self, reader: asyncio.StreamReader, host: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                told = json.loads(line)
                waiting = self._exits.get(told.pop("id"))
                if waiting is not None and not waiting.done():
                    waiting.set_result(Exit(code=told["exit"], signal=told["signal"], error=told.get("error", "")))
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        code = await asyncio.to_thread(host.wait)
        for agent, waiting in self._exits.items():
            if not waiting.done():
                kill_marked(agent)
                waiting.set_exception(WorkerDied("agents", f"the host of agents ended with {code}"))

    async def _tell(self, request: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise WorkerDied("agents", "the host of agents is gone")
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()

    def _log(self, name: str) -> Path:
        """The file for an agent's output; the oldest ones go."""
        path = self._logs / f"{name}.log"
        if path not in self._kept:
            self._kept.append(path)
        while len(self._kept) > _KEPT_LOGS:
            self._kept.popleft().unlink(missing_ok=True)
        return path


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
