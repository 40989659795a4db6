"""Replicates a run's buffer.db to another machine; this is the orchestrator's side."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from headway.buffer.database import Statement, storage_error
from headway.records.errors import HeadwayError
from headway.runtime.clock import Clock
from headway.runtime.nodes.files import file_parts
from headway.runtime.scratch import ScratchFolder
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.buffer.replica_service:AccountingReplicaService"
_CALL_S = 60.0
_PAGES_AT_ONCE = 256  # of the database, saved in one step
_MOST_TRANSACTIONS = 256  # in one call


class AccountingReplica:
    """Keeps a copy of ``buffer.db`` by repeating its transactions in another process.

    Lifecycle: *absent* -> *synchronised* (the whole database was sent; each transaction follows) -> *absent* when the
    copy's process or node is lost, which is reported. The run continues; the process is restarted and synchronised.

    Example: ``copy.start(); buffer = GroupBuffer(..., journal=copy.journal); ...; await copy.reached()``.
    """

    def __init__(self, launcher: Launcher, clock: Clock, target: str, original: Path, on_event: EventCallback) -> None:
        """``target``: NODE:PATH, as ``cluster.replicate_to``. ``original``: the buffer's file."""
        node, _, folder = target.partition(":")
        self._original, self._on_event, self._place = original, on_event, target
        device = f"{node}/cpu:all" if node else "cpu:all"
        spec = WorkerSpec(name="accounting-copy", factory=_FACTORY, arguments={"folder": folder}, device=device)
        self._slot = WorkerSlot(spec, launcher, clock, on_event, restart_arguments={"again": True})
        self._waiting: list[Sequence[Statement]] = []  # transactions not yet at the copy
        self._journalled = self._copied = 0  # numbers of the last transaction here and there
        self._synchronised = False
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()  # a transaction waits, or the worker has died
        self._sending: asyncio.Task[None] | None = None

    def journal(self, statements: Sequence[Statement]) -> None:
        """Queue a committed transaction for the copy."""
        self._journalled += 1
        if self._synchronised:
            self._waiting.append(statements)
        self._work.set()

    async def start(self) -> None:
        """Start the copy and send the whole database. Raises WorkerDied, RemoteError, StorageFailed, OSError."""
        await self._synchronise(await self._slot.start())
        self._sending = asyncio.create_task(self._send(), name="accounting-copy")

    async def reached(self) -> None:
        """Wait until every transaction committed so far has reached the copy, or the copy is lost."""
        target_count = self._journalled
        async with self._changed:
            await self._changed.wait_for(lambda: self._copied >= target_count or not self._synchronised)

    async def stop(self) -> None:
        """Bring the copy up to date and stop it."""
        if self._sending is not None:
            await self.reached()
            self._sending.cancel()
        await self._slot.stop(5.0)

    async def _synchronise(self, worker: WorkerHandle) -> None:
        """Send a snapshot of the database; transactions committed meanwhile are queued until the copy has it."""
        journalled_count, self._waiting, self._synchronised = self._journalled, [], True
        worker.died.add_done_callback(lambda _: self._work.set())
        with ScratchFolder("accounting-copy-", directory=self._original.parent) as folder:
            try:
                with closing(sqlite3.connect(self._original, isolation_level=None, check_same_thread=False)) as source:
                    source.execute("BEGIN")
                    source.execute("SELECT 1 FROM sqlite_master").fetchone()  # starts the snapshot
                    await asyncio.to_thread(_save, source, folder / "buffer.db")
            except sqlite3.Error as error:
                raise storage_error(self._original, error) from error
            async for part in file_parts(folder / "buffer.db"):
                await worker.call("store", part, timeout_s=_CALL_S)
        await worker.call("replace", journalled_count, timeout_s=_CALL_S)
        await self._note_copied(journalled_count)

    async def _note_copied(self, number: int) -> None:
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
                    self._on_event("accounting_copied", f"to {self._place} again, whole")
                while self._waiting:
                    sent_transactions = self._waiting[:_MOST_TRANSACTIONS]
                    copied_count = await worker.call("apply", self._copied + 1, sent_transactions, timeout_s=_CALL_S)
                    del self._waiting[: len(sent_transactions)]
                    await self._note_copied(copied_count)
                self._work.clear()
                if not self._waiting and worker.alive:
                    await self._work.wait()
                if not worker.alive:
                    raise worker.died.result()
            except (HeadwayError, OSError) as error:
                self._synchronised = False
                self._on_event("accounting_copy_lost", f"{self._place}: {error}; the run continues without this copy")
                await self._note_copied(self._copied)
                if worker is not None:
                    worker.kill()
                    await worker.died


def _save(database: sqlite3.Connection, path: Path) -> None:
    """Save the database as a connection sees it to the file ``path``."""
    with closing(sqlite3.connect(path)) as target_connection:
        database.backup(target_connection, pages=_PAGES_AT_ONCE)
