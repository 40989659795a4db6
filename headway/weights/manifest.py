"""The names, types and positions of a version's tensors in its payload, as its file has them. Torch-free."""

from __future__ import annotations

from math import prod

import msgspec

from headway.weights.checksums import Algorithm, Block, blocks_of


class PayloadTensor(msgspec.Struct, frozen=True):
    """The position of a tensor in the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    size: int  # bytes


class PayloadManifest(msgspec.Struct, frozen=True):
    """The tensors of a payload, in its order."""

    algorithm: Algorithm  # hash of the table's rows
    tensors: tuple[PayloadTensor, ...]

    def blocks(self) -> list[Block]:
        """The blocks of the checksum's table."""
        return blocks_of((entry.offset, entry.size) for entry in self.tensors)

    def word_bytes(self, tensor: int) -> int:
        """Bytes of an element of a tensor that isn't empty."""
        entry = self.tensors[tensor]
        return entry.size // prod(entry.shape)
