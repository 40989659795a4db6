"""A reader's own copy of a version: the next one is brought into it, whole or by deltas, and verified there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights.checksums import PassSeconds, differing_block, hash_blocks
from headway.weights.delta_codec import Overwrites
from headway.weights.deltas import DeltaContent, PayloadSection, apply_deltas, chain_to
from headway.weights.device_memory import DeviceMemory
from headway.weights.layout import Layout

log = logging.getLogger(__name__)
_ALIGNMENT = 64  # bytes: for the fastest reads


class ChangedValues(NamedTuple):
    """Values of one tensor that deltas have changed."""

    name: str
    positions: Tensor  # [changes] int64, in the tensor's elements
    values: Tensor  # [changes], of the published dtype
    bases: Tensor  # [changes], those before the delta


class StagingBuffer:
    """Memory for one version at a time, of the host or of a device.

    Invariant: ``version`` and ``checksum`` are those of the bytes that are there since they were last verified.
    """

    def __init__(self, memory: DeviceMemory | None) -> None:
        """``memory``: of the reader's device, for which host memory is pinned."""
        self._memory = memory
        self.payload, self._in_device = torch.empty(0, dtype=torch.uint8), False
        self._layout: Layout | None = None
        self._views = dict[str, Tensor]()
        self._table = np.zeros(0, np.uint64)
        self.version, self.checksum = -1, ""
        self._changes = list[tuple[PayloadSection, Overwrites]]()
        self.change_steps = 0  # deltas of the last fetch
        self.changed_from = ""  # checksum of the version that the last deltas led from; "": the last one came whole

    def tensors(self, layout: Layout, *, in_device: bool) -> dict[str, Tensor]:
        """The tensors in the buffer, which is made unless it fits."""
        if len(self.payload) != layout.payload_size or self._in_device != in_device:
            self._in_device, self._layout, self.version, self.checksum = in_device, None, -1, ""
            if in_device and self._memory is not None:
                self.payload = self._memory.allocate(layout.payload_size)
            else:
                host_buffer = _aligned(layout.payload_size)
                if self._memory is not None:
                    self._memory.pin(host_buffer)
                self.payload = torch.from_numpy(host_buffer)
        if self._layout is None or self._layout.manifest != layout.manifest:
            self._layout, self._views = layout, layout.views(self.payload)
        return self._views

    def tensors_of(self, checksum: str) -> dict[str, Tensor]:
        """The tensors, if they are of this version; none if not."""
        return self._views if checksum and self.checksum == checksum else {}

    def advance(
        self, published: PublishedWeights, table: np.ndarray, on_progress: Callable[[int, int], None]
    ) -> PassSeconds | None:
        """Make the version that is there ``published``, by its deltas; None where they don't lead there, or don't give
        the ``table``: the content is no version's then. ``on_progress``: see `checksums.hash_blocks`."""
        version, checksum = self.version, self.checksum
        self.version, self.checksum, self.changed_from = -1, "", ""
        self._changes.clear()
        if self._layout is None or published.handle or not (chain := chain_to(published, version, checksum)):
            return None
        payload, layout, started_s = self.payload.numpy(), self._layout, time.perf_counter()
        try:
            contents = [DeltaContent(delta, Path(delta.path).read_bytes()) for delta in chain]
            self._changes += apply_deltas(payload, contents)
            applied_s = time.perf_counter() - started_s
            hashes, spent = hash_blocks(payload, layout.blocks, None, on_progress)
            if (block := differing_block(hashes, table, layout.blocks)) is not None:
                raise WeightsCorrupt(f"{layout.entries[block.tensor].name} differs, in block {block.row}")
        except (WeightsCorrupt, OSError) as error:
            log.warning("version %d is copied whole, not by deltas from %d: %s", published.version, version, error)
            return None
        self.changed_from, self.change_steps = checksum, len(chain)
        return PassSeconds(applied_s, spent.hash_s)

    def verified(self, published: PublishedWeights, table: np.ndarray) -> None:
        """Note that the buffer has the bytes of a version."""
        self.version, self.checksum, self._table = published.version, published.checksum, table

    def damage(self) -> str:
        """The tensor and block that have changed since the buffer was verified; "": none, or it isn't the host's."""
        if self._layout is None or self._in_device or not self.checksum:
            return ""
        hashes, _ = hash_blocks(self.payload.numpy(), self._layout.blocks)
        block = differing_block(hashes, self._table, self._layout.blocks)
        if block is None:
            return ""
        return f"{self._layout.entries[block.tensor].name}, block {block.row} of version {self.version}"

    def changes(self) -> Iterator[ChangedValues]:
        """The values that the last deltas have changed, in their order: a later one counts."""
        assert self._layout is not None
        for section, (positions, values, bases) in self._changes:
            starts = positions * section.word_bytes + section.first
            for entry in self._layout.entries:
                if entry.offset >= section.last or entry.offset + entry.size <= section.first:
                    continue
                first, last = np.searchsorted(starts, (entry.offset, entry.offset + entry.size))
                elements = torch.from_numpy((starts[first:last] - entry.offset) // section.word_bytes)
                dtype = self._views[entry.name].dtype
                typed_values = (torch.from_numpy(words[first:last]).view(dtype) for words in (values, bases))
                yield ChangedValues(entry.name, elements, *typed_values)


def _aligned(size: int) -> np.ndarray:
    """A buffer of ``size`` bytes aligned like the slots, for the fastest reads."""
    padded_buffer = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    first_byte = -padded_buffer.ctypes.data % _ALIGNMENT
    return padded_buffer[first_byte : first_byte + size]
