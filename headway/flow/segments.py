"""Shared memory for payloads: segments that a process makes, and any process of its machine can read.

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
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from headway.flow.packing import Packed, flat
from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.framing import ALIGNMENT
from headway.runtime.scratch import remove_unlocked

SHARED_MEMORY = Path("/dev/shm")
_FOLDER_PREFIX = "headway-flow-"
_MAPPED = 8  # segments of others that a reader keeps mapped
_STATE = struct.Struct("<Q?")  # at the start of a segment: number of its payload, whether that outlives its owner


class PayloadReleased(HeadwayError):
    """A payload was fetched after its owner had released it, or was forgotten."""


def new_folder() -> Path:
    """A path for the folder of a new workflow, the same on all of its machines."""
    return SHARED_MEMORY / f"{_FOLDER_PREFIX}{secrets.token_hex(8)}"


class WorkflowFolder:
    """A workflow's folder on this machine, for sockets and segments: locked by each of its processes, removed by the
    last of them, or after kills by the next workflow that starts here."""

    def __init__(self, path: str | Path) -> None:
        """Make it, where it isn't there. Raises ConfigurationError for one that other users can enter."""
        self.path = Path(path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:  # for its sockets and segments have no other guard
            raise ConfigurationError(f"{self.path} is open to other users; valid is a folder of mode 0700 of one's own")
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        remove_unlocked(self.path.parent, f"{_FOLDER_PREFIX}*")

    def forget(self, incarnation: str) -> None:
        """Remove what a dead process left, but for payloads that outlive it."""
        for file in self.path.glob(f"{incarnation}*"):
            if file.suffix != ".segment" or not _outlives(file):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the folder; remove it if this was its last process."""
        os.close(self._lock)
        remove_unlocked(self.path.parent, self.path.name)


def _outlives(segment: Path) -> bool:
    with suppress(FileNotFoundError, struct.error), segment.open("rb") as file:  # removed, or its maker died making it
        return _STATE.unpack(file.read(_STATE.size))[1]
    return False


class Segment:
    """A segment, for its maker."""

    def __init__(self, path: Path, size: int) -> None:
        """Make it, locked exclusively. Raises OSError where there is no room, with nothing left."""
        self.path, self.size = path, size
        self._file = path.open("x+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.posix_fallocate(self._file.fileno(), 0, size)  # a write beyond a full file system would be a SIGBUS
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError:
            self.remove()
            raise

    @staticmethod
    def size_for(packed: Packed) -> int:
        """Bytes of a segment for a payload: at least a little more than needed, as the next one may be larger."""
        needed = ALIGNMENT + packed.size_bytes
        step = max(mmap.PAGESIZE, 1 << (needed.bit_length() - 3))
        return -(-needed // step) * step

    def claim(self) -> bool:
        """Lock it exclusively, unless somebody reads it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, number: int, packed: Packed, *, outlives: bool) -> None:
        """Write a payload while it is claimed; readable afterwards under ``number``. ``outlives``: until it is
        released, also when its owner is dead."""
        _STATE.pack_into(self._map, 0, number, False)
        packed.write(memoryview(self._map)[ALIGNMENT:])
        _STATE.pack_into(self._map, 0, number, outlives)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let it go with its owner: its payload is released."""
        _STATE.pack_into(self._map, 0, 0, False)

    def remove(self) -> None:
        """Remove it; who has read it keeps what was in it."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class SegmentReader:
    """Reads the segments of this machine's processes."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}  # of segments that were read by this process alone, and come again

    def read(self, path: str, number: int, *, alone: bool) -> Packed:
        """A payload, whose segment isn't used again while a part of it lives. It is this process's own: where it reads
        ``alone`` the segment itself, else memory that is copied where it is written to. Raises PayloadReleased."""
        with suppress(FileNotFoundError, BlockingIOError), open(path, "r+b") as file:  # removed, or written anew
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapped = self._kept(path) if alone else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if _STATE.unpack_from(mapped)[0] == number:
                content = np.frombuffer(mapped, np.uint8)
                weakref.finalize(content, os.close, os.dup(file.fileno())).atexit = False  # with it goes the lock
                return flat(content.data[ALIGNMENT:])
        raise PayloadReleased(f"payload {number} of {Path(path).name} was released before it was fetched")

    def _kept(self, path: str) -> mmap.mmap:
        """The mapping of a segment, made once: to map 100 MB anew costs as much as to copy them."""
        if path not in self._mapped:
            there = [known for known in self._mapped if Path(known).exists()][1 - _MAPPED :]
            with open(path, "r+b") as file:  # without the lock, which ends with the message
                kept = {known: self._mapped[known] for known in there}
                self._mapped = {**kept, path: mmap.mmap(file.fileno(), 0)}
        return self._mapped[path]
