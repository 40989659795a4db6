"""Reading a run's finished groups and their counts from outside, also while the run is in progress."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from headway.buffer.database import reading, require_readable
from headway.buffer.rows import read_group, read_rollouts
from headway.records.rollout import FinishedGroup


class BufferCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rollouts since the beginning of a run, and of those that the trainer has not taken."""

    waiting: int = 0  # of finished groups that no step has completed
    finished: int = 0  # verified and committed
    trained: int = 0


def read_waiting(path: Path, most: int) -> list[FinishedGroup]:
    """The oldest finished groups of the buffer at ``path`` that no step has completed, at most ``most``. Raises
    BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        query = "SELECT idx FROM groups WHERE state IN ('buffered', 'batched') ORDER BY idx LIMIT ?"
        indices = [index for (index,) in connection.execute(query, (most,)).fetchall()]
        return [
            FinishedGroup(group=read_group(connection, index), rollouts=read_rollouts(connection, index))
            for index in indices
        ]


def read_buffer_counts(path: Path) -> BufferCounts:
    """Counts of the buffer at ``path``. Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        finished, trained = connection.execute(
            "SELECT coalesce(sum(finished), 0), coalesce(sum(ending = 'trained'), 0) FROM rollouts"
        ).fetchone()
        (waiting,) = connection.execute("SELECT count(*) FROM rollouts WHERE finished AND ending IS NULL").fetchone()
        return BufferCounts(waiting=waiting, finished=finished, trained=trained)


def read_group_state(path: Path, index: int) -> str:
    """What became of a group: "open", "buffered", "batched", or how it ended; "" for one that was never admitted.
    Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        row = connection.execute("SELECT state, ending FROM groups WHERE idx = ?", (index,)).fetchone()
        return "" if row is None else row[1] or row[0]


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with reading(path), closing(sqlite3.connect(uri, uri=True, timeout=10.0)) as connection:
        require_readable(connection.execute("PRAGMA user_version").fetchone()[0], path)
        with closing(connection.execute("BEGIN")):  # one state for all readings
            yield connection
