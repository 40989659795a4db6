"""Versioned weights through shared memory or a device's: one publisher, any number of readers, every read verified.

A slot is one mapped file: a header, a manifest, the table of the checksum and a flat payload. The publisher rotates
over its slots, so version v stays readable until v + slots is published. Readers copy first and verify after: a race
with the copy shows up as a wrong version or checksum, never as wrong weights. Or they verify a slot and use it where it
is, under a lock of the file (`slots.SlotLock`), for which the next update of that slot waits. Each process that has a
slot mapped holds it (`slots.hold`): a slot that no process holds was left behind by a crash.

Ranks that divide a model publish together (`writers.Writers`): the first of each node makes the file, and all write
their rows into it.

With a `DeviceMemory` that others map, the payload stays there: the file ends with the table, and the record has the
memory's handle. A reader copies it under such a lock. The kernel ends the locks of dead processes, so that no dead
reader holds up the publisher, and a dead publisher is known as such.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.checksums import PassSeconds, differing_block, hash_blocks, hash_lanes
from headway.weights.delta_archive import DeltaArchive
from headway.weights.delta_chain import DeltaChain
from headway.weights.deltas import chain_to
from headway.weights.device_memory import DeviceMemory, lane_sums
from headway.weights.division import Extent, PayloadDivision
from headway.weights.layout import Layout, TensorRows
from headway.weights.publication import Publication, Slot
from headway.weights.slot_file import HEADER, UNWRITTEN, default_folders
from headway.weights.slot_heads import Read, gone, other_checksum, read_head, wrong_version
from headway.weights.slots import SlotLock, hold, slot_stem
from headway.weights.staging import ChangedValues, StagingBuffer
from headway.weights.writers import OneWriter, Writers

log = logging.getLogger(__name__)
_READERS_S = 5.0  # that an update waits for the locks of a slot's readers, before it takes other memory


class Publisher:
    """Publisher of versions in ``slots`` reused files, so that only the first round pays for new memory pages.

    ``directory``: where the files lie; default /dev/shm, or the temporary folder where that is missing or too small.
    ``dtype``: convert floating tensors while copying (a bfloat16 generator under a float32 trainer).
    ``memory``: the device's in which the tensors are. With ``snapshots``, and space, it takes one, so that the copy to
    the host runs beside the device's next work; or, with ``exports`` and space, it has the payload of all slots.
    ``writers``: ranks that publish together, with this one among them; None: it publishes alone.
    ``whole_every``: each version has a delta from the one before it (see `DeltaChain`), but so many, the first of all;
    1: none has. A version that stays in device memory has none. ``archive``: keeps deltas; of all writers, or none.
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
        writers: Writers | None = None,
        whole_every: int = 1,
        archive: DeltaArchive | None = None,
    ) -> None:
        if slots < 2:
            raise ConfigurationError(f"weights: slots = {slots}: at least 2, or a reader always races the writer")
        self._stem = slot_stem(run_id)
        self._slots = slots
        self._dtype = dtype
        self._memory, self._exports, self._snapshots = memory, exports, snapshots and not exports
        self._folders = [Path(directory)] if directory is not None else default_folders()
        self._writers: Writers = writers or OneWriter()
        self._chain = (
            DeltaChain(self._stem, whole_every, self._writers, archive) if whole_every > 1 or archive else None
        )
        self._division: tuple[bytes, list[Extent], PayloadDivision] | None = None  # with the layout's manifest
        self._open: dict[int, Slot] = {}
        self._next = 0

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> PublishedWeights:
        """Copy ``tensors`` (any device) into the next slot. Raises ConfigurationError when no folder has the space."""
        return self.begin(version, tensors).finish()

    def begin(self, version: int, tensors: Mapping[str, Tensor]) -> Publication:
        """Begin to publish: ``tensors`` may change as soon as this returns. The publication must be finished, in any
        thread, before the next one begins."""
        return self.begin_rows(version, {name: TensorRows.all_of(tensor) for name, tensor in tensors.items()})

    def begin_rows(self, version: int, rows: Mapping[str, TensorRows]) -> Publication:
        """Begin to publish as `begin` does, the rows that this writer has of each tensor. A call of all writers, whose
        tensors have equal names and shapes. Raises ValueError unless all rows are some writer's, each once."""
        if version < 0:
            raise ValueError(f"version = {version}: must not be negative")
        started_s, writers = time.perf_counter(), self._writers
        layout = Layout.of(rows, self._dtype, "lanes" if self._exports else "xxh3")
        extents = layout.extents(rows)
        division = self._divide(layout, extents)
        try:
            slot, paths = self._common_slot(layout, division)
        except torch.OutOfMemoryError:  # a slot on the device stays until its turn to be replaced
            self._exports = False
            log.warning("no memory for version %d on the GPU: weights go through the host from now on", version)
            return self.begin_rows(version, rows)
        snapshot, target, starts = None, slot.payload, [extent.first for extent in extents]
        with suppress(torch.OutOfMemoryError):  # without space the tensors are copied to the slot now
            if self._memory is not None and self._snapshots:
                *packed_starts, size = layout.packed(extents)
                snapshot = target = self._memory.allocate(size)
                starts = packed_starts
        with torch.no_grad():
            layout.write(target, starts, rows)
        work_context = nullcontext() if self._memory is None else self._memory.after_present_work()
        self._next = (self._next + 1) % self._slots
        snapshot_s = time.perf_counter() - started_s
        parts = slot, version, writers, division, extents, paths, snapshot, starts, work_context, snapshot_s
        return Publication(*parts, self._chain)

    def _divide(self, layout: Layout, extents: list[Extent]) -> PayloadDivision:
        """The division of the payload, which is the last one's unless shapes have changed."""
        if self._division is None or self._division[:2] != (layout.manifest, extents):
            extents_by_rank = self._writers.all_gather(extents)
            division = PayloadDivision(layout.blocks, layout.payload_size, extents_by_rank, self._writers.nodes)
            self._division = layout.manifest, extents, division
        return self._division[2]

    def _common_slot(self, layout: Layout, division: PayloadDivision) -> tuple[Slot, dict[str, str]]:
        """The next slot, which a node's first writer makes for all of its writers; with its path on each node."""
        rank, nodes = self._writers.rank, self._writers.nodes
        slot, path, problem = None, "", ""
        if nodes.index(nodes[rank]) == rank:
            try:
                slot = self._slot(layout, division)
                path = str(slot.path)
            except ConfigurationError as error:  # the others must not wait for this writer
                problem = str(error)
        announcements = self._writers.all_gather((path, problem))
        if problems := [problem for _, problem in announcements if problem]:
            raise ConfigurationError(problems[0])
        paths = {node: announcements[nodes.index(node)][0] for node in dict.fromkeys(nodes)}
        return slot or self._attached(Path(paths[nodes[rank]]), layout), paths

    def _slot(self, layout: Layout, division: PayloadDivision) -> Slot:
        slot = self._open.get(self._next)
        if slot is None or slot.layout != layout or not slot.wait_for_readers(_READERS_S):
            if slot is not None:
                self._open.pop(self._next).unlink()
            self._open[self._next] = slot = self._create(layout, division)
        slot.write_versions(UNWRITTEN, UNWRITTEN)
        return slot

    def _attached(self, path: Path, layout: Layout) -> Slot:
        slot = self._open.get(self._next)
        if slot is None or slot.path != path or slot.layout != layout or not slot.is_present:
            self._open[self._next] = slot = Slot.attach(path, layout)
        return slot

    def _create(self, layout: Layout, division: PayloadDivision) -> Slot:
        rank, nodes = self._writers.rank, self._writers.nodes
        stem = self._stem if rank == 0 else f"{self._stem}-{nodes[rank]}-ranks"  # other machines may have this folder
        used = division.written_on(nodes[rank]) if len(set(nodes)) > 1 else ()
        memory = self._memory if len(nodes) == 1 else None  # pinned by each rank, all memory would be pinned repeatedly
        refusals: list[str] = []
        for folder in self._folders:
            path = folder / f"{stem}-{self._next}.weights"
            try:
                return Slot.create(path, layout, memory, exports=self._exports, used=used)
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
        if self._chain is not None:
            self._chain.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Subscriber:
    """Reader of published versions, into a private buffer that it reuses, or two in turn: see ``keep``. Or it attaches
    a version, which is read where it is.

    ``memory``: of the reader's device, from which it maps that of a publisher. Its buffer is then in that memory; the
    buffer of a version from a file is host memory, pinned for the device.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        self._memory = memory
        self._maps: dict[str, tuple[tuple[int, int, int], mmap.mmap]] = {}
        self._sources: dict[str, tuple[str, Tensor]] = {}  # of publishers' device memory: by path, its handle
        self._buffer, self._kept = StagingBuffer(memory), StagingBuffer(memory)
        self.spent = PassSeconds()  # of the last fetch
        self._attached: SlotLock | None = None

    def fetch(
        self,
        published: PublishedWeights,
        on_progress: Callable[[str, Tensor, int], None] = lambda name, tensor, size: None,
    ) -> dict[str, Tensor]:
        """Copy and verify the tensors of ``published``: views of a private buffer, valid until the next fetch. Where
        deltas lead to it from the buffer's version, these are written over that.
        ``on_progress(name, tensor, size)``: the first ``size`` bytes of a tensor are copied, not yet verified (see
        `checksums.hash_blocks`); from a file alone.

        Raises WeightsCorrupt when the slot is gone, was overwritten before or while it was copied, or does not
        have the announced version and checksum; the remedy is to fetch a newer version.
        """
        with self._opened(published) as (read, file_bytes):
            layout, expected_table = read_head(read, published)
            if not published.handle and layout.payload_start + layout.payload_size > file_bytes:
                raise WeightsCorrupt(f"{published.path}: {file_bytes} bytes, which is too short")
            names = [entry.name for entry in layout.entries]
            tensors = self._buffer.tensors(layout, in_device=bool(published.handle))

            def report(tensor: int, size: int) -> None:
                on_progress(names[tensor], tensors[names[tensor]], size)

            copied_table, spent = expected_table, self._buffer.advance(published, expected_table, report)
            if spent is None:
                copied_table = self._copy(published, layout, report)
            else:
                self.spent = spent
            final_version = HEADER.unpack(read(0, HEADER.size))[1]
        if final_version != published.version:
            raise WeightsCorrupt(wrong_version(published, final_version) + " (overwritten while it was read)")
        if (damaged_block := differing_block(copied_table, expected_table, layout.blocks)) is not None:
            raise WeightsCorrupt(other_checksum(published, f": {names[damaged_block.tensor]} differs"))
        self._buffer.verified(published, expected_table)
        return dict(tensors)

    def attach(self, published: PublishedWeights, share: int = 0, shares: int = 1) -> dict[str, Tensor]:
        """Return the tensors of ``published`` in its slot, without a copy, verified. They stay as they are until the
        next call of this, or of `forget`: until then the publisher takes other memory for its versions. Who writes into
        them changes a private copy. ``share`` of ``shares``: readers verify a part each, and one may use its tensors
        when all have returned. Raises WeightsCorrupt as `fetch` does, and for a version in a GPU's memory."""
        self.detach()
        if published.handle:
            raise WeightsCorrupt(f"{published.path}: version {published.version} is in a GPU's memory, not in the file")
        try:
            lock = SlotLock(published.path)
        except OSError as error:
            raise WeightsCorrupt(gone(published, error)) from None
        with ExitStack() as on_failure:
            on_failure.callback(lock.close)
            if not lock.acquire(exclusive=False):
                raise WeightsCorrupt(wrong_version(published, UNWRITTEN))
            layout, expected_table = read_head(lock.read, published)
            if layout.payload_start + layout.payload_size > lock.size:
                raise WeightsCorrupt(f"{published.path}: {lock.size} bytes, which is too short")
            payload = np.frombuffer(lock.map(), np.uint8, layout.payload_size, layout.payload_start)
            blocks = layout.blocks[share::shares]
            hashes, self.spent = hash_blocks(payload, blocks)
            if (damaged_block := differing_block(hashes, expected_table[share::shares], blocks)) is not None:
                name = layout.entries[damaged_block.tensor].name
                raise WeightsCorrupt(other_checksum(published, f": {name} differs"))
            on_failure.pop_all()
        self._attached = lock
        return layout.views(torch.from_numpy(payload))

    def detach(self) -> None:
        """Let the publisher have the slot of `attach` again, whose tensors must not be used any more."""
        if self._attached is not None:
            self._attached.close()
            self._attached = None

    def keep(self) -> None:
        """Keep the last fetch's tensors valid until the next call of this: fetches fill another buffer meanwhile."""
        self._buffer, self._kept = self._kept, self._buffer

    def damage(self) -> str:
        """The tensor and block of the kept tensors that have changed since they were verified; "": none."""
        return self._kept.damage()

    def tensors_of(self, checksum: str) -> dict[str, Tensor]:
        """The tensors of the last fetch, if it was of this version and `keep` doesn't have them; empty if not."""
        return self._buffer.tensors_of(checksum)

    def deltas_to(self, published: PublishedWeights) -> int:
        """The deltas by which the next fetch can come, if it is of ``published``; 0: it comes whole."""
        return 0 if published.handle else len(chain_to(published, self._buffer.version, self._buffer.checksum))

    def changes_from(self, checksum: str, steps: int | None = None) -> Iterator[ChangedValues] | None:
        """The values in which the last fetch differs from a version, if it came by deltas from that, by so many if
        given; None if not."""
        is_from = checksum and self._buffer.changed_from == checksum and steps in (None, self._buffer.change_steps)
        return self._buffer.changes() if is_from else None

    def forget(self) -> None:
        """Free what was fetched; mappings stay, for as long as a reader has one the publisher's death removes none."""
        self._buffer, self._kept = StagingBuffer(self._memory), StagingBuffer(self._memory)
        self._sources.clear()
        self.detach()
        for _, file_map in self._maps.values():
            file_map.madvise(mmap.MADV_DONTNEED)

    def _copy(self, published: PublishedWeights, layout: Layout, on_progress: Callable[[int, int], None]) -> np.ndarray:
        """Fill the buffer; returns its table."""
        if not published.handle:
            file_map = self._maps[published.path][1]
            source_bytes = np.frombuffer(file_map, np.uint8, layout.payload_size, layout.payload_start)
            table, self.spent = hash_blocks(self._buffer.payload.numpy(), layout.blocks, source_bytes, on_progress)
            return table
        assert self._memory is not None
        started_s = time.perf_counter()
        with self._memory.after_present_work():
            self._buffer.payload.copy_(self._sources[published.path][1])
        copied_at_s = time.perf_counter()
        with self._memory.after_present_work():
            table = hash_lanes(lane_sums(self._buffer.payload), layout.blocks)
        self.spent = PassSeconds(copied_at_s - started_s, time.perf_counter() - copied_at_s)
        return table

    @contextmanager
    def _opened(self, published: PublishedWeights) -> Iterator[tuple[Read, int]]:
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
            raise WeightsCorrupt(gone(published, error)) from None
        with closing(lock):
            if not lock.acquire(exclusive=False):
                raise WeightsCorrupt(wrong_version(published, UNWRITTEN))
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
            raise WeightsCorrupt(gone(published, error)) from None
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
