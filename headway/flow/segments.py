"""Shared memory for payloads: segments that a process makes, and any process of its machine can read.

A segment is a file in the workflow's folder in /dev/shm, named after the process that made it. It is reused, since the
first touch of new memory is slow in virtual machines. Kernel locks (`flock`) track its users: its maker and every
reader hold a shared lock, a reader for as long as an array of its message lives; the maker overwrites it only under an
exclusive lock. So readers needn't report the end of their use, and dead processes hold no lock.
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

from headway.records.errors import ConfigurationError, HeadwayError
from headway.runtime.framing import ALIGNMENT
from headway.runtime.scratch import remove_unlocked
from headway.runtime.transport.packing import Packed, packed_from

SHARED_MEMORY = Path("/dev/shm")
_FOLDER_PREFIX = "headway-flow-"
_MAPPED = 8  # segments of other processes that a reader keeps mapped
_STATE = struct.Struct("<Q?")  # header of a segment: number of its payload, whether the payload outlives its owner


class PayloadReleased(HeadwayError):
    """A payload was fetched after its owner had released it, or after it was dropped."""


def new_folder() -> Path:
    """Return a path for the folder of a new workflow, the same on all of its machines."""
    return SHARED_MEMORY / f"{_FOLDER_PREFIX}{secrets.token_hex(8)}"


class WorkflowFolder:
    """A workflow's folder on this machine, for sockets and segments. Each of its processes locks it; the last one
    removes it, or after kills the next workflow that starts on this machine."""

    def __init__(self, path: str | Path) -> None:
        """Make and lock the folder, if it doesn't exist. Raises ConfigurationError for one that other users can
        enter."""
        self.path = Path(path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:  # its sockets and segments have no other guard
            raise ConfigurationError(f"{self.path} is open to other users; valid: a folder of this user with mode 0700")
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        remove_unlocked(self.path.parent, f"{_FOLDER_PREFIX}*")

    def forget(self, incarnation: str) -> None:
        """Remove the files of a dead process, except payloads that outlive it."""
        for file in self.path.glob(f"{incarnation}*"):
            if file.suffix != ".segment" or not _outlives_owner(file):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the folder, and remove it if this was its last process."""
        os.close(self._lock)
        remove_unlocked(self.path.parent, self.path.name)


def _outlives_owner(segment: Path) -> bool:
    with suppress(FileNotFoundError, struct.error), segment.open("rb") as file:  # removed, or its maker died making it
        return _STATE.unpack(file.read(_STATE.size))[1]
    return False


class Segment:
    """A shared-memory segment, as its maker uses it."""

    def __init__(self, path: Path, size: int) -> None:
        """Make the segment, locked exclusively. Raises OSError when shared memory is full, and then leaves no file."""
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
        """Return the bytes of a segment for a payload, rounded up since the next payload may be larger."""
        needed_bytes = ALIGNMENT + packed.size_bytes
        step_bytes = max(mmap.PAGESIZE, 1 << (needed_bytes.bit_length() - 3))
        return -(-needed_bytes // step_bytes) * step_bytes

    def claim(self) -> bool:
        """Lock the segment exclusively; False when a reader still uses it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, number: int, packed: Packed, *, outlives: bool) -> None:
        """Write a payload into the claimed segment; afterwards it is readable under ``number``. ``outlives``: the
        payload stays until it is released, even if its owner dies."""
        _STATE.pack_into(self._map, 0, number, False)
        packed.write(memoryview(self._map)[ALIGNMENT:])
        _STATE.pack_into(self._map, 0, number, outlives)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the payload, so that the segment doesn't outlive its owner."""
        _STATE.pack_into(self._map, 0, 0, False)

    def remove(self) -> None:
        """Remove the segment's file; readers keep its content."""
        self.path.unlink(missing_ok=True)
        self._file.close()


class SegmentReader:
    """Reads the segments of this machine's processes."""

    def __init__(self) -> None:
        self._mapped: dict[str, mmap.mmap] = {}  # segments that only this process reads, which are reused

    def read(self, path: str, number: int, *, alone: bool) -> Packed:
        """Read a payload, whose segment isn't reused while a part of the payload lives. Its memory is private to this
        process: the segment itself for the only reader (``alone``), otherwise copied on write. Raises
        PayloadReleased."""
        with suppress(FileNotFoundError, BlockingIOError), open(path, "r+b") as file:  # removed, or being overwritten
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapping = self._mapping_of(path) if alone else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if _STATE.unpack_from(mapping)[0] == number:
                content = np.frombuffer(mapping, np.uint8)
                weakref.finalize(content, os.close, os.dup(file.fileno())).atexit = False  # which ends the lock
                return packed_from(content.data[ALIGNMENT:])
        raise PayloadReleased(f"payload {number} of {Path(path).name} was released before it was fetched")

    def _mapping_of(self, path: str) -> mmap.mmap:
        """Return the cached mapping of a segment, since mapping 100 MB costs as much as copying them."""
        if path not in self._mapped:
            existing_paths = [mapped_path for mapped_path in self._mapped if Path(mapped_path).exists()][1 - _MAPPED :]
            with open(path, "r+b") as file:  # without the lock, which ends with the message
                kept_mappings = {mapped_path: self._mapped[mapped_path] for mapped_path in existing_paths}
                self._mapped = {**kept_mappings, path: mmap.mmap(file.fileno(), 0)}
        return self._mapped[path]
