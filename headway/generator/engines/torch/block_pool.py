"""Allocates the blocks of a paged KV cache to rows, on the host (Kwon et al. 2023, PagedAttention).

Shape suffixes: n rows that take part in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK_TOKENS = 16
PADDING = 0  # the block in which rows without a request write; never allocated


def blocks_for(tokens: int) -> int:
    """Count of blocks that hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def whole_blocks(tokens: int) -> int:
    """``tokens`` rounded up to blocks."""
    return blocks_for(tokens) * BLOCK_TOKENS


class BlockPool:
    """Block tables of rows, with a reference count for each block.

    Invariants: a block is free or has as many references as rows that list it; a row's blocks are a prefix of its
    table, whose rest is `PADDING`. Rows share the blocks of equal beginnings, and `extend` gives a row that writes into
    a shared block its own copy, so that no row sees what another one appends.

    Example of 20 tokens in blocks of 16: allocate(0, 20) takes blocks 1 and 2; share(0, 1, 20) makes them row 1's as
    well; once both are written at position 20, extend([20, 20]) returns [(2, 3)], after which row 0 has 1 and 3.
    """

    def __init__(self, rows: int, context_tokens: int, blocks: int) -> None:
        """``blocks``: those that can be allocated, numbered from 1."""
        self.tables = np.full((rows, blocks_for(context_tokens)), PADDING, np.int32)
        self.references = np.zeros(blocks + 1, np.int32)
        self.references[PADDING] = -1
        self._free = list(range(blocks, PADDING, -1))
        self._first = np.arange(rows) * self.tables.shape[1]  # of each row in the flat tables

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Count of blocks that rows have; one that several share counts once."""
        return len(self.references) - 1 - len(self._free)

    def allocate(self, row: int, tokens: int) -> None:
        """Give a row the blocks that it lacks for ``tokens`` tokens. Raises IndexError when too few are free."""
        for index in np.flatnonzero(self.tables[row, : blocks_for(tokens)] == PADDING).tolist():
            self.tables[row, index] = self._take()

    def share(self, source: int, target: int, tokens: int, *, copy_last: bool = False) -> list[tuple[int, int]]:
        """Make the blocks of the source's first ``tokens`` tokens those of another row, in place of what it has there.
        With ``copy_last`` a last block that they don't fill isn't shared, and is returned to be copied, as
        (source, target)."""
        shared = tokens // BLOCK_TOKENS if copy_last else blocks_for(tokens)
        for index in range(shared):
            block, replaced = int(self.tables[source, index]), int(self.tables[target, index])
            self.references[block] += 1
            self.tables[target, index] = block
            if replaced != PADDING:
                self._drop(replaced)
        if shared == blocks_for(tokens):
            return []
        self.allocate(target, tokens)
        pair = int(self.tables[source, shared]), int(self.tables[target, shared])
        return [] if pair[0] == pair[1] else [pair]

    def own(self, row: int) -> None:
        """Give a row blocks that no other one has, in place of those that it shares; their content isn't copied."""
        for index in np.flatnonzero(self.references[self.tables[row]] > 1).tolist():
            self._replace(row, index)

    def extend(self, position_n: np.ndarray) -> list[tuple[int, int]]:
        """Make the next position of each of the first n rows writable; returns the blocks to copy before the step, as
        (source, target). Raises IndexError when `shortage` is positive."""
        copies: list[tuple[int, int]] = []
        for row, index in self._unwritable(position_n):
            block = int(self.tables[row, index])
            if block == PADDING:
                self.tables[row, index] = self._take()
            elif self.references[block] > 1:  # the last one that shares it keeps it
                copies.append((block, self._replace(row, index)))
        return copies

    def shortage(self, position_n: np.ndarray) -> int:
        """Count of blocks that `extend` lacks."""
        needed_blocks, remaining = 0, dict[int, int]()
        for row, index in self._unwritable(position_n):
            block = int(self.tables[row, index])
            remaining[block] = remaining.get(block, int(self.references[block])) - 1
            needed_blocks += block == PADDING or remaining[block] > 0
        return max(0, needed_blocks - len(self._free))

    def release(self, row: int) -> None:
        """Free a row's blocks, but for those that others share."""
        for block in self.tables[row][self.tables[row] != PADDING].tolist():
            self._drop(block)
        self.tables[row] = PADDING

    def move(self, source: int, target: int) -> None:
        """Make a row's blocks those of an empty row instead."""
        self.tables[target] = self.tables[source]
        self.tables[source] = PADDING

    def _unwritable(self, position_n: np.ndarray) -> Sequence[tuple[int, int]]:
        """Row and index of each block at these positions that is missing or shared."""
        index_n = position_n // BLOCK_TOKENS
        writable_n = self.references[self.tables.take(self._first[: len(position_n)] + index_n)] == 1
        if writable_n.all():
            return ()
        rows = np.flatnonzero(~writable_n)
        return list(zip(rows.tolist(), index_n[rows].tolist(), strict=True))

    def _take(self) -> int:
        block = self._free.pop()
        self.references[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self._free.append(block)

    def _replace(self, row: int, index: int) -> int:
        self.references[self.tables[row, index]] -= 1
        self.tables[row, index] = block = self._take()
        return block
