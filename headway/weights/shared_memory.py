"""Versioned weights through shared memory or a device's: one writer, any number of readers, every read verified.

A slot is one mapped file: a header, a manifest, the table of the checksum and a flat payload. The publisher rotates
over its slots, so version v stays readable until v + slots is published. Readers copy first and verify after: a race
with the copy shows up as a wrong version or checksum, never as wrong weights. Each process that has a slot mapped
holds it (`slots.hold`): a slot that no process holds was left behind by a crash.

With a `DeviceMemory` that others map, the payload stays there: the file ends with the table, and the record has the
memory's handle. A reader copies it under a lock of the file (`slots.SlotLock`), for which the next update of that slot
waits; the kernel ends the locks of dead processes, so that no dead reader holds up the publisher, and a dead
publisher is known as such.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.checksums import PassSeconds, differing_block, hash_blocks, hash_lanes, root_of
from headway.weights.device_memory import DeviceMemory, lane_sums
from headway.weights.layout import Layout
from headway.weights.slot_file import HEADER, MAGIC, UNWRITTEN, default_folders, new_slot, table_start
from headway.weights.slots import SlotLock, hold, slot_stem

log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes, of a reader's buffer: for the fastest reads
_Read = Callable[[int, int], bytes]  # of a file: from the first byte to before the last
_READERS_S = 5.0  # that an update waits for the readers of a slot in device memory, before it takes other memory


class Publisher:
    """Publisher of versions in ``slots`` reused files, so that only the first round pays for new memory pages.

    ``directory``: where the files lie; default /dev/shm, or the temporary folder where that is missing or too small.
    ``dtype``: convert floating tensors while copying (a bfloat16 generator under a float32 trainer).
    ``memory``: the device's in which the tensors are. With ``snapshots``, and space, it takes one, so that the copy to
    the host runs beside the device's next work; or, with ``exports`` and space, it has the payload of all slots.
    """

    def __init__(
        self,
        run_id: str,
        slots: int = 3,
        *,
        directory: str | Path | None = None,
        dtype: torch.dtype | None = None,
        memory: DeviceMemory | None = None,
        exports: bool = False,
        snapshots: bool = True,
    ) -> None:
        if slots < 2:
            raise ConfigurationError(f"weights: slots = {slots}: at least 2, or a reader always races the writer")
        self._stem = slot_stem(run_id)
        self._slots = slots
        self._dtype = dtype
        self._memory, self._exports, self._snapshots = memory, exports, snapshots and not exports
        self._folders = [Path(directory)] if directory is not None else default_folders()
        self._open: dict[int, _Slot] = {}
        self._next = 0

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> PublishedWeights:
        """Copy ``tensors`` (any device) into the next slot. Raises ConfigurationError when no folder has the space."""
        return self.begin(version, tensors).finish()

    def begin(
        self, version: int, tensors: Mapping[str, Tensor], complete: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Publication:
        """Begin to publish: ``tensors`` may change as soon as this returns. The publication must be finished, in any
        thread, before the next one begins. ``complete``: gathers one of the tensors if ranks divide them; it is called
        in their order."""
        if version < 0:
            raise ValueError(f"version = {version}: must not be negative")
        started_s = time.perf_counter()
        layout = Layout.of(tensors, self._dtype, "lanes" if self._exports else "xxh3")
        try:
            slot = self._slot(layout)
        except torch.OutOfMemoryError:  # a slot on the device stays until its turn to be replaced
            self._exports = False
            log.warning("no memory for version %d on the GPU: weights go through the host from now on", version)
            return self.begin(version, tensors)
        slot.write_versions(UNWRITTEN, UNWRITTEN)
        snapshot = None
        with suppress(torch.OutOfMemoryError):  # without space the tensors are copied to the slot now
            if self._memory is not None and self._snapshots:
                snapshot = self._memory.allocate(layout.payload_size)
        views = slot.views if snapshot is None else layout.views(snapshot)
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(complete(tensors[name]))
        work_context = nullcontext() if self._memory is None else self._memory.after_present_work()
        self._next = (self._next + 1) % self._slots
        return Publication(slot, version, snapshot, work_context, time.perf_counter() - started_s)

    def _slot(self, layout: Layout) -> _Slot:
        slot = self._open.get(self._next)
        if slot is not None and slot.layout == layout and slot.wait_for_readers(_READERS_S):
            return slot
        if slot is not None:
            self._open.pop(self._next).unlink()
        self._open[self._next] = slot = self._create(layout)
        return slot

    def _create(self, layout: Layout) -> _Slot:
        refusals: list[str] = []
        for folder in self._folders:
            try:
                return _Slot(folder / f"{self._stem}-{self._next}.weights", layout, self._memory, self._exports)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOTDIR):
                    raise
                refusals.append(f"{folder}: {error.strerror}")
        raise ConfigurationError(
            f"weights: no space to publish {layout.payload_size / 1e6:.1f} MB x {self._slots} slots "
            f"({'; '.join(refusals)}); free or enlarge /dev/shm, or choose another directory"
        )

    def close(self) -> None:
        """Remove the files, but not a successor's; readers that still map one keep what they have."""
        for slot in self._open.values():
            slot.unlink()
        self._open.clear()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Slot:
    """The mapped file that the publisher writes one version to, and its payload in the file or in device memory."""

    def __init__(self, path: Path, layout: Layout, memory: DeviceMemory | None, exports: bool) -> None:
        self.path, self.layout, self.handle = path, layout, ""
        self._lock: SlotLock | None = None
        device_payload = memory.allocate(layout.payload_size) if memory is not None and exports else None
        self._map = new_slot(path, layout.payload_start + (0 if exports else layout.payload_size))
        self._inode = path.stat().st_ino
        self.write_versions(UNWRITTEN, UNWRITTEN)
        self._map[HEADER.size : HEADER.size + len(layout.manifest)] = layout.manifest
        self.table = np.frombuffer(self._map, np.uint64, len(layout.blocks), layout.table_start)
        if memory is not None and device_payload is not None:
            self._lock = SlotLock(path, owner=True)
            self.payload, self.handle = device_payload, memory.export(device_payload)
            self.wait_for_readers(_READERS_S)  # there are none; none may come before it is written
        else:
            payload_array = np.frombuffer(self._map, dtype=np.uint8, offset=layout.payload_start)
            if memory is not None:
                memory.pin(payload_array)
            self.payload = torch.from_numpy(payload_array)
        self.views = layout.views(self.payload)

    def write_versions(self, first: int, second: int) -> None:
        layout = self.layout
        section_sizes = len(layout.manifest), 8 * len(layout.blocks), layout.payload_size
        HEADER.pack_into(self._map, 0, MAGIC, first, second, *section_sizes)

    def wait_for_readers(self, patience_s: float) -> bool:
        """Wait for the readers of device memory, and keep others out until `admit_readers`; False if one stays. Readers
        of a file aren't waited for: they notice a race."""
        return self._lock is None or self._lock.acquire(exclusive=True, patience_s=patience_s)

    def admit_readers(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def unlink(self) -> None:
        if self.path.exists() and self.path.stat().st_ino == self._inode:  # else it is gone, or a successor's
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()


@dataclass
class Publication:
    """A version that is being published: its tensors are copied, its checksum is not made. Readers find no version in
    the slot before `finish`; a publication that its process doesn't finish is never one."""

    slot: _Slot
    version: int
    snapshot: Tensor | None  # of the payload, in device memory until `finish`; None: it is in the slot
    beside: AbstractContextManager[None]  # of the work that follows the snapshot
    snapshot_s: float

    def finish(self) -> PublishedWeights:
        """Copy the snapshot, make the table and its root, and let readers in."""
        slot, layout, started_s = self.slot, self.slot.layout, time.perf_counter()
        with torch.no_grad(), self.beside:
            if self.snapshot is not None:
                slot.payload.copy_(self.snapshot)
            copied_at_s = time.perf_counter()
            if slot.handle:
                slot.table[:] = hash_lanes(lane_sums(slot.payload), layout.blocks)
            else:
                slot.table[:] = hash_blocks(slot.payload.numpy(), layout.blocks)[0]
        self.snapshot = None  # its memory is the next step's
        checksum = root_of(self.version, layout.manifest, slot.table)
        slot.write_versions(self.version, self.version)
        slot.admit_readers()
        finished_s = time.perf_counter()
        return PublishedWeights(
            version=self.version,
            path=str(slot.path),
            checksum=checksum,
            size_bytes=layout.payload_size,
            publish_s=self.snapshot_s + finished_s - started_s,
            handle=slot.handle,
            snapshot_s=self.snapshot_s,
            hash_s=finished_s - copied_at_s,
        )


class Subscriber:
    """Reader of published versions, into a private buffer that it reuses, or two in turn: see ``keep``.

    ``memory``: of the reader's device, from which it maps that of a publisher. Its buffer is then in that memory; the
    buffer of a version from a file is host memory, pinned for the device.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        self._memory = memory
        self._maps: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}
        self._sources: dict[str, tuple[str, Tensor]] = {}  # of publishers' device memory: by path, its handle
        self._buffer, self._in_device = torch.empty(0, dtype=torch.uint8), False
        self._views: tuple[bytes, dict[str, Tensor]] | None = None
        self._kept = (self._buffer, self._in_device, self._views)
        self.spent = PassSeconds()  # of the last fetch

    def fetch(
        self,
        published: PublishedWeights,
        on_progress: Callable[[str, Tensor, int], None] = lambda name, tensor, size: None,
    ) -> dict[str, Tensor]:
        """Copy and verify the tensors of ``published``: views of a private buffer, valid until the next fetch.
        ``on_progress(name, tensor, size)``: the first ``size`` bytes of a tensor are copied, not yet verified (see
        `checksums.hash_blocks`); from a file alone.

        Raises WeightsCorrupt when the slot is gone, was overwritten before or while it was copied, or does not
        have the announced version and checksum; the remedy is to fetch a newer version.
        """
        with self._opened(published) as (read, file_bytes):
            layout, expected_table = _read_head(read, published)
            if not published.handle and layout.payload_start + layout.payload_size > file_bytes:
                raise WeightsCorrupt(f"{published.path}: {file_bytes} bytes, which is too short")
            names = [entry.name for entry in layout.entries]
            tensors = self._tensors(layout, in_device=bool(published.handle))
            copied_table = self._copy(published, layout, lambda i, size: on_progress(names[i], tensors[names[i]], size))
            final_version = HEADER.unpack(read(0, HEADER.size))[1]
        if final_version != published.version:
            raise WeightsCorrupt(_wrong_version(published, final_version) + " (overwritten while it was read)")
        if (damaged_block := differing_block(copied_table, expected_table, layout.blocks)) is not None:
            raise WeightsCorrupt(_other_checksum(published, f": {names[damaged_block.tensor]} differs"))
        return dict(tensors)

    def keep(self) -> None:
        """Keep the last fetch's tensors valid until the next call of this: fetches fill another buffer meanwhile."""
        latest = self._buffer, self._in_device, self._views
        (self._buffer, self._in_device, self._views), self._kept = self._kept, latest

    def forget(self) -> None:
        """Free what was fetched; mappings stay, for as long as a reader has one the publisher's death removes none."""
        self._buffer, self._views = torch.empty(0, dtype=torch.uint8), None
        self._kept = (self._buffer, self._in_device, self._views)
        self._sources.clear()
        for _, file_map in self._maps.values():
            file_map.madvise(mmap.MADV_DONTNEED)

    def _tensors(self, layout: Layout, *, in_device: bool) -> dict[str, Tensor]:
        """The views of the private buffer, which is made, in device memory or the host's, unless it fits."""
        if len(self._buffer) != layout.payload_size or self._in_device != in_device:
            self._in_device, self._views = in_device, None
            if in_device and self._memory is not None:
                self._buffer = self._memory.allocate(layout.payload_size)
            else:
                host_buffer = _aligned(layout.payload_size)
                if self._memory is not None:
                    self._memory.pin(host_buffer)
                self._buffer = torch.from_numpy(host_buffer)
        if self._views is None or self._views[0] != layout.manifest:
            self._views = (layout.manifest, layout.views(self._buffer))
        return self._views[1]

    def _copy(self, published: PublishedWeights, layout: Layout, on_progress: Callable[[int, int], None]) -> np.ndarray:
        """Fill the buffer; returns its table."""
        if not published.handle:
            file_map = self._maps[published.path][1]
            source_bytes = np.frombuffer(file_map, np.uint8, layout.payload_size, layout.payload_start)
            table, self.spent = hash_blocks(self._buffer.numpy(), layout.blocks, source_bytes, on_progress)
            return table
        assert self._memory is not None
        started_s = time.perf_counter()
        with self._memory.after_present_work():
            self._buffer.copy_(self._sources[published.path][1])
        copied_at_s = time.perf_counter()
        with self._memory.after_present_work():
            table = hash_lanes(lane_sums(self._buffer), layout.blocks)
        self.spent = PassSeconds(copied_at_s - started_s, time.perf_counter() - copied_at_s)
        return table

    @contextmanager
    def _opened(self, published: PublishedWeights) -> Iterator[tuple[_Read, int]]:
        """Yield the bytes of the slot's file and their count; a slot of device memory is mapped, and locked."""
        if not published.handle:
            file_map = self._map(published)
            yield lambda first, last: file_map[first:last], len(file_map)
            return
        if self._memory is None:
            raise WeightsCorrupt(f"{published.path}: version {published.version} is in a GPU's memory, not in the file")
        try:
            lock = SlotLock(published.path)
        except OSError as error:
            raise WeightsCorrupt(_gone(published, error)) from None
        with closing(lock):
            if not lock.acquire(exclusive=False):
                raise WeightsCorrupt(_wrong_version(published, UNWRITTEN))
            if not lock.owner_lives():
                raise WeightsCorrupt(
                    f"{published.path}: version {published.version} went with its publisher's process; its successor "
                    "publishes it again"
                )
            cached_source = self._sources.get(published.path)
            if cached_source is None or cached_source[0] != published.handle:
                self._sources.pop(published.path, None)
                self._sources[published.path] = published.handle, self._memory.map(published.handle)
            yield lock.read, lock.size

    def _map(self, published: PublishedWeights) -> mmap.mmap:
        """The mapping of the slot's present file; a restarted publisher replaces the file under the same name."""
        try:
            descriptor = os.open(published.path, os.O_RDONLY)
        except OSError as error:
            raise WeightsCorrupt(_gone(published, error)) from None
        try:
            hold(descriptor)  # a reader too: should the publisher die, its last version must stay for a restart
            file_status = os.fstat(descriptor)
            file_identity = (file_status.st_dev, file_status.st_ino, file_status.st_size)
            cached_map = self._maps.get(published.path)
            if cached_map is None or cached_map[0] != file_identity:
                if file_status.st_size == 0:
                    raise WeightsCorrupt(f"{published.path}: empty")
                cached_map = (file_identity, mmap.mmap(descriptor, file_status.st_size, access=mmap.ACCESS_READ))
                self._maps[published.path] = cached_map
            return cached_map[1]
        finally:
            os.close(descriptor)


def _read_head(read: _Read, published: PublishedWeights) -> tuple[Layout, np.ndarray]:
    """Read layout and table of a slot, which are those of the announced checksum."""
    if len(header := read(0, HEADER.size)) < HEADER.size:
        raise WeightsCorrupt(f"{published.path}: too short for a header")
    magic, version, _, manifest_size, table_size, payload_size = HEADER.unpack(header)
    if magic != MAGIC:
        raise WeightsCorrupt(f"{published.path}: not a weights file")
    if version != published.version:
        raise WeightsCorrupt(_wrong_version(published, version))
    if payload_size != published.size_bytes:
        raise WeightsCorrupt(f"{published.path}: {payload_size} bytes where {published.size_bytes} were announced")
    manifest = read(HEADER.size, HEADER.size + manifest_size)
    table_offset = table_start(manifest_size)
    table = np.frombuffer(read(table_offset, table_offset + table_size // 8 * 8), np.uint64)
    if root_of(version, manifest, table) != published.checksum:
        raise WeightsCorrupt(_other_checksum(published, ""))
    return Layout.read(manifest, payload_size), table


def _aligned(size: int) -> np.ndarray:
    """A buffer of ``size`` bytes aligned like the slots, for the fastest reads."""
    padded_buffer = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    first_byte = -padded_buffer.ctypes.data % _ALIGNMENT
    return padded_buffer[first_byte : first_byte + size]


def _gone(published: PublishedWeights, error: OSError) -> str:
    return f"{published.path}: version {published.version} is gone: {error.strerror}"


def _other_checksum(published: PublishedWeights, detail: str) -> str:
    return f"{published.path}: version {published.version} does not have checksum {published.checksum}{detail}"


def _wrong_version(published: PublishedWeights, actual: int) -> str:
    state_text = "is being overwritten" if actual == UNWRITTEN else f"holds version {actual}"
    return f"{published.path}: version {published.version} was announced, but the slot {state_text}"
