"""Folders for a process's passing files: gone with it, and where it was killed, with the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class ScratchFolder:
    """A folder of this process's own, held by a lock that ends with it however it ends.

    Making one removes those of the same prefix that nobody holds.
    """

    def __init__(self, prefix: str) -> None:
        reap(prefix)
        self.path, self._lock = _made(prefix)

    def remove(self) -> None:
        """It goes; no-op the second time."""
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
            if path.exists():  # else it came before the lock
                return path, lock
            os.close(lock)


def reap(prefix: str) -> list[Path]:
    """Remove the folders of this prefix that no process holds; another user's can't be opened, and stay."""
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
