"""Versions that are read where they are: verified, unchanged while they are attached, in nobody's way afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch
from device_stand_in import SharedDevice
from torch import Tensor

from headway.records.errors import WeightsCorrupt
from headway.weights import checksums, shared_memory
from headway.weights.shared_memory import Publisher, Subscriber

torch.set_num_threads(1)


def weights(version: int) -> dict[str, Tensor]:
    return {"a": torch.full((300,), float(version)), "b": torch.arange(version, version + 9), "none": torch.empty(0)}


def same(tensors: dict[str, Tensor], version: int) -> bool:
    return all(torch.equal(tensors[name], tensor) for name, tensor in weights(version).items())


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setattr(shared_memory, "_READERS_S", 0.0)
    with Publisher("run", 2, directory=tmp_path) as publisher:
        yield publisher


def test_an_attached_version_is_the_slot_and_stays_while_others_are_published(publisher: Publisher) -> None:
    reader, published = Subscriber(), publisher.publish(0, weights(0))
    inode = os.stat(published.path).st_ino
    tensors = reader.attach(published)
    for version in range(1, 6):
        latest = publisher.publish(version, weights(version))
        assert same(Subscriber().fetch(latest), version)
        assert same(tensors, 0)
    assert os.stat(published.path).st_ino != inode, "the publisher has taken other memory"


def test_a_detached_slot_is_used_again(publisher: Publisher) -> None:
    reader, paths = Subscriber(), dict[str, int]()
    for version in range(8):
        published = publisher.publish(version, weights(version))
        assert same(reader.attach(published), version)
        inode = os.stat(published.path).st_ino
        assert paths.setdefault(published.path, inode) == inode
    reader.forget()
    assert len(paths) == 2


def test_what_is_written_into_attached_tensors_is_private(publisher: Publisher) -> None:
    reader, published = Subscriber(), publisher.publish(1, weights(1))
    reader.attach(published)["a"].zero_()
    assert same(Subscriber().fetch(published), 1)
    assert same(reader.attach(published), 1)


def test_a_slot_that_is_written_or_overwritten_is_refused(publisher: Publisher) -> None:
    reader, first = Subscriber(), publisher.publish(0, weights(0))
    publisher.publish(1, weights(1))
    begun = publisher.begin(2, weights(2))
    with pytest.raises(WeightsCorrupt, match="version 0 was announced, but the slot is being overwritten"):
        reader.attach(first)
    second = begun.finish()
    with pytest.raises(WeightsCorrupt, match="the slot holds version 2"):
        reader.attach(first)
    assert same(reader.attach(second), 2)
    inode = os.stat(first.path).st_ino
    publisher.publish(3, weights(3))
    reader.detach()
    assert os.stat(publisher.publish(4, weights(4)).path).st_ino == inode, "the refusals hold no lock"


def test_each_reader_of_several_verifies_its_share(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 256)
    published = publisher.publish(0, {"a": torch.arange(1000.0)})  # 16 blocks
    content = bytearray(Path(published.path).read_bytes())
    for block in (0, 5, 15):
        damaged = bytearray(content)
        damaged[len(content) - 4032 + 256 * block] ^= 1
        Path(published.path).write_bytes(damaged)
        for share in range(3):
            with pytest.raises(WeightsCorrupt, match="a differs") if share == block % 3 else nullcontext():
                Subscriber().attach(published, share, 3)


def test_wrong_announcements_are_refused(publisher: Publisher, tmp_path: Path) -> None:
    published, reader = publisher.publish(5, weights(5)), Subscriber()
    short = tmp_path / "short"
    short.write_bytes(Path(published.path).read_bytes()[:-64])
    with pytest.raises(WeightsCorrupt, match="too short"):
        reader.attach(msgspec.structs.replace(published, path=str(short)))
    for change in ({"version": 6}, {"checksum": "00" * 16}, {"path": str(tmp_path / "nothing")}):
        with pytest.raises(WeightsCorrupt):
            reader.attach(msgspec.structs.replace(published, **change))
    device = Publisher("device", 2, directory=tmp_path, memory=SharedDevice(tmp_path), exports=True)
    with pytest.raises(WeightsCorrupt, match="is in a GPU's memory"):
        reader.attach(device.publish(0, weights(0)))
    device.close()


def test_a_killed_reader_holds_no_slot(publisher: Publisher) -> None:
    published = publisher.publish(0, weights(0))
    inode = os.stat(published.path).st_ino
    code = (
        "import sys, time, msgspec; from headway.weights.shared_memory import Subscriber;"
        "from headway.records.generation import PublishedWeights;"
        "attached = Subscriber().attach(msgspec.json.decode(sys.argv[1], type=PublishedWeights));"
        "print('attached', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, msgspec.json.encode(published).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "attached\n"
        publisher.publish(1, weights(1))
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert os.stat(publisher.publish(2, weights(2)).path).st_ino == inode
