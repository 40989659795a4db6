"""Describes the flat payload of a version: the position of every tensor, and its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headway.records.errors import ConfigurationError
from headway.weights.checksums import LANE_BYTES, Algorithm, Block
from headway.weights.division import Extent
from headway.weights.manifest import PayloadManifest, PayloadTensor
from headway.weights.slot_file import PAGE, table_start

_ALIGNMENT = {"xxh3": 64, "lanes": LANE_BYTES}  # bytes to which every tensor is aligned: for any dtype; a lane
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64)}


class TensorRows(NamedTuple):
    """The consecutive rows of a tensor that a rank has; of a tensor that isn't divided, all."""

    tensor: Tensor  # contiguous, if it is divided
    shape: tuple[int, ...]  # of the undivided tensor
    first: int = 0  # elements before the rank's

    @classmethod
    def all_of(cls, tensor: Tensor) -> TensorRows:
        """The rows of a tensor that isn't divided."""
        return cls(tensor, tuple(tensor.shape))


@dataclass(frozen=True)
class Layout:
    """The positions of a version's tensors. In a file they are behind the header, the manifest and the table."""

    manifest: bytes
    algorithm: Algorithm
    entries: tuple[PayloadTensor, ...]
    payload_size: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, rows: Mapping[str, TensorRows], dtype: torch.dtype | None, algorithm: Algorithm = "xxh3") -> Layout:
        """Lay out the tensors that have these rows, floating ones as ``dtype``. Raises ConfigurationError for one that
        isn't publishable."""
        entries, offset, alignment = list[PayloadTensor](), 0, _ALIGNMENT[algorithm]
        for name, (tensor, shape, _) in rows.items():
            stored_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            type_name = str(stored_dtype).removeprefix("torch.")
            if type_name not in _DTYPES:
                raise ConfigurationError(f"weights: {name} has dtype {type_name}; publishable are {', '.join(_DTYPES)}")
            size_bytes = prod(shape) * stored_dtype.itemsize
            entries.append(PayloadTensor(name, type_name, shape, offset, size_bytes))
            offset += -(-size_bytes // alignment) * alignment
        manifest = msgspec.json.encode(PayloadManifest(algorithm, tuple(entries)))
        return cls.read(manifest, max(offset, alignment))

    @classmethod
    def read(cls, manifest: bytes, payload_size: int) -> Layout:
        """Read the layout of a payload from its manifest, which is verified."""
        decoded_manifest = msgspec.json.decode(manifest, type=PayloadManifest)
        blocks = tuple(decoded_manifest.blocks())
        return cls(manifest, decoded_manifest.algorithm, decoded_manifest.tensors, payload_size, blocks)

    @property
    def table_start(self) -> int:
        return table_start(len(self.manifest))

    @property
    def payload_start(self) -> int:
        """Bytes from the start of the file; a multiple of the page size."""
        return -(-(self.table_start + 8 * len(self.blocks)) // PAGE) * PAGE

    def extents(self, rows: Mapping[str, TensorRows]) -> list[Extent]:
        """The bytes of the payload that these rows take, in the order of the tensors."""
        extents = list[Extent]()
        for index, (entry, part) in enumerate(zip(self.entries, rows.values(), strict=True)):
            item_bytes = _DTYPES[entry.dtype].itemsize
            first_byte = entry.offset + part.first * item_bytes
            extents.append(Extent(index, first_byte, first_byte + part.tensor.numel() * item_bytes))
        return extents

    def packed(self, extents: Iterable[Extent]) -> list[int]:
        """The first bytes of these extents in memory that has nothing else, and its size."""
        sizes, alignment = (last - first for _, first, last in extents), _ALIGNMENT[self.algorithm]
        starts = list(accumulate((-(-size // alignment) * alignment for size in sizes), initial=0))
        return [*starts[:-1], max(starts[-1], alignment)]

    def write(self, memory: Tensor, starts: Iterable[int], rows: Mapping[str, TensorRows]) -> None:
        """Copy rows into ``memory`` ([bytes] uint8), those of each tensor from the byte in ``starts`` on."""
        for start, entry, (tensor, *_) in zip(starts, self.entries, rows.values(), strict=True):
            dtype = _DTYPES[entry.dtype]
            memory[start : start + tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape).copy_(tensor)

    def views(self, payload: Tensor) -> dict[str, Tensor]:
        """Views of all tensors into a payload of bytes."""
        return {
            e.name: payload[e.offset : e.offset + e.size].view(_DTYPES[e.dtype]).view(e.shape) for e in self.entries
        }
