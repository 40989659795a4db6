"""The checksum of weights: any change of the content changes the root, and no order of computing does."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.weights import checksums
from headway.weights.checksums import (
    BLOCK_BYTES,
    LANE_BYTES,
    blocks_of,
    differing_block,
    hash_blocks,
    hash_lanes,
    lane_keys,
    root_of,
)
from headway.weights.device_memory import lane_sums

ALGORITHMS = ("xxh3", "lanes")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two lanes, so that small payloads have many."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 2 * LANE_BYTES)


def table_of(payload: np.ndarray, extents: list[tuple[int, int]], algorithm: str) -> np.ndarray:
    blocks = blocks_of(extents)
    if algorithm == "xxh3":
        return hash_blocks(payload, blocks)[0]
    return hash_lanes(lane_sums(torch.from_numpy(payload)), blocks)


def root(payload: np.ndarray, extents: list[tuple[int, int]], algorithm: str) -> str:
    return root_of(3, repr(extents).encode(), table_of(payload, extents, algorithm))


def layout_of(sizes: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Tensors of these sizes, each at the beginning of a lane; with the bytes of the payload."""
    extents, offset = [], 0
    for size in sizes:
        extents.append((offset, size))
        offset += -(-size // LANE_BYTES) * LANE_BYTES
    return extents, offset


def content(sizes: list[int], seed: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    extents, total = layout_of(sizes)
    payload, random = np.zeros(total, np.uint8), np.random.default_rng(seed)
    for offset, size in extents:
        payload[offset : offset + size] = random.integers(0, 256, size, np.uint8)
    return payload, extents


SIZES = st.lists(st.integers(1, 5 * LANE_BYTES), min_size=1, max_size=4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, seed=st.integers(0, 2**32), position=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_any_flipped_bit_changes_the_root(algorithm: str, sizes: list[int], seed: int, position: int, bit: int):
    payload, extents = content(sizes, seed)
    expected, table = root(payload, extents, algorithm), table_of(payload, extents, algorithm)
    offset, size = extents[position % len(extents)]
    changed = offset + position % size
    payload[changed] ^= 1 << bit
    assert root(payload, extents, algorithm) != expected
    block = differing_block(table_of(payload, extents, algorithm), table, blocks_of(extents))
    assert block is not None
    assert block.first <= changed < block.last


def test_a_table_of_another_length_is_a_damage():
    blocks = blocks_of([(0, 10), (64, 10), (128, 10)])
    whole = np.arange(3, dtype=np.uint64)
    assert differing_block(whole, whole.copy(), blocks) is None
    assert differing_block(whole, whole[:2], blocks) == blocks[2]
    assert differing_block(whole, np.arange(4, dtype=np.uint64), blocks) == blocks[2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), pair=st.sampled_from([(0, 1), (0, 2), (1, 3)]))
def test_swapped_blocks_and_lanes_change_the_root(algorithm: str, seed: int, pair: tuple[int, int]):
    for unit in (LANE_BYTES, 2 * LANE_BYTES):
        payload, extents = content([8 * LANE_BYTES], seed)
        expected = root(payload, extents, algorithm)
        first, second = (slice(index * unit, (index + 1) * unit) for index in pair)
        payload[first], payload[second] = payload[second].copy(), payload[first].copy()
        assert root(payload, extents, algorithm) != expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    source=st.integers(0, 4 * LANE_BYTES // 8 - 1),
    target=st.integers(0, 4 * LANE_BYTES // 8 - 1),
)
def test_a_moved_word_changes_the_root(algorithm: str, seed: int, source: int, target: int):
    payload, extents = content([4 * LANE_BYTES], seed)
    words = payload.view(np.uint64)
    words[target] = 0
    if source == target or words[source] == 0:
        return
    expected = root(payload, extents, algorithm)
    words[source], words[target] = words[target], words[source]
    assert root(payload, extents, algorithm) != expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, seed=st.integers(0, 2**32), cut=st.integers(1, 9))
def test_a_truncated_tensor_changes_the_table(algorithm: str, sizes: list[int], seed: int, cut: int):
    """Also one whose end was zeros, where a sum alone would stay the same."""
    sizes = [*sizes, sizes[-1] + 10]
    payload, extents = content(sizes, seed)
    offset, size = extents[-1]
    payload[offset + size - cut :] = 0
    shorter = [*extents[:-1], (offset, size - cut)]
    tables = [table_of(payload, which, algorithm).tolist() for which in (extents, shorter)]
    assert tables[0] != tables[1]


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_the_order_of_computing_changes_nothing(sizes: list[int], seed: int, order):
    """Rows made one by one in any order, by parts of the tensors, with a copy in the same pass, and of lanes in any
    order, are those of one pass."""
    payload, extents = content(sizes, seed)
    blocks = blocks_of(extents)
    shuffled = order.sample(blocks, len(blocks))
    for algorithm in ALGORITHMS:
        rows = {}
        for block in shuffled:
            [rows[block.row]] = table_of(payload, [(block.first, block.last - block.first)], algorithm).tolist()
        assert [rows[row] for row in range(len(blocks))] == table_of(payload, extents, algorithm).tolist()
    target = np.full_like(payload, 7)
    copied, spent = hash_blocks(target, blocks, payload)
    assert copied.tolist() == table_of(payload, extents, "xxh3").tolist()
    assert spent.copy_s > 0
    assert all((target[b.first : b.last] == payload[b.first : b.last]).all() for b in blocks)


def test_threads_make_the_same_table(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(checksums.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    payload, extents = content([50 << 20, 3, 7 << 20], 1)
    blocks, finished = blocks_of(extents), list[tuple[int, int]]()
    assert [block.tensor for block in blocks] == [0, 0, 0, 0, 1, 2]
    target = np.zeros_like(payload)
    table, _ = hash_blocks(target, blocks, payload, lambda tensor, size: finished.append((tensor, size)))
    assert sorted(finished) == [(0, 50 << 20), (1, 3), (2, 7 << 20)]
    assert (target == payload).all()
    monkeypatch.setattr(checksums.os, "sched_getaffinity", lambda process: {0})
    finished.clear()
    again, _ = hash_blocks(target, blocks, payload, lambda tensor, size: finished.append((tensor, size)))
    assert table.tolist() == again.tolist()
    assert finished == sorted(finished)
    assert [finished[-1], len(finished)] == [(2, 7 << 20), 2 * 50 + 1 + 2 * 7]


def test_lanes_are_as_defined():
    """The definition of `checksums`, computed with Python's integers."""
    mask = (1 << 64) - 1

    def split_mix(number: int) -> int:
        mixed = (number + 1) * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        return mixed ^ mixed >> 31

    keys = lane_keys()
    assert keys[:50].tolist() == [split_mix(number) | 1 for number in range(50)]
    assert len(set(keys.tolist())) == LANE_BYTES // 4
    words = np.random.default_rng(0).integers(-(2**31), 2**31, LANE_BYTES // 4).astype("<i4")
    expected = sum(int(word) * int(key) for word, key in zip(words, keys, strict=True)) & mask
    assert lane_sums(torch.from_numpy(words.view(np.uint8))).tolist() == [expected]


def test_version_and_manifest_are_in_the_root():
    table = np.arange(3, dtype=np.uint64)
    roots = {root_of(1, b"ab", table), root_of(2, b"ab", table), root_of(1, b"a", table), root_of(1, b"ab", table[:2])}
    assert len(roots) == 4


def test_the_hosts_hash_is_not_the_devices(monkeypatch):
    """Why there are two: on a core, the lanes' sums take more than 1.5 times as long as XXH3."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(checksums.os, "sched_getaffinity", lambda process: {0})
    payload, extents = content([32 << 20], 1)
    seconds = {}
    for algorithm in ALGORITHMS:
        table_of(payload, extents, algorithm)
        times = []
        for _ in range(5):
            started = time.process_time()
            table_of(payload, extents, algorithm)
            times.append(time.process_time() - started)
        seconds[algorithm] = min(times)
    assert seconds["lanes"] > 1.5 * seconds["xxh3"], seconds
