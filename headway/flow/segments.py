"""Shared memory for payloads: a process's pool of segments, which any process of its machine can read.

A segment is a file in the workflow's folder in /dev/shm, named after the process that made it. It is used again and
again, since the first touch of new memory is slow in virtual machines. Locks of the kernel (`flock`) say who uses it:
its maker and every reader lock it shared, a reader for as long as an array of its message lives; the maker writes it
anew only when it gets it exclusively. So nobody has to report that a message is done with, and the dead hold nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from headway.flow.packing import ALIGNMENT, Packed, split
from headway.records.errors import HeadwayError
from headway.runtime.scratch import remove_unlocked

SHARED_MEMORY = Path("/dev/shm")
_FOLDER_PREFIX = "headway-flow-"
_SPARE = 8  # released segments that are kept for the next payloads
_NUMBER = struct.Struct("<Q")  # at the start of a segment: of the payload in it


class PayloadReleased(HeadwayError):
    """A payload was fetched after its owner had released it, or was forgotten."""


def new_folder() -> Path:
    """A path for the folder of a new workflow, the same on all of its machines."""
    return SHARED_MEMORY / f"{_FOLDER_PREFIX}{secrets.token_hex(8)}"


class WorkflowFolder:
    """A workflow's folder on this machine, for sockets and segments: locked by each of its processes, removed by the
    last of them, or after kills by the next workflow that starts here."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        remove_unlocked(self.path.parent, f"{_FOLDER_PREFIX}*")

    def forget(self, incarnation: str) -> None:
        """Remove what a dead process left."""
        for file in self.path.glob(f"{incarnation}*"):
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the folder; remove it if this was its last process."""
        os.close(self._lock)
        remove_unlocked(self.path.parent, self.path.name)


class Segments:
    """The segments that a process has made. Thread-safe."""

    def __init__(self, folder: Path, incarnation: str) -> None:
        self._stem = folder / incarnation
        self._made = 0
        self._held: dict[int, _Segment] = {}  # by the payload's number
        self._spare: deque[_Segment] = deque()  # released; a reader may still have a message of it
        self._lock = threading.Lock()

    def write(self, number: int, packed: Packed) -> str:
        """Copy a payload into a segment and return its path. Raises OSError where there is no room."""
        needed = ALIGNMENT + packed.flat_bytes
        segment = self._take(needed)
        with segment.written(number) as content:
            packed.write(content[: needed - ALIGNMENT])
        with self._lock:
            self._held[number] = segment
        return str(segment.path)

    def release(self, number: int) -> None:
        """Let a payload's segment be used again, once nobody reads it; no-op for one that isn't in any."""
        with self._lock:
            if (segment := self._held.pop(number, None)) is not None:
                self._spare.append(segment)
            if len(self._spare) > _SPARE:
                self._spare.popleft().remove()

    def close(self) -> None:
        """Remove all segments; readers keep what they have mapped."""
        with self._lock:
            for segment in (*self._held.values(), *self._spare):
                segment.remove()
            self._held.clear()
            self._spare.clear()

    def _take(self, needed: int) -> _Segment:
        """A segment of at least ``needed`` bytes and at most twice as many, locked exclusively."""
        with self._lock:
            fitting = [segment for segment in self._spare if needed <= segment.size <= 2 * needed]
            for segment in sorted(fitting, key=lambda segment: segment.size):
                if segment.claim():
                    self._spare.remove(segment)
                    return segment
            self._made += 1
            path = self._stem.with_name(f"{self._stem.name}-{self._made}.segment")
        step = max(mmap.PAGESIZE, 1 << (needed.bit_length() - 3))  # a little more than needed: the next may be larger
        return _Segment(path, -(-needed // step) * step)


class _Segment:
    """The maker's side of a segment."""

    def __init__(self, path: Path, size: int) -> None:
        """Make it, locked exclusively. Raises OSError, with nothing left."""
        self.path, self.size = path, size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(self._descriptor, 0, size)  # a write beyond a full file system would be a SIGBUS
            self._map = mmap.mmap(self._descriptor, size)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    def claim(self) -> bool:
        """Lock it exclusively, unless somebody reads it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def written(self, number: int) -> Iterator[memoryview]:
        """Its content, to be written while it is claimed; readable afterwards under ``number``."""
        _NUMBER.pack_into(self._map, 0, number)
        try:
            yield memoryview(self._map)[ALIGNMENT:]
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class SegmentReader:
    """Reads the segments of this machine's processes."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}  # of segments that were read by this process alone, and come again

    def read(self, path: str, number: int, *, alone: bool) -> tuple[memoryview, list[memoryview]]:
        """Header and parts of a payload, whose segment isn't used again while one of them lives. They are this
        process's own: for a payload that it reads ``alone`` the segment itself, else memory that is copied where it is
        written to. Raises PayloadReleased."""
        with suppress(FileNotFoundError, BlockingIOError):  # removed, or being written anew
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mapped = self._kept(path) if alone else mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
                if _NUMBER.unpack_from(mapped)[0] == number:
                    content = np.frombuffer(mapped, np.uint8)
                    weakref.finalize(content, os.close, os.dup(descriptor)).atexit = False  # with it goes the lock
                    return split(content.data[ALIGNMENT:])
            finally:
                os.close(descriptor)
        raise PayloadReleased(f"payload {number} of {Path(path).name} was released before it was fetched")

    def _kept(self, path: str) -> mmap.mmap:
        """The mapping of a segment, made once: to map 100 MB anew costs as much as to copy them."""
        if path not in self._mapped:
            gone = [known for known in self._mapped if not Path(known).exists()]
            for known in (*gone, *list(self._mapped)[: len(self._mapped) - _SPARE + 1]):
                self._mapped.pop(known, None)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # without the lock, which ends with the message
            try:
                self._mapped[path] = mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        return self._mapped[path]
