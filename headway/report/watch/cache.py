"""The cache of `headway watch` keeps data derived from runs in the user's folder. It may be deleted at any time."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from headway.runtime.user_cache import cache_root

LIMIT_BYTES = 20 << 30
_NAME = "watch"


def cache_folder(run: Path) -> Path:
    """Return the cache of a run's folder; it is made where there is none. A new run under the path of a deleted one
    has another cache. The cache's modification time is the time of its last use."""
    stat = run.stat()
    name = hashlib.sha256(f"{run.resolve()}\0{stat.st_dev}\0{stat.st_ino}".encode("utf-8", "surrogateescape"))
    folder = cache_root(_NAME) / name.hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    return folder


def trim_cache(limit_bytes: int = LIMIT_BYTES) -> None:
    """Delete the least recently used caches until the others take at most ``limit_bytes``; the last used one stays."""
    folders = [entry for entry in os.scandir(cache_root(_NAME)) if entry.is_dir(follow_symlinks=False)]
    total = 0
    for number, entry in enumerate(sorted(folders, key=lambda entry: -entry.stat().st_mtime)):
        total += sum(file.lstat().st_size for file in Path(entry).rglob("*"))
        if number and total > limit_bytes:
            shutil.rmtree(entry, ignore_errors=True)
