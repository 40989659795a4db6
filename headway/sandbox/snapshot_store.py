"""Stores a run's snapshots on disk: each is written atomically, within a limit of bytes over all of them.

Several processes of a run may write into the folder. Each counts the others' files when one of its own snapshots
starts, and again under a lock before it is committed. Disk work is done in threads.

A snapshot kept by a provider is noted as an empty file with its quoted name. A process that drops it needs no access to
the provider; a process with access deletes it there later, also after a kill in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote, unquote

from headway.records.errors import ConfigurationError
from headway.records.sandbox import SandboxError, SandboxFailure, Snapshot, environment_failure, infrastructure_failure
from headway.runtime.supervision import run_to_completion

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
SUFFIX, INCOMING, LOCK = ".tar", ".incoming", ".lock"
HOSTED, DROPPED = ".hosted", ".dropped"  # suffixes of notes: a snapshot at a provider; one to be deleted there
_threads = ThreadPoolExecutor(8, thread_name_prefix="snapshots")


class SnapshotFolder:
    """The folder of snapshots, with its limit. ``most_bytes``: limit on all committed snapshots, and on committed and
    incoming ones as far as this process knows; None: no limit but the disk's."""

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self.path = folder
        self.most_bytes = most_bytes
        self._used = 0
        self._open: set[IncomingSnapshot] = set()

    def incoming(self, name: str, sandbox: str) -> IncomingSnapshot:
        """Make the incoming snapshot of this name. Raises ConfigurationError if it isn't a plain file name."""
        if not NAME.fullmatch(name):
            raise ConfigurationError(f"sandbox snapshot {name!r}: needs a plain file name")
        path = self.path / f".{name}.{sandbox}.{os.getpid()}{INCOMING}"
        return IncomingSnapshot(self, path, self.path / f"{name}{SUFFIX}")

    def others(self) -> Callable[[str], bool]:
        """Return a predicate on file names. It rejects this process's present incoming snapshots, and incomplete files
        of dead processes."""
        incoming_names = frozenset(snapshot.path.name for snapshot in self._open)
        return lambda name: name not in incoming_names and not _is_stale(name)

    def bytes_of(self, is_counted: Callable[[str], bool]) -> int:
        """Return the bytes of the folder's files whose names ``is_counted`` accepts."""
        total_bytes = 0
        for dir_entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # its rollout has resumed or ended
                if is_counted(dir_entry.name) and dir_entry.is_file():
                    total_bytes += dir_entry.stat().st_size
        return total_bytes

    def register(self, snapshot: IncomingSnapshot, others_bytes: int) -> None:
        """Add an incoming snapshot to the accounting; ``others_bytes``: bytes of all other files in the folder."""
        self._open.add(snapshot)
        self._used = others_bytes + sum(snapshot.size for snapshot in self._open)

    def claim(self, size: int) -> bool:
        """Reserve ``size`` more bytes; False: they exceed the limit, as far as this process knows."""
        if self.most_bytes is not None and self._used + size > self.most_bytes:
            return False
        self._used += size
        return True

    @contextlib.contextmanager
    def lock_for_commit(self, more_bytes: int) -> Iterator[None]:
        """Run the block under the folder's lock, if ``more_bytes`` fit the limit. Raises SandboxError, OSError."""
        if self.most_bytes is None:
            yield
            return
        with open(self.path / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.bytes_of(lambda name: name.endswith(SUFFIX)) + more_bytes > self.most_bytes:
                raise SandboxError(self.full_failure())
            yield

    def full_failure(self) -> SandboxFailure:
        message = f"no space for another snapshot: this run's may have {self.most_bytes} bytes"
        evidence = {"snapshot_bytes": self.most_bytes or 0}
        return infrastructure_failure(
            f"{message}, half of what was free; free space in {self.path}", retry=False, evidence=evidence
        )

    def unregister(self, snapshot: IncomingSnapshot, freed_bytes: int) -> None:
        """Remove an incoming snapshot from the accounting; ``freed_bytes``: its size if it was dropped, else the size
        of the snapshot that it replaced."""
        if snapshot in self._open:
            self._open.remove(snapshot)
            self._used -= freed_bytes


class IncomingSnapshot:
    """A snapshot being written. Entering it raises SandboxError if the disk can't be written to."""

    def __init__(self, folder: SnapshotFolder, path: Path, target: Path) -> None:
        self._folder = folder
        self.path = path
        self._target = target
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self.size = 0
        self._failure: SandboxFailure | None = None  # why it can't be kept
        self._freed_bytes = 0
        self.kept = False
        self._lock = asyncio.Lock()

    async def append(self, part: bytes, /) -> None:
        """Write a part. Parts that don't fit are discarded, and `keep` raises: the sender's answer can't be stopped."""
        if self._failure is not None:
            return
        if not self._folder.claim(len(part)):
            self._failure = self._folder.full_failure()
            return
        self.size += len(part)
        try:
            await self._on_disk(lambda: self._write(part))
        except OSError as error:
            self._failure = _disk_failure(error)

    async def keep(self) -> Snapshot:
        """Commit the file and return its record. Raises SandboxError if it exceeded the limit or the disk."""
        if self._failure is not None:
            raise SandboxError(self._failure)
        try:
            await self._on_disk(self._commit)
        except OSError as error:
            raise SandboxError(_disk_failure(error)) from error
        except asyncio.CancelledError:
            self._target.unlink(missing_ok=True)  # no record will ever name it
            self.kept = False
            raise
        return Snapshot(path=str(self._target), bytes=self.size, sha256=self._digest.hexdigest())

    async def __aenter__(self) -> IncomingSnapshot:
        try:
            is_other = self._folder.others()
            self._folder.register(self, await self._on_disk(lambda: self._begin(is_other)))
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, OSError):
                raise SandboxError(_disk_failure(error)) from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._on_disk(self._end)
        except asyncio.CancelledError:
            if self.kept:
                self._target.unlink(missing_ok=True)  # no record will ever name it
                self.kept = False
            raise
        finally:
            self._folder.unregister(self, self._freed_bytes if self.kept else self.size)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, one call at a time, and to its end even if the caller is cancelled."""
        async with self._lock:
            return await _in_thread(work)

    # In threads.

    def _begin(self, others: Callable[[str], bool]) -> int:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "wb")  # noqa: SIM115  closed in _end
        return self._folder.bytes_of(others)

    def _write(self, part: bytes) -> None:
        assert self._file is not None
        self._digest.update(part)
        self._file.write(part)

    def _commit(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        freed_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            freed_bytes = self._target.stat().st_size
        with self._folder.lock_for_commit(self.size - freed_bytes):
            os.replace(self.path, self._target)
        self._freed_bytes, self.kept = freed_bytes, True

    def _end(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the disk is full for the buffered rest
                self._file.close()
            if not self.kept:
                self.path.unlink(missing_ok=True)


async def open_snapshot(snapshot: Snapshot, stack: contextlib.ExitStack) -> int:
    """Open a snapshot and return its descriptor, which ``stack`` closes: a sandbox's user may not be able to read the
    file. Raises SandboxError if it can't be opened, or its size or checksum differs, since files would be missing."""

    def open_checked() -> int:
        try:
            file = stack.enter_context(Path(snapshot.path).open("rb", buffering=0))  # noqa: SIM115
        except OSError as error:
            message = f"{snapshot.path}: {error.strerror}: give one that can be read"
            raise SandboxError(environment_failure(message)) from error
        try:
            is_intact = os.fstat(file.fileno()).st_size == snapshot.bytes
            is_intact = is_intact and hashlib.file_digest(file, "sha256").hexdigest() == snapshot.sha256
            file.seek(0)
        except OSError as error:
            raise SandboxError(infrastructure_failure(f"{snapshot.path}: {error.strerror}", retry=False)) from error
        if not is_intact:
            message = f"{snapshot.path} has changed since it was taken, or is damaged"
            raise SandboxError(infrastructure_failure(message, retry=False))
        return file.fileno()

    return await _in_thread(open_checked)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` to its end in a thread for the disk, since environments' tools may block the loop's own threads."""

    async def run_in_pool() -> T:
        return await asyncio.get_running_loop().run_in_executor(_threads, work)

    return await run_to_completion(run_in_pool())


def _is_stale(name: str) -> bool:
    """Return whether ``name`` is an incomplete file of a process that has ended."""
    if not name.endswith(INCOMING):
        return False
    pid_text = name.removesuffix(INCOMING).rpartition(".")[2]
    return pid_text.isdigit() and not Path("/proc", pid_text).exists()


def _disk_failure(error: OSError) -> SandboxFailure:
    """Make the failure for a disk that can't be written to; a retry may find free space."""
    message = f"a snapshot can't be written: {error.strerror or error}: free space, or name another folder"
    return infrastructure_failure(message, evidence={"errno": errno.errorcode.get(error.errno or 0, "?")})


def is_hosted(name: str) -> bool:
    """Return whether ``name`` is a provider's snapshot, PROVIDER:ID; else it is a file's name or path."""
    return ":" in name and not name.startswith("/")


def note_hosted(folder: Path, name: str) -> None:
    """Note that a provider keeps this snapshot. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _note_path(folder, name, HOSTED).touch()


def drop(folder: Path, name: str) -> None:
    """Drop a snapshot that won't be restored: remove the file, or mark a provider's for `dropped_snapshots`. No-op if
    there is none."""
    with contextlib.suppress(FileNotFoundError):
        if is_hosted(name):
            _note_path(folder, name, HOSTED).rename(_note_path(folder, name, DROPPED))
        else:
            (folder / name).unlink()


def dropped_snapshots(folder: Path) -> list[tuple[str, Path]]:
    """Return the snapshots to delete at a provider, each with the note to remove afterwards; the latest first, since
    later ones may be based on earlier ones."""
    mtimes: dict[Path, float] = {}
    for mark in folder.glob(f"*{DROPPED}"):
        with contextlib.suppress(FileNotFoundError):  # another worker has just deleted it
            mtimes[mark] = mark.stat().st_mtime
    return [(unquote(mark.stem), mark) for mark in sorted(mtimes, key=lambda mark: mtimes[mark], reverse=True)]


def _note_path(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{quote(name, safe='')}{suffix}"


def remove_others(folder: Path, keep: Collection[str]) -> list[str]:
    """Drop the snapshots whose names aren't in ``keep``, and return those names; also remove incomplete files. Called
    when a run restarts, before it takes any snapshot: no record refers to the dropped ones."""
    removed_names: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.name.endswith(INCOMING):
                path.unlink()
                continue
            name = unquote(path.stem) if path.suffix == HOSTED else path.name
            if path.suffix in (SUFFIX, HOSTED) and name not in keep and path.is_file():
                drop(folder, name)
                removed_names.append(name)
    return removed_names
