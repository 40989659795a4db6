"""Ranks that publish a version together: the division of its bytes, its root, and what is there when one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from device_stand_in import SharedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from writer_threads import ThreadWriter, WriterThreads, rows_of

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights import checksums, publication
from headway.weights.checksums import Block, blocks_of
from headway.weights.division import Extent, PayloadDivision
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slot_file import UNWRITTEN, version_in

torch.set_num_threads(1)
BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(3, generator=generator),
        "experts": torch.randn(3, 4, 9, generator=generator),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 4),
        "one row": torch.randn(1, 40, generator=generator),
    }


# --- bytes ------------------------------------------------------------------------------------------------


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[Block], int, list[list[Extent]], list[str]]:
    """The blocks of some tensors, their payload's size, what each rank writes of them, and the nodes of the ranks."""
    nodes = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
    bounds, offset = list[tuple[int, int]](), 0
    extents: list[list[Extent]] = [[] for _ in nodes]
    for tensor, size in enumerate(draw(st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=4))):
        bounds.append((offset, size))
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=len(nodes) - 1, max_size=len(nodes) - 1)))
        edges = [offset, *(offset + cut for cut in cuts), offset + size]
        ranks = draw(st.permutations(range(len(nodes))))
        for rank, first, last in zip(ranks, edges, edges[1:], strict=False):
            extents[rank].append(Extent(tensor, first, last))
        offset += -(-size // 64) * 64
    return blocks_of(bounds), offset, extents, nodes


@settings(deadline=None, max_examples=150)
@given(divisions())
def test_every_block_is_complete_where_it_is_hashed_and_served(case: tuple[Any, ...]) -> None:
    blocks, size, extents_by_rank, nodes = case
    division = PayloadDivision(blocks, size, extents_by_rank, nodes)
    memory = {node: np.zeros(size, bool) for node in nodes}  # the bytes that a node has
    for extents, node in zip(extents_by_rank, nodes, strict=True):
        for _, first, last in extents:
            memory[node][first:last] = True
    written = {node: here.copy() for node, here in memory.items()}
    for source, target, first, last in division.transfers():
        assert nodes[source] != nodes[target]
        assert written[nodes[source]][first:last].all()
        assert not memory[nodes[target]][first:last].any(), "sent twice"
        memory[nodes[target]][first:last] = True
    hashed = [block for rank in range(len(nodes)) for block in division.hashed_by(rank)]
    assert sorted(hashed) == list(blocks)
    for rank, node in enumerate(nodes):
        assert all(memory[node][block.first : block.last].all() for block in division.hashed_by(rank))
    of_blocks, served = np.zeros(size, bool), np.zeros(size, int)
    for block in blocks:
        of_blocks[block.first : block.last] = True
    for node, here in memory.items():
        for first, last in division.served_by(node):
            served[first:last] += 1
            assert (here | ~of_blocks)[first:last].all()
        allocated = np.zeros(size, bool)
        for first, last in division.written_on(node):
            allocated[first:last] = True
        assert not (here & ~allocated).any()
    assert (served == (1 if blocks else 0)).all()


@settings(deadline=None, max_examples=60)
@given(divisions(), st.integers(0, 10**6), st.sampled_from(["missing", "twice"]))
def test_rows_that_no_rank_or_two_ranks_write_are_refused(case: tuple[Any, ...], choice: int, fault: str) -> None:
    blocks, size, extents_by_rank, nodes = case
    extents = [(rank, extent) for rank, extents in enumerate(extents_by_rank) for extent in extents]
    filled = [(rank, extent) for rank, extent in extents if extent.first < extent.last]
    if not filled:
        return
    rank, extent = filled[choice % len(filled)]
    extents_by_rank[rank].remove(extent)
    if fault == "twice":
        extents_by_rank[rank].append(extent._replace(last=extent.last + 1))
    with pytest.raises(ValueError, match=f"tensor {extent.tensor} of the weights isn't written exactly once"):
        PayloadDivision(blocks, size, extents_by_rank, nodes)


def test_ranks_hash_equal_shares_of_small_tensors() -> None:
    blocks = blocks_of([(64 * tensor, 64) for tensor in range(40)])
    extents = [[Extent(t, 64 * t + 16 * rank, 64 * t + 16 * rank + 16) for t in range(40)] for rank in range(4)]
    division = PayloadDivision(blocks, 64 * 40, extents, [""] * 4)
    assert [len(division.hashed_by(rank)) for rank in range(4)] == [10] * 4
    assert not list(division.transfers())


# --- versions ---------------------------------------------------------------------------------------------


def publish(
    folder: Path, ranks: WriterThreads, versions: list[int], memory: bool = False, **options: Any
) -> list[list[PublishedWeights]]:
    """The records of every rank, by version; the files stay."""

    def of_rank(writer: ThreadWriter) -> list[PublishedWeights]:
        device = SharedDevice(folder) if memory else None
        publisher = Publisher("run", directory=folder, writers=writer, memory=device, **options)
        published = list[PublishedWeights]()
        for version in versions:
            rows = rows_of(weights(version), writer.rank, len(ranks.nodes))
            begun = publisher.begin_rows(version, rows)
            for tensor, *_ in rows.values():
                tensor.zero_()  # they may change now
            published.append(begun.finish())
        return published

    outcomes = ranks.run(of_rank)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [list(records) for records in zip(*outcomes, strict=True)]


def alone(folder: Path, version: int, dtype: torch.dtype | None = None) -> str:
    with Publisher("alone", directory=folder, dtype=dtype) as publisher:
        return publisher.publish(version, weights(version)).checksum


def assembled(published: PublishedWeights, folder: Path) -> PublishedWeights:
    """The version in one file, of the ranges that each part has."""
    if not published.parts:
        return published
    content = bytearray(Path(published.path).stat().st_size)
    for part in published.parts:
        file_bytes = Path(part.path).read_bytes()
        assert version_in(file_bytes) == published.version
        for first, last in part.ranges:
            assert not any(content[first:last])
            content[first:last] = file_bytes[first:last]
    (folder / "assembled").write_bytes(content)
    return msgspec.structs.replace(published, path=str(folder / "assembled"), parts=())


def same(fetched: dict[str, Tensor], version: int) -> bool:
    return all(torch.equal(fetched[name], tensor) for name, tensor in weights(version).items())


@pytest.mark.parametrize("nodes", ["a", "aa", "aaaa", "ab", "abab", "aabbb"])
@pytest.mark.parametrize("memory", [False, True], ids=["copied", "snapshot"])
def test_ranks_publish_the_version_of_one(nodes: str, memory: bool, tmp_path: Path) -> None:
    ranks = WriterThreads(*nodes)
    versions = publish(tmp_path, ranks, [0, 1, 2, 3], memory)
    for version, records in enumerate(versions):
        assert {record.checksum for record in records} == {alone(tmp_path, version)}
        assert len({record.path for record in records}) == len(set(nodes))
        assert [part.node for part in records[0].parts] == ([] if len(set(nodes)) == 1 else sorted(set(nodes)))
    for version in (1, 2, 3):
        assert same(Subscriber().fetch(assembled(versions[version][0], tmp_path)), version)
    assert bool(ranks.sent_bytes) == (len(set(nodes)) > 1)


@settings(deadline=None, max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=5),
    nodes=st.sampled_from(["aa", "aaa", "ab", "aba"]),
    seed=st.integers(0, 1000),
)
def test_any_shapes_have_the_root_of_one_writer(
    shapes: list[list[int]], nodes: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, generator = tmp_path_factory.mktemp("shapes"), torch.Generator().manual_seed(seed)
    tensors = {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    with Publisher("alone", directory=folder, dtype=torch.bfloat16) as publisher:
        expected = publisher.publish(4, tensors).checksum
    ranks = WriterThreads(*nodes)

    def of_rank(writer: ThreadWriter) -> str:
        publisher = Publisher("run", directory=folder, writers=writer, dtype=torch.bfloat16)
        return publisher.begin_rows(4, rows_of(tensors, writer.rank, len(nodes))).finish().checksum

    assert set(ranks.run(of_rank)) == {expected}


def test_a_small_tensors_neighbours_are_left_alone(tmp_path: Path) -> None:
    """A rank's snapshot is as long as the payload where all tensors are small; its gaps are other ranks' rows."""
    tensors = {str(number): torch.full((8,), float(number)) for number in range(5)}

    def of_rank(writer: ThreadWriter) -> PublishedWeights:
        publisher = Publisher("run", directory=tmp_path, writers=writer, memory=SharedDevice(tmp_path))
        return publisher.begin_rows(1, rows_of(tensors, writer.rank, 2)).finish()

    fetched = Subscriber().fetch(WriterThreads("a", "a").run(of_rank)[0])
    assert all(torch.equal(fetched[name], tensor) for name, tensor in tensors.items())


def test_nothing_is_hashed_before_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 copies its snapshot only when rank 0 waits for it."""
    waiting, ranks = threading.Event(), WriterThreads("a", "a")
    ranks.writers[0].on_call = lambda writer: waiting.set() if writer.calls.count("all_gather") == 3 else None
    copy = publication.Publication._copy_snapshot

    def late(begun: publication.Publication) -> None:
        if begun.writers.rank == 1:
            waiting.wait(5.0)
        copy(begun)

    monkeypatch.setattr(publication.Publication, "_copy_snapshot", late)
    assert publish(tmp_path, ranks, [2], memory=True)[0][0].checksum == alone(tmp_path, 2)


@pytest.mark.parametrize("nodes", ["aa", "ab"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", range(1, 6))
def test_a_rank_that_fails_leaves_no_half_version(nodes: str, rank: int, call: int, tmp_path: Path) -> None:
    ranks = WriterThreads(*nodes)
    first = publish(tmp_path, ranks, [1])[0][0]
    per_version = len(ranks.writers[0].calls)
    assert per_version == 5

    def fail(writer: ThreadWriter) -> None:
        if len(writer.calls) == per_version + call:
            raise ConnectionError("killed")

    ranks.writers[rank].on_call = fail

    def again(writer: ThreadWriter) -> None:
        publisher = Publisher("run", directory=tmp_path, writers=writer)
        publisher._next = 1
        publisher.begin_rows(2, rows_of(weights(2), writer.rank, 2)).finish()

    assert any(isinstance(outcome, ConnectionError) for outcome in ranks.run(again))
    for file in tmp_path.glob("*.weights"):
        assert version_in(file.read_bytes()) in (1, UNWRITTEN)
    assert same(Subscriber().fetch(assembled(first, tmp_path)), 1)
    successors = publish(tmp_path, WriterThreads(*nodes), [2])[0]
    assert same(Subscriber().fetch(assembled(successors[0], tmp_path)), 2)


def test_a_node_without_space_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    def of_rank(writer: ThreadWriter) -> str:
        publisher = Publisher("run", directory=tmp_path / ("none" if writer.rank == 2 else ""), writers=writer)
        with pytest.raises(ConfigurationError) as refusal:
            publisher.begin_rows(1, rows_of(weights(1), writer.rank, 4))
        return str(refusal.value)

    for outcome in WriterThreads("a", "a", "b", "b").run(of_rank):
        assert "no space to publish" in outcome


def test_shapes_may_change_and_a_restarted_publisher_is_followed(tmp_path: Path) -> None:
    def of_rank(writer: ThreadWriter) -> list[PublishedWeights]:
        published = list[PublishedWeights]()
        publisher = Publisher("run", 2, directory=tmp_path, writers=writer)
        for version in range(1, 6):
            rows = rows_of({"a": torch.full((version, 50), float(version))}, writer.rank, 2)
            published.append(publisher.begin_rows(version, rows).finish())
            if version == 4:
                publisher.close()
        return published

    last = WriterThreads("a", "a").run(of_rank)[0][-1]
    assert torch.equal(Subscriber().fetch(last)["a"], torch.full((5, 50), 5.0))
    with pytest.raises(WeightsCorrupt):
        Subscriber().fetch(msgspec.structs.replace(last, version=4))
