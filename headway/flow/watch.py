"""Watches a workflow for waits that nothing will end: all its workers wait, and nothing moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from headway.flow.channels import WORKFLOW
from headway.records.errors import NoProgress, RemoteError, WorkerDied
from headway.runtime.clock import Clock

if TYPE_CHECKING:
    from headway.flow.channels import Channels
    from headway.flow.group import WorkerGroup
    from headway.flow.peers import Hub

_LOOKS = 4  # in the time that a stall may last
_ASK_S = 10.0


class FlowWatch:
    """Ends a workflow in which nothing has moved for ``stall_s`` while every worker that has a call waits: with the
    name of what each waits for, and the channels that nobody reads. A worker that computes may take any time."""

    def __init__(
        self,
        groups: Callable[[], Mapping[str, WorkerGroup]],
        channels: Channels,
        hub: Hub,
        clock: Clock,
        stall_s: float,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._groups, self._channels, self._hub = groups, channels, hub
        self._clock, self._stall_s, self._fail = clock, stall_s, fail

    async def loop(self) -> None:
        """Runs until it is cancelled, or has ended the workflow."""
        seen, since_s = -1, self._clock.now()
        while True:
            await self._clock.sleep(self._stall_s / _LOOKS)
            moved = self._moved()
            at_work = any(group.busy for group in self._groups().values()) or self._channels.waits_of(WORKFLOW)
            if moved != seen or not at_work:
                seen, since_s = moved, self._clock.now()
            elif self._clock.now() - since_s >= self._stall_s:
                waits = await self._waits()
                if waits is not None and self._moved() == seen:
                    unread = "".join(f"; nobody reads channel {name}" for name in self._channels.unread())
                    self._fail(NoProgress(f"nothing has moved for {self._stall_s:g} s: {', '.join(waits)}{unread}"))
                    return

    def _moved(self) -> int:
        return self._channels.changes + sum(group.ended for group in self._groups().values())

    async def _waits(self) -> list[str] | None:
        """Ask the workers that have a call what they wait for; None: one of them doesn't wait."""
        names = [slot.name for group in self._groups().values() for slot in group.slots if slot.name in group.busy]
        found = await asyncio.gather(*(self._wait_of(name) for name in names))
        waiting = [f"{name} waits for {what}" for name, what in zip(names, found, strict=True) if what]
        own = [f"{WORKFLOW} waits for {what}" for what in self._channels.waits_of(WORKFLOW)]
        return waiting + own if len(waiting) == len(names) else None

    async def _wait_of(self, name: str) -> str:
        try:
            async with asyncio.timeout(_ASK_S):
                return await self._hub.call(name, "waits_for")
        except (TimeoutError, WorkerDied, RemoteError):
            return ""
