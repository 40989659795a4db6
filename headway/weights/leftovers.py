"""Names of the files and folders in which weights are published, and their removal after a crash. Torch-free."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_EXCHANGE = ".exchange"  # suffix of folders from which a server reads weights


def stem(run_id: str) -> str:
    """File name stem of a run's slots. A run id that isn't a plain file name is replaced by its hash."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", run_id):
        run_id = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return f"headway-{run_id}"


def reap(run_id: str, *, directory: str | Path | None = None) -> list[str]:
    """Remove the slots that killed runs left behind: all of ``run_id``, and those of other runs that no process holds.
    Returns their paths. The caller must hold the lock of ``run_id``, whose processes must have ended."""
    folders = [Path(directory)] if directory is not None else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    own = re.compile(re.escape(stem(run_id)) + r"-\d+\.weights")
    removed: list[str] = []
    for folder in folders:
        for file in folder.glob("headway-*-*.weights"):
            if own.fullmatch(file.name):
                file.unlink(missing_ok=True)
            elif not _removed_if_unheld(file):
                continue
            removed.append(str(file))
        removed += reap_folders(folder)
    return sorted(removed)


def reap_folders(directory: str | Path) -> list[str]:
    """Remove the exchange folders in ``directory`` whose process was killed. Returns their paths."""
    return sorted(str(folder) for folder in Path(directory).glob(f"headway-*{_EXCHANGE}") if _removed_if_unheld(folder))


@contextmanager
def exchange_folder(directory: str | Path) -> Iterator[Path]:
    """A new folder of this process for weights that others read; removed at the end, or by ``reap_folders`` after a
    crash."""
    folder, descriptor = _held_folder(Path(directory))
    try:
        folder.chmod(0o755)  # the reader may be another user
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _held_folder(directory: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix="headway-", suffix=_EXCHANGE, dir=directory))
        with suppress(FileNotFoundError):  # reaped in the instant of its making
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            with suppress(OSError):  # no locks in this file system: nor does anybody reap there
                hold(descriptor)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def hold(descriptor: int) -> None:
    """Mark an open slot or folder as in use by this process, until it is closed and unmapped (a mapping has its own
    descriptor)."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def _removed_if_unheld(file: Path) -> bool:
    """Remove a slot or a folder unless a process holds it; another user's can't be opened, and stays."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under the lock: a process that has just made it waits in `hold`, then sees it is gone.
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
