"""Reading a run's history of drawn groups from another process, also while the run is in progress."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from headway.buffer.database import reading, require_readable
from headway.buffer.rows import read_drawn_groups
from headway.records.curriculum import DrawnGroup


def read_history(path: Path) -> list[DrawnGroup]:
    """Every group of the buffer at ``path``, by index. Read-only. Raises BufferCorrupt, StorageFailed."""
    with reading(path), closing(sqlite3.connect(path, timeout=10.0)) as connection:
        connection.execute("PRAGMA query_only=ON")
        require_readable(connection, path)
        return read_drawn_groups(connection)
