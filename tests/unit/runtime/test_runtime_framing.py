"""Frames survive any cutting of the byte stream; large arrays travel out of band."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.generation import TokenDelta
from headway.records.rollout import Verdict
from headway.runtime.framing import OUT_OF_BAND_BYTES, SCRATCH_BYTES, Chunk, Frame, FrameReader, Kind, encode


def _bytes(chunks: list[Chunk]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def _read(stream: bytes, cuts: list[int]) -> list[Frame]:
    """Feed ``stream`` in pieces of the given sizes, over and over."""
    reader, frames, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        target = reader.target()
        piece = stream[at : at + min(cuts[turn % len(cuts)], len(target))]
        target[: len(piece)] = piece
        frames += reader.received(len(piece))
        at, turn = at + len(piece), turn + 1
    return frames


MESSAGES = st.one_of(
    st.none(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=5),
    st.binary(max_size=50),
    st.builds(lambda size: np.arange(size, dtype=np.int64), st.sampled_from([0, 1, 3000, 40_000])),
)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


@settings(deadline=None, max_examples=60)
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=6),
    cuts=st.lists(st.sampled_from([1, 7, 24, 25, 1000, 65_536, SCRATCH_BYTES]), min_size=1, max_size=5).filter(
        lambda cuts: max(cuts) >= 1000
    ),
)
def test_any_cutting_gives_the_same_messages(messages: list[Any], cuts: list[int]):
    stream = b"".join(_bytes(encode(Kind.EVENT, number, message)) for number, message in enumerate(messages))
    frames = _read(stream, cuts)
    assert [frame.call for frame in frames] == list(range(len(messages)))
    assert all(_same(frame.load(), message) for frame, message in zip(frames, messages, strict=True))


def test_one_byte_at_a_time():
    messages = [{"a": 1}, np.ones(3), "x"]
    frames = _read(b"".join(_bytes(encode(Kind.CALL, 9, message)) for message in messages), [1])
    assert [frame.kind for frame in frames] == [Kind.CALL] * 3
    assert frames[0].load() == {"a": 1}


def test_large_arrays_are_not_copied_by_the_sender_and_are_writable_at_the_receiver():
    array = np.zeros(OUT_OF_BAND_BYTES, dtype=np.uint8)
    chunks = encode(Kind.CALL, 1, {"array": array, "small": np.zeros(8)})
    assert len(chunks) == 2
    assert np.shares_memory(np.frombuffer(chunks[1], dtype=np.uint8), array)
    (frame,) = _read(_bytes(chunks), [4096])
    received = frame.load()["array"]
    received[0] = 1
    assert received.flags.aligned
    assert received[0] == 1


def test_several_large_arrays_keep_their_places():
    arrays = [np.full(OUT_OF_BAND_BYTES + extra, extra, dtype=np.uint8) for extra in (3, 1, 2)]
    (frame,) = _read(_bytes(encode(Kind.CALL, 1, arrays)), [5000])
    assert all(_same(one, other) for one, other in zip(frame.load(), arrays, strict=True))


def test_records_cross_unchanged():
    records = [
        TokenDelta.of("1-0", (1, 2), (-0.5, -0.25), version=3),
        Verdict(reward=1.0, solved=True, detail={"parts": [1, {"x": None}]}),
    ]
    (frame,) = _read(_bytes(encode(Kind.EVENT, 0, records)), [4096])
    assert frame.load() == records


def test_what_does_not_pickle_raises_at_the_sender():
    with pytest.raises((AttributeError, TypeError)):
        encode(Kind.CALL, 1, lambda: None)


def test_many_arrays_share_one_block_and_each_is_aligned():
    arrays: list[Any] = [np.ones(OUT_OF_BAND_BYTES + 1, dtype=np.uint8)]
    arrays += [np.arange(OUT_OF_BAND_BYTES, dtype=np.int64) + number for number in range(40)]
    (frame,) = _read(_bytes(encode(Kind.CALL, 1, arrays)), [SCRATCH_BYTES])
    received = frame.load()
    assert all(_same(one, other) for one, other in zip(received, arrays, strict=True))
    assert all(array.flags.aligned and array.flags.writeable for array in received)
    assert len({id(buffer.obj) for buffer in frame.buffers}) == 1
