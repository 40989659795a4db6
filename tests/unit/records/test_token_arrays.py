"""Token sequences are tuples to their readers and arrays on their way: against plain tuples, through every format."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.orchestrator_tokens import token_costs
from headway.records.generation import PartialResponse, TokenDelta, VersionSpan
from headway.records.token_block import TokenBlock
from headway.records.tokens import TokenArray, TokenIds, TokenLogprobs, TokenMask, decoder, encoder, plain, restored
from headway.runtime.framing import OUT_OF_BAND_BYTES, FrameReader, Kind, encode

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
LOGPROBS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)
MASKS = st.lists(st.booleans(), max_size=40)
ANY = st.one_of(
    st.tuples(st.just(TokenIds), IDS), st.tuples(st.just(TokenLogprobs), LOGPROBS), st.tuples(st.just(TokenMask), MASKS)
)
PYTHON = {TokenIds: int, TokenLogprobs: float, TokenMask: bool}
KINDS = tuple(PYTHON)


@given(given_=ANY, other=ANY, data=st.data())
def test_sequences_read_like_tuples(given_: Any, other: Any, data: st.DataObject) -> None:
    kind, items = given_
    model, tokens = tuple(items), kind(items)
    assert (len(tokens), bool(tokens), tuple(tokens), hash(tokens)) == (len(model), bool(model), model, hash(model))
    assert all(type(item) is PYTHON[kind] for item in tokens)
    for same in (model, items, kind(model), np.asarray(items, kind.dtype)):
        assert (tokens == same) is True
        assert (tokens != same) is False
    assert (model == tokens) is True
    third = other[0](other[1])
    assert (tokens == third) is (model == tuple(other[1]))
    assert (tokens < third, tokens >= third) == (model < tuple(other[1]), model >= tuple(other[1]))
    assert (tokens == "tokens", tokens == None, tokens == 3) == (False, False, False)  # noqa: E711
    piece = data.draw(st.slices(len(model)))
    assert type(tokens[piece]) is kind
    assert tokens[piece] == model[piece]
    assert tokens + items == model + model == items + tokens
    assert list(reversed(tokens)) == list(reversed(model))
    if model:
        at = data.draw(st.integers(-len(model), len(model) - 1))
        assert (tokens[at], type(tokens[at])) == (model[at], PYTHON[kind])
        assert (model[at] in tokens, tokens.index(model[at]), tokens.count(model[at])) == (
            True,
            model.index(model[at]),
            model.count(model[at]),
        )
    with pytest.raises(IndexError):
        tokens[len(model)]


@given(given_=ANY)
def test_sequences_survive_every_format(given_: Any) -> None:
    kind, items = given_
    tokens: TokenArray[Any] = kind(items)
    packed = encoder().encode(tokens)
    assert len(packed) <= len(items) * kind.dtype.itemsize + 5
    copies = [
        decoder(kind).decode(packed),
        decoder(kind).decode(msgspec.msgpack.encode(items)),  # as they were stored before there were arrays
        msgspec.json.decode(msgspec.json.encode(tokens, enc_hook=plain), type=kind, dec_hook=restored),
        *(pickle.loads(pickle.dumps(tokens, protocol)) for protocol in (2, 4, 5)),
        copy.deepcopy(tokens),
    ]
    for same in copies:
        assert type(same) is kind
        assert same == tokens
        assert same.array.dtype == kind.dtype
        assert not same.array.flags.writeable
    assert msgspec.json.encode(tokens, enc_hook=plain) == msgspec.json.encode(items)


def test_a_long_sequence_travels_beside_the_pickle() -> None:
    tokens = TokenIds(range(OUT_OF_BAND_BYTES))
    chunks = encode(Kind.EVENT, 0, (tokens, tokens[: len(tokens) // 2]))
    assert [len(chunk) for chunk in chunks[1:]] == [4 * OUT_OF_BAND_BYTES, 2 * OUT_OF_BAND_BYTES]
    assert len(chunks[0]) < 500
    reader, data, at = FrameReader(), b"".join(chunks), 0
    frames: list[Any] = []
    while not frames:
        target = reader.target()
        taken = min(len(target), len(data) - at)
        target[:taken] = data[at : at + taken]
        at += taken
        frames = reader.received(taken)
    whole, half = frames[0].load()
    assert (whole, half) == (tokens, tokens[: len(tokens) // 2])
    assert not whole.array.flags.writeable


def test_slices_share_memory_and_nobody_can_write() -> None:
    owned = np.arange(6, dtype=np.int32)
    tokens = TokenIds(owned)
    owned[0] = 99  # the owner may go on with its array
    assert tokens[0] == 0
    assert np.shares_memory(tokens[2:5].array, tokens.array)
    with pytest.raises(ValueError, match="read-only"):
        tokens.array[0] = 1
    with pytest.raises(TypeError):
        tokens[0] = 1  # type: ignore[index]
    assert torch.tensor(tokens).tolist() == np.asarray(tokens).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.exp(TokenLogprobs((0.0,)))[0] == 1.0


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        (TokenIds, [1.5], "float64"),
        (TokenIds, [2**31], "32 bits"),
        (TokenIds, [-(2**31) - 1], "32 bits"),
        (TokenIds, [2**70], "object"),
        (TokenIds, [True], "bool"),
        (TokenIds, [[1]], "2 dimensions"),
        (TokenIds, ["1"], "<U1"),
        (TokenLogprobs, [None], "object"),
        (TokenMask, [0, 1], "int64"),
    ],
)
def test_other_kinds_of_items_are_refused_and_never_cast(kind: Any, values: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kind(values)


@pytest.mark.parametrize("bad", [{"ids": "abc"}, {"ids": b"abc"}, {"ids": [1.5]}, {"ids": {}}, {"logprobs": [[0.5]]}])
def test_a_record_with_damaged_tokens_is_not_decoded(bad: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder(PartialResponse).decode(msgspec.msgpack.encode(bad))


PIECES = st.lists(
    st.one_of(
        st.tuples(st.just("delta"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("response"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("reply"), st.integers(0, 5), st.just(0)),
    ),
    max_size=12,
)


@given(begun=st.integers(0, 4), pieces=PIECES)
def test_a_block_is_its_pieces_one_after_another(begun: int, pieces: list[tuple[str, int, int]]) -> None:
    """Against four plain lists with a version for every token."""
    ids, logprobs, mask, versions = list(range(begun)), [-0.5] * begun, [True] * begun, [7] * begun
    spans = (VersionSpan(version=7, tokens=begun),) if begun else ()
    block = TokenBlock(PartialResponse(ids=tuple(ids), logprobs=tuple(logprobs), versions=spans))
    seen: list[tuple[PartialResponse, tuple[int, ...]]] = []
    for number, (how, count, version) in enumerate(pieces):
        new = [100 * number + i for i in range(count)]
        values = [-0.25 * (i + 1) for i in range(count)]
        if how == "delta" and count:
            block.append(TokenDelta.of("r", new, values, version=version).data, version)
        elif how == "response":
            block.extend(new, values, (VersionSpan(version=version, tokens=count),) if count else ())
        elif how == "reply":
            block.append_reply(new)
            values, version = [0.0] * count, versions[-1] if versions else -1
        ids, logprobs, versions = ids + new, logprobs + values, versions + [version] * count
        mask += [how != "reply"] * count
        seen.append((block.response(), tuple(ids)))
    assert len(block) == len(ids)
    assert (block.ids, block.logprobs, block.mask) == (ids, logprobs, mask)
    assert [span.version for span in block.versions for _ in range(span.tokens)] == versions
    assert all(span.tokens for span in block.versions)
    assert all(one.version != next_.version for one, next_ in zip(block.versions, block.versions[1:], strict=False))
    assert all(response.ids == then for response, then in seen)  # what was handed out stays as it was


def test_a_block_refuses_parts_that_dont_match() -> None:
    one = (VersionSpan(version=1, tokens=1),)
    for parts in (((1, 2), (-0.5,), one), ((1, 2), (-0.5, -0.5), one), ((), (), one)):
        with pytest.raises(ValueError, match="the counts must be equal"):
            TokenBlock().extend(*parts)


def test_a_delta_takes_eight_bytes_a_token() -> None:
    deltas = [TokenDelta.of("12-3.0.0", range(count), [-0.5] * count, version=3) for count in (8, 16)]
    short, long = (len(encoder().encode([delta])) for delta in deltas)
    assert long - short == 8 * 8
    assert long <= 16 * 12
    assert (deltas[0].ids, deltas[0].logprobs) == (tuple(range(8)), (-0.5,) * 8)
    assert operator.eq(decoder(TokenDelta).decode(encoder().encode(deltas[0])), deltas[0])


def test_a_token_takes_at_most_sixteen_bytes_in_every_message() -> None:
    """From an engine's deltas to the trainer's arrays, through the code that runs use; times are the benchmark's."""
    costs = token_costs(rounds=1)
    assert set(costs["bytes_by_message"]) == {"frame", "row", "batch"}
    assert 9.0 <= costs["bytes_per_token"] <= 16.0
