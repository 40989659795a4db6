"""The copy of a run's books on another machine, as its orchestrator sees it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from headway.buffer.database import Statement
from headway.records.errors import RemoteError, WorkerDied
from headway.runtime.clock import Clock
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import EventCallback, Launcher, Worker, WorkerSpec

_FACTORY = "headway.buffer.copy:CopyService"
_WHOLE_S, _CALL_S = 600.0, 60.0
_MOST_TRANSACTIONS = 256  # in one call


class BooksCopy:
    """Keeps a copy of ``buffer.db`` by repeating its transactions in another process.

    Lifecycle: *absent* -> *synchronised* (the whole database was sent; each transaction follows) -> *absent* when the
    copy's process or node is lost, which is reported; it is started and sent everything again, and the run goes on.

    Example: ``copy.start(); buffer = GroupBuffer(..., journal=copy.journal); ...; await copy.reached()``.
    """

    def __init__(self, launcher: Launcher, clock: Clock, place: str, original: Path, on_event: EventCallback) -> None:
        """``place``: NODE:PATH, as ``cluster.replicate_to``. ``original``: the buffer's file."""
        node, _, folder = place.partition(":")
        self._original, self._on_event, self._place = original, on_event, place
        device = f"{node}/cpu:all" if node else "cpu:all"
        spec = WorkerSpec(name="books-copy", factory=_FACTORY, arguments={"folder": folder}, device=device)
        self._slot = WorkerSlot(spec, launcher, clock, on_event)
        self._waiting: list[Sequence[Statement]] = []  # transactions not yet at the copy
        self._journalled = self._copied = 0  # numbers of the last transaction here and there
        self._synchronised = False
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def journal(self, statements: Sequence[Statement]) -> None:
        """Take a transaction that was committed."""
        self._journalled += 1
        if self._synchronised:
            self._waiting.append(statements)
        self._work.set()

    async def start(self) -> None:
        """Start the copy, and send the books as they are. Raises WorkerDied, RemoteError."""
        await self._synchronise(await self._slot.start())
        self._sending = asyncio.create_task(self._send(), name="books-copy")

    async def reached(self) -> None:
        """Wait until all that is committed now has reached the copy, or the copy is lost."""
        wanted = self._journalled
        async with self._changed:
            await self._changed.wait_for(lambda: self._copied >= wanted or not self._synchronised)

    async def stop(self) -> None:
        """Bring the copy up to date and stop it."""
        if self._sending is not None:
            await self.reached()
            self._sending.cancel()
        await self._slot.stop(5.0)

    async def _synchronise(self, worker: Worker) -> None:
        with closing(sqlite3.connect(self._original)) as connection:
            content = connection.serialize()
        number, self._waiting, self._synchronised = self._journalled, [], True
        await worker.call("replace", content, number, timeout_s=_WHOLE_S)
        await self._copied_to(number)

    async def _copied_to(self, number: int) -> None:
        self._copied = number
        async with self._changed:
            self._changed.notify_all()

    async def _send(self) -> None:
        while True:
            worker = self._slot.live
            try:
                if worker is None or not self._synchronised:
                    worker = worker or await self._slot.restart()
                    if worker is None:
                        continue  # `restart` pauses longer each time
                    await self._synchronise(worker)
                    self._on_event("books_copied", f"to {self._place} again, whole")
                while self._waiting:
                    several = self._waiting[:_MOST_TRANSACTIONS]
                    number = await worker.call("apply", self._copied + 1, several, timeout_s=_CALL_S)
                    del self._waiting[: len(several)]
                    await self._copied_to(number)
                self._work.clear()
                if not self._waiting:
                    await self._idle(worker)
            except (WorkerDied, RemoteError, TimeoutError) as error:
                self._synchronised = False
                self._on_event("books_copy_lost", f"{self._place}: {error}; the run goes on without it meanwhile")
                await self._copied_to(self._copied)
                if worker is not None:
                    worker.kill()
                    await worker.died

    async def _idle(self, worker: Worker) -> None:
        """Wait for a transaction or the worker's death. Raises WorkerDied."""
        work = asyncio.ensure_future(self._work.wait())
        death = asyncio.ensure_future(_death(worker))
        try:
            await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise death.result()
        finally:
            for waiting in (work, death):
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting


async def _death(worker: Worker) -> WorkerDied:
    return await worker.died
