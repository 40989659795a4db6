"""The files of a task's repository, from its metadata, or from a directory or tar on this machine."""

from __future__ import annotations

import functools
import os
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a repository
MOST_FILES = 5000

Files = dict[str, tuple[bytes, int]]  # content and mode, by path


def files_of(metadata: Mapping[str, Any]) -> Files:
    """Return a task's files, from its ``files`` or ``repository``. Raises ValueError for invalid metadata or files, and
    OSError for a repository that can't be read."""
    texts_by_path, path = metadata.get("files"), metadata.get("repository")
    if isinstance(texts_by_path, dict) == bool(path):
        raise ValueError("a task needs either 'files', a text for each path, or 'repository', a directory or tar")
    if path:
        return _read(str(path))
    return _checked({name: (text.encode(), 0o644) for name, text in (texts_by_path or {}).items()})


@functools.lru_cache(maxsize=32)
def _read(path: str) -> Files:
    return _checked(_of_directory(Path(path)) if os.path.isdir(path) else _of_tar(path))


def _of_directory(folder: Path) -> Files:
    """Read the plain files of a directory, without links, ``.git`` and ``__pycache__``."""
    files: Files = {}
    for parent, folder_names, file_names in os.walk(folder):
        folder_names[:] = sorted(name for name in folder_names if name not in (".git", "__pycache__"))
        for file in sorted(Path(parent, name) for name in file_names):
            if file.is_file() and not file.is_symlink():
                files[file.relative_to(folder).as_posix()] = (file.read_bytes(), _mode(file.stat().st_mode))
    return files


def _of_tar(path: str) -> Files:
    files: Files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (stream := archive.extractfile(member)) is not None:
                files[posixpath.normpath(member.name)] = (stream.read(MOST_BYTES + 1), _mode(member.mode))
    return files


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def _checked(files: Files) -> Files:
    for path in files:
        if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ValueError(f"a repository's file can't be at {path!r}: paths are relative to it, and stay in it")
    size = sum(len(content) for content, _ in files.values())
    if not files or len(files) > MOST_FILES or size > MOST_BYTES:
        raise ValueError(f"a repository of {len(files)} files, {size} bytes: valid: 1 to {MOST_FILES}, {MOST_BYTES}")
    return files
