"""Opens the buffer's SQLite file, defines its tables, and runs transactions whose failures are clear errors."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.records.errors import BufferCorrupt, HeadwayError, StorageFailed
from headway.runtime.run_directory import SCHEMA

Statement = tuple[str, list[tuple[Any, ...]]]  # SQL, and the parameters of each of its executions

# A rollout has a row once it has finished or ended; open ones are the members without a row (or with
# finished = 1 and no ending). Small columns stay for the audit; payloads and tasks go when a checkpoint
# covers them.
TABLES = (
    """CREATE TABLE groups (
        idx INTEGER PRIMARY KEY,      -- admission index
        task_id TEXT NOT NULL,
        task BLOB,                    -- JSON; NULL once released
        prompt_ids BLOB,              -- msgpack, int32; NULL once released
        size INTEGER NOT NULL,
        admitted_version INTEGER NOT NULL,
        admitted_s REAL NOT NULL,
        draw BLOB,                    -- JSON: why this task was drawn; NULL: it was its turn
        state TEXT NOT NULL CHECK (state IN ('open', 'buffered', 'batched', 'ended')),
        first_version INTEGER,        -- oldest first token, once finished
        ending TEXT,
        reason TEXT,
        step INTEGER                  -- the step it is batched in or was trained or skipped at
    )""",
    "CREATE INDEX groups_left ON groups (idx) WHERE state <> 'ended'",
    """CREATE TABLE rollouts (
        grp INTEGER NOT NULL,
        member INTEGER NOT NULL,
        finished INTEGER NOT NULL,    -- 1: it has a verified record
        ending TEXT,                  -- NULL: open
        reason TEXT,
        boundary TEXT,                -- of a failure
        cause TEXT,
        reward REAL,
        solved INTEGER,
        length INTEGER NOT NULL,      -- response tokens reached
        complete INTEGER NOT NULL,    -- 1: generation came to its own end
        first_version INTEGER NOT NULL,
        opened_s REAL,
        generated_s REAL,
        finished_s REAL,
        verify_s REAL,
        PRIMARY KEY (grp, member)
    ) WITHOUT ROWID""",
    # The evidence of finished groups about their tasks; failed groups have none. ``id`` is the order of finishing.
    """CREATE TABLE evidence (
        id INTEGER PRIMARY KEY,
        grp INTEGER NOT NULL UNIQUE,
        solved INTEGER NOT NULL,
        valid INTEGER NOT NULL,
        zero_variance INTEGER NOT NULL,
        version INTEGER NOT NULL      -- of the oldest first token
    )""",
    # The partial rollouts of parked members, until their group finishes or ends.
    "CREATE TABLE partials (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",  # id as of payloads; msgpack
    "CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL)",  # id = grp << 16 | member; msgpack
    """CREATE TABLE batches (
        step INTEGER NOT NULL,        -- trainer version before the step
        attempt INTEGER NOT NULL,     -- counts skipped attempts at the same step
        groups TEXT NOT NULL,         -- JSON: for each part the list of its indices in the order of training
        outcome TEXT CHECK (outcome IN ('trained', 'skipped')),  -- NULL: not completed
        PRIMARY KEY (step, attempt)
    ) WITHOUT ROWID""",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
)

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


_BUFFER = "group buffer"  # a database's name in errors, unless it is another service's


def storage_error(path: Path, error: sqlite3.Error, name: str = _BUFFER) -> HeadwayError:
    """Convert a SQLite error to BufferCorrupt (damaged) or StorageFailed (full, locked, unusable) with advice."""
    sqlite_code = getattr(error, "sqlite_errorcode", None)
    primary_code = sqlite_code & 0xFF if sqlite_code is not None else None
    if primary_code in _DAMAGED:
        return BufferCorrupt(f"the {name} {path} is damaged: {error}")
    if primary_code == sqlite3.SQLITE_FULL:
        return StorageFailed(f"no space left for the {name} {path}: {error}; free some and resume")
    if primary_code in _FULL:
        return StorageFailed(f"the {name} {path} can't be read or written: {error}")
    if primary_code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return StorageFailed(f"the {name} {path} is locked by another process")
    return StorageFailed(f"the {name} {path}: {type(error).__name__}: {error}")


def open_database(
    path: Path, tables: Sequence[str] = TABLES, schema: int = SCHEMA, name: str = _BUFFER
) -> sqlite3.Connection:
    """Open or create the file of a buffer, or of other ``tables``, with WAL and ``synchronous=NORMAL``.

    A commit survives kill -9 of the process; ``make_durable`` adds the fsync that a power cut requires.

    Raises BufferCorrupt for a damaged file or another schema, StorageFailed when it can't be used.
    """
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, cached_statements=256)
        _prepare(connection, path, tables, schema, name)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise storage_error(path, error, name) from None
    except HeadwayError:
        if connection is not None:
            connection.close()
        raise
    return connection


def require_readable(connection: sqlite3.Connection, path: Path, readable: int = SCHEMA, name: str = _BUFFER) -> int:
    """Return the schema version of the database at ``path``, 0 for a new file. Raises BufferCorrupt for others."""
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    if schema not in (0, readable):
        raise BufferCorrupt(
            f"the {name} {path} has schema {schema}, and this Headway reads schema {readable}: resume the run with "
            "the Headway that wrote it, or start in another directory"
        )
    return schema


def _prepare(connection: sqlite3.Connection, path: Path, tables: Sequence[str], schema: int, name: str) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")
    schema_version = require_readable(connection, path, schema, name)
    table_count = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if schema_version == 0 and table_count:
        raise BufferCorrupt(f"{path} is a database, but not a {name}")
    journal_mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if journal_mode != "wal":
        raise StorageFailed(f"the file system of {path} does not support SQLite's WAL (journal mode {journal_mode})")
    connection.execute("PRAGMA wal_autocheckpoint=4000")  # pages: the log is folded back every 16 MB
    connection.execute("PRAGMA journal_size_limit=33554432")
    if schema_version == 0:
        with transaction(connection, path, name=name):
            for statement in tables:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={schema}")
        return
    problem_text = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem_text != "ok":
        raise BufferCorrupt(f"the {name} {path} is damaged: {problem_text}")


class _Recorder:
    """A connection that records the statements which modify the database, to repeat them elsewhere."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.statements: list[Statement] = []

    def execute(self, text: str, row: Sequence[Any] = ()) -> sqlite3.Cursor:
        if not text.startswith("SELECT"):
            self.statements.append((text, [tuple(row)]))
        return self._connection.execute(text, row)

    def executemany(self, text: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        row_tuples = [tuple(row) for row in rows]
        self.statements.append((text, row_tuples))
        return self._connection.executemany(text, row_tuples)


@contextmanager
def transaction(
    connection: sqlite3.Connection,
    path: Path,
    fence: Callable[[], None] = lambda: None,
    journal: Callable[[Sequence[Statement]], None] | None = None,
    name: str = _BUFFER,
) -> Iterator[sqlite3.Connection]:
    """Run the block as one transaction, committed whole or rolled back.

    ``fence`` is called before the commit and may raise; ``journal`` receives the statements after the commit. Database
    errors become StorageFailed or BufferCorrupt."""
    recorder = _Recorder(connection)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield connection if journal is None else cast("sqlite3.Connection", recorder)
        fence()
        connection.execute("COMMIT")
        if journal is not None:
            journal(recorder.statements)
    except sqlite3.Error as error:
        raise storage_error(path, error, name) from error
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def reading(path: Path, name: str = _BUFFER) -> Iterator[None]:
    """Turn database and decoding errors of the block's reads into StorageFailed or BufferCorrupt."""
    try:
        yield
    except sqlite3.Error as error:
        raise storage_error(path, error, name) from error
    except (msgspec.DecodeError, json.JSONDecodeError) as error:
        raise BufferCorrupt(f"the {name} {path} holds an unreadable record: {error}") from error
