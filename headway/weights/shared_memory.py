"""Versioned weights through shared memory: one writer, any number of readers, every read verified.

A slot is one mapped file: a header, a manifest and a flat payload. The publisher rotates over its slots and never
waits for a reader, so version v stays readable until v + slots is published. Readers copy first and verify after: a
race with the copy shows up as a wrong version or checksum, never as wrong weights. Each process that has a slot mapped
holds it (`leftovers.hold`): a slot that no process holds was left behind by a crash.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.slot_file import HEADER, MAGIC, PAGE, UNWRITTEN, default_folders, new_slot
from headway.weights.slots import hold, slot_stem

_ALIGNMENT = 64  # bytes to which every tensor is aligned: enough for vector loads and any dtype
_BLOCK = 1 << 18  # bytes copied, and then hashed, at a time
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64)}


class _Entry(msgspec.Struct, frozen=True):
    """The position of a tensor in the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    size: int  # bytes


@dataclass(frozen=True)
class _Layout:
    manifest: bytes
    entries: tuple[_Entry, ...]
    payload_start: int  # bytes from the start of the file; a multiple of the page size
    payload_size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> _Layout:
        entries: list[_Entry] = []
        offset = 0
        for name, tensor in tensors.items():
            stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            kind = str(stored).removeprefix("torch.")
            if kind not in _DTYPES:
                raise ConfigurationError(f"weights: {name} has dtype {kind}; publishable are {', '.join(_DTYPES)}")
            size = tensor.numel() * stored.itemsize
            entries.append(_Entry(name, kind, tuple(tensor.shape), offset, size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        manifest = msgspec.json.encode(entries)
        start = -(-(HEADER.size + len(manifest)) // PAGE) * PAGE
        return cls(manifest, tuple(entries), start, max(offset, _ALIGNMENT))

    @property
    def file_size(self) -> int:
        return self.payload_start + self.payload_size

    def views(self, payload: Tensor) -> dict[str, Tensor]:
        """Views of all tensors into a payload of bytes."""
        return {
            e.name: payload[e.offset : e.offset + e.size].view(_DTYPES[e.dtype]).view(e.shape) for e in self.entries
        }


class Publisher:
    """Publisher of versions in ``slots`` reused files, so that only the first round pays for new memory pages.

    ``directory``: where the files lie; default /dev/shm, or the temporary folder where that is missing or too small.
    ``dtype``: convert floating tensors while copying (a bfloat16 generator under a float32 trainer).
    """

    def __init__(
        self, run_id: str, slots: int = 3, *, directory: str | Path | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if slots < 2:
            raise ConfigurationError(f"weights: slots = {slots}: at least 2, or a reader always races the writer")
        self._stem = slot_stem(run_id)
        self._slots = slots
        self._dtype = dtype
        self._folders = [Path(directory)] if directory is not None else default_folders()
        self._open: dict[int, _Slot] = {}
        self._next = 0

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> PublishedWeights:
        """Copy ``tensors`` (any device) into the next slot. Raises ConfigurationError when no folder has the space."""
        if version < 0:
            raise ValueError(f"version = {version}: must not be negative")
        started = time.perf_counter()
        layout = _Layout.of(tensors, self._dtype)
        slot = self._slot(layout)
        slot.write_versions(UNWRITTEN, UNWRITTEN)
        with torch.no_grad():
            for name, view in slot.views.items():
                view.copy_(tensors[name])
        checksum = _checksum(version, layout.manifest, (slot.payload,))
        slot.write_versions(version, version)
        self._next = (self._next + 1) % self._slots
        return PublishedWeights(
            version=version,
            path=str(slot.path),
            checksum=checksum,
            size_bytes=layout.payload_size,
            publish_s=time.perf_counter() - started,
        )

    def _slot(self, layout: _Layout) -> _Slot:
        slot = self._open.get(self._next)
        if slot is not None and slot.layout == layout:
            return slot
        if slot is not None:
            slot.unlink()
        self._open[self._next] = slot = self._create(layout)
        return slot

    def _create(self, layout: _Layout) -> _Slot:
        refused: list[str] = []
        for folder in self._folders:
            try:
                return _Slot(folder / f"{self._stem}-{self._next}.weights", layout)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOTDIR):
                    raise
                refused.append(f"{folder}: {error.strerror}")
        raise ConfigurationError(
            f"weights: no space to publish {layout.file_size / 1e6:.1f} MB x {self._slots} slots "
            f"({'; '.join(refused)}); free or enlarge /dev/shm, or choose another directory"
        )

    def close(self) -> None:
        """Remove the files; readers that still map one keep what they have."""
        for slot in self._open.values():
            slot.unlink()
        self._open.clear()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """The mapped file that the publisher writes one version to."""

    def __init__(self, path: Path, layout: _Layout) -> None:
        self.path = path
        self.layout = layout
        self._map = new_slot(path, layout.file_size)
        self.write_versions(UNWRITTEN, UNWRITTEN)
        self._map[HEADER.size : HEADER.size + len(layout.manifest)] = layout.manifest
        self.payload = np.frombuffer(self._map, dtype=np.uint8, offset=layout.payload_start)
        self.views = layout.views(torch.from_numpy(self.payload))

    def write_versions(self, first: int, second: int) -> None:
        layout = self.layout
        HEADER.pack_into(self._map, 0, MAGIC, first, second, len(layout.manifest), layout.payload_size)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


class Subscriber:
    """Reader of published versions, into a private buffer that it reuses, or two in turn: see ``keep``."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}
        self._buffer = np.empty(0, dtype=np.uint8)
        self._views: tuple[bytes, dict[str, Tensor]] | None = None
        self._kept = (self._buffer, self._views)

    def fetch(self, published: PublishedWeights) -> dict[str, Tensor]:
        """Copy and verify the tensors of ``published``: views of a private buffer, valid until the next fetch.

        Raises WeightsCorrupt when the slot is gone, was overwritten before or while it was copied, or does not
        have the announced version and checksum; the remedy is to fetch a newer version.
        """
        source = self._map(published)
        if len(source) < HEADER.size:
            raise WeightsCorrupt(f"{published.path}: too short for a header")
        magic, version, _, manifest_size, payload_size = HEADER.unpack_from(source, 0)
        if magic != MAGIC:
            raise WeightsCorrupt(f"{published.path}: not a weights file")
        if version != published.version:
            raise WeightsCorrupt(_wrong_version(published, version))
        start = -(-(HEADER.size + manifest_size) // PAGE) * PAGE
        if payload_size != published.size_bytes or start + payload_size > len(source):
            raise WeightsCorrupt(f"{published.path}: {payload_size} bytes where {published.size_bytes} were announced")
        manifest = bytes(source[HEADER.size : HEADER.size + manifest_size])
        if len(self._buffer) != payload_size:
            self._buffer = _aligned(payload_size)
            self._views = None
        checksum = _checksum(version, manifest, self._copy_blocks(source, start))
        version_after = HEADER.unpack_from(source, 0)[1]
        if version_after != published.version:
            raise WeightsCorrupt(_wrong_version(published, version_after) + " (overwritten while it was read)")
        if checksum != published.checksum:
            raise WeightsCorrupt(f"{published.path}: version {version} does not have checksum {published.checksum}")
        if self._views is None or self._views[0] != manifest:
            entries = tuple(msgspec.json.decode(manifest, type=list[_Entry]))
            layout = _Layout(manifest, entries, start, payload_size)
            self._views = (manifest, layout.views(torch.from_numpy(self._buffer)))
        return dict(self._views[1])

    def keep(self) -> None:
        """Keep the last fetch's tensors valid until the next call of this: fetches fill another buffer meanwhile."""
        (self._buffer, self._views), self._kept = self._kept, (self._buffer, self._views)

    def forget(self) -> None:
        """Free what was fetched; mappings stay, for as long as a reader has one the publisher's death removes none."""
        self._buffer, self._views = np.empty(0, dtype=np.uint8), None
        self._kept = (self._buffer, self._views)
        for _, source in self._maps.values():
            source.madvise(mmap.MADV_DONTNEED)

    def _copy_blocks(self, source: mmap.mmap, start: int) -> Iterator[np.ndarray]:
        """Fill the buffer block by block; yield each block while it is still in the core's cache."""
        payload = np.frombuffer(source, dtype=np.uint8, count=len(self._buffer), offset=start)
        for first in range(0, len(payload), _BLOCK):
            block = self._buffer[first : first + _BLOCK]
            np.copyto(block, payload[first : first + _BLOCK])
            yield block

    def _map(self, published: PublishedWeights) -> mmap.mmap:
        """The mapping of the slot's present file; a restarted publisher replaces the file under the same name."""
        try:
            descriptor = os.open(published.path, os.O_RDONLY)
        except OSError as error:
            raise WeightsCorrupt(f"{published.path}: version {published.version} is gone: {error.strerror}") from None
        try:
            hold(descriptor)  # a reader too: should the publisher die, its last version must stay for a restart
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino, status.st_size)
            known = self._maps.get(published.path)
            if known is None or known[0] != identity:
                if status.st_size == 0:
                    raise WeightsCorrupt(f"{published.path}: empty")
                known = (identity, mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ))
                self._maps[published.path] = known
            return known[1]
        finally:
            os.close(descriptor)


def _aligned(size: int) -> np.ndarray:
    """A buffer of ``size`` bytes aligned like the slots, for the fastest reads."""
    memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size]


def _checksum(version: int, manifest: bytes, payload: Iterable[np.ndarray]) -> str:
    """Checksum of a version, its manifest and its payload, which comes in blocks."""

    state = xxhash.xxh3_128(version.to_bytes(8, "little"))
    state.update(manifest)
    for block in payload:
        state.update(block.data)
    return state.hexdigest()


def _wrong_version(published: PublishedWeights, actual: int) -> str:
    state = "is being overwritten" if actual == UNWRITTEN else f"holds version {actual}"
    return f"{published.path}: version {published.version} was announced, but the slot {state}"
