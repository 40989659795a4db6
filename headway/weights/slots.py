"""Names the files and folders in which weights are published, and removes them after a crash. Torch-free."""

from __future__ import annotations

import fcntl
import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.runtime.scratch import ScratchFolder, remove_unlocked

SHARED_MEMORY = Path("/dev/shm")
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
    run_slot = re.compile(re.escape(slot_stem(run_id)) + r"-\d+\.weights")
    removed: list[str] = []
    for folder in folders:
        for file in folder.glob("headway-*.weights"):
            if run_slot.fullmatch(file.name):
                file.unlink(missing_ok=True)
                removed.append(str(file))
        removed += map(str, remove_unlocked(folder, "headway-*-*.weights"))
        removed += reap_folders(folder)
    return sorted(removed)


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
