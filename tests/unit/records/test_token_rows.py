"""Rows beside tokens: cut and joined like lists, through every format, and continued when a rollout is."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithms.samples import lay_out, prefix_tree, slice_micro_batch
from headway.records.generation import PartialResponse, TokenDelta, VersionSpan
from headway.records.rollout import Branch, Rollout, Sample
from headway.records.token_block import TokenBlock
from headway.records.tokens import EXPERTS, KEPT, ExpertRouting, TokenRows, decoder, encoder, outside_kept
from headway.records.training import TrainBatch
from headway.runtime.framing import Kind, encode

ROWS = st.lists(st.lists(st.integers(0, 254), max_size=4), max_size=12)


def listed(rows: TokenRows) -> list[list[int]]:
    ends = np.cumsum(rows.lengths.array)
    return [row.tolist() for row in np.split(rows.values, ends[:-1])] if len(rows) else []


def numbered(first: int, end: int) -> TokenRows:
    """Rows of tokens ``first`` to ``end``, each with its token's number, twice."""
    return TokenRows.of(np.arange(first, end, dtype=np.uint8).repeat(2).reshape(-1, 2))


@given(parts=st.lists(st.tuples(ROWS, st.sampled_from([1, 2, 4])), max_size=4), data=st.data())
def test_rows_are_cut_and_joined_like_lists(parts: list[tuple[list[list[int]], int]], data: st.DataObject) -> None:
    model = [row for rows, _ in parts for row in rows]
    joined = TokenRows.joined(TokenRows.of(rows, item_bytes) for rows, item_bytes in parts)
    assert listed(joined) == model
    assert len(joined) == len(model)
    first = data.draw(st.integers(0, len(model)))
    end = data.draw(st.integers(first, len(model)))
    assert listed(joined[first:end]) == model[first:end]
    assert listed(TokenRows.joined((joined[:first], joined[first:]))) == model
    beyond = data.draw(st.integers(0, 3))
    runs = joined.cut([first, 0], [len(model) - first + beyond, end])
    assert listed(runs) == model[first:] + [[]] * beyond + model[:end]


@given(rows=ROWS, item_bytes=st.sampled_from([1, 2, 4]))
def test_rows_survive_every_format(rows: list[list[int]], item_bytes: int) -> None:
    made = TokenRows.of(rows, item_bytes)
    rollout = Rollout(group=0, member=1, prompt_ids=(1,), token_rows={EXPERTS: made})
    assert decoder(Rollout).decode(encoder().encode(rollout)).token_rows == {EXPERTS: made}
    assert pickle.loads(pickle.dumps(rollout)).token_rows == {EXPERTS: made}
    delta = TokenDelta.of("r", (5,), (-0.5,), version=1, token_rows={EXPERTS: made})
    assert decoder(list[TokenDelta]).decode(encoder().encode([delta])) == [delta]


@given(rows=ROWS, item_bytes=st.sampled_from([1, 2, 4]))
def test_equal_rows_and_no_others_have_equal_hashes(rows: list[list[int]], item_bytes: int) -> None:
    hashes = TokenRows.of(rows, item_bytes).hashes().tolist() if rows else []
    assert [[one == other for other in hashes] for one in hashes] == [[one == other for other in rows] for one in rows]


def test_large_rows_travel_beside_a_frames_message() -> None:
    made = TokenRows.of(np.random.default_rng(0).integers(0, 99, (5000, 16), np.uint8))
    chunks = encode(Kind.RESULT, 1, {EXPERTS: made})
    assert made.data.array.nbytes in [len(chunk) for chunk in chunks[1:]]
    assert len(chunks[0]) < 500


def test_a_tables_unknown_numbers_are_negative() -> None:
    rows = TokenRows.joined((numbered(3, 5), TokenRows.of([[], [255, 255]])))
    assert rows.table(2).tolist() == [[3, 3], [4, 4], [-1, -1], [-1, -1]]
    assert TokenRows.of([[65535, 255]], 2).table(2).tolist() == [[-1, 255]]
    with pytest.raises(ValueError, match="2 numbers where 6"):
        rows.table(6)


def test_experts_of_another_model_are_named() -> None:
    routing = ExpertRouting(layers=2, per_token=1, experts=4)
    assert routing.fault(TokenRows.of([[0, 3], [], [255, 255]])) == ""
    assert routing.fault(TokenRows.of([[0, 4]])) == "expert 4 of a layer that has 4"
    assert "1 numbers where 2 are needed: 2 layers with 1 experts" in routing.fault(TokenRows.of([[0]]))
    assert (routing.item_bytes, routing.row_bytes) == (1, 6)
    assert ExpertRouting(layers=2, per_token=1, experts=256).item_bytes == 2  # one number is none of them


@given(counts=st.lists(st.integers(0, 5), max_size=5))
def test_a_block_says_of_how_many_tokens_it_has_rows(counts: list[int]) -> None:
    """Each call returns those behind: joined, a row for each token in turn."""
    block = TokenBlock()
    for count in counts:
        known = block.rows
        block.append_rows({EXPERTS: numbered(known, known + count)} if count else {})
    assert block.rows == sum(counts)
    assert block.token_rows.get(EXPERTS, TokenRows()).table(2).tolist() == [[i, i] for i in range(sum(counts))]


@given(counts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=5))
def test_rows_of_two_kinds_end_at_different_tokens(counts: list[tuple[int, int, bool]]) -> None:
    """Experts belong to tokens read, kept sets to tokens sampled: calls are asked for rows of which one kind is known
    already. An engine may leave out sets that are all empty."""
    block, sequence, sets = TokenBlock(), 0, dict[int, list[int]]()
    for prompt, response, truncated in counts:
        known, sampled = block.rows, range(sequence + prompt, sequence + prompt + response)
        sequence = sampled.stop
        kept = {token: [token, 99] for token in sampled} if truncated else {}
        rows = {EXPERTS: numbered(known, sequence - 1)}
        if truncated:
            rows[KEPT] = TokenRows.of([kept.get(token, []) for token in range(known, sequence)], 2)
        block.append_rows(rows, known)
        sets |= kept
    assert block.token_rows[EXPERTS] == numbered(0, sequence - 1)
    found = block.token_rows.get(KEPT, TokenRows())
    assert listed(found) == [sets.get(token, []) for token in range(len(found))]
    assert len(found) > max(sets, default=-1)


@given(rows=st.lists(st.lists(st.integers(0, 65535), max_size=3), max_size=8), data=st.data())
def test_rows_taken_by_their_places(rows: list[list[int]], data: st.DataObject) -> None:
    at = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    lengths, values = TokenRows.of(rows, 2).take(np.array(at, np.int64))
    assert lengths.tolist() == [len(rows[i]) for i in at]
    assert values.tolist() == [number for i in at for number in rows[i]]
    tokens = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=len(at), max_size=len(at))), np.int64)
    wrong = [i for i, row in enumerate(at) if rows[row] and tokens[i] not in rows[row]]
    assert outside_kept(lengths, values, tokens).tolist() == wrong


def test_a_parked_response_goes_on_where_its_rows_end() -> None:
    """Deltas before a parking and after it make the rows that one call would have made; a watcher gets none."""
    block = TokenBlock()
    block.append(TokenDelta.of("r", (5, 6), (-0.5, -0.5)).data, 1)
    block.append_rows({EXPERTS: numbered(0, 4)})  # three of the prompt, one sampled
    parked = decoder(PartialResponse).decode(encoder().encode(block.response()))
    resumed = TokenBlock(parked)
    resumed.append(TokenDelta.of("r", (7,), (-0.5,)).data, 2)
    resumed.append_rows({EXPERTS: numbered(4, 5)})
    assert resumed.response().token_rows == {EXPERTS: numbered(0, 5)}
    assert resumed.response(with_rows=False).token_rows == {}


def test_a_batchs_rows_stay_beside_their_tokens() -> None:
    """Trunk and branch, short and missing rows; tokens with other rows are not shared."""

    def sample(member: int, response: tuple[int, ...], rows: TokenRows | None, *branches: Branch) -> Sample:
        given_ = {} if rows is None else {EXPERTS: rows}
        n = len(response)
        spans = (VersionSpan(version=0, tokens=n),)
        rollout = Rollout(
            group=0, member=member, prompt_ids=(1, 2, 3), response_ids=response, response_logprobs=(-1.0,) * n,
            response_mask=(True,) * n, versions=spans, token_rows=given_, branches=branches,
        )  # fmt: skip
        return Sample(rollout=rollout, advantage=1.0)

    branch = Branch(
        prompt_ids=(1, 2, 3, 4), response_ids=(9,), response_logprobs=(-1.0,), response_mask=(True,),
        versions=(VersionSpan(version=0, tokens=1),),
        token_rows={EXPERTS: TokenRows.joined((numbered(10, 13), numbered(100, 106)))},
    )  # fmt: skip
    samples = (
        sample(0, (4, 5), numbered(10, 14), branch),
        sample(1, (6, 7, 8), numbered(20, 22)),
        sample(2, (9,), None),
    )
    flat = lay_out(TrainBatch(step=0, samples=samples))
    table = flat.arrays().token_rows[EXPERTS].table(2)[:, 0].tolist()
    assert table == [10, 11, 12, 13, -1, 10, 11, 12, 100, 101, 20, 21, -1, -1, -1, -1, -1, -1, -1, -1]
    arrays = flat.arrays()
    whole = np.arange(4)
    alone = slice_micro_batch(arrays, whole)
    fed = [10, 11, 12, 13, 10, 11, 12, 100, 20, 21, -1, -1, -1, -1, -1, -1]  # all but the last of each sequence
    assert alone.token_rows[EXPERTS].table(2)[:, 0].tolist() == fed
    shared = slice_micro_batch(arrays, whole, prefix_tree(arrays, whole, 1))
    # The trunk's prompt, once. Of token 4, which the branch begins with too, both have experts of their own.
    rows = sorted(shared.token_rows[EXPERTS].table(2)[:, 0].tolist())
    assert rows == [-1, -1, -1, -1, -1, -1, 10, 11, 12, 13, 20, 21, 100]
    assert sorted(shared.input_ids.tolist()) == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 6, 7]
    plain = lay_out(TrainBatch(step=0, samples=(samples[2],)))
    assert plain.token_rows == {}  # nothing is sent where nothing is recorded
    assert msgspec.structs.replace(samples[2].rollout, token_rows={}) == samples[2].rollout
