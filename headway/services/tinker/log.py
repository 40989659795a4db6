"""The service's log: every request is committed before it is answered, with its reply and what that changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from headway.buffer.database import open_database, reading, transaction
from headway.records.errors import ConfigurationError
from headway.records.tenants.protocols import BaseDescription, TenantAdapter
from headway.runtime.file_lock import FileLock
from headway.services.tinker.ordering import (
    RETAINED_S,
    ReplyMark,
    RequestAdmission,
    admit,
    releasable,
    released_prefix,
    stream_start,
)

_NAME = "log of the Tinker service"
_SCHEMA = 1


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the log has it; open while ``replied_s`` is None."""

    scope: str  # a model or a sampler
    sequence: int
    kind: str  # the route
    digest: bytes  # of kind and content
    body: bytes | None = None  # None once no restart needs it
    reply: bytes | None = None  # None: open, or released
    protobuf: int = 0  # 1: of the reply's format; else JSON
    failed: int = 0  # 1: the reply is an error
    replied_s: float | None = None
    fetched_s: float | None = None
    released: int = 0  # 1: the reply is no longer kept


class LoggedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the log has it."""

    id: str
    session: str
    tenant: str
    created_s: float
    requested_s: float  # of its last request
    adapter: str | None  # JSON; None: its first request was refused
    metadata: str | None  # JSON
    applied: int  # sequence of the newest durable state; -1: none
    steps: int = 0  # optim_steps that were applied

    def settings(self) -> TenantAdapter | None:
        """Return its adapter; None if its first request was refused."""
        return None if self.adapter is None else msgspec.json.decode(self.adapter, type=TenantAdapter)


class LoggedSampler(msgspec.Struct, frozen=True, kw_only=True):
    """A sampler as the log has it."""

    id: str
    session: str
    tenant: str
    digest: bytes  # of the request that made it
    path: str | None  # in the store; None: the base
    inflight: int


class LoggedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the log has it."""

    id: str
    tenant: str
    created_s: float
    finished: str | None  # JSON: the client's reason; None: it hasn't finished
    body: str  # JSON: as it was created


class LoggedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as the log has it."""

    path: str  # MODEL/KIND/NAME
    model: str
    tenant: str
    created_s: float
    bytes: int
    public: int  # 1: all tenants may read it
    expires_s: float | None  # None: never
    adapter: str  # JSON
    metadata: str | None  # JSON
    listed: int  # 0: a sampler's own, without a name
    step: int = 0  # optim_steps of its model when it was saved

    def settings(self) -> TenantAdapter:
        """Return the adapter that was saved."""
        return msgspec.json.decode(self.adapter, type=TenantAdapter)


class LoggedAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of what a tenant's replied requests used."""

    id: str  # the tenant
    prefilled_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    device_s: float = 0.0  # of the trainer, and by tokens of the engines


_RECORDS: dict[str, Any] = {
    "requests": LoggedRequest,
    "models": LoggedModel,
    "samplers": LoggedSampler,
    "sessions": LoggedSession,
    "checkpoints": LoggedCheckpoint,
    "accounts": LoggedAccount,
}
_KEYS = {"requests": "scope, sequence", "checkpoints": "path"}
Effect = tuple[str, tuple[Any, ...]]  # SQL and its parameters, committed with a request or its reply
_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # Of each stream, which starts at sequence ``start``: the rows below ``released_below`` are gone.
    "CREATE TABLE streams (scope, start, released_below, PRIMARY KEY (scope, start)) WITHOUT ROWID",
    *(
        f"CREATE TABLE {table} ({', '.join(record.__struct_fields__)}, PRIMARY KEY ({_KEYS.get(table, 'id')}))"
        for table, record in _RECORDS.items()
    ),
    "CREATE INDEX requests_open ON requests (scope) WHERE replied_s IS NULL",
    "CREATE INDEX requests_fetched ON requests (fetched_s) WHERE fetched_s IS NOT NULL AND released = 0",
    "CREATE INDEX checkpoints_model ON checkpoints (model)",
)
_SELECTS = {table: f"SELECT {', '.join(record.__struct_fields__)} FROM {table}" for table, record in _RECORDS.items()}


def insertion(record: msgspec.Struct) -> Effect:
    """Return the effect that adds a record to its table, or replaces the one of its key."""
    table = next(name for name, kind in _RECORDS.items() if isinstance(record, kind))
    columns = record.__struct_fields__
    text = f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    return text, tuple(getattr(record, column) for column in columns)


class TinkerLog:
    """Sessions, models, samplers, checkpoints and requests of a store, in an SQLite file that one service has open.

    A commit survives the end of the process; one in the last moment before a power cut may be missing. All calls are
    of the service's event loop, and raise StorageFailed and BufferCorrupt. Times are of the wall clock, for people and
    for retention alone.
    """

    def __init__(self, store: Path, base: BaseDescription) -> None:
        """Open or make the log of the folder ``store``. Raises RunLocked if another service has it, ConfigurationError
        if it is of another base."""
        self.path = store / "log.sqlite"
        self._lock = FileLock(store / "lock", "tinker.store", store)
        self._lock.acquire()
        try:
            self._connection = open_database(self.path, _TABLES, _SCHEMA, _NAME)
            self.commit([("INSERT OR IGNORE INTO meta VALUES ('base', ?)", (base.digest,))])
            digest = self._rows("SELECT value FROM meta WHERE key = 'base'")[0][0]
            if digest != base.digest:
                raise ConfigurationError(
                    f"tinker.store = {str(store)!r} is of the base {digest}, and {base.name} is {base.digest}: "
                    "valid: that base, or another store"
                )
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Close the file, and let another service open it."""
        self._connection.close()
        self._lock.release()

    def commit(self, effects: Iterable[Effect]) -> None:
        """Commit effects together."""
        with transaction(self._connection, self.path, name=_NAME) as connection:
            for text, parameters in effects:
                connection.execute(text, parameters)

    def all(self, table: str, condition: str = "1", parameters: tuple[Any, ...] = ()) -> list[Any]:
        """Return the records of a table for which the SQL ``condition`` holds."""
        record = _RECORDS[table]
        rows = self._rows(f"{_SELECTS[table]} WHERE {condition}", parameters)
        return [record(**dict(zip(record.__struct_fields__, row, strict=True))) for row in rows]

    def get(self, table: str, key: str) -> Any:
        """Return the record of a key; None if there is none."""
        return next(iter(self.all(table, f"{_KEYS.get(table, 'id')} = ?", (key,))), None)

    def request(self, scope: str, sequence: int) -> LoggedRequest | None:
        """Return a request; None if it never came or was released."""
        return next(iter(self.all("requests", "scope = ? AND sequence = ?", (scope, sequence))), None)

    def replied(self, scope: str) -> list[int]:
        """Return the listed sequences that have replies, also released ones."""
        text = "SELECT sequence FROM requests WHERE scope = ? AND replied_s NOT NULL"
        return [row[0] for row in self._rows(text, (scope,))]

    # --- the life of a request ----------------------------------------------------------------------------------------

    def submit(self, request: LoggedRequest, effects: Iterable[Effect] = ()) -> RequestAdmission:
        """Commit a request, if it is new, with effects. A refused one comes with its reply."""
        with transaction(self._connection, self.path, name=_NAME) as connection:
            logged = self.request(request.scope, request.sequence)
            start = self._start(request.scope, request.sequence)
            released_below = self.released_below(request.scope, start)
            admission = admit(request.sequence, request.digest, logged and logged.digest, released_below)
            if admission is RequestAdmission.NEW:
                for text, parameters in (insertion(request), *effects):
                    connection.execute(text, parameters)
        if admission is RequestAdmission.REPEATED and logged is not None and logged.released:
            return RequestAdmission.RELEASED
        return admission

    def reply(
        self, request: LoggedRequest, effects: Iterable[Effect] = (), *, keeps_body: bool = False, applied: bool = False
    ) -> None:
        """Commit the reply of an open request, with effects. ``applied``: the model's durable state is now the
        request's, so a restart needs no body up to it; ``keeps_body``: a restart repeats this one until then."""
        with transaction(self._connection, self.path, name=_NAME) as connection:
            key = (request.scope, request.sequence)
            connection.execute(
                "UPDATE requests SET reply = ?, protobuf = ?, failed = ?, replied_s = ?, body = iif(?, body, NULL) "
                "WHERE scope = ? AND sequence = ? AND replied_s IS NULL",
                (request.reply, request.protobuf, request.failed, request.replied_s, keeps_body, *key),
            )
            if applied:
                connection.execute("UPDATE models SET applied = ?2 WHERE id = ?1 AND applied < ?2", key)
                connection.execute(
                    "UPDATE requests SET body = NULL WHERE scope = ? AND sequence <= ? AND body NOT NULL", key
                )
            for text, parameters in effects:
                connection.execute(text, parameters)

    def note_fetched(self, scope: str, sequence: int, now_s: float) -> None:
        """Note that a reply was fetched."""
        text = "UPDATE requests SET fetched_s = ? WHERE scope = ? AND sequence = ? AND fetched_s IS NULL"
        self.commit([(text, (now_s, scope, sequence))])

    def release_replies(self, now_s: float) -> int:
        """Release the replies that need no longer be kept, see `ordering.releasable`; returns their number. Those of a
        model stay while a restart would repeat its requests. Their sequence numbers stay used."""
        due_scopes = self._rows(
            "SELECT DISTINCT scope FROM requests WHERE fetched_s <= ? AND fetched_s NOT NULL AND released = 0",
            (now_s - RETAINED_S,),
        )
        count = 0
        for (scope,) in due_scopes:
            count += self._release_scope(scope, now_s)
        return count

    def _release_scope(self, scope: str, now_s: float) -> int:
        model = self.get("models", scope)
        marks: dict[int, list[ReplyMark]] = defaultdict(list)
        text = "SELECT sequence, fetched_s FROM requests WHERE scope = ? AND fetched_s NOT NULL AND released = 0"
        rows = self._rows(text, (scope,))
        for sequence, fetched_s in rows:
            mark = ReplyMark(sequence=sequence, fetched_s=fetched_s)
            marks[self._start(scope, sequence)].append(mark)
        effects: list[Effect] = []
        count = 0
        for start, stream in marks.items():
            numbers = [number for number in releasable(stream, now_s) if model is None or number <= model.applied]
            count += len(numbers)
            released_below = released_prefix(self.released_below(scope, start), numbers + self._released(scope, start))
            effects += [
                ("UPDATE requests SET reply = NULL, released = 1 WHERE scope = ? AND sequence = ?", (scope, number))
                for number in numbers
            ]
            effects.append(("INSERT OR REPLACE INTO streams VALUES (?, ?, ?)", (scope, start, released_below)))
            bounds = (scope, start, released_below)
            effects.append(("DELETE FROM requests WHERE scope = ? AND sequence >= ? AND sequence < ?", bounds))
        self.commit(effects)
        return count

    def _released(self, scope: str, start: int) -> list[int]:
        text = "SELECT sequence FROM requests WHERE scope = ? AND sequence >= ? AND released = 1"
        return [row[0] for row in self._rows(text, (scope, start))]

    def released_below(self, scope: str, start: int) -> int:
        """Return the number below which the stream's replies are released and their rows gone."""
        rows = self._rows("SELECT released_below FROM streams WHERE scope = ? AND start = ?", (scope, start))
        return rows[0][0] if rows else start

    def was_released(self, scope: str, sequence: int) -> bool:
        """Whether a request that isn't listed was done, and its reply released."""
        return sequence < self.released_below(scope, self._start(scope, sequence))

    def _start(self, scope: str, sequence: int) -> int:
        return 0 if ":train:" in scope else stream_start(sequence)

    def _rows(self, text: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        with reading(self.path, _NAME):
            return self._connection.execute(text, parameters).fetchall()
