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
    path_hash = hashlib.sha256(f"{run.resolve()}\0{stat.st_dev}\0{stat.st_ino}".encode("utf-8", "surrogateescape"))
    folder = cache_root(_NAME) / path_hash.hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    return folder


def trim_cache(limit_bytes: int = LIMIT_BYTES) -> None:
    """Delete the least recently used caches until the others take at most ``limit_bytes``; the last used one stays."""
    folders = [folder for folder in os.scandir(cache_root(_NAME)) if folder.is_dir(follow_symlinks=False)]
    total_bytes = 0
    for number, folder in enumerate(sorted(folders, key=lambda entry: -entry.stat().st_mtime)):
        total_bytes += sum(file.lstat().st_size for file in Path(folder).rglob("*"))
        if number and total_bytes > limit_bytes:
            shutil.rmtree(folder, ignore_errors=True)
