"""Folders that live as long as the test process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def scratch_folder(name: str) -> Path:
    """A new folder, removed when this process exits."""
    made = tempfile.mkdtemp(prefix=f"headway-{name}-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)
