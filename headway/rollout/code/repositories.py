"""The files of a task's repository: written in its metadata, in a directory, or in a tar of this machine."""

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
    """Return a task's files, from its ``files`` or ``repository``. Raises ValueError that says what is wrong, and
    OSError where it can't be read."""
    given, path = metadata.get("files"), metadata.get("repository")
    if isinstance(given, dict) == bool(path):
        raise ValueError("a task needs either 'files', a text for each path, or 'repository', a directory or tar")
    if path:
        return _read(str(path))
    return _checked({name: (text.encode(), 0o644) for name, text in (given or {}).items()})


@functools.lru_cache(maxsize=32)
def _read(path: str) -> Files:
    return _checked(_of_directory(Path(path)) if os.path.isdir(path) else _of_tar(path))


def _of_directory(folder: Path) -> Files:
    """Plain files; links are left out, and so are repositories' own books."""
    found: Files = {}
    for parent, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in (".git", "__pycache__"))
        for file in sorted(Path(parent, name) for name in files):
            if file.is_file() and not file.is_symlink():
                found[file.relative_to(folder).as_posix()] = (file.read_bytes(), _mode(file.stat().st_mode))
    return found


def _of_tar(path: str) -> Files:
    found: Files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                found[posixpath.normpath(member.name)] = (content.read(MOST_BYTES + 1), _mode(member.mode))
    return found


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
