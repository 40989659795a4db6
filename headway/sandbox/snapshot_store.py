"""A run's snapshots on disk: written whole or not at all, within a limit of bytes over all of them.

Several processes of a run may write into the folder: each counts the others' files when one of its own starts, and
again, one process at a time, before it is kept. Disk work is done in threads.

A snapshot kept by a provider is noted as an empty file with its quoted name: a process that drops it need not be able
to reach the provider, and one that can deletes it there later, also after a kill in between.
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
from headway.runtime.supervision import to_its_end

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
SUFFIX, INCOMING, LOCK = ".tar", ".incoming", ".lock"
HOSTED, DROPPED = ".hosted", ".dropped"  # suffixes of notes: kept at a provider; to be deleted there
_threads = ThreadPoolExecutor(8, thread_name_prefix="snapshots")


class SnapshotFolder:
    """The folder of snapshots, with its limit. ``most_bytes``: bound on all that are kept, and on all that are kept or
    incoming as far as one process knows; None: no limit but the disk's."""

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self.path = folder
        self.most_bytes = most_bytes
        self._used = 0
        self._open: set[IncomingSnapshot] = set()

    def incoming(self, name: str, sandbox: str) -> IncomingSnapshot:
        """Make the incoming snapshot of this name. Raises ConfigurationError where it isn't a plain file name."""
        if not NAME.fullmatch(name):
            raise ConfigurationError(f"sandbox snapshot {name!r}: needs a plain file name")
        path = self.path / f".{name}.{sandbox}.{os.getpid()}{INCOMING}"
        return IncomingSnapshot(self, path, self.path / f"{name}{SUFFIX}")

    def others(self) -> Callable[[str], bool]:
        """Which file names now are neither this process's incoming snapshots nor incomplete ones of dead processes."""
        ours = frozenset(one.path.name for one in self._open)
        return lambda name: name not in ours and not _left(name)

    def bytes_of(self, wanted: Callable[[str], bool]) -> int:
        """Bytes of the folder's files with such names."""
        there = 0
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # its rollout has resumed or ended
                if wanted(entry.name) and entry.is_file():
                    there += entry.stat().st_size
        return there

    def admit(self, one: IncomingSnapshot, others_bytes: int) -> None:
        """Register an incoming snapshot; ``others_bytes``: bytes of all other files in the folder."""
        self._open.add(one)
        self._used = others_bytes + sum(one.size for one in self._open)

    def claim(self, size: int) -> bool:
        """Reserve ``size`` more bytes; False: as far as this process knows, there is no room."""
        if self.most_bytes is not None and self._used + size > self.most_bytes:
            return False
        self._used += size
        return True

    @contextlib.contextmanager
    def keeping(self, more_bytes: int) -> Iterator[None]:
        """Run the block under the folder's lock, if ``more_bytes`` fit the limit. Raises SandboxError, OSError."""
        if self.most_bytes is None:
            yield
            return
        with open(self.path / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.bytes_of(lambda name: name.endswith(SUFFIX)) + more_bytes > self.most_bytes:
                raise SandboxError(self.full())
            yield

    def full(self) -> SandboxFailure:
        what = f"no room for another snapshot: this run's may have {self.most_bytes} bytes"
        evidence = {"snapshot_bytes": self.most_bytes or 0}
        return infrastructure_failure(
            f"{what}, half of what was free; make room in {self.path}", retry=False, evidence=evidence
        )

    def settle(self, one: IncomingSnapshot, freed_bytes: int) -> None:
        """Unregister an incoming snapshot; ``freed_bytes``: its size if dropped, else that of the one it replaced."""
        if one in self._open:
            self._open.remove(one)
            self._used -= freed_bytes


class IncomingSnapshot:
    """A snapshot being written. Entering it raises SandboxError where the disk can't be written to."""

    def __init__(self, folder: SnapshotFolder, path: Path, target: Path) -> None:
        self._folder = folder
        self.path = path
        self._target = target
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self.size = 0
        self._lost: SandboxFailure | None = None  # why it can't be kept
        self._freed = 0
        self.kept = False
        self._turn = asyncio.Lock()

    async def append(self, part: bytes, /) -> None:
        """Write a part. Parts that don't fit are discarded and `keep` raises, since the sender is in mid-answer."""
        if self._lost is not None:
            return
        if not self._folder.claim(len(part)):
            self._lost = self._folder.full()
            return
        self.size += len(part)
        try:
            await self._on_disk(lambda: self._write(part))
        except OSError as error:
            self._lost = _disk_failure(error)

    async def keep(self) -> Snapshot:
        """Finish the file and return its record. Raises SandboxError where there was no room for it."""
        if self._lost is not None:
            raise SandboxError(self._lost)
        try:
            await self._on_disk(self._place)
        except OSError as error:
            raise SandboxError(_disk_failure(error)) from error
        except asyncio.CancelledError:
            self._target.unlink(missing_ok=True)  # no record will ever name it
            self.kept = False
            raise
        return Snapshot(path=str(self._target), bytes=self.size, sha256=self._digest.hexdigest())

    async def __aenter__(self) -> IncomingSnapshot:
        try:
            others = self._folder.others()
            self._folder.admit(self, await self._on_disk(lambda: self._begin(others)))
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
            self._folder.settle(self, self._freed if self.kept else self.size)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, one call at a time, and to its end even if the caller is cancelled."""
        async with self._turn:
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

    def _place(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        freed = 0
        with contextlib.suppress(FileNotFoundError):
            freed = self._target.stat().st_size
        with self._folder.keeping(self.size - freed):
            os.replace(self.path, self._target)
        self._freed, self.kept = freed, True

    def _end(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # there is no room for what was still buffered
                self._file.close()
            if not self.kept:
                self.path.unlink(missing_ok=True)


async def opened(snapshot: Snapshot, until: contextlib.ExitStack) -> int:
    """Open a snapshot and return its descriptor, closed by ``until``: a sandbox's own user may not be able to read it.
    Raises SandboxError where it can't be opened, or its size or checksum differs: files would be missing unnoticed."""

    def look() -> int:
        try:
            file = until.enter_context(Path(snapshot.path).open("rb", buffering=0))  # noqa: SIM115
        except OSError as error:
            what = f"{snapshot.path}: {error.strerror}: give one that can be read"
            raise SandboxError(environment_failure(what)) from error
        try:
            same = os.fstat(file.fileno()).st_size == snapshot.bytes
            same = same and hashlib.file_digest(file, "sha256").hexdigest() == snapshot.sha256
            file.seek(0)
        except OSError as error:
            raise SandboxError(infrastructure_failure(f"{snapshot.path}: {error.strerror}", retry=False)) from error
        if not same:
            what = f"{snapshot.path} isn't what was taken any more: damaged, or changed"
            raise SandboxError(infrastructure_failure(what, retry=False))
        return file.fileno()

    return await _in_thread(look)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run ``work`` to its end in a thread for the disk; the loop's own threads serve environments' tools, which may
    hang."""

    async def done() -> T:
        return await asyncio.get_running_loop().run_in_executor(_threads, work)

    return await to_its_end(done())


def _left(name: str) -> bool:
    """Whether it is an incomplete file of a process that has ended."""
    if not name.endswith(INCOMING):
        return False
    owner = name.removesuffix(INCOMING).rpartition(".")[2]
    return owner.isdigit() and not Path("/proc", owner).exists()


def _disk_failure(error: OSError) -> SandboxFailure:
    """Make the failure for a disk that can't be written to: a retry may find room."""
    what = f"a snapshot can't be written: {error.strerror or error}: make room, or name another folder"
    return infrastructure_failure(what, evidence={"errno": errno.errorcode.get(error.errno or 0, "?")})


def is_hosted(name: str) -> bool:
    """Whether ``name`` is a provider's snapshot, PROVIDER:ID; else it is a file's name or path."""
    return ":" in name and not name.startswith("/")


def note_hosted(folder: Path, name: str) -> None:
    """Note that a provider keeps this snapshot. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _mark(folder, name, HOSTED).touch()


def drop(folder: Path, name: str) -> None:
    """Drop a snapshot that won't be resumed from: remove the file, or mark it for `dropped`. No-op if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if is_hosted(name):
            _mark(folder, name, HOSTED).rename(_mark(folder, name, DROPPED))
        else:
            (folder / name).unlink()


def dropped(folder: Path) -> list[tuple[str, Path]]:
    """Snapshots to delete at a provider, each with the note to remove afterwards; the latest first, since later ones
    may be based on earlier ones."""
    marks: dict[Path, float] = {}
    for mark in folder.glob(f"*{DROPPED}"):
        with contextlib.suppress(FileNotFoundError):  # another worker has just done it
            marks[mark] = mark.stat().st_mtime
    return [(unquote(mark.stem), mark) for mark in sorted(marks, key=lambda mark: marks[mark], reverse=True)]


def _mark(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{quote(name, safe='')}{suffix}"


def remove_others(folder: Path, keep: Collection[str]) -> list[str]:
    """Drop the snapshots whose names aren't in ``keep``, and return those names; also remove incomplete files. For a
    run that restarts, before it takes any snapshot: one that nothing names is never used again."""
    removed: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.name.endswith(INCOMING):
                path.unlink()
                continue
            name = unquote(path.stem) if path.suffix == HOSTED else path.name
            if path.suffix in (SUFFIX, HOSTED) and name not in keep and path.is_file():
                drop(folder, name)
                removed.append(name)
    return removed
