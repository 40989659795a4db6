"""Versions by deltas: what a reader has afterwards is the announced version, bit for bit, or nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from writer_threads import ThreadWriter, WriterThreads, rows_of

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedDelta, PublishedWeights
from headway.weights import delta_chain, deltas
from headway.weights.delta_archive import DeltaArchive, kept_chain
from headway.weights.deltas import DeltaContent, chain_to
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slot_file import HEADER
from headway.weights.slots import reap

torch.set_num_threads(1)


def drift(version: int, *, share: float = 0.02) -> dict[str, Tensor]:
    """The weights of a version: a share of them differs from those of the one before."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embedding": torch.randn(301, 64, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(33, generator=generator),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "head": torch.randn(64, 97, generator=generator).to(torch.bfloat16),
    }
    for step in range(version):
        generator.manual_seed(step + 1)
        for tensor in tensors.values():
            if tensor.is_floating_point():
                is_changed = torch.rand(tensor.shape, generator=generator) < share
                tensor[is_changed] *= 1.01
    return tensors


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], tensor) for name, tensor in right.items()) and left.keys() == right.keys()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher("run", directory=tmp_path, whole_every=100) as publisher:
        yield publisher


def came_by_delta(subscriber: Subscriber) -> bool:
    return subscriber._buffer.changed_from != ""


def test_versions_come_by_deltas_once_there_is_a_base(publisher: Publisher):
    subscriber = Subscriber()
    for version in range(8):
        published = publisher.publish(version, drift(version))
        assert same(subscriber.fetch(published), drift(version))
        assert came_by_delta(subscriber) == (version > 0)
        assert [delta.version for delta in published.deltas] == list(range(1, version + 1))
        for delta in published.deltas:
            assert delta.size_bytes < 0.1 * published.size_bytes
            assert Path(delta.path).stat().st_size == delta.size_bytes
        assert published.encode_s >= 0


def test_reader_that_lags_takes_the_deltas_between(publisher: Publisher):
    subscriber = Subscriber()
    subscriber.fetch(publisher.publish(0, drift(0)))
    for version in range(1, 5):
        published = publisher.publish(version, drift(version))
    assert same(subscriber.fetch(published), drift(4))
    assert came_by_delta(subscriber)


def test_two_buffers_in_turn_have_the_version_before_the_last(publisher: Publisher):
    """As an engine that adopts what it fetches."""
    subscriber = Subscriber()
    for version in range(5):
        live = subscriber.fetch(publisher.publish(version, drift(version)))
        subscriber.keep()
        assert same(live, drift(version))
        assert came_by_delta(subscriber) == (version > 2)  # of the buffer before
    published = publisher.publish(5, drift(5))
    subscriber.fetch(published)
    assert came_by_delta(subscriber)
    assert same(live, drift(4)), "the kept version stays while the next is made"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "base"])
def test_what_keeps_deltas_from_being_the_version_is_named_and_the_whole_is_taken(
    publisher: Publisher, damage: str, caplog: pytest.LogCaptureFixture
):
    subscriber = Subscriber()
    subscriber.fetch(publisher.publish(0, drift(0)))
    published = publisher.publish(1, drift(1))
    (delta,) = published.deltas
    content = bytearray(Path(delta.path).read_bytes())
    reasons = {"gone": "No such file", "base": "embedding differs, in block 0"}
    if damage == "flipped":
        content[-1] ^= 1
        Path(delta.path).write_bytes(content)
    elif damage == "cut":
        Path(delta.path).write_bytes(content[:-1])
    elif damage == "gone":
        Path(delta.path).unlink()
    else:
        subscriber._buffer.payload[1] ^= 1
    with caplog.at_level(logging.WARNING):
        assert same(subscriber.fetch(published), drift(1))
    assert not came_by_delta(subscriber)
    assert reasons.get(damage, "doesn't have") in caplog.text
    assert same(subscriber.fetch(publisher.publish(2, drift(2))), drift(2))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**7), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_base_never_survives(tmp_path_factory: pytest.TempPathFactory, position: int, bit: int):
    with Publisher("flip", directory=tmp_path_factory.mktemp("flip"), whole_every=9) as publisher:
        subscriber = Subscriber()
        subscriber.fetch(publisher.publish(0, drift(0)))
        payload = subscriber._buffer.payload
        payload[position % len(payload)] ^= 1 << bit
        assert same(subscriber.fetch(publisher.publish(1, drift(1))), drift(1))


def test_chain_begins_again(tmp_path: Path):
    """After so many versions, with other shapes, and an earlier version; a large delta isn't tried at once again."""
    with Publisher("run", directory=tmp_path, whole_every=3) as publisher:
        counts = [len(publisher.publish(version, drift(version)).deltas) for version in range(7)]
        assert counts == [0, 1, 2, 0, 1, 2, 0]
        assert not publisher.publish(8, {"a": torch.zeros(9)}).deltas
        assert not publisher.publish(3, {"a": torch.ones(9)}).deltas
    assert os.listdir(tmp_path) == []


def test_deltas_that_do_not_pay_are_left_out(tmp_path: Path):
    with Publisher("run", directory=tmp_path, whole_every=100) as publisher:
        random = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        counts = [len(publisher.publish(version, {"a": random[version % 2]}).deltas) for version in range(4)]
        assert counts == [0, 0, 0, 0]
        tried: list[int] = []
        encode = delta_chain.encode_sections
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta_chain, "encode_sections", lambda *of: tried.append(version) or encode(*of))
            for version in range(4, 16):
                publisher.publish(version, {"a": random[version % 2]})
        assert tried == [6, 11], "after 1, 2, 4, ... versions"
        for version in range(16, 30):  # equal ones
            published = publisher.publish(version, {"a": random[0]})
        assert published.deltas


def test_chain_takes_no_more_than_readers_would(tmp_path: Path):
    with Publisher("run", directory=tmp_path, whole_every=1000) as publisher:
        for version in range(30):
            published = publisher.publish(version, drift(version, share=0.2))
        assert 1 < len(published.deltas) < 20
        assert sum(delta.size_bytes for delta in published.deltas) <= 0.4 * published.size_bytes
        files = {file for file in os.listdir(tmp_path) if "-delta" in file}
        assert files == {Path(delta.path).name for delta in published.deltas}
        subscriber = Subscriber()
        assert same(subscriber.fetch(published), drift(29, share=0.2))


def test_full_disk_costs_only_the_delta(publisher: Publisher, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, size: int) -> None:
        raise OSError(28, "No space left on device")

    subscriber = Subscriber()
    subscriber.fetch(publisher.publish(0, drift(0)))
    with monkeypatch.context() as patch:
        patch.setattr(delta_chain, "new_slot", full)
        published = publisher.publish(1, drift(1))
        assert not published.deltas
        assert same(subscriber.fetch(published), drift(1))
    assert len(publisher.publish(2, drift(2)).deltas) == 1


def test_a_publisher_that_ends_leaves_its_successors_deltas(tmp_path: Path):
    old, new = (Publisher("run", directory=tmp_path, whole_every=100) for _ in range(2))
    for publisher in (old, new):
        publisher.publish(0, drift(0))
        (delta,) = publisher.publish(1, drift(1)).deltas
    old.close()
    assert Path(delta.path).exists()
    new.close()
    assert not list(tmp_path.glob("*.weights"))


def test_files_of_a_killed_publisher_are_reaped(tmp_path: Path):
    publisher = Publisher("run", directory=tmp_path, whole_every=9)
    publisher.publish(0, drift(0))
    published = publisher.publish(1, drift(1))
    assert reap("other", directory=tmp_path) == []  # it lives
    path = published.deltas[0].path
    publisher._chain = None  # as its process's end does
    publisher.close()
    assert reap("other", directory=tmp_path) == [path]


@pytest.mark.parametrize("nodes", ["aa", "aab"])
def test_ranks_encode_their_blocks_and_the_first_has_the_file(tmp_path: Path, nodes: str):
    def of_rank(writer: ThreadWriter) -> list[PublishedWeights]:
        ranks = len(nodes)
        publisher = Publisher("ranks", directory=tmp_path, writers=writer, whole_every=9)
        return [
            publisher.begin_rows(version, rows_of(drift(version), writer.rank, ranks)).finish() for version in range(3)
        ]

    published, *others = WriterThreads(*nodes).run(of_rank)
    assert [len(version.deltas) for version in published] == [0, 1, 2]
    assert all(not version.deltas for versions in others for version in versions)
    contents = [DeltaContent(delta, Path(delta.path).read_bytes()) for delta in published[2].deltas]
    with Publisher("alone", directory=tmp_path, whole_every=9) as publisher:
        subscriber = Subscriber()
        subscriber.fetch(publisher.publish(0, drift(0)))
        payload = subscriber._buffer.payload.numpy()
        for _ in deltas.apply_deltas(payload, contents):
            pass
        assert same(subscriber._buffer._views, drift(2))


def delta_of(version: int, base: int, size_bytes: int = 1, checksum: str = "") -> PublishedDelta:
    return PublishedDelta(
        version=version,
        checksum=checksum or f"c{version}",
        base=base,
        base_checksum=f"c{base}",
        path="",
        size_bytes=size_bytes,
        digest="",
    )


def published_with(*chain: PublishedDelta) -> PublishedWeights:
    return PublishedWeights(version=5, path="", checksum="c5", size_bytes=100, deltas=chain)


def test_chain_leads_from_the_version_that_a_reader_has_or_there_is_none():
    chain = delta_of(3, 2), delta_of(4, 3), delta_of(5, 4)
    assert chain_to(published_with(*chain), 3, "c3") == list(chain[1:])
    assert chain_to(published_with(*reversed(chain)), 2, "c2") == list(chain), "in any order"
    assert chain_to(published_with(*chain), 3, "other") == [], "of another run"
    assert chain_to(published_with(*chain), 1, "c1") == [], "too old"
    assert chain_to(published_with(*chain), 6, "c6") == [], "newer"
    assert chain_to(published_with(*chain), 5, "c5") == [], "it is here"
    assert chain_to(published_with(chain[0], chain[2]), 3, "c3") == [], "one is missing"
    assert chain_to(published_with(delta_of(5, 4, checksum="c6")), 4, "c4") == []
    assert chain_to(published_with(delta_of(5, 4), delta_of(4, 5)), 3, "c3") == [], "a ring"
    assert chain_to(published_with(delta_of(5, 4, size_bytes=40)), 4, "c4"), "not more than 0.4 of the whole"
    assert chain_to(published_with(delta_of(4, 3, 20), delta_of(5, 4, 21)), 3, "c3") == []


def test_delta_of_another_format_is_refused(publisher: Publisher):
    publisher.publish(0, drift(0))
    (delta,) = publisher.publish(1, drift(1)).deltas
    content = Path(delta.path).read_bytes()
    for changed, message in ((b"HEADWAY9" + content[8:], "isn't a delta of this version"), (b"", "isn't a delta")):
        announced = msgspec.structs.replace(delta, digest=deltas.digest_of([changed]), size_bytes=len(changed))
        with pytest.raises(WeightsCorrupt, match=message):
            DeltaContent(announced, changed)
    with pytest.raises(WeightsCorrupt, match="is that of version 1 from 0"):
        DeltaContent(msgspec.structs.replace(delta, base=7), content)


def test_kept_delta_with_any_bit_of_its_head_flipped_is_refused_or_is_the_version(tmp_path: Path):
    archive = DeltaArchive(tmp_path / "kept", 1 << 30, lambda: 0)
    with Publisher("run", directory=tmp_path, whole_every=100, archive=archive) as publisher:
        base = Path(publisher.publish(0, drift(0)).path).read_bytes()
        published = publisher.publish(1, drift(1))
    *_, manifest_size, _, payload_size = HEADER.unpack_from(base)
    manifest = base[HEADER.size : HEADER.size + manifest_size]
    (file,) = (tmp_path / "kept").iterdir()
    content, refused = file.read_bytes(), 0
    for position in range(deltas._read_head(memoryview(content), "")[2]):
        for bit in (0, 2, 7):
            file.write_bytes(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :])
            payload = np.frombuffer(base, np.uint8)[-payload_size:].copy()
            try:
                _, chain = kept_chain(tmp_path / "kept", 1, {0})
                for _ in deltas.apply_deltas(payload, chain):
                    pass
                deltas.require_version(published, manifest, chain[-1].table, payload)
            except WeightsCorrupt:
                refused += 1
    assert refused > 2 * position, "but for the base's checksum, which whoever has the base compares"


def test_kept_deltas_that_another_trainer_removes_meanwhile_are_not_missed(tmp_path: Path):
    archive = DeltaArchive(tmp_path, 1 << 30, lambda: 0)
    archive.add(1, "aa", [b"1"])
    (tmp_path / "00000002-bb.delta").symlink_to(tmp_path / "gone")  # listed, and not there when it is looked at
    archive.add(3, "cc", [b"3"])
    assert {path.name for path in tmp_path.glob("*-[ac]*.delta")} == {"00000001-aa.delta", "00000003-cc.delta"}


def test_changes_name_tensors_and_elements(publisher: Publisher):
    subscriber = Subscriber()
    first = publisher.publish(0, drift(0))
    copies = {name: tensor.clone() for name, tensor in subscriber.fetch(first).items()}
    subscriber.fetch(publisher.publish(1, drift(1)))
    subscriber_changes = subscriber.changes_from(first.checksum)
    assert subscriber_changes is not None
    assert subscriber.changes_from("other") is None
    for name, positions, values, bases in subscriber_changes:
        assert torch.equal(copies[name].view(-1)[positions], bases)
        copies[name].view(-1)[positions] = values
    assert same(copies, drift(1))
