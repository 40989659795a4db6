"""The slot that versions are written to, and a version that is being published, by one process or by several ranks."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.records.generation import PublishedDelta, PublishedPart, PublishedWeights
from headway.weights.checksums import hash_blocks, hash_lanes, root_of
from headway.weights.delta_chain import ChainedVersion, DeltaChain
from headway.weights.device_memory import DeviceMemory, lane_sums
from headway.weights.division import Extent, PayloadDivision, Range
from headway.weights.layout import Layout
from headway.weights.slot_file import HEADER, MAGIC, UNWRITTEN, map_slot, new_slot
from headway.weights.slots import SlotLock
from headway.weights.writers import Writers


class Slot:
    """A mapped file for one version, and the payload, in the file or in device memory."""

    def __init__(
        self, path: Path, layout: Layout, slot_map: mmap.mmap, lock: SlotLock | None = None, handle: str = ""
    ) -> None:
        """``lock``: of the process that made the file. ``handle``: of a payload in device memory."""
        self.path, self.layout, self.handle = path, layout, handle
        self._map, self._lock, self._inode = slot_map, lock, path.stat().st_ino
        self._table = np.frombuffer(slot_map, np.uint64, len(layout.blocks), layout.table_start)
        self.payload = torch.from_numpy(np.frombuffer(slot_map, np.uint8, offset=layout.payload_start))

    @classmethod
    def create(
        cls,
        path: Path,
        layout: Layout,
        memory: DeviceMemory | None = None,
        *,
        exports: bool = False,
        used: Sequence[Range] = (),
    ) -> Slot:
        """Create a file, whose payload is in ``memory`` if that ``exports`` it, else pinned for it. ``used``: the
        ranges of the payload that get memory, if not all do. Raises OSError and OutOfMemoryError."""
        device_payload = memory.allocate(layout.payload_size) if memory is not None and exports else None
        head_bytes = layout.payload_start
        file_ranges = [(0, head_bytes), *((head_bytes + first, head_bytes + last) for first, last in used)]
        file_bytes = head_bytes + (layout.payload_size if device_payload is None else 0)
        slot_map = new_slot(path, file_bytes, file_ranges if used else ())
        slot_map[HEADER.size : HEADER.size + len(layout.manifest)] = layout.manifest
        handle = memory.export(device_payload) if memory is not None and device_payload is not None else ""
        slot = cls(path, layout, slot_map, SlotLock(path, owner=True), handle)
        if device_payload is not None:
            slot.payload = device_payload
        elif memory is not None:
            memory.pin(slot.payload.numpy())
        slot.write_versions(UNWRITTEN, UNWRITTEN)
        slot.wait_for_readers(0.0)  # there are none; none may come before it is written
        return slot

    @classmethod
    def attach(cls, path: Path, layout: Layout) -> Slot:
        """Map the slot that another rank of this node has created. Raises OSError."""
        return cls(path, layout, map_slot(path))

    @property
    def is_present(self) -> bool:
        """Whether the file still has its name; else it is gone, or a successor's has it."""
        return self.path.exists() and self.path.stat().st_ino == self._inode

    def write_versions(self, first: int, second: int) -> None:
        layout = self.layout
        section_sizes = len(layout.manifest), 8 * len(layout.blocks), layout.payload_size
        HEADER.pack_into(self._map, 0, MAGIC, first, second, *section_sizes)

    def wait_for_readers(self, patience_s: float) -> bool:
        """Wait for readers that don't copy a file, or do copy device memory, and keep others out until `complete`;
        False if one stays. Those that copy a file aren't waited for: they notice a race."""
        return self._lock is None or self._lock.acquire(exclusive=True, patience_s=patience_s)

    def complete(self, version: int, table: np.ndarray) -> None:
        """Write the table and the version, and let readers in, if this process has created the file."""
        if self._lock is not None:
            self._table[:] = table
            self.write_versions(version, version)
            self._lock.release()

    def unlink(self) -> None:
        """Remove the file, if this process has created it."""
        if self._lock is None:
            return
        if self.is_present:
            self.path.unlink(missing_ok=True)
        self._lock.close()


@dataclass
class Publication:
    """A version that is being published: its tensors are copied, its checksum is not made. Readers find no version in
    the slot before `finish` has returned on all writers; a publication that one of them doesn't finish is never one."""

    slot: Slot
    version: int
    writers: Writers
    division: PayloadDivision
    extents: list[Extent]  # of this rank, of which the snapshot has those of all tensors one after another
    paths: dict[str, str]  # of the slot on each node
    snapshot: Tensor | None  # in device memory until `finish`; None: it is in the slot
    starts: list[int]  # of the tensors in the snapshot
    beside: AbstractContextManager[None]  # of the work that follows the snapshot
    snapshot_s: float
    chain: DeltaChain | None = None  # that the version continues

    def finish(self) -> PublishedWeights:
        """Copy the snapshot, make the table and its root, and let readers in. A call of all writers."""
        slot, layout, writers, started_s = self.slot, self.slot.layout, self.writers, time.perf_counter()
        with torch.no_grad(), self.beside:
            self._copy_snapshot()
            copied_at_s = time.perf_counter()
            if slot.handle:
                hashes = hash_lanes(lane_sums(slot.payload), layout.blocks)
            else:
                writers.all_gather(None)  # now all have written
                parts = ((step.source, step.target, step.first, step.last) for step in self.division.transfers())
                writers.exchange((source, target, slot.payload[a:b]) for source, target, a, b in parts)
                hashes, _ = hash_blocks(slot.payload.numpy(), self.division.hashed_by(writers.rank))
        self.snapshot = None  # its memory is the next step's
        table = np.zeros(len(layout.blocks), np.uint64)
        for rank, rank_hashes in enumerate(writers.all_gather(hashes)):
            table[[block.row for block in self.division.hashed_by(rank)]] = rank_hashes
        checksum = root_of(self.version, layout.manifest, table)
        slot.complete(self.version, table)
        hashed_at_s, deltas = time.perf_counter(), tuple[PublishedDelta, ...]()
        if self.chain is not None and not slot.handle:
            new = ChainedVersion(self.version, checksum, layout.manifest, slot.payload.numpy())
            deltas = self.chain.extend(slot.path.parent, new, table, self.division.hashed_by(writers.rank))
        finished_s = time.perf_counter()
        return PublishedWeights(
            version=self.version,
            path=str(slot.path),
            checksum=checksum,
            size_bytes=layout.payload_size,
            publish_s=self.snapshot_s + finished_s - started_s,
            handle=slot.handle,
            snapshot_s=self.snapshot_s,
            hash_s=hashed_at_s - copied_at_s,
            encode_s=finished_s - hashed_at_s,
            parts=self._parts() if len(self.paths) > 1 else (),
            deltas=deltas,
        )

    def _copy_snapshot(self) -> None:
        if self.snapshot is None:
            return
        if len(self.writers.nodes) == 1:  # it has all rows, where the payload has them
            self.slot.payload.copy_(self.snapshot)
            return
        for start, (_, first_byte, end_byte) in zip(self.starts, self.extents, strict=True):
            self.slot.payload[first_byte:end_byte].copy_(self.snapshot[start : start + end_byte - first_byte])

    def _parts(self) -> tuple[PublishedPart, ...]:
        head_bytes, first_node = self.slot.layout.payload_start, self.writers.nodes[0]
        parts = list[PublishedPart]()
        for node, path in self.paths.items():
            served = self.division.served_by(node)
            ranges = [(head_bytes + first_byte, head_bytes + end_byte) for first_byte, end_byte in served]
            ranges = [(0, head_bytes), *ranges] if node == first_node else ranges
            parts.append(PublishedPart(node=node, path=path, ranges=tuple(ranges)))
        return tuple(parts)
