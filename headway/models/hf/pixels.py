"""Pixel arrays of prompts' pictures, stored once by content hash in the run's folder and read by engine and trainer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from headway.records.errors import BufferCorrupt
from headway.runtime.run_directory import write_atomically

Pixels = Mapping[str, NDArray[Any]]  # by the name under which the model's forward() takes it
FOLDER = "pixels"  # of a run's folder
_SUFFIX = ".safetensors"
CACHED = 32  # prompts whose arrays a process keeps in memory


class PixelStore:
    """Pixel arrays in a folder, with a file for each content hash. ``read(digest)`` caches the last CACHED prompts'."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self.read = lru_cache(CACHED)(self._read)

    def write(self, arrays: Pixels) -> str:
        """Store the arrays, or set their file's time to the present if they are stored. Returns their content hash, in
        hex. Raises HeadwayError on a full disk."""
        file_bytes = save(dict(sorted(arrays.items())))
        file = self._file(digest := _digest(file_bytes))
        try:
            if file.stat().st_size == len(file_bytes):
                os.utime(file)
                return digest
        except FileNotFoundError:  # or it was removed since: `remove` runs in another process
            self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, file_bytes)
        return digest

    def _read(self, digest: str) -> Pixels:
        """The read-only arrays with this hash. Raises BufferCorrupt if they are missing or damaged."""
        file = self._file(digest)
        try:
            file_bytes = file.read_bytes()
            if _digest(file_bytes) == digest:
                return load(file_bytes)
        except (OSError, SafetensorError) as error:
            raise BufferCorrupt(f"pixel arrays of a prompt can't be read: {file}: {error}") from None
        raise BufferCorrupt(f"pixel arrays of a prompt aren't what was stored: {file}")

    def stored(self) -> dict[str, int]:
        """The hashes of all stored arrays, each with its last write time in ns."""
        return {file.stem: file.stat().st_mtime_ns for file in self._folder.glob(f"[!.]*{_SUFFIX}")}

    def remove(self, digest: str, written: int) -> None:
        """Delete arrays unless they were written again after ``written``, a time of `stored`."""
        file = self._file(digest)
        if file.is_file() and file.stat().st_mtime_ns == written:
            file.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}{_SUFFIX}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
