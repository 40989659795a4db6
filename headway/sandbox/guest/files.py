"""The files of a sandbox, as its first process reads and writes them for its owner. Standard library alone.

Links, pipes, devices and leases that commands have left at a path can't reach the owner, who opens nothing himself;
here they can't make init wait: a file is opened without following or waiting, and is read only if it is a plain one.
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
    """Read a plain file in chunks. Raises OSError: ELOOP for a link, EINVAL for no file, EFBIG beyond the limit."""
    descriptor = os.open(path, os.O_RDONLY | OPEN)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:
            raise OSError(errno.EINVAL, "not a plain file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, more than {max_bytes}")
        left = max_bytes
        while left > 0 and (data := os.read(descriptor, min(CHUNK_BYTES, left))):
            left -= len(data)
            yield data
    finally:
        os.close(descriptor)


def entries(path: str, max_entries: int) -> list[dict[str, Any]]:
    """A directory, sorted by name. EFBIG beyond the limit."""
    found: list[dict[str, Any]] = []
    with os.scandir(path) as listing:
        for entry in listing:
            if len(found) == max_entries:
                raise OSError(errno.EFBIG, f"more than {max_entries} entries")
            kind, size = "other", 0
            with contextlib.suppress(OSError):
                seen = entry.stat(follow_symlinks=False)
                kind, size = KINDS.get(stat.S_IFMT(seen.st_mode), "other"), seen.st_size
            name = entry.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            found.append({"name": name, "kind": kind, "size_bytes": size if kind == "file" else 0})
    return sorted(found, key=lambda one: one["name"])


def listing(path: str, max_entries: int) -> bytes:
    """A directory's `entries` as JSON, for the body of an answer. EFBIG where they don't fit into it."""
    encoded = json.dumps(entries(path, max_entries), ensure_ascii=False).encode()
    if len(encoded) > BODY_BYTES:
        raise OSError(errno.EFBIG, f"a list of {len(encoded)} bytes, more than {BODY_BYTES}")
    return encoded


class Writing:
    """A file being written: made beside its place and renamed to it, so that it appears whole or not at all."""

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        folder, name = os.path.split(path)
        os.makedirs(folder or "/", exist_ok=True)
        self._beside = os.path.join(folder, f".{name[:200]}.incoming")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._beside)
        self._descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600)
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
            os.rename(self._beside, self._path)
        except OSError:
            self.abandon()
            raise
        os.close(self._descriptor)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._beside)
        os.close(self._descriptor)
