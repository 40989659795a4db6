"""Transports of weights: through files of shared memory, and through the memory of a device, by a stand-in.

A publisher or a reader is killed between every two calls that it makes; nothing torn is ever read, nothing hangs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from device_stand_in import SharedDevice

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights import shared_memory
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slots import SlotLock, reap

torch.set_num_threads(1)
TRANSPORTS = ("file", "snapshot", "device")
# Transport, and calls from one kill to the next.
KILLS = [
    ("device", 7),
    *(pytest.param(name, 7, marks=pytest.mark.slow) for name in TRANSPORTS if name != "device"),
    *(pytest.param(name, 1, marks=pytest.mark.long) for name in TRANSPORTS),
]
_KILLED_IN = ("headway/weights/", "device_stand_in")


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((70, 5), float(version)), "b": torch.arange(version, version + 40), "none": torch.empty(0)}


def same(fetched: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(fetched[name], tensor) for name, tensor in weights(version).items())


def publisher_in(folder: Path, transport: str, slots: int = 2) -> Publisher:
    memory = None if transport == "file" else SharedDevice(folder)
    return Publisher("run", slots, directory=folder, memory=memory, exports=transport == "device")


def reader_in(folder: Path) -> Subscriber:
    return Subscriber(SharedDevice(folder))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_are_read_by_every_transport(tmp_path: Path, transport: str):
    reader = reader_in(tmp_path)
    with publisher_in(tmp_path, transport) as publisher:
        for version in range(5):
            published = publisher.publish(version, weights(version))
            assert published.transport == ("cuda ipc" if transport == "device" else "shared memory")
            assert same(reader.fetch(published), version)
            assert reader.spent.hash_s > 0
            assert published.publish_s >= published.snapshot_s + published.hash_s
            assert os.stat(published.path).st_size <= (4096 if transport == "device" else 8192)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_may_change_once_a_publication_has_begun(tmp_path: Path, transport: str):
    with publisher_in(tmp_path, transport) as publisher:
        publisher.publish(1, weights(1))
        tensors = weights(2)
        begun = publisher.begin(2, tensors)
        for tensor in tensors.values():
            tensor.zero_()
        assert same(reader_in(tmp_path).fetch(begun.finish()), 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_unfinished_publication_is_no_version(tmp_path: Path, transport: str):
    with publisher_in(tmp_path, transport) as publisher:
        old = publisher.publish(1, weights(1))
        again = publisher.publish(2, weights(2))
        publisher.begin(3, weights(3))
        with pytest.raises(WeightsCorrupt, match="version 1 was announced, but the slot is being overwritten"):
            reader_in(tmp_path).fetch(old)
        assert same(reader_in(tmp_path).fetch(again), 2)


def test_a_snapshots_memory_is_given_back(tmp_path: Path):
    memory = SharedDevice(tmp_path)
    with Publisher("run", directory=tmp_path, memory=memory) as publisher:
        begun = publisher.begin(1, weights(1))
        assert memory.used_bytes == begun.slot.layout.payload_size
        published = begun.finish()
        assert memory.used_bytes == 0
        assert same(reader_in(tmp_path).fetch(published), 1)


@pytest.mark.parametrize("options", [{"snapshots": False}, {"capacity_bytes": 100}])
def test_without_a_snapshot_versions_go_straight_to_pinned_memory(tmp_path: Path, options: dict[str, Any]):
    """Where the device has no space for one, or the trainer waits for its copy anyway."""
    memory = SharedDevice(tmp_path, options.pop("capacity_bytes", float("inf")))
    with Publisher("run", directory=tmp_path, memory=memory, **options) as publisher:
        for version in range(4):
            begun = publisher.begin(version, weights(version))
            assert memory.used_bytes == 0
            assert same(reader_in(tmp_path).fetch(begun.finish()), version)
        assert len(memory.pinned) == 3


def test_a_device_without_space_for_a_slot_publishes_by_the_host(tmp_path: Path):
    """The last version on the device stays, and no file is left half-written."""
    memory, reader = SharedDevice(tmp_path, 3 * 65536), reader_in(tmp_path)
    with Publisher("run", 2, directory=tmp_path, memory=memory, exports=True) as publisher:
        first = publisher.publish(1, weights(1))
        second = publisher.publish(2, weights(2))
        assert (first.transport, second.transport) == ("cuda ipc", "shared memory")
        assert len(list(tmp_path.glob("*.weights"))) == 2
        assert same(reader.fetch(first), 1)
        for version in range(2, 6):
            assert same(reader.fetch(publisher.publish(version, weights(version))), version)
        assert memory.used_bytes == 0
    assert not list(tmp_path.glob("*.weights"))


def test_a_successors_slots_stay_when_a_publisher_closes(tmp_path: Path):
    old = publisher_in(tmp_path, "file")
    old.publish(1, weights(1))
    with publisher_in(tmp_path, "file") as successor:
        published = successor.publish(1, weights(1))
        old.close()
        assert same(reader_in(tmp_path).fetch(published), 1)


def test_damage_is_named_by_tensor(tmp_path: Path):
    with publisher_in(tmp_path, "device") as publisher:
        published = publisher.publish(1, weights(1))
        memory = SharedDevice(tmp_path).map(published.handle)
        memory[65536 + 8] ^= 4
        with pytest.raises(WeightsCorrupt, match="b differs"):
            reader_in(tmp_path).fetch(published)


def test_update_waits_for_a_reader_of_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A reader that stays has the memory that it locked; the update takes other memory, under another handle."""
    with publisher_in(tmp_path, "device") as publisher:
        first = publisher.publish(0, weights(0))
        publisher.publish(1, weights(1))
        lock = SlotLock(first.path)
        assert lock.acquire(exclusive=False)
        waited: list[float] = []
        acquire = SlotLock.acquire

        def noted(self: SlotLock, *, exclusive: bool, patience_s: float = 0.0) -> bool:
            waited.append(patience_s)
            if len(waited) == 1:
                lock.release()  # while the update waits
            return acquire(self, exclusive=exclusive, patience_s=patience_s)

        monkeypatch.setattr(SlotLock, "acquire", noted)
        second = publisher.publish(2, weights(2))
        assert waited[0] == shared_memory._READERS_S
        assert second.handle == first.handle
        monkeypatch.undo()
        monkeypatch.setattr(shared_memory, "_READERS_S", 0.0)
        with closing(SlotLock(publisher._open[1].path)) as stays:
            assert stays.acquire(exclusive=False)
            kept = SharedDevice(tmp_path).map(publisher._open[1].handle).clone()
            third = publisher.publish(3, weights(3))
            assert torch.equal(SharedDevice(tmp_path).map(third.handle), kept) is False
        assert same(reader_in(tmp_path).fetch(third), 3)
        assert same(reader_in(tmp_path).fetch(second), 2)


def test_a_reader_without_the_device_is_refused(tmp_path: Path):
    with publisher_in(tmp_path, "device") as publisher:
        published = publisher.publish(0, weights(0))
        with pytest.raises(WeightsCorrupt, match="is in a GPU's memory, not in the file"):
            Subscriber().fetch(published)
        Path(published.handle).unlink()
        with pytest.raises(WeightsCorrupt, match="can't be mapped"):
            reader_in(tmp_path).fetch(published)
    with pytest.raises(WeightsCorrupt, match="is gone"):
        reader_in(tmp_path).fetch(published)


def test_owner_that_died_is_named_and_its_successor_read(tmp_path: Path):
    """Its memory would be gone on a GPU. A successor by another transport is read too: the host's path."""
    killed = list(announced(lambda say: say(publisher_in(tmp_path, "device").publish(4, weights(4))), tmp_path))[-1]
    reader = reader_in(tmp_path)
    with pytest.raises(WeightsCorrupt, match="went with its publisher's process"):
        reader.fetch(killed)
    for transport in ("device", "file"):
        with publisher_in(tmp_path, transport) as successor:
            assert same(reader.fetch(successor.publish(4, weights(4))), 4)


def announced(work: Callable[[Callable[[PublishedWeights], None]], Any], folder: Path) -> Iterator[PublishedWeights]:
    """What ``work`` announces in a process of its own, which then kills itself."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            work(lambda published: [os.write(writing, msgspec.json.encode(published) + b"\n")].clear())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        content = lines.read()
    os.waitpid(process, 0)
    yield from (msgspec.json.decode(line, type=PublishedWeights) for line in content.splitlines())


def killed_at(number: int) -> None:
    """Kill this process before its ``number``-th call from here on in the transport's modules."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call") and any(part in frame.f_code.co_filename for part in _KILLED_IN):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


@pytest.mark.parametrize(("transport", "every"), KILLS)
def test_publisher_killed_between_any_two_calls(tmp_path: Path, transport: str, every: int):
    """Version 2 is published, or isn't; version 1 stays readable where its memory outlives the publisher, else the
    reader is told; the successor's version is read by the same reader."""
    number, ended = 0, False
    while not ended:
        number += every

        def publish(say: Callable[[PublishedWeights], None], number: int = number) -> None:
            publisher = publisher_in(tmp_path, transport)
            say(publisher.publish(1, weights(1)))
            killed_at(number)
            published = publisher.publish(2, weights(2))
            sys.setprofile(None)
            say(published)

        records = list(announced(publish, tmp_path))
        ended = len(records) == 2
        reader = reader_in(tmp_path)
        for record in records:
            if transport == "device":
                with pytest.raises(WeightsCorrupt, match=r"went with|being overwritten"):
                    reader.fetch(record)
            else:
                assert same(reader.fetch(record), record.version)
        with publisher_in(tmp_path, transport) as successor:
            assert same(reader.fetch(successor.publish(2, weights(2))), 2)
        del reader
        for leftover in tmp_path.glob("device-*"):
            leftover.unlink()
        reap("run", directory=tmp_path)
        assert not list(tmp_path.iterdir())
    assert number > 30


@pytest.mark.parametrize(("transport", "every"), KILLS)
def test_reader_killed_between_any_two_calls_holds_up_nothing(
    tmp_path: Path, transport: str, every: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_memory, "_READERS_S", 0.0)  # a lock that stayed would cost the slot its memory
    number, version, ended = 0, 0, False
    with publisher_in(tmp_path, transport) as publisher:
        handles = {publisher.publish(slot, weights(slot)).handle for slot in range(2)}
        while not ended:
            number += every
            version += 2
            published = publisher.publish(version, weights(version))

            def read(
                say: Callable[[PublishedWeights], None],
                number: int = number,
                published: PublishedWeights = published,
            ) -> None:
                reader = reader_in(tmp_path)
                killed_at(number)
                fetched = reader.fetch(published)
                sys.setprofile(None)
                assert same(fetched, published.version)
                say(published)

            ended = list(announced(read, tmp_path)) == [published]
            assert publisher.publish(version + 1, weights(version + 1)).handle in handles
            assert same(reader_in(tmp_path).fetch(published), version)
    assert number > 20
