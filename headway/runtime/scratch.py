"""Folders for a process's temporary files, removed when it ends, or by the next process where it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class ScratchFolder:
    """A folder of this process, protected by a lock that the kernel releases when the process ends.

    Making one removes those of the same prefix that no process has locked.
    """

    def __init__(self, prefix: str) -> None:
        reap(prefix)
        self.path, self._lock = _made(prefix)

    def remove(self) -> None:
        """Remove the folder; no-op the second time."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _made(prefix: str) -> tuple[Path, int | None]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # another process's `reap` was quicker
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():  # else that `reap` came before the lock
                return path, lock
            os.close(lock)


def reap(prefix: str) -> list[Path]:
    """Remove the folders of this prefix that no process has locked; other users' folders stay."""
    removed: list[Path] = []
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except OSError:
            continue
        finally:
            os.close(lock)
    return removed
