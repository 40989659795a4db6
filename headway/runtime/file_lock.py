"""A lock file for one process at a time, which the kernel releases when its holder ends, also by a kill."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from headway.records.errors import ConfigurationError, RunLocked

_ATTEMPTS = 5  # `holder` takes the lock for an instant to see whether it is free, which doesn't count as use
_PAUSE_S = 0.01


class FileLock:
    """A ``flock`` on a file that names the process that holds it.

    Lifecycle: *free* -> ``acquire`` -> *held* -> ``release`` -> *free*. The kernel drops the lock when the process
    ends, so a killed one leaves nothing to clean up. The file stays: removing it would let a process that has just
    opened the old one and a process that makes a new one both hold "the" lock.
    """

    def __init__(self, path: Path, key: str, value: str | Path) -> None:
        """``path``: the lock file. ``key`` = ``value``: the setting it guards, which errors name."""
        self.path = path
        self._key = key
        self._value = str(value)
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, making file and folder if needed. Raises RunLocked naming the process that holds it."""
        if self._fd is not None:
            raise ValueError(f"{self.path} is already locked by this object")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"{self._key} = {self._value!r}: {error.strerror}") from None
        try:
            self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def _lock(self, fd: int) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S)  # real time, 40 ms at most: the lock is taken before there is a clock or a loop
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                continue
            except OSError as error:
                raise ConfigurationError(f"{self.path} can't be locked: {error.strerror}") from None
        holder_pid = self._recorded_pid()
        holder_name = f"process {holder_pid}" if holder_pid is not None else "another process"
        raise RunLocked(f"{self._value} is in use by {holder_name}: wait for it, or choose another {self._key}")

    def release(self) -> None:
        """Release the lock; no-op when it isn't held."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def holder(self) -> int | None:
        """Id of the process that holds the lock now; None when none does (or it hasn't written its id)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return self._recorded_pid()
        finally:
            os.close(fd)
        return None

    def _recorded_pid(self) -> int | None:
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
