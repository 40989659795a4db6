"""Describes the flat payload of a version: the position of every tensor, and its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from headway.records.errors import ConfigurationError
from headway.weights.checksums import LANE_BYTES, Algorithm, Block, blocks_of
from headway.weights.slot_file import PAGE, table_start

_ALIGNMENT = {"xxh3": 64, "lanes": LANE_BYTES}  # bytes to which every tensor is aligned: for any dtype; a lane
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64)}


class _Entry(msgspec.Struct, frozen=True):
    """The position of a tensor in the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    size: int  # bytes


class _Manifest(msgspec.Struct, frozen=True):
    algorithm: Algorithm  # hash of the table's rows
    tensors: tuple[_Entry, ...]


@dataclass(frozen=True)
class Layout:
    """The positions of a version's tensors. In a file they are behind the header, the manifest and the table."""

    manifest: bytes
    algorithm: Algorithm
    entries: tuple[_Entry, ...]
    payload_size: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, algorithm: Algorithm = "xxh3") -> Layout:
        """Lay out ``tensors``, floating ones as ``dtype``. Raises ConfigurationError for one that isn't publishable."""
        entries, offset, alignment = list[_Entry](), 0, _ALIGNMENT[algorithm]
        for name, tensor in tensors.items():
            stored_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            type_name = str(stored_dtype).removeprefix("torch.")
            if type_name not in _DTYPES:
                raise ConfigurationError(f"weights: {name} has dtype {type_name}; publishable are {', '.join(_DTYPES)}")
            size_bytes = tensor.numel() * stored_dtype.itemsize
            entries.append(_Entry(name, type_name, tuple(tensor.shape), offset, size_bytes))
            offset += -(-size_bytes // alignment) * alignment
        manifest = msgspec.json.encode(_Manifest(algorithm, tuple(entries)))
        return cls.read(manifest, max(offset, alignment))

    @classmethod
    def read(cls, manifest: bytes, payload_size: int) -> Layout:
        """Read the layout of a payload from its manifest, which is verified."""
        decoded_manifest = msgspec.json.decode(manifest, type=_Manifest)
        blocks = tuple(blocks_of((entry.offset, entry.size) for entry in decoded_manifest.tensors))
        return cls(manifest, decoded_manifest.algorithm, decoded_manifest.tensors, payload_size, blocks)

    @property
    def table_start(self) -> int:
        return table_start(len(self.manifest))

    @property
    def payload_start(self) -> int:
        """Bytes from the start of the file; a multiple of the page size."""
        return -(-(self.table_start + 8 * len(self.blocks)) // PAGE) * PAGE

    def views(self, payload: Tensor) -> dict[str, Tensor]:
        """Views of all tensors into a payload of bytes."""
        return {
            e.name: payload[e.offset : e.offset + e.size].view(_DTYPES[e.dtype]).view(e.shape) for e in self.entries
        }
