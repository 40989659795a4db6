"""Holds the copy of a run's buffer.db on another machine; this is the worker there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from headway.buffer.database import Statement, open_database, transaction
from headway.records.errors import StorageFailed
from headway.runtime.child import WorkerContext
from headway.runtime.file_lock import FileLock


class AccountingReplicaService:
    """The worker object of a copy: it receives a whole buffer.db, then every transaction of the original in order."""

    def __init__(self, context: WorkerContext, *, folder: str, again: bool = False) -> None:
        """Open the copy in ``folder``; ``again``: this run started it before.

        Raises RunLocked while another process keeps its buffer there."""
        self._path = Path(folder) / "buffer.db"
        self._fresh = self._path.with_suffix(".fresh")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._path.with_name("lock"), "cluster.replicate_to", folder)
        self._lock.acquire()
        self._keep = not again
        self._fresh.unlink(missing_ok=True)  # of a process that was killed
        self._connection: sqlite3.Connection | None = None
        self._number = 0  # of the last transaction applied

    def store(self, part: bytes | memoryview) -> None:
        """Append a part of the whole database that is being sent."""
        with self._fresh.open("ab") as file:
            file.write(part)

    def replace(self, number: int) -> None:
        """Replace the copy by the database that was stored, which holds the transactions up to ``number``.

        The former database is kept as buffer.db.old: it may be the only copy of another run."""
        if self._connection is not None:
            self._connection.close()
        old_path = self._path.with_suffix(".db.old")
        log_path, old_log_path = (path.with_name(f"{path.name}-wal") for path in (self._path, old_path))
        if self._path.exists() and self._keep:
            self._path.replace(old_path)
            old_log_path.unlink(missing_ok=True)
            if log_path.exists():  # of a process that was killed: it holds the last transactions
                log_path.replace(old_log_path)
        self._keep = False
        log_path.unlink(missing_ok=True)
        self._path.with_name(f"{self._path.name}-shm").unlink(missing_ok=True)
        self._fresh.replace(self._path)
        self._connection, self._number = open_database(self._path), number

    def apply(self, first: int, transactions: Sequence[Sequence[Statement]]) -> int:
        """Apply the transactions from number ``first`` on, each atomically; return the number of the last.

        Raises StorageFailed when an earlier transaction is missing."""
        if self._connection is None or first != self._number + 1:
            raise StorageFailed(f"transaction {first} reaches the copy of the accounting after {self._number}")
        for statements in transactions:
            with transaction(self._connection, self._path) as connection:
                for text, rows in statements:
                    connection.executemany(text, rows)
            self._number += 1
        return self._number

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._lock.release()
