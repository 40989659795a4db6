"""Reads a run's groups and their counts from another process, also while the run is in progress."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headway.buffer.database import reading, require_readable
from headway.buffer.row_encoding import read_drawn_groups, read_group, read_parked, read_rollouts
from headway.records.curriculum import DrawnGroup
from headway.records.rollout import FinishedGroup, Rollout


def read_waiting(path: Path, limit: int) -> list[FinishedGroup]:
    """Return at most ``limit`` of the oldest finished groups at ``path`` that no completed step has trained.

    Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        query = "SELECT idx FROM groups WHERE state IN ('buffered', 'batched') ORDER BY idx LIMIT ?"
        index_rows = connection.execute(query, (limit,)).fetchall()
        groups = [(read_group(connection, index), read_rollouts(connection, index)) for (index,) in index_rows]
        return [FinishedGroup(group=group, rollouts=rollouts) for group, rollouts in groups]


def read_history(path: Path) -> list[DrawnGroup]:
    """Return every drawn group of the buffer at ``path``, by index. Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        return read_drawn_groups(connection)


def read_rollout_counts(path: Path) -> tuple[int, int, int]:
    """Count rollouts of the buffer at ``path``: (waiting for the trainer, ever finished, trained). Raises likewise."""
    with _opened(path) as connection:
        query = "SELECT sum(finished AND ending IS NULL), sum(finished), sum(ending = 'trained') FROM rollouts"
        waiting_count, finished_count, trained_count = connection.execute(query).fetchone()
        return waiting_count or 0, finished_count or 0, trained_count or 0


def read_member(path: Path, group: int, member: int) -> tuple[str, Rollout | None]:
    """Return a member's group state ("open", "buffered", "batched") or ending, and its stored record once it finished.

    The result is ("", None) where there is no such member. Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        query = "SELECT coalesce(ending, state) FROM groups WHERE idx = ? AND size > ?"
        row = connection.execute(query, (group, member)).fetchone()
        parked = [partial.finished for partial in read_parked(connection, group) if partial.finished is not None]
        matches = (rollout for rollout in (*read_rollouts(connection, group), *parked) if rollout.member == member)
        return ("", None) if row is None else (row[0], next(matches, None))


def read_pixels(path: Path) -> set[str]:
    """Return content hashes of the pixel arrays of groups that may still be generated or trained.

    Raises BufferCorrupt, StorageFailed."""
    with _opened(path) as connection:
        query = "SELECT DISTINCT json_extract(CAST(task AS TEXT), '$.pixels') FROM groups WHERE task IS NOT NULL"
        return {digest for (digest,) in connection.execute(query) if digest}


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with reading(path), closing(sqlite3.connect(uri, uri=True, timeout=10.0)) as connection:
        require_readable(connection, path)
        connection.execute("BEGIN")  # all reads see one snapshot
        yield connection
