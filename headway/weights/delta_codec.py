"""Encodes what has changed between two arrays of words, as gaps and differences. Torch-free.

Words are bit patterns, unsigned integers of 2, 4 or 8 bytes: NaN and -0 are bits as others are. An encoded array has
three streams, each compressed by zstd, whose Huffman codes bring them near their entropy:

- gaps: unchanged words before each change, in bytes that add up; 255 is continued by the next byte. Gaps between random
  changes are geometric, which loses nothing by being cut.
- nibbles: the difference from the base, modulo the word's range, as a natural number (+1, -1, +2, ... are 0, 1, 2, ...)
  below 15; 15 is an exception. Two share a byte: a code of whole bits for each of them would cost a third more.
- exceptions: those numbers less 15, as planes of bytes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headway.records.errors import WeightsCorrupt

WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}  # by their bytes
_HEAD = struct.Struct("<6Q")  # bytes of each stream, raw and compressed
_CONTINUED = 255  # of a gap's bytes
_EXCEPTION = 15  # of nibbles
_CHUNK_WORDS = 1 << 16  # that are compared while they are in the core's cache
_LEVEL = 1  # of zstd: higher ones search longer for what repeats, and nothing does


class Overwrites(NamedTuple):
    """The values that make an array of words another one: written twice they do no harm."""

    positions: np.ndarray  # [changes] int64, ascending
    values: np.ndarray  # [changes], of the words' type
    bases: np.ndarray  # [changes], what was there


def encode(base: np.ndarray, new: np.ndarray) -> bytes:
    """Encode ``new`` by its changes from ``base``: both [words] of one type in `WORDS`."""
    chunk_starts = range(0, len(new), _CHUNK_WORDS)
    changed_positions = [
        np.flatnonzero(base[first : first + _CHUNK_WORDS] != new[first : first + _CHUNK_WORDS]) + first
        for first in chunk_starts
    ]
    positions = np.concatenate([np.zeros(0, np.int64), *changed_positions])
    continued, remainders = np.divmod(np.diff(positions, prepend=-1) - 1, _CONTINUED)
    gaps = np.full(len(positions) + int(continued.sum()), _CONTINUED, np.uint8)
    gaps[np.cumsum(continued + 1) - 1] = remainders

    numbers = _naturals(new[positions] - base[positions])
    nibbles = np.minimum(numbers, _EXCEPTION).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    exceptions = numbers[numbers >= _EXCEPTION] - new.dtype.type(_EXCEPTION)
    planes = exceptions.astype(exceptions.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, new.itemsize)
    streams = [gaps, nibbles[::2] | nibbles[1::2] << 4, np.ascontiguousarray(planes.T)]
    zstd = pa.Codec("zstd", compression_level=_LEVEL)  # not for several threads
    compressed = [zstd.compress(stream, asbytes=True) if stream.size else b"" for stream in streams]
    sizes = (size for pair in zip(streams, compressed, strict=True) for size in (pair[0].size, len(pair[1])))
    return _HEAD.pack(*sizes) + b"".join(compressed)


def decode(encoded: bytes | memoryview, base: np.ndarray) -> Overwrites:
    """Decode the overwrites that make ``base``, [words] of the type that was encoded, the new array. Raises
    WeightsCorrupt for what `encode` can't have made of a base of this length; another base isn't noticed."""
    content, word_bytes = memoryview(encoded), base.itemsize
    if len(content) < _HEAD.size:
        raise WeightsCorrupt(f"a delta's section has {len(content)} bytes, less than its head")
    sizes = _HEAD.unpack_from(content)
    limits = 2 * len(base) + 1, len(base) + 1, len(base) * word_bytes
    if sum(sizes[1::2]) != len(content) - _HEAD.size or any(map(int.__gt__, sizes[::2], limits)):
        raise WeightsCorrupt(f"a delta's section has {len(content)} bytes, and streams of {sizes}")
    streams, first_byte = list[np.ndarray](), _HEAD.size
    for raw_bytes, compressed_bytes in zip(sizes[::2], sizes[1::2], strict=True):
        streams.append(_decompressed(content[first_byte : first_byte + compressed_bytes], raw_bytes))
        first_byte += compressed_bytes

    gaps, pairs, planes = streams
    ends = np.flatnonzero(gaps != _CONTINUED)
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    nibbles = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)
    numbers = nibbles[: len(ends)].astype(base.dtype)
    exceptional = np.flatnonzero(numbers == _EXCEPTION)
    is_sound = len(pairs) == (len(ends) + 1) // 2 and len(planes) == len(exceptional) * word_bytes
    if not is_sound or (len(ends) < len(gaps) and (not len(ends) or ends[-1] != len(gaps) - 1)):
        raise WeightsCorrupt(f"a delta's section has streams of {len(ends)} changes that don't fit")
    if len(positions) and positions[-1] >= len(base):
        raise WeightsCorrupt(f"a delta changes word {positions[-1]} of {len(base)}")
    words = np.ascontiguousarray(planes.reshape(word_bytes, -1).T).view(base.dtype.newbyteorder("<"))
    numbers[exceptional] += words.reshape(-1).astype(base.dtype)
    bases = base[positions]
    return Overwrites(positions, bases + _differences(numbers), bases)


def _naturals(differences: np.ndarray) -> np.ndarray:
    """Number the differences other than 0, of unsigned words: +1, -1, +2, ... are 0, 1, 2, ..."""
    sign_shift = differences.dtype.type(8 * differences.itemsize - 1)
    is_negative = differences >> sign_shift
    magnitudes = np.where(is_negative, -differences, differences)
    return (magnitudes - differences.dtype.type(1) << differences.dtype.type(1)) + is_negative


def _differences(numbers: np.ndarray) -> np.ndarray:
    """Undo `_naturals`."""
    one = numbers.dtype.type(1)
    magnitudes = (numbers >> one) + one
    return np.where(numbers & one, -magnitudes, magnitudes)


def _decompressed(stream: memoryview, raw_bytes: int) -> np.ndarray:
    """Decompress a stream, [raw_bytes] uint8."""
    if not raw_bytes:
        return np.zeros(0, np.uint8)
    try:
        content = pa.CompressedInputStream(pa.BufferReader(stream), "zstd").read(raw_bytes + 1)
    except (OSError, ValueError) as error:  # pyarrow's
        raise WeightsCorrupt(f"a delta's section can't be decompressed: {error}") from None
    if len(content) != raw_bytes:
        raise WeightsCorrupt(f"a delta's section has a stream of another size than {raw_bytes} bytes")
    return np.frombuffer(content, np.uint8)
