"""Folders for a process's temporary files, removed when it ends, or by the next process where it was killed."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class ScratchFolder:
    """A folder of this process, protected by a lock that the kernel releases when the process ends.

    Making one removes those of the same place and name, but for the random part, that no process has locked.
    """

    def __init__(self, prefix: str, suffix: str = "", directory: str | Path | None = None) -> None:
        """``directory``: where it is made; default the machine's temporary folder."""
        directory = Path(directory or tempfile.gettempdir())
        name_pattern = re.compile(f"{re.escape(prefix)}[a-z0-9_]{{8}}{re.escape(suffix)}")  # as tempfile names them
        for path in directory.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}"):
            if name_pattern.fullmatch(path.name):
                _remove_if_unlocked(path, stat.S_ISDIR)
        self.path, self._lock = _make_locked(prefix, suffix, directory)

    def remove(self) -> None:
        """Remove the folder; no-op the second time."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _make_locked(prefix: str, suffix: str, directory: Path) -> tuple[Path, int | None]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=directory))
        with suppress(FileNotFoundError):  # another process's `remove_unlocked` was quicker
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # no locks in this file system: then no process removes it either
                fcntl.flock(lock_fd, fcntl.LOCK_SH)
            if path.exists():  # else that came before the lock
                return path, lock_fd
            os.close(lock_fd)


def remove_unlocked(directory: str | Path, pattern: str) -> list[Path]:
    """Remove the files and folders of these names that no process has locked, and return their paths; those of other
    users stay."""
    return sorted(path for path in Path(directory).glob(pattern) if _remove_if_unlocked(path))


def _is_file_or_folder(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _remove_if_unlocked(path: Path, fits: Callable[[int], bool] = _is_file_or_folder) -> bool:
    """Remove ``path`` if its mode ``fits``, it is this user's and no process has locked it. Returns whether it did."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block for ever
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or not fits(status.st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under the lock: a process that has just made it waits for its own, then sees that it is gone.
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def flush_folder(folder: Path) -> None:
    """Flush a folder and all below it to disk, so that a rename which follows survives a power cut whole."""
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
