"""Names of the files weights are published in, and their removal after a crash. Torch-free."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def stem(run_id: str) -> str:
    """File name stem of a run's slots. A run id that is no plain file name is replaced by its hash."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", run_id):
        run_id = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return f"headway-{run_id}"


def reap(run_id: str, *, directory: str | Path | None = None) -> list[str]:
    """Remove the slots that killed runs left behind: those of ``run_id``, and of other runs what no process holds.
    Returns their paths. The caller has the lock of ``run_id`` and no process of it is alive."""
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
    return sorted(removed)


def hold(descriptor: int) -> None:
    """Say that this process uses an open slot: until it is closed, and unmapped (a mapping has its own descriptor)."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def _removed_if_unheld(file: Path) -> bool:
    """Remove a slot unless somebody holds it; another user's can't be opened, and stays."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink(missing_ok=True)  # under the lock: whoever has just made it waits in `hold`, then sees it is gone
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
