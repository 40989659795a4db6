"""The state of a peer as this process knows it: its present incarnation, waits for it, and its messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from headway.flow.paths import PeerAddress
from headway.records.errors import WorkerDied
from headway.runtime.link import Link

MAX_UNRECEIVED = 64  # messages of one peer and tag
MAX_UNRECEIVED_BYTES = 1 << 30


class Inbox:
    """Unreceived messages of one peer and tag, in order: at most ``max_messages`` and ``max_bytes``, or one larger
    message alone."""

    def __init__(self, max_messages: int = MAX_UNRECEIVED, max_bytes: int = MAX_UNRECEIVED_BYTES) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._messages: deque[tuple[int, Any]] = deque()  # with their bytes
        self._changed = asyncio.Event()
        self._accepting = asyncio.Lock()  # messages are accepted one by one
        self.receiving = asyncio.Lock()  # receivers take turns
        self.sending = asyncio.Lock()  # messages to the peer are sent in the order of their calls

    async def accept(self, size_bytes: int, fetch: Callable[[], Awaitable[Any]]) -> None:
        """Fetch a message once there is space for it; returns when it can be received."""
        async with self._accepting:
            while self._messages and not self._has_capacity(size_bytes):
                await self.changed()
            self._messages.append((size_bytes, await fetch()))
            self._notify()

    def pop(self) -> tuple[Any] | None:
        """Remove and return the next message, as a tuple of one; None when there is none yet."""
        if not self._messages:
            return None
        self._notify()
        return (self._messages.popleft()[1],)

    def changed(self) -> Coroutine[Any, Any, Any]:
        """Wait for the next change after this call: a message that arrives or is received."""
        return self._changed.wait()

    def _has_capacity(self, size_bytes: int) -> bool:
        used_bytes = sum(nbytes for nbytes, _ in self._messages)
        return len(self._messages) < self._max_messages and used_bytes + size_bytes <= self._max_bytes

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PeerState:
    """A peer as this process knows it: its present incarnation, and the waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address: PeerAddress | None = None  # address of its last incarnation that isn't known to be dead
        self.link: Link | None = None
        self.end_causes: dict[str, str] = {}  # cause of death, by incarnation
        self.connecting = asyncio.Lock()
        self._joined = asyncio.Event()  # set when the peer connects, also after a restart
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # at the end of an incarnation
        self._inboxes: dict[str, Inbox] = {}

    def inbox(self, tag: str) -> Inbox:
        """Return the inbox of the peer's messages of this tag; its ``sending`` orders the messages to the peer."""
        return self._inboxes.setdefault(tag, Inbox())

    def died(self) -> WorkerDied:
        """Return the peer's last death as an error."""
        return WorkerDied(self.name, next(reversed(self.end_causes.values()), "isn't there"))

    def join(self, address: PeerAddress, link: Link) -> None:
        """Record a connection to the peer at this address."""
        self.end_causes.pop(address.incarnation, None)  # it was assumed dead too early
        self.address, self.link = address, self.link or link
        self._joined.set()
        self._joined = asyncio.Event()

    async def find(self, besides: Sequence[str], timeout_s: float) -> PeerAddress | None:
        """Wait for an incarnation of the peer that isn't among ``besides``, and return its address; None after
        ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.address is None or self.address.incarnation in besides:
                    await self._joined.wait()
                return self.address
        return None

    def fail(self) -> None:
        """Fail all waits for the incarnation that has just ended."""
        self.address = self.link = None
        self._lost.set_result(None)
        self._lost = asyncio.get_running_loop().create_future()

    async def result_unless_lost(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of ``work``. Raises WorkerDied when the peer ends meanwhile."""
        work_task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((work_task, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not work_task.done():
                raise self.died()
            return work_task.result()
        finally:
            work_task.cancel()
