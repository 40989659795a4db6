"""Published weights: what is read is what was written, or an error."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.weights import shared_memory, slot_file, slots
from headway.weights.shared_memory import Publisher, Subscriber
from headway.weights.slots import reap

torch.set_num_threads(1)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(7, 5, generator=generator),
        "norm": torch.randn(3, generator=generator),
        "half": torch.randn(2, 3, 4, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one
    )


@pytest.fixture
def publisher(tmp_path):
    with Publisher("run", directory=tmp_path) as publisher:
        yield publisher


def test_fetched_tensors_equal_published_ones(publisher):
    subscriber = Subscriber()
    for version in range(7):
        published = publisher.publish(version, weights(version))
        assert published.version == version
        assert published.publish_s > 0
        assert same(subscriber.fetch(published), weights(version))


def test_three_slots_rotate_and_are_reused(publisher, tmp_path):
    published = [publisher.publish(version, weights(version)) for version in range(3)]
    inodes = {item.path: os.stat(item.path).st_ino for item in published}
    assert len(inodes) == 3
    assert all(same(Subscriber().fetch(item), weights(item.version)) for item in published)
    fourth = publisher.publish(3, weights(3))
    assert fourth.path == published[0].path
    assert os.stat(fourth.path).st_ino == inodes[fourth.path]
    with pytest.raises(WeightsCorrupt, match="version 0 was announced, but the slot holds version 3"):
        Subscriber().fetch(published[0])
    assert same(Subscriber().fetch(published[1]), weights(1))
    assert len(os.listdir(tmp_path)) == 3


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_flipped_bit_is_detected_anywhere(tmp_path_factory, position, bit):
    with Publisher("flip", directory=tmp_path_factory.mktemp("flip")) as publisher:
        published = publisher.publish(5, weights())
        content = bytearray(Path(published.path).read_bytes())
        position %= len(content)
        content[position] ^= 1 << bit
        Path(published.path).write_bytes(content)
        try:
            fetched = Subscriber().fetch(published)
        except WeightsCorrupt:
            return
        assert same(fetched, weights())  # the bit lies in the padding between manifest and payload, which nobody reads


def test_every_byte_of_the_payload_and_manifest_is_covered(publisher):
    published = publisher.publish(5, weights())
    original = Path(published.path).read_bytes()
    start = original.index(b'[{"name":"embedding"')
    payload = len(original) - published.size_bytes
    tensors = msgspec.json.decode(original[start : original.index(b"]}", start) + 1])
    covered = [*range(0, 16), *range(start, start + 40)]
    for tensor in tensors:  # between them there are zeros, which nobody reads
        covered += range(payload + tensor["offset"], payload + tensor["offset"] + tensor["size"])
    for position in covered:
        content = bytearray(original)
        content[position] ^= 0x10
        Path(published.path).write_bytes(content)
        with pytest.raises(WeightsCorrupt):
            Subscriber().fetch(published)


def test_wrong_announcements_are_refused(publisher, tmp_path):
    published = publisher.publish(5, weights())
    for change in ({"version": 6}, {"checksum": "00" * 16}, {"size_bytes": published.size_bytes + 64}):
        with pytest.raises(WeightsCorrupt):
            Subscriber().fetch(msgspec.structs.replace(published, **change))
    for name, content in (("empty", b""), ("short", b"HEAD"), ("other", b"x" * 9000)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsCorrupt, match=name):
            Subscriber().fetch(msgspec.structs.replace(published, path=str(tmp_path / name)))
    truncated = Path(published.path).read_bytes()[:-64]
    (tmp_path / "truncated").write_bytes(truncated)
    with pytest.raises(WeightsCorrupt):
        Subscriber().fetch(msgspec.structs.replace(published, path=str(tmp_path / "truncated")))
    assert same(Subscriber().fetch(published), weights())


def test_a_slot_overwritten_while_it_is_read_is_noticed(publisher, monkeypatch):
    """The publisher laps the reader in the middle of its copy."""
    published = publisher.publish(0, weights(0))
    copy = np.copyto

    def overtaken(target: np.ndarray, source: np.ndarray) -> None:
        half = len(source) // 2
        copy(target[:half], source[:half])
        for version in (1, 2, 3):
            publisher.publish(version, weights(version))
        copy(target[half:], source[half:])

    monkeypatch.setattr(shared_memory.np, "copyto", overtaken)
    with pytest.raises(WeightsCorrupt, match=r"slot holds version 3 .overwritten while it was read"):
        Subscriber().fetch(published)


def test_torn_payload_is_detected_by_checksum(publisher, monkeypatch):
    """A publisher restarted at the same version writes the same slot while it is read: only the checksum can tell."""
    published = publisher.publish(0, weights(0))
    copy = np.copyto

    def overtaken(target: np.ndarray, source: np.ndarray) -> None:
        half = len(source) // 2
        copy(target[:half], source[:half])
        for version in (1, 2, 0):
            publisher.publish(version, weights(9))
        copy(target[half:], source[half:])

    monkeypatch.setattr(shared_memory.np, "copyto", overtaken)
    with pytest.raises(WeightsCorrupt, match="does not have checksum"):
        Subscriber().fetch(published)


def test_writer_killed_mid_write_publishes_nothing(publisher):
    publisher.publish(0, weights(0))
    publisher.publish(1, weights(1))
    last = publisher.publish(2, weights(2))
    broken = {**weights(3), "norm": None}
    publisher._next = 2
    with pytest.raises(AttributeError):
        publisher.publish(3, broken)
    assert same(Subscriber().fetch(last), weights(2))  # refused before the slot was touched
    slot = publisher._open[2]
    slot.write_versions(-1, -1)
    with pytest.raises(WeightsCorrupt, match="is being overwritten"):
        Subscriber().fetch(last)


def test_subscribers_are_independent_and_reuse_their_buffer(publisher):
    first, second = publisher.publish(0, weights(0)), publisher.publish(1, weights(1))
    one, other = Subscriber(), Subscriber()
    mine, theirs = one.fetch(first), other.fetch(second)
    assert same(mine, weights(0))
    assert same(theirs, weights(1))
    address = mine["embedding"].data_ptr()
    assert one.fetch(second)["embedding"].data_ptr() == address
    theirs["embedding"].zero_()  # a private copy: nobody else sees it
    assert same(Subscriber().fetch(second), weights(1))


def test_shapes_may_change_between_versions(publisher):
    subscriber = Subscriber()
    assert same(subscriber.fetch(publisher.publish(0, weights())), weights())
    for version in range(1, 5):
        larger = {"a": torch.full((version, 100), float(version)), "b": torch.arange(3)}
        assert same(subscriber.fetch(publisher.publish(version, larger)), larger)


def test_dtype_is_converted_while_publishing(tmp_path):
    with Publisher("cast", directory=tmp_path, dtype=torch.bfloat16) as publisher:
        fetched = Subscriber().fetch(publisher.publish(0, weights()))
    assert fetched["embedding"].dtype == torch.bfloat16
    assert torch.equal(fetched["embedding"], weights()["embedding"].to(torch.bfloat16))
    assert fetched["scalar"].dtype == torch.int64


def test_strided_and_differentiable_tensors_are_published(publisher):
    tensors = {"t": torch.arange(12.0).view(3, 4).t(), "p": torch.nn.Parameter(torch.ones(3))}
    fetched = Subscriber().fetch(publisher.publish(0, tensors))
    assert torch.equal(fetched["t"], tensors["t"])
    assert torch.equal(fetched["p"], torch.ones(3))


def test_fetched_tensors_are_cache_line_aligned(publisher):
    for size in range(1, 200, 7):  # a buffer of its own for each
        published = publisher.publish(size, {"a": torch.ones(3 * size), "b": torch.ones(7)})
        assert all(tensor.data_ptr() % 64 == 0 for tensor in Subscriber().fetch(published).values())


def test_a_new_publisher_takes_over_the_dead_ones_files(tmp_path):
    subscriber = Subscriber()
    dead = Publisher("run", directory=tmp_path)
    old = dead.publish(4, weights(4))
    subscriber.fetch(old)
    with Publisher("run", directory=tmp_path) as fresh:
        new = fresh.publish(4, weights(5))
        assert new.path == old.path
        assert same(subscriber.fetch(new), weights(5))
        with pytest.raises(WeightsCorrupt):
            subscriber.fetch(old)


def test_closing_and_reaping_remove_the_files_of_one_run_only(tmp_path):
    with Publisher("run-a", directory=tmp_path) as publisher:
        published = publisher.publish(0, weights())
    assert os.listdir(tmp_path) == []
    with pytest.raises(WeightsCorrupt, match="is gone"):
        Subscriber().fetch(published)
    alive = [Publisher(run, directory=tmp_path) for run in ("run", "run-a", "run-0", "a/b c")]
    for publisher in alive:
        publisher.publish(0, weights())
    assert len(reap("run", directory=tmp_path)) == 1
    assert reap("run", directory=tmp_path) == []
    assert len(reap("a/b c", directory=tmp_path)) == 1
    assert sorted(os.listdir(tmp_path)) == ["headway-run-0-0.weights", "headway-run-a-0.weights"]


def publish_and_be_killed(run: str, folder: Path) -> PublishedWeights:
    """Version 0, published by a process that ends in a SIGKILL."""
    code = (
        "import os, signal, sys, msgspec, torch; from headway.weights.shared_memory import Publisher;"
        f"published = Publisher({run!r}, directory={str(folder)!r}).publish(0, {{'a': torch.ones(9)}});"
        "os.write(1, msgspec.json.encode(published)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True).stdout
    return msgspec.json.decode(output, type=PublishedWeights)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["SHARED_MEMORY", "tempfile"])
def test_leftovers_of_killed_publisher_are_reaped_in_all_directories(tmp_path, monkeypatch, place):
    (tmp_path / "other").mkdir()
    shared, temporary = (tmp_path, tmp_path / "other")[:: 1 if place == "SHARED_MEMORY" else -1]
    monkeypatch.setattr(slots, "SHARED_MEMORY", shared)
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(temporary))
    path = publish_and_be_killed("run", tmp_path).path
    assert os.path.exists(path)
    assert reap("run") == [path]
    assert not os.path.exists(path)


def test_start_reaps_unheld_slots_of_killed_runs(tmp_path, publisher):
    publisher.publish(0, weights())
    killed = publish_and_be_killed("killed", tmp_path)
    reader = Subscriber()
    reader.fetch(killed)
    assert reap("another", directory=tmp_path) == []  # a generator of the killed trainer may still need it
    del reader
    assert reap("another", directory=tmp_path) == [killed.path]
    assert os.listdir(tmp_path) == ["headway-run-0.weights"]


def test_slot_reaped_during_creation_is_recreated(tmp_path, monkeypatch):
    hold, reaped = slot_file.hold, []

    def late(descriptor: int) -> None:
        if not reaped:
            reaped.extend(reap("another", directory=tmp_path))
        hold(descriptor)

    monkeypatch.setattr(slot_file, "hold", late)
    with Publisher("run", directory=tmp_path) as publisher:
        published = publisher.publish(0, weights())
        assert reaped == [published.path]
        assert same(Subscriber().fetch(published), weights())


def test_no_room_is_a_clear_error_or_another_folder(tmp_path, monkeypatch):
    reserve = os.posix_fallocate
    full = tmp_path / "full"
    full.mkdir()

    def limited(descriptor: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(full)):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", limited)
    with pytest.raises(ConfigurationError, match=r"no space to publish .* MB x 3 slots .*No space left.*/dev/shm"):
        Publisher("run", directory=full).publish(0, weights())
    assert os.listdir(full) == []
    monkeypatch.setattr(slot_file, "SHARED_MEMORY", full)
    monkeypatch.setattr(slot_file.tempfile, "gettempdir", lambda: str(tmp_path))
    with Publisher("run") as publisher:
        assert Path(publisher.publish(0, weights()).path).parent == tmp_path
    monkeypatch.setattr(slot_file, "SHARED_MEMORY", tmp_path / "missing")
    with Publisher("run") as publisher:
        assert Path(publisher.publish(0, weights()).path).parent == tmp_path
    with pytest.raises(ConfigurationError, match="nowhere"):
        Publisher("run", directory=tmp_path / "nowhere").publish(0, weights())


def test_unpublishable_tensors_are_refused(publisher, tmp_path):
    with pytest.raises(ConfigurationError, match="a has dtype complex64"):
        publisher.publish(0, {"a": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match="must not be negative"):
        publisher.publish(-1, weights())
    with pytest.raises(ConfigurationError, match="at least 2"):
        Publisher("run", slots=1)


def _read_in_another_process(published: PublishedWeights) -> float:
    return float(Subscriber().fetch(published)["embedding"].sum())


def test_other_process_reads_equal_tensors(publisher):
    published = publisher.publish(1, weights(1))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        total = pool.apply(_read_in_another_process, (published,))
    assert total == float(weights(1)["embedding"].sum())


def test_readers_racing_a_writer_get_whole_versions_or_errors(tmp_path):
    """Real threads, no pauses: every successful fetch is exactly one version."""
    size = 200_000
    with Publisher("race", slots=2, directory=tmp_path) as publisher:
        latest = [publisher.publish(0, {"a": torch.zeros(size)})]
        outcomes: list[str] = []

        def read() -> None:
            subscriber = Subscriber()
            while latest[0].version < 150:
                published = latest[0]
                try:
                    tensor = subscriber.fetch(published)["a"]
                except WeightsCorrupt:
                    outcomes.append("refused")
                    continue
                whole = bool((tensor == published.version).all())
                outcomes.append("whole" if whole else "torn")

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            for version in range(1, 151):
                latest[0] = publisher.publish(version, {"a": torch.full((size,), float(version))})
            for reader in readers:
                reader.result()
    assert "torn" not in outcomes


def test_run_names_become_plain_file_names(tmp_path):
    for run in ("../../evil", "x" * 300, "", ".hidden"):
        with Publisher(run, directory=tmp_path) as publisher:
            path = Path(publisher.publish(0, weights()).path)
            assert path.parent == tmp_path
            assert re.fullmatch(r"headway-[0-9a-f]{16}-0\.weights", path.name)
