"""The checksum of weights: a table of hashes, one for each tensor and block of 16 MiB, and a root over it. Torch-free.

Rows are made by threads, ranks, readers and devices apart, in any order, each from its block alone; only the root
orders them. Slots, mirrors of them and files of weights have the same table, which names the hash of its rows:

- ``xxh3``, on hosts: XXH3 of the block's bytes, 64 bits.
- ``lanes``, in device memory, where blocks of a GPU make it in parallel (`device_memory.lane_sums`): the block is
  padded with zeros to lanes of 64 KiB, a lane to 16,384 little-endian int32 words w_j. Its sum is
  sum of w_j K_j (mod 2^64), K_j = SplitMix64(j) | 1; the row is XXH3 of its lanes' sums (uint64, little-endian), seeded
  with the count of its bytes. K_j is odd and w_j less than 2^32, so that no change of one word leaves a sum alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
import xxhash

Algorithm = Literal["xxh3", "lanes"]
BLOCK_BYTES = 16 << 20
LANE_BYTES = 64 << 10
_PIECE_BYTES = 512 << 10  # copied, and then hashed while it is in the core's cache
_THREAD_BYTES = 4 << 20  # less isn't worth a thread
_MOST_THREADS = 4  # they reach the bandwidth of a machine's memory


class Block(NamedTuple):
    """A row of the table: at most 16 MiB of one tensor."""

    row: int
    tensor: int  # index of the tensor
    first: int  # byte of the payload
    last: int  # the byte after the block


class PassSeconds(NamedTuple):
    """Seconds of a pass over the payload, of its copying and its hashing; those of threads are averaged."""

    copy_s: float = 0.0
    hash_s: float = 0.0


def blocks_of(extents: Iterable[tuple[int, int]]) -> list[Block]:
    """Divide tensors at these offsets, of these sizes in bytes, into the table's blocks; an empty tensor has none."""
    blocks = list[Block]()
    for tensor_index, (offset, size) in enumerate(extents):
        for first_byte in range(offset, offset + size, BLOCK_BYTES):
            blocks.append(Block(len(blocks), tensor_index, first_byte, min(first_byte + BLOCK_BYTES, offset + size)))
    return blocks


def hash_blocks(
    payload: np.ndarray,
    blocks: Sequence[Block],
    source: np.ndarray | None = None,
    on_progress: Callable[[int, int], None] = lambda tensor, size: None,
) -> tuple[np.ndarray, PassSeconds]:
    """Hash ``blocks`` of ``payload`` ([bytes] uint8) in threads: all of them make the table. With ``source``, copy that
    into it in the same pass.
    ``on_progress(tensor, size)``: the first ``size`` bytes of a tensor are complete. It is called after every piece,
    while that is in the core's cache; with several threads, by one of them when the tensor is."""
    table, passes, counting_lock = np.zeros(len(blocks), np.uint64), list[PassSeconds](), threading.Lock()
    thread_count = min(_MOST_THREADS, len(os.sched_getaffinity(0)), payload.nbytes // _THREAD_BYTES)
    blocks_left = Counter(block.tensor for block in blocks)  # blocks
    start_by_tensor = {block.tensor: block.first for block in reversed(blocks)}
    end_by_tensor = {block.tensor: block.last for block in blocks}

    def hash_block(index: int) -> None:
        block = blocks[index]
        hasher, copy_s, hash_s = xxhash.xxh3_64(), 0.0, 0.0
        for first_byte in range(block.first, block.last, _PIECE_BYTES):
            end_byte, started_s = min(first_byte + _PIECE_BYTES, block.last), time.perf_counter()
            if source is not None:
                np.copyto(payload[first_byte:end_byte], source[first_byte:end_byte])
            copied_at_s = time.perf_counter()
            hasher.update(payload[first_byte:end_byte].data)
            copy_s, hash_s = copy_s + copied_at_s - started_s, hash_s + time.perf_counter() - copied_at_s
            if thread_count <= 1:
                on_progress(block.tensor, end_byte - start_by_tensor[block.tensor])
        if thread_count > 1:
            with counting_lock:
                blocks_left[block.tensor] -= 1
                is_complete = not blocks_left[block.tensor]
            if is_complete:
                on_progress(block.tensor, end_by_tensor[block.tensor] - start_by_tensor[block.tensor])
        table[index] = hasher.intdigest()
        passes.append(PassSeconds(copy_s, hash_s))

    if thread_count > 1:
        with ThreadPoolExecutor(thread_count) as pool:
            list(pool.map(hash_block, range(len(blocks))))
    else:
        for index in range(len(blocks)):
            hash_block(index)
    divisor = max(thread_count, 1)
    return table, PassSeconds(sum(s.copy_s for s in passes) / divisor, sum(s.hash_s for s in passes) / divisor)


def hash_lanes(sums: np.ndarray, blocks: Sequence[Block]) -> np.ndarray:
    """Make the table from the sums of the payload's lanes ([lanes] uint64); blocks begin with a lane."""
    table = np.zeros(len(blocks), np.uint64)
    for block in blocks:
        block_sums = sums[block.first // LANE_BYTES : -(-block.last // LANE_BYTES)]
        table[block.row] = xxhash.xxh3_64_intdigest(block_sums.tobytes(), seed=block.last - block.first)
    return table


def lane_keys() -> np.ndarray:
    """The odd numbers K_j by which the words of a lane are multiplied, uint64."""
    mixed = np.arange(1, LANE_BYTES // 4 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def root_of(version: int, manifest: bytes, table: np.ndarray) -> str:
    """The checksum of a version: XXH3, 128 bits, of its number, its manifest (names, shapes, the rows' hash) and its
    table, in hexadecimal."""
    hasher = xxhash.xxh3_128(version.to_bytes(8, "little"))
    hasher.update(len(manifest).to_bytes(8, "little") + manifest)
    hasher.update(table.astype("<u8").tobytes())
    return hasher.hexdigest()


def differing_block(table: np.ndarray, expected: np.ndarray, blocks: Sequence[Block]) -> Block | None:
    """The first block whose hash isn't the expected one, the last in a table of another length; None if none is."""
    differing_rows = np.flatnonzero(table != expected) if table.shape == expected.shape else np.array([-1])
    return blocks[int(differing_rows[0])] if len(differing_rows) else None
