"""The cache of `headway watch`: what is derived from runs, in the user's folder. It may be deleted at any time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LIMIT_BYTES = 20 << 30
_NAME = ("headway", "watch")


def cache_root() -> Path:
    """The folder of all caches, readable by its user alone: $XDG_CACHE_HOME or ~/.cache; where that can't be written, a
    temporary one."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for parent in (Path(home), Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"):
        root = parent.joinpath(*_NAME)
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if root.stat().st_uid == os.getuid() and os.access(root, os.W_OK):
                return root
    return Path(tempfile.mkdtemp(prefix="headway-watch-"))


def cache_folder(run: Path) -> Path:
    """The cache of a run's folder, made where there is none. A new run in the place of a deleted one has another. Its
    modification time is that of its last use."""
    found = run.stat()
    name = hashlib.sha256(f"{run.resolve()}\0{found.st_dev}\0{found.st_ino}".encode("utf-8", "surrogateescape"))
    folder = cache_root() / name.hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    return folder


def write_cached(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` make a file of a cache, whole, by rename: of two watchers the later one wins. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def trim_cache(limit_bytes: int = LIMIT_BYTES) -> None:
    """Delete the caches that were used longest ago until the others take ``limit_bytes``; the last used one stays."""
    folders = [entry for entry in os.scandir(cache_root()) if entry.is_dir(follow_symlinks=False)]
    total = 0
    for number, entry in enumerate(sorted(folders, key=lambda entry: -entry.stat().st_mtime)):
        total += sum(file.lstat().st_size for file in Path(entry).rglob("*"))
        if number and total > limit_bytes:
            shutil.rmtree(entry, ignore_errors=True)
