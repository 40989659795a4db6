"""Reads and writes files of a sandbox for its owner, in the first process. Standard library alone.

Commands may leave links, pipes, devices and leases at a path. These can't reach the owner, which opens no file itself,
nor block init: a file is opened without following links or waiting, and is read only if it is a regular one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from headway.sandbox.guest.wire import BODY_BYTES, CHUNK_BYTES

KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def read(path: str, max_bytes: int) -> Iterator[bytes]:
    """Yield a regular file in chunks. Raises OSError: ELOOP for a link, EINVAL for other types, EFBIG beyond the
    limit."""
    descriptor = os.open(path, os.O_RDONLY | OPEN)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EINVAL, "not a plain file")
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {max_bytes}")
        remaining_bytes = max_bytes
        while remaining_bytes > 0 and (chunk := os.read(descriptor, min(CHUNK_BYTES, remaining_bytes))):
            remaining_bytes -= len(chunk)
            yield chunk
    finally:
        os.close(descriptor)


def entries(path: str, max_entries: int) -> list[dict[str, Any]]:
    """Return a directory's entries, sorted by name. Raises OSError with EFBIG beyond the limit."""
    entry_infos: list[dict[str, Any]] = []
    with os.scandir(path) as scanned:
        for dir_entry in scanned:
            if len(entry_infos) == max_entries:
                raise OSError(errno.EFBIG, f"more than {max_entries} entries")
            kind, size_bytes = "other", 0
            with contextlib.suppress(OSError):
                status = dir_entry.stat(follow_symlinks=False)
                kind, size_bytes = KINDS.get(stat.S_IFMT(status.st_mode), "other"), status.st_size
            name = dir_entry.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            entry_infos.append({"name": name, "kind": kind, "size_bytes": size_bytes if kind == "file" else 0})
    return sorted(entry_infos, key=lambda info: info["name"])


def listing(path: str, max_entries: int) -> bytes:
    """Return a directory's `entries` as JSON for the body of an answer. Raises OSError with EFBIG if they don't fit."""
    encoded = json.dumps(entries(path, max_entries), ensure_ascii=False).encode()
    if len(encoded) > BODY_BYTES:
        raise OSError(errno.EFBIG, f"a list of {len(encoded)} bytes, more than {BODY_BYTES}")
    return encoded


class FileWriter:
    """Writes a file atomically: into a temporary file in the same folder, which is then renamed."""

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        folder, name = os.path.split(path)
        os.makedirs(folder or "/", exist_ok=True)
        self._temporary = os.path.join(folder, f".{name[:200]}.incoming")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600)
        self._mode = mode

    def add(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self.abandon()
            raise

    def finish(self) -> None:
        try:
            os.fchmod(self._descriptor, self._mode)
            os.rename(self._temporary, self._path)
        except OSError:
            self.abandon()
            raise
        os.close(self._descriptor)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        os.close(self._descriptor)
