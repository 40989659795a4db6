"""Creates the files in which weights are published, and reads their headers. Torch-free."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headway.weights.slots import SHARED_MEMORY, hold

MAGIC = b"HEADWAY2"
HEADER = struct.Struct("<8sqqQQQ")  # magic, version, version again; bytes of manifest, table and payload
UNWRITTEN = -1  # version of a slot that is being written
PAGE = 4096  # bytes to which the payload is aligned in the file


def version_in(slot: bytes | bytearray | memoryview) -> int:
    """The version that a slot holds; `UNWRITTEN` for one that is being written or is no slot."""
    if len(slot) < HEADER.size:
        return UNWRITTEN
    magic, version, repeated_version, *_ = HEADER.unpack_from(slot)
    return version if magic == MAGIC and version == repeated_version else UNWRITTEN


def table_start(manifest_size: int) -> int:
    """The first byte of the checksum's table, behind the header and a manifest of this size."""
    return -(-(HEADER.size + manifest_size) // 8) * 8


def new_file(path: Path) -> int:
    """Create a file held by this process and return its descriptor. Readers of an old one at ``path`` keep their
    mapping."""
    while True:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        hold(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another run's start removed it as a leftover before it was held


def new_slot(path: Path, size: int, used: Sequence[tuple[int, int]] = ()) -> mmap.mmap:
    """Create and map a file of ``size`` bytes, of which only the ranges in ``used`` get memory, if there are any.
    Raises OSError, with no file left, where the file system is full."""
    descriptor = new_file(path)
    try:
        os.ftruncate(descriptor, size)
        for first_byte, end_byte in used or [(0, size)]:  # a write to a page without memory could be a SIGBUS
            os.posix_fallocate(descriptor, first_byte, end_byte - first_byte)
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def map_slot(path: Path) -> mmap.mmap:
    """Map another process's slot, to write into it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        hold(descriptor)
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def default_folders() -> list[Path]:
    """The folders to make slots in: shared memory, then the temporary folder for where that is missing or too small."""
    temporary_folder = Path(tempfile.gettempdir())
    return [SHARED_MEMORY, temporary_folder] if os.access(SHARED_MEMORY, os.W_OK) else [temporary_folder]
