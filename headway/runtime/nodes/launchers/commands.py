"""Agents started by a command of this machine that runs another one elsewhere: ssh, srun.

The run's key goes through the command's standard input: a command line can be read by every user of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from headway.records.errors import ConfigurationError
from headway.runtime.nodes.launchers.agents import GIVE_UP_S, AgentEnd
from headway.runtime.supervision import end_group

_OUTPUT_LINES, _LINE_BYTES = 10, 2000
_END_S = 3.0  # between SIGTERM and SIGKILL


def agent_arguments(name: str, address: str) -> list[str]:
    """Arguments of ``headway`` that start the agent of node ``name``, which reads the key from standard input."""
    return ["node", "--join", address, "--name", name, "--key-stdin", "--give-up-s", f"{GIVE_UP_S:g}"]


class CommandLauncher:
    """Starts each agent by a command of this machine. ``prefix`` of a node: what precedes the agent's command."""

    def __init__(
        self, prefixes: Mapping[str, Sequence[str]], command: str, *, quoted: bool, logs: Path | None = None
    ) -> None:
        """``command``: headway on the nodes, as a shell would split it; ``quoted``: a shell there splits it. ``logs``:
        the folder that keeps what the agents write."""
        self._prefixes, self._command, self._quoted, self._logs = prefixes, command, quoted, logs

    async def open(self) -> None:
        """See :meth:`AgentLauncher.open`."""
        for prefix in self._prefixes.values():
            if shutil.which(prefix[0]) is None:
                raise ConfigurationError(f"cluster.launcher: {prefix[0]} is not installed on this machine")

    async def run(self, name: str, address: str, key: str) -> AgentEnd:
        """See :meth:`AgentLauncher.run`."""
        arguments = agent_arguments(name, address)
        if self._quoted:
            command = [*self._prefixes[name], f"{self._command} {shlex.join(arguments)}"]
        else:
            command = [*self._prefixes[name], *shlex.split(self._command), *arguments]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            process_group=0,  # Ctrl-C drains the run, which needs its nodes
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{key}\n".encode())
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            output = await self._keep_output(name, process.stdout)
            return AgentEnd(code=await process.wait(), output=output)
        finally:
            if process.returncode is None:
                # srun passes SIGTERM on. Behind ssh an agent that hasn't joined ends when it finds no run for a minute.
                await end_group(process, (signal.SIGTERM, signal.SIGKILL), _END_S)

    async def close(self) -> None:
        """See :meth:`AgentLauncher.close`."""

    async def _keep_output(self, name: str, stream: asyncio.StreamReader) -> str:
        """Append what an agent writes to its log; returns the last lines when it has ended."""
        last_texts: deque[str] = deque(maxlen=_OUTPUT_LINES)
        with self._open_log(name) as log_file:
            while block := await stream.read(_LINE_BYTES):
                with contextlib.suppress(OSError):  # a full disk is no reason to end the agent
                    log_file.write(block)
                last_texts.append(block.decode(errors="replace"))
        return "\n".join("".join(last_texts).strip().splitlines()[-_OUTPUT_LINES:])

    def _open_log(self, name: str) -> IO[bytes]:
        log_path = Path(os.devnull) if self._logs is None else self._logs / f"node-{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        return open(log_path, "ab", buffering=0)
