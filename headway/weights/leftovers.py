"""Names of the files weights are published in, and their removal after a crash. Torch-free."""

from __future__ import annotations

import hashlib
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
    """Remove the slots that a killed trainer left behind; returns their paths. The caller holds the run's lock and
    no process of the run is alive."""
    folders = [Path(directory)] if directory is not None else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    pattern = re.compile(re.escape(stem(run_id)) + r"-\d+\.weights")
    removed: list[str] = []
    for folder in folders:
        for file in folder.iterdir() if folder.is_dir() else ():
            if pattern.fullmatch(file.name):
                file.unlink(missing_ok=True)
                removed.append(str(file))
    return sorted(removed)
