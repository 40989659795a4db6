"""Caches in the user's folder, of files that can be derived again. They may be deleted at any time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def cache_root(name: str) -> Path:
    """The folder of the caches called ``name``, readable by its user alone, in $XDG_CACHE_HOME or ~/.cache; where that
    can't be written, a temporary one."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for parent in (Path(cache_home), Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"):
        root = parent.joinpath("headway", name)
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid == os.getuid() and os.access(root, os.W_OK):
                return root
    return Path(tempfile.mkdtemp(prefix=f"headway-{name}-"))


def write_cached(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a cache's file atomically, by rename: of two processes the later one wins. Raises OSError."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary_path.open("wb") as file:
            write(file)
        temporary_path.replace(path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise
