"""Agents that a run starts itself on its nodes, and starts again when they end before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from headway.runtime.clock import Clock
from headway.runtime.retries import backoff_s
from headway.runtime.supervision import cancel_all
from headway.runtime.workers import EventCallback

GIVE_UP_S = 60.0  # an agent that finds no run for so long ends: its launcher starts another
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before an agent is started again
_STEADY_S = 60.0  # after so long, an agent's end counts as its first
_JOINED_POLL_S = 1.0
_LEAVE_S = 10.0  # for the agents to end by themselves when the run is over


@dataclass(frozen=True, kw_only=True)
class AgentEnd:
    """The end of an agent, as its launcher sees it."""

    code: int | None  # its exit status; 0: the run ended it; None: unknown, or it was not started
    output: str = ""  # the last lines that it, or the command that started it, wrote


class AgentLauncher(Protocol):
    """Starts agents on nodes: by ssh, by Slurm, by Ray."""

    async def open(self) -> None:
        """Prepare to start agents. Raises ConfigurationError where there is nothing to start them."""
        ...

    async def run(self, name: str, address: str, key: str) -> AgentEnd:
        """Run the agent of node ``name`` for the run at ``address`` until it ends. Being cancelled ends it."""
        ...

    async def close(self) -> None:
        """Release the launcher's resources. Its agents have ended."""
        ...


class LaunchedAgents:
    """The agents of a run's nodes, each started again with backoff until the run is over.

    Example::

        agents = LaunchedAgents(CommandLauncher(...), ["b", "c"], key, clock, joined=nodes.joined.__contains__)
        await agents.start(nodes.address)
        ...
        agents.run_is_over()  # before the nodes are ended: agents that end from now on aren't started again
        await agents.stop()
    """

    def __init__(
        self,
        launcher: AgentLauncher,
        names: Iterable[str],
        key: str,
        clock: Clock,
        *,
        joined: Callable[[str], bool],
        on_event: EventCallback = lambda name, detail, /, **fields: None,
    ) -> None:
        """``joined``: whether a node is there, whoever started its agent."""
        self._launcher, self._names, self._key, self._clock = launcher, tuple(names), key, clock
        self._joined, self._on_event = joined, on_event
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by node
        self._pausing: set[str] = set()  # nodes whose agent has ended, and isn't started again yet
        self._over = False
        self.last_end: dict[str, AgentEnd] = {}  # of nodes whose agent has ended since it was started first

    async def start(self, address: str) -> None:
        """Start all agents; they join the run at ``address``. Raises ConfigurationError."""
        await self._launcher.open()
        self._tasks = {
            name: asyncio.create_task(self._keep(name, address), name=f"agent {name}") for name in self._names
        }

    def run_is_over(self) -> None:
        """Start no agent again."""
        self._over = True

    async def stop(self) -> None:
        """Wait until the agents have ended because of the run's end; end the remaining ones after 10 s."""
        self._over = True
        if running_tasks := [task for name, task in self._tasks.items() if name not in self._pausing]:
            await asyncio.wait(running_tasks, timeout=_LEAVE_S)
        await cancel_all(*self._tasks.values())
        await self._launcher.close()

    async def _keep(self, name: str, address: str) -> None:
        """Keep a node's agent running.

        Consumes: ends of the agent. Waits for: the backoff, and while a node of this name is there. Unblocked by: the
        clock, `stop`."""
        failures = 0
        while not self._over:
            started_s = self._clock.now()
            try:
                agent_end = await self._launcher.run(name, address, self._key)
            except OSError as error:  # no process or descriptor left here, say
                agent_end = AgentEnd(code=None, output=f"its agent could not be run: {error.strerror or error}")
            self.last_end[name] = agent_end
            if self._over:
                return
            failures = 1 if self._clock.now() - started_s > _STEADY_S else failures + 1
            pause_s = backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._on_event("agent_ended", f"{name}: {describe(agent_end)}; started again in {pause_s:g} s", worker=name)
            self._pausing.add(name)
            await self._clock.sleep(pause_s)
            while self._joined(name) and not self._over:  # ssh's or srun's client has gone, the agent has not
                await self._clock.sleep(_JOINED_POLL_S)
            self._pausing.discard(name)


def describe(end: AgentEnd) -> str:
    """An agent's end in a line or more: exit code and last output."""
    if end.code is None:
        return end.output
    return f"its agent ended with exit code {end.code}" + (f": {end.output}" if end.output else "")
