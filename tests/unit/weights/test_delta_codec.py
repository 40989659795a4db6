"""The codec of deltas: bit patterns come back exactly, near their entropy, and what isn't an encoding is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.errors import WeightsCorrupt
from headway.weights.delta_codec import WORDS, decode, encode

WORD_BYTES = st.sampled_from(sorted(WORDS))


def arrays(word_bytes: int, size: int, density: float, reach: int, seed: int) -> tuple[Any, Any]:
    """A base of any bits and what it becomes: a share of the words changes, by up to so much or to anything (0)."""
    random, dtype = np.random.default_rng(seed), WORDS[word_bytes]
    base = random.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    changes = random.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    if reach:
        changes = random.integers(-reach, reach + 1, size).astype(np.int64).astype(dtype)
    return base, np.where(random.random(size) < density, base + changes, base)


@settings(deadline=None, max_examples=60)
@given(
    WORD_BYTES,
    st.one_of(st.integers(0, 40), st.integers(60_000, 140_000)),
    st.sampled_from([0.0, 1e-4, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 1, 6, 7, 8, 300]),
    st.integers(0, 99),
)
def test_words_come_back_and_twice_is_harmless(word_bytes: int, size: int, density: float, reach: int, seed: int):
    base, new = arrays(word_bytes, size, density, reach, seed)
    positions, values, bases = decode(encode(base, new), base)
    assert np.array_equal(bases, base[positions])
    assert positions.tolist() == np.flatnonzero(base != new).tolist()
    target = base.copy()
    for _ in range(2):
        target[positions] = values
        assert target.dtype == new.dtype
        assert np.array_equal(target, new)


@settings(deadline=None, max_examples=60)
@given(WORD_BYTES, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**64 - 1)), max_size=8), st.data())
def test_any_change_of_any_word_is_exact(word_bytes: int, changes: list[tuple[int, int]], data: st.DataObject):
    dtype = WORDS[word_bytes]
    limit = int(np.iinfo(dtype).max)
    base = np.array([data.draw(st.integers(0, limit)) for _ in range(10)], dtype)
    new = base.copy()
    for position, value in changes:
        new[position] = value & limit
    positions, values, _ = decode(encode(base, new), base)
    base[positions] = values
    assert np.array_equal(base, new)


def test_nan_and_minus_zero_are_bits():
    base = np.array([0.0, -0.0, np.nan, 1.0, np.inf], np.float32).view(np.uint32)
    new = np.array([-0.0, 0.0, np.nan, np.nan, -np.inf], np.float32).view(np.uint32)
    new[2] ^= 5  # another NaN
    positions, values, _ = decode(encode(base, new), base)
    assert positions.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(values, new)


@pytest.mark.parametrize("density", [0.003, 0.018, 0.11])
def test_size_is_near_the_entropy(density: float):
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 1 << 21, dtype=np.uint16)
    is_changed = random.random(len(base)) < density
    choices, shares = np.array([1, -1, 2, -2, 40]), np.array([0.47, 0.47, 0.025, 0.025, 0.01])
    differences = random.choice(choices, len(base), p=shares).astype(np.uint16)
    new = np.where(is_changed, base + differences, base)
    bits = -(density * np.log2(density) + (1 - density) * np.log2(1 - density))
    bits += density * -(shares * np.log2(shares)).sum()
    assert 8 * len(encode(base, new)) < 1.08 * bits * len(base)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_what_is_no_encoding_is_refused(content: bytes):
    with pytest.raises(WeightsCorrupt, match="delta's section"):
        decode(content, np.zeros(20, np.uint16))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_damaged_encoding_is_refused_or_decodes_within_the_array(position: int, bit: int):
    base, new = arrays(2, 3000, 0.1, 20, 3)
    content = bytearray(encode(base, new))
    content[position % len(content)] ^= 1 << bit
    try:
        positions, values, _ = decode(bytes(content), base)
    except WeightsCorrupt:
        return
    assert len(positions) == len(values)
    assert all(0 <= index < len(base) for index in positions)


def test_encoding_for_a_longer_array_is_refused():
    base = np.zeros(1000, np.uint16)
    with pytest.raises(WeightsCorrupt, match="changes word 999 of 500"):
        decode(encode(base, np.append(base[:-1], np.uint16(1))), base[:500])
