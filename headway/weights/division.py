"""The division of a version's payload among the ranks that publish it together. Torch-free.

Each rank writes its rows of every tensor. A block of the checksum's table often has rows of several ranks: one of them
hashes it once all have written, and the block is served by the node of that rank, which has all of its bytes then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from headway.weights.checksums import Block

Range = tuple[int, int]  # the first byte, and the byte after the last


class Extent(NamedTuple):
    """The consecutive bytes of one tensor that a rank writes."""

    tensor: int  # index of the tensor
    first: int  # byte of the payload
    last: int  # the byte after the extent


class Transfer(NamedTuple):
    """The bytes of a block that the rank that hashes it doesn't have on its node."""

    source: int  # rank that wrote them
    target: int  # rank that hashes the block
    first: int  # byte of the payload
    last: int


class PayloadDivision:
    """The ranks that write, hash and serve each byte of a payload.

    Example: two ranks on two nodes have a half each of a tensor of 24 MiB. Rank 0 hashes the first block, of 16 MiB,
    and rank 1 sends it the last 4 of them; rank 1 hashes the second.
    """

    def __init__(
        self, blocks: Sequence[Block], size: int, extents_by_rank: Sequence[Iterable[Extent]], nodes: Sequence[str]
    ) -> None:
        """``size``: of the payload. ``nodes``: of each rank. Raises ValueError unless the extents cover each tensor
        exactly once."""
        self._blocks, self._size, self._nodes = blocks, size, nodes
        parts = [(extent, rank) for rank, extents in enumerate(extents_by_rank) for extent in extents]
        parts = sorted(part for part in parts if part[0].first < part[0].last)
        _require_cover(blocks, [extent for extent, _ in parts])
        self._writers: list[list[tuple[Extent, int]]] = [[] for _ in blocks]  # of each block, by its row
        starts = [block.first for block in blocks]
        for extent, rank in parts:
            for row in range(bisect_right(starts, extent.first) - 1, bisect_left(starts, extent.last)):
                self._writers[row].append((extent, rank))
        # In turns, since small tensors are blocks of all ranks.
        self._hashers = [writers[row % len(writers)][1] for row, writers in enumerate(self._writers)]

    def hashed_by(self, rank: int) -> list[Block]:
        """The blocks that a rank hashes."""
        return [block for block, hasher in zip(self._blocks, self._hashers, strict=True) if hasher == rank]

    def transfers(self) -> Iterator[Transfer]:
        """Yield what ranks send to other nodes before the blocks are hashed, in an order that is equal on all ranks."""
        for block, hasher, writers in zip(self._blocks, self._hashers, self._writers, strict=True):
            for extent, rank in writers:
                if self._nodes[rank] != self._nodes[hasher]:
                    first_byte, end_byte = max(extent.first, block.first), min(extent.last, block.last)
                    yield Transfer(rank, hasher, first_byte, end_byte)

    def written_on(self, node: str) -> list[Range]:
        """The ranges of the payload that need memory on a node: blocks in which its ranks write."""
        nodes_by_row = ({self._nodes[rank] for _, rank in writers} for writers in self._writers)
        return self._joined([node in nodes for nodes in nodes_by_row])

    def served_by(self, node: str) -> list[Range]:
        """The ranges of the payload that a node has completely, with what separates tensors; nodes' are disjoint."""
        return self._joined([self._nodes[hasher] == node for hasher in self._hashers])

    def _joined(self, chosen: Sequence[bool]) -> list[Range]:
        """The ranges of the chosen blocks, each up to the beginning of the next block."""
        bounds = pairwise([*(block.first for block in self._blocks), self._size])
        runs = groupby(zip(bounds, chosen, strict=True), key=lambda pair: pair[1])
        spans = [[bound for bound, _ in run] for is_chosen, run in runs if is_chosen]
        return [(span[0][0], span[-1][1]) for span in spans]


def _require_cover(blocks: Sequence[Block], extents: Sequence[Extent]) -> None:
    """Raise ValueError unless sorted ``extents`` are all bytes of the tensors, each once."""
    end_by_tensor = {block.tensor: block.last for block in blocks}
    start_by_tensor = {block.tensor: block.first for block in reversed(blocks)}
    extents_by_tensor = {tensor: list(group) for tensor, group in groupby(extents, key=lambda extent: extent.tensor)}
    for tensor, start in start_by_tensor.items():
        tensor_extents = extents_by_tensor.get(tensor, [])
        bounds = [start, *(byte for extent in tensor_extents for byte in extent[1:]), end_by_tensor[tensor]]
        if any(end_byte != next_byte for end_byte, next_byte in zip(bounds[::2], bounds[1::2], strict=True)):
            raise ValueError(f"tensor {tensor} of the weights isn't written exactly once: {tensor_extents}")
