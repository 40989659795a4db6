"""Another process as this one knows it: its present incarnation, what waits for it, and its messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from headway.flow.paths import PeerAddress
from headway.records.errors import WorkerDied
from headway.runtime.link import Link

MOST_UNRECEIVED = 64  # messages of one peer and tag
MOST_UNRECEIVED_BYTES = 1 << 30


class Inbox:
    """Messages of one peer and tag that nobody has received yet: in order, at most ``most`` and ``most_bytes``, or one
    that is larger alone."""

    def __init__(self, most: int = MOST_UNRECEIVED, most_bytes: int = MOST_UNRECEIVED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._messages: deque[tuple[int, Any]] = deque()  # with their bytes
        self._changed = asyncio.Event()
        self._accepting = asyncio.Lock()  # messages are taken one by one
        self.receiving = asyncio.Lock()  # receivers take turns
        self.sending = asyncio.Lock()  # of messages to the peer: they leave in the order of their calls

    async def accept(self, size_bytes: int, fetch: Callable[[], Awaitable[Any]]) -> None:
        """Take a message in its turn; returns when it can be received."""
        async with self._accepting:
            while self._messages and not self._has_room(size_bytes):
                await self.changed()
            self._messages.append((size_bytes, await fetch()))
            self._change()

    def pop(self) -> tuple[Any] | None:
        """The next message; None when there is none yet."""
        if not self._messages:
            return None
        self._change()
        return (self._messages.popleft()[1],)

    def changed(self) -> Coroutine[Any, Any, Any]:
        """Wait until a message is there, or is received, after this call."""
        return self._changed.wait()

    def _has_room(self, size_bytes: int) -> bool:
        used_bytes = sum(size for size, _ in self._messages)
        return len(self._messages) < self._most and used_bytes + size_bytes <= self._most_bytes

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PeerState:
    """Another process as this one knows it: its present incarnation, and what waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address: PeerAddress | None = None  # of its last incarnation that isn't known to be dead
        self.link: Link | None = None
        self.gone: dict[str, str] = {}  # cause of the end, by incarnation
        self.connecting = asyncio.Lock()
        self._joined = asyncio.Event()  # set when it is there, or there again
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # at the end of an incarnation
        self._inboxes: dict[str, Inbox] = {}

    def inbox(self, tag: str) -> Inbox:
        """Messages of this tag from it, and the order of those to it."""
        return self._inboxes.setdefault(tag, Inbox())

    def died(self) -> WorkerDied:
        """The last death as an error."""
        return WorkerDied(self.name, next(reversed(self.gone.values()), "isn't there"))

    def join(self, address: PeerAddress, link: Link) -> None:
        """Take notice that it is there."""
        self.gone.pop(address.incarnation, None)  # it was given up too early
        self.address, self.link = address, self.link or link
        self._joined.set()
        self._joined = asyncio.Event()

    async def find(self, besides: Sequence[str], timeout_s: float) -> PeerAddress | None:
        """Its address when it is there, and none of these incarnations; None when that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.address is None or self.address.incarnation in besides:
                    await self._joined.wait()
                return self.address
        return None

    def fail(self) -> None:
        """End all that waits for the incarnation that has just ended."""
        self.address = self.link = None
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()

    async def unless_lost(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``, unless the process at its other end ends meanwhile. Raises WorkerDied."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.died()
            return task.result()
        finally:
            task.cancel()
