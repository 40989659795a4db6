"""Other processes as one knows them: their present incarnation and what waits for it; the driver's registry of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from headway.flow.inbox import Inbox
from headway.flow.paths import PairGroup, PeerAddress
from headway.records.errors import WorkerDied
from headway.runtime.link import Link


class PeerState:
    """Another process as this one knows it: its present incarnation, and what waits for it."""

    def __init__(self, name: str, most: int, most_bytes: int) -> None:
        self.name = name
        self.address: PeerAddress | None = None  # of its last incarnation that isn't known to be dead
        self.link: Link | None = None
        self.gone: dict[str, str] = {}  # cause of the end, by incarnation
        self.connecting = asyncio.Lock()
        self.collecting = asyncio.Lock()
        self.group: PairGroup | None = None  # that carries tensors from it to here
        self.groups: dict[str, PairGroup] = {}  # that carry tensors to it, by rendezvous
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # at the end of an incarnation
        self._inboxes: dict[str, Inbox] = {}
        self._limits = most, most_bytes

    def inbox(self, tag: str) -> Inbox:
        """Messages of this tag from it, and the order of those to it."""
        if tag not in self._inboxes:
            self._inboxes[tag] = Inbox(*self._limits)
        return self._inboxes[tag]

    def died(self) -> WorkerDied:
        """The last death as an error."""
        return WorkerDied(self.name, next(reversed(self.gone.values()), "isn't there"))

    def fail(self) -> None:
        """End all that waits for the incarnation that has just ended."""
        self.address = self.link = self.group = None
        self.groups.clear()
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()
        for inbox in self._inboxes.values():
            inbox.fail(self.died())

    async def unless_lost(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work`` in a thread, unless the process at its other end ends. Raises WorkerDied."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise self.died()
        return task.result()


class Registry:
    """The driver's registry: which processes are there."""

    def __init__(self) -> None:
        self._addresses: dict[str, PeerAddress] = {}
        self._names: dict[str, str] = {}  # of all there ever were, by incarnation
        self._news = asyncio.Event()

    def add(self, address: PeerAddress) -> None:
        """Register a process, in the place of the last one of its name."""
        self._addresses[address.name] = address
        self._names[address.incarnation] = address.name
        self._news.set()
        self._news = asyncio.Event()

    def remove(self, name: str, incarnation: str) -> bool:
        """Remove a process; False when it isn't there any more."""
        found = self._addresses.get(name)
        if found is None or found.incarnation != incarnation:
            return False
        del self._addresses[name]
        return True

    def name_of(self, incarnation: str) -> str | None:
        """Name of a process that is there, or was."""
        return self._names.get(incarnation)

    async def find(self, name: str, besides: list[str], timeout_s: float) -> PeerAddress | None:
        """The address of a process that isn't one of these incarnations; None when it wasn't there in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (found := self._addresses.get(name)) is None or found.incarnation in besides:
                    await self._news.wait()
                return found
        return None
