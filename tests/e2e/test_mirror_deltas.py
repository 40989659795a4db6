"""Mirrors that fetch deltas: what they serve is the announced version, and every fault costs a whole one at most."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from mirrored_weights import Context, Weights
from node_processes import KEY

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights import mirror
from headway.weights.mirror import MirrorService
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slot_file import new_slot, version_in
from headway.weights.transfers import CONNECTIONS, MirrorTransfer

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


@pytest.fixture
def mirrors(tmp_path: Path) -> Iterator[dict[str, MirrorService]]:
    settings: dict[str, Any] = {"key": KEY, "epoch": 1, "orphan_s": 10.0, "ports": [0], "host": "127.0.0.1"}
    services = {
        node: MirrorService(cast(Any, Context()), run_id=tmp_path.name, node=node, **settings) for node in "abcd"
    }
    yield services
    for service in services.values():
        service.close()
    assert not list(Path("/dev/shm").glob(f"headway-{tmp_path.name}-*")), "mirrors remove their deltas"


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(tmp_path.name, directory=tmp_path, whole_every=1000) as publisher:
        yield publisher


def fetched(service: MirrorService, published: PublishedWeights, source: MirrorService) -> PublishedWeights:
    return service.fetch(published, [(source.address(), ())])


def test_a_chain_carries_deltas_and_a_late_joiner_begins_with_a_whole_version(
    mirrors: dict[str, MirrorService], publisher: Publisher
):
    weights = Weights(kilobytes=2000)
    a, b, c, late = mirrors.values()
    for version in range(6):
        published = publisher.publish(version, weights.step())
        a.serve_published(published)
        old_bytes = a.served_bytes
        copies = [fetched(b, published, a), fetched(c, published, b)]
        if version >= 4:
            copies.append(fetched(late, published, c))
        assert all(weights.are(copy) for copy in copies)
        sent_bytes = a.served_bytes - old_bytes
        assert sent_bytes >= published.size_bytes if version == 0 else sent_bytes < 0.05 * published.size_bytes
        local_subscriber_deltas = [delta.path for delta in copies[0].deltas]
        assert all("-b-" in path and Path(path).exists() for path in local_subscriber_deltas)
        assert len(local_subscriber_deltas) == version
    assert b.statistics()["versions_by_deltas"] == c.statistics()["versions_by_deltas"] == 5
    assert (late.versions_by_deltas, late.versions_whole) == (1, 1)


def test_a_mirror_that_lags_takes_the_deltas_between(mirrors: dict[str, MirrorService], publisher: Publisher):
    weights = Weights(kilobytes=2000)
    a, b, *_ = mirrors.values()
    for version in range(8):
        published = publisher.publish(version, weights.step())
        a.serve_published(published)
        if version in (0, 3, 7):
            assert weights.are(fetched(b, published, a))
    assert (b.versions_by_deltas, b.versions_whole) == (2, 1)


def test_a_chain_whose_middle_takes_the_whole_passes_it_on(mirrors: dict[str, MirrorService], publisher: Publisher):
    """A node has no base; the next one has, and the delta isn't where it asks."""
    weights = Weights(kilobytes=400)
    a, b, c, _ = mirrors.values()
    published = publisher.publish(0, weights.step())
    a.serve_published(published)
    fetched(c, published, a)
    published = publisher.publish(1, weights.step())
    a.serve_published(published)
    assert weights.are(fetched(b, published, a))
    assert weights.are(fetched(c, published, b))
    assert (b.versions_whole, c.versions_whole) == (1, 2)


def full_for_deltas(path: Path, size: int) -> Any:
    if "-delta" in path.name:
        raise OSError(28, "No space left on device")
    return new_slot(path, size)


@pytest.mark.parametrize("fault", ["base", "flipped", "gone", "full", "twice", "other run"])
def test_a_fault_costs_a_whole_version_and_is_named(
    mirrors: dict[str, MirrorService],
    publisher: Publisher,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    weights = Weights(kilobytes=400)
    a, b, *_ = mirrors.values()
    first = publisher.publish(0, weights.step())
    a.serve_published(first)
    copy = fetched(b, first, a)
    published = publisher.publish(1, weights.step())
    a.serve_published(published)
    (delta,) = published.deltas
    content = bytearray(Path(delta.path).read_bytes())
    if fault == "base":
        with open(copy.path, "r+b") as file:
            file.seek(-1000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 64]))
    elif fault == "flipped":
        content[len(content) // 2] ^= 1
        Path(delta.path).write_bytes(content)
    elif fault == "gone":
        Path(delta.path).unlink()
    elif fault == "full":
        monkeypatch.setattr(mirror, "new_slot", full_for_deltas)
    elif fault == "twice":
        assert weights.are(fetched(b, published, a))
    else:
        other = msgspec.structs.replace(delta, base_checksum="another")
        published = msgspec.structs.replace(published, deltas=(other,))
    with caplog.at_level(logging.WARNING):
        assert weights.are(fetched(b, published, a))
    messages = {"base": "a differs", "flipped": "digest", "gone": "no longer", "full": "No space left"}
    assert messages.get(fault, "") in caplog.text
    assert b.versions_whole == (1 if fault == "twice" else 2)
    monkeypatch.undo()
    published = publisher.publish(2, weights.step())
    a.serve_published(published)
    assert weights.are(fetched(b, published, a))
    assert b.versions_whole == (1 if fault == "twice" else 2), "the next one comes by deltas again"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_versions_with_faults_are_bit_equal_wherever_a_mirror_says_it_has_them(
    mirrors: dict[str, MirrorService], publisher: Publisher
):
    """Lags, doubled and lost deltas, flips of bases, late joiners, mirrors that begin again."""
    faults = random.Random(0)
    weights = Weights(kilobytes=100)
    source, *readers = mirrors.values()
    checked = 0
    for version in range(int(os.environ.get("DELTA_VERSIONS", "100"))):
        published = publisher.publish(version, weights.step())
        source.serve_published(published)
        for index, reader in enumerate(readers):
            if version < 20 * index or faults.random() < 0.3:  # it isn't there yet, or is slow
                continue
            served = published
            if faults.random() < 0.1 and published.deltas:
                lost = faults.randrange(len(published.deltas))
                kept_deltas = tuple(delta for n, delta in enumerate(published.deltas) if n != lost)
                served = msgspec.structs.replace(published, deltas=kept_deltas)
            if faults.random() < 0.05 and reader._arriving:
                base = faults.choice(list(reader._arriving.values()))
                position = faults.randrange(len(base.content) // 2, len(base.content))
                base.content[position] ^= 1 << faults.randrange(8)
            if faults.random() < 0.03:
                reader._arriving.clear()  # as one that begins again
            for _ in range(1 + (faults.random() < 0.1)):
                assert weights.are(fetched(reader, served, source))
                checked += 1
    by_deltas = sum(reader.versions_by_deltas for reader in readers)
    assert by_deltas >= 0.6 * checked


def test_nothing_of_a_delta_can_be_read_when_both_ways_fail(mirrors: dict[str, MirrorService], publisher: Publisher):
    weights = Weights(kilobytes=400)
    a, b, *_ = mirrors.values()
    first = publisher.publish(0, weights.step())
    a.serve_published(first)
    copy = fetched(b, first, a)
    published = publisher.publish(1, weights.step())
    with pytest.raises(WeightsCorrupt):
        b.fetch(published, [("127.0.0.1:1", ())])
    held_first = Subscriber().fetch(copy)
    assert held_first["b"][0, 0] == 1.0


def test_a_mirror_that_dies_between_connection_and_request_breaks_the_transfer():
    async def connect_to_dead_mirror(source: str) -> list[socket.socket]:
        here, there = socket.socketpair()
        there.close()
        return [here]

    with (
        pytest.raises(WeightsCorrupt, match="version 3 from node-7"),
        MirrorTransfer("node-7", 3, connect_to_dead_mirror),
    ):
        pass


def test_a_version_that_a_slow_node_fetches_is_not_overwritten(
    mirrors: dict[str, MirrorService], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.weights.shared_memory._READERS_S", 0.01)
    weights = Weights(kilobytes=400)
    a, b, *_ = mirrors.values()
    first = publisher.publish(0, weights.step())
    a.serve_published(first)
    with MirrorTransfer(a.address(), 0, b._connector(0, CONNECTIONS)) as transfer:
        for version in range(1, 9):
            published = publisher.publish(version, weights.step())
            a.serve_published(published)
            assert weights.are(fetched(b, published, a))
        content = bytearray(transfer.size)
        transfer.receive_into(memoryview(content), lambda first, last: True)
        assert version_in(transfer.header) == 0
        assert a._held.keys() == {0}
    with pytest.raises(WeightsCorrupt), MirrorTransfer(a.address(), 1, b._connector(1, CONNECTIONS)):
        pass
    for _ in range(100):
        if not a._held:
            break
        time.sleep(0.05)
    assert not a._held, "it is let go when the connections end"
