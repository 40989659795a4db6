"""Watches a workflow for deadlocks: all its workers wait, and nothing makes progress."""

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
    from headway.flow.peers import PeerNetwork

_CHECKS_PER_STALL = 4  # checks within the time that a stall may last
_ASK_S = 10.0


class FlowWatch:
    """Ends a workflow that has made no progress for ``stall_s`` while every worker with a call waits.

    The error (NoProgress) names what each worker waits for, and the channels that have no reader. A worker that
    computes may take any time."""

    def __init__(
        self,
        groups: Callable[[], Mapping[str, WorkerGroup]],
        channels: Channels,
        network: PeerNetwork,
        clock: Clock,
        stall_s: float,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._groups, self._channels, self._network = groups, channels, network
        self._clock, self._stall_s, self._fail = clock, stall_s, fail

    async def loop(self) -> None:
        """Check repeatedly, until cancelled or until a deadlock has ended the workflow."""
        last_count, since_s = -1, self._clock.now()
        while True:
            await self._clock.sleep(self._stall_s / _CHECKS_PER_STALL)
            progress_count = self._progress_count()
            is_working = any(group.busy for group in self._groups().values()) or self._channels.waits_of(WORKFLOW)
            if progress_count != last_count or not is_working:
                last_count, since_s = progress_count, self._clock.now()
            elif self._clock.now() - since_s >= self._stall_s:
                waits = await self._waits()
                if waits is not None and self._progress_count() == last_count:
                    unread_text = "".join(f"; no worker reads channel {channel}" for channel in self._channels.unread())
                    self._fail(NoProgress(f"no progress for {self._stall_s:g} s: {', '.join(waits)}{unread_text}"))
                    return

    def _progress_count(self) -> int:
        return self._channels.changes + sum(group.ended for group in self._groups().values())

    async def _waits(self) -> list[str] | None:
        """Ask the workers that have a call what they wait for; None when one of them doesn't wait."""
        names = [slot.name for group in self._groups().values() for slot in group.slots if slot.name in group.busy]
        reasons = await asyncio.gather(*(self._wait_of(name) for name in names))
        waiting_texts = [f"{name} waits for {reason}" for name, reason in zip(names, reasons, strict=True) if reason]
        workflow_waits = [f"{WORKFLOW} waits for {reason}" for reason in self._channels.waits_of(WORKFLOW)]
        return waiting_texts + workflow_waits if len(waiting_texts) == len(names) else None

    async def _wait_of(self, name: str) -> str:
        try:
            async with asyncio.timeout(_ASK_S):
                return await self._network.call(name, "waits_for")
        except (TimeoutError, WorkerDied, RemoteError):
            return ""
