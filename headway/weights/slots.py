"""Names the files and folders in which weights are published, and removes them after a crash. Torch-free."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headway.runtime.scratch import ScratchFolder, remove_unlocked

SHARED_MEMORY = Path("/dev/shm")
_LOCK = struct.Struct("hhqqi0q")  # struct flock: kind, origin of the offset, offset, count, process
_OWNER, _READERS = 0, 1  # bytes of a slot's file that are locked: as long as its owner lives, while it is copied
_POLL_S = 0.001
_EXCHANGE = ".exchange"  # suffix of folders from which a server reads weights


def slot_stem(run_id: str) -> str:
    """File name stem of a run's slots. A run id that isn't a plain file name is replaced by its hash."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", run_id):
        run_id = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return f"headway-{run_id}"


def reap(run_id: str, *, directory: str | Path | None = None) -> list[str]:
    """Remove the slots that killed runs left behind: all of ``run_id``, and those of other runs that no process holds.
    Returns their paths. The caller must hold the lock of ``run_id``, whose processes must have ended."""
    folders = [Path(directory)] if directory is not None else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    slot_pattern = re.compile(re.escape(slot_stem(run_id)) + r"-\d+\.weights")
    removed_paths: list[str] = []
    for folder in folders:
        for file in folder.glob("headway-*.weights"):
            if slot_pattern.fullmatch(file.name):
                file.unlink(missing_ok=True)
                removed_paths.append(str(file))
        removed_paths += map(str, remove_unlocked(folder, "headway-*-*.weights"))
        removed_paths += reap_folders(folder)
    return sorted(removed_paths)


def reap_folders(directory: str | Path) -> list[str]:
    """Remove the exchange folders in ``directory`` whose process was killed. Returns their paths."""
    return list(map(str, remove_unlocked(directory, f"headway-*{_EXCHANGE}")))


@contextmanager
def exchange_folder(directory: str | Path) -> Iterator[Path]:
    """Make a folder of this process for weights that others read. It is removed at the end of the block, or by
    ``reap_folders`` after a crash."""
    with ScratchFolder("headway-", _EXCHANGE, directory) as folder:
        folder.chmod(0o755)  # the reader may be another user
        yield folder


def hold(descriptor: int) -> None:
    """Mark an open slot as used by this process, until it is closed and unmapped. A mapping has its own descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


class SlotLock:
    """The locks of a slot, on its file: the owner's, and those of readers against updates.

    The kernel ends them with the process, or the description, that has them (``F_OFD_SETLK``). They are independent of
    ``hold``.
    """

    def __init__(self, path: str | Path, *, owner: bool = False) -> None:
        """Open the slot's file, as its ``owner`` or a reader. Raises OSError."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if owner:
            self._set(_OWNER, fcntl.F_WRLCK)

    def acquire(self, *, exclusive: bool, patience_s: float = 0.0) -> bool:
        """Lock the slot for an update (``exclusive``) or against updates; False when others have it for longer."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                self._set(_READERS, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(_POLL_S)
            else:
                return True

    def release(self) -> None:
        """Undo ``acquire``."""
        self._set(_READERS, fcntl.F_UNLCK)

    def owner_lives(self) -> bool:
        """Whether the process that made the slot lives, and still has it."""
        lock_query = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _OWNER, 1, 0)
        return _LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, lock_query))[0] != fcntl.F_UNLCK

    def read(self, first: int, last: int) -> bytes:
        """Read bytes of the file."""
        return os.pread(self._descriptor, last - first, first)

    def open(self) -> IO[bytes]:
        """Open the file once more, to read it: it may have another name by now, or none."""
        return os.fdopen(os.dup(self._descriptor), "rb")

    def map(self) -> mmap.mmap:
        """Map the file, to read it: what is written to the mapping changes a private copy."""
        hold(self._descriptor)
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """End the locks."""
        os.close(self._descriptor)

    def _set(self, byte: int, kind: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
