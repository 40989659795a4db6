"""Files of a node that workers read by path: comparison with the orchestrator's, and a cache for missing folders.

The cache is addressed by content: a folder is kept under the digest of all its names and bytes, so that a second run
finds it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.runtime.file_systems import network_file_system
from headway.runtime.imports import require_module
from headway.runtime.scratch import ScratchFolder

if TYPE_CHECKING:
    from headway.runtime.child import WorkerContext

_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16
_BLOCK_BYTES = 8 << 20
PART_BYTES = 16 << 20
_LARGEST_HEADER_BYTES = 100 << 20  # of a safetensors file, as its format says


def file_digests(folder: Path, *, deep: bool = False) -> dict[str, str]:
    """Size and digest of each file below ``folder``, by its name there: of its first bytes, its safetensors header and
    samples; ``deep``: of every byte. Raises OSError."""
    digests: dict[str, str] = {}
    for name in file_names(folder):
        path = folder / name
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            digest = _full_digest(file) if deep else _sampled_digest(file, size_bytes, path.suffix == ".safetensors")
        digests[name] = f"{size_bytes} bytes, {digest}"
    return digests


def file_names(folder: Path) -> list[str]:
    """Names of all files below ``folder``, relative to it."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


async def file_parts(path: Path) -> AsyncIterator[pickle.PickleBuffer]:
    """A file in parts of `PART_BYTES`, read in a thread; for calls of a worker, which gets a buffer for each without a
    copy here. An empty file is one empty part. Raises OSError."""
    offset, byte_count = 0, PART_BYTES
    while byte_count == PART_BYTES:
        part = await asyncio.to_thread(_part, path, offset)
        yield pickle.PickleBuffer(part)
        byte_count = len(part)
        offset += byte_count


def _part(path: Path, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def folder_digest(deep: dict[str, str]) -> str:
    """The digest of a folder, from the deep digests of its files."""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{name}: {digest}" for name, digest in sorted(deep.items())).encode())


def _full_digest(file: BinaryIO) -> str:
    hasher = xxhash.xxh3_128()
    while block := file.read(_BLOCK_BYTES):
        hasher.update(block)
    return hasher.hexdigest()


def _sampled_digest(file: BinaryIO, size: int, safetensors: bool) -> str:
    hasher = xxhash.xxh3_128(file.read(_HEAD_BYTES))
    if safetensors:
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        hasher.update(file.read(min(header_bytes, _LARGEST_HEADER_BYTES)))
    for index in range(_SAMPLES):
        file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
        hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()


class FilesService:
    """The worker object that checks a node's files, and keeps copies of folders that the node lacks."""

    def __init__(self, context: WorkerContext, *, cache: str = "") -> None:
        """``cache``: folder of the copies; default: ``headway`` in the user's cache folder."""
        cache_home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self._cache = Path(cache or Path(cache_home, "headway"))
        self._partial: ScratchFolder | None = None

    def digests(self, folder: str, deep: bool = False) -> dict[str, str] | None:
        """`file_digests` of ``folder``; None where there is none."""
        return file_digests(Path(folder), deep=deep) if Path(folder).is_dir() else None

    def problems(self, modules: dict[str, str], marker: str) -> dict[str, str]:
        """Return by key why a user's module of ``modules`` (by its key) isn't found here, and for ``run.directory`` why
        ``marker``, a file of the orchestrator in it, isn't found or its folder not writable; "": it isn't checked."""
        problem_by_key: dict[str, str] = {}
        for key, name in modules.items():
            try:
                require_module(name, key, ())
            except ConfigurationError as error:
                problem_by_key[key] = str(error)
        folder = Path(marker).parent
        if marker and not (Path(marker).is_file() and os.access(folder, os.W_OK)):
            problem_by_key["run.directory"] = (
                f"{folder} isn't the orchestrator's or can't be written to, as a trainer there must"
            )
        return problem_by_key

    @staticmethod
    def copy_problem(folder: str) -> str:
        """Return why the copy of the accounting can't be kept in ``folder`` of this machine; "" where it can."""
        path = Path(folder).absolute()
        ancestor = next(parent for parent in (path, *path.parents) if parent.exists())
        if not (ancestor.is_dir() and os.access(ancestor, os.W_OK)):
            return f"{ancestor} is no folder that can be written to"
        fs_type = network_file_system(path)
        return f"{folder} is on a network file system ({fs_type}), where SQLite's log isn't safe" if fs_type else ""

    def copy_of(self, digest: str) -> str:
        """Path of the copy with this digest; empty: there is none."""
        path = self._cache / digest
        return str(path) if path.is_dir() else ""

    def begin(self, digest: str) -> None:
        """Begin a copy, and remove an unfinished one of a killed sender. Raises OSError."""
        self._cache.mkdir(parents=True, exist_ok=True)
        self.close()
        self._partial = ScratchFolder(f"partial-{digest}-", directory=self._cache)

    def store(self, name: str, part: bytes | memoryview) -> None:
        """Append to a file of the copy. Raises OSError when the disk is full; the copy is then removed."""
        relative_path = PurePosixPath(name)
        if self._partial is None or relative_path.is_absolute() or ".." in relative_path.parts:
            raise ConfigurationError(f"no copy was started, or {name!r} lies outside it")
        path = self._partial.path / relative_path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(part)
        except OSError:
            self.close()
            raise

    def finish(self, digest: str) -> str:
        """Verify the copy that was stored, and keep it; returns its path. Raises CheckpointCorrupt."""
        if self._partial is None:
            raise ConfigurationError("no copy was started")
        received_digest = folder_digest(file_digests(self._partial.path, deep=True))
        if received_digest != digest:
            self.close()
            raise CheckpointCorrupt(f"the copy has digest {received_digest} where {digest} was sent")
        path = self._cache / digest
        if not path.is_dir():  # else another sender was quicker
            self._partial.path.chmod(0o755)
            self._partial.path.rename(path)
        self.close()
        return str(path)

    def close(self) -> None:
        """Remove an unfinished copy."""
        if self._partial is not None:
            self._partial.remove()
            self._partial = None
