"""The cache of `headway watch`: what is derived from runs, in the user's folder. It may be deleted at any time."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from headway.runtime.user_cache import cache_root

LIMIT_BYTES = 20 << 30
_NAME = "watch"


def cache_folder(run: Path) -> Path:
    """The cache of a run's folder, made where there is none. A new run in the place of a deleted one has another. Its
    modification time is that of its last use."""
    found = run.stat()
    name = hashlib.sha256(f"{run.resolve()}\0{found.st_dev}\0{found.st_ino}".encode("utf-8", "surrogateescape"))
    folder = cache_root(_NAME) / name.hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)
    return folder


def trim_cache(limit_bytes: int = LIMIT_BYTES) -> None:
    """Delete the caches that were used longest ago until the others take ``limit_bytes``; the last used one stays."""
    folders = [entry for entry in os.scandir(cache_root(_NAME)) if entry.is_dir(follow_symlinks=False)]
    total = 0
    for number, entry in enumerate(sorted(folders, key=lambda entry: -entry.stat().st_mtime)):
        total += sum(file.lstat().st_size for file in Path(entry).rglob("*"))
        if number and total > limit_bytes:
            shutil.rmtree(entry, ignore_errors=True)
