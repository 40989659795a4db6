"""The two slots of a tenant's adapter: any kill, and any torn slot, leave a complete state."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from headway.records.errors import StorageFailed
from headway.records.tenants.protocols import AppliedState, TenantAdapter
from headway.trainer.tenants import state_slots
from headway.trainer.tenants.state_slots import StateFile, StoredState, flush_state

SIZES = (7, 64, 1, 3000)


def stored(sequence: int) -> StoredState:
    applied = AppliedState(sequence=sequence, adapter=TenantAdapter(rank=2), metrics={"grad_norm:mean": sequence / 3})
    return StoredState(applied=applied, version=sequence // 2, alpha=32.0)


def tensors(sequence: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sequence)
    return [torch.randn(size, generator=generator) for size in SIZES]


def opened(path: Path) -> int:
    """The sequence of the newest complete state, whose tensors must be its own."""
    file = StateFile.open(path)
    assert file is not None
    sequence = file.stored.applied.sequence
    assert file.stored == stored(sequence)
    read = [torch.empty(size) for size in SIZES]
    file.read(read)
    assert all(torch.equal(a, b) for a, b in zip(read, tensors(sequence), strict=True))
    return sequence


def test_the_newest_of_many_states_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "states" / "s:train:0"
    assert StateFile.open(path) is None
    file = StateFile.create(path, stored(0), tensors(0))
    assert opened(path) == 0
    for sequence in range(2, 9):
        file.write(stored(sequence), tensors(sequence))
        assert opened(path) == sequence
    flush_state(path)
    file = StateFile.create(path, stored(3), tensors(3))  # a load begins anew
    assert opened(path) == 3
    assert os.listdir(path.parent) == [path.name]
    flush_state(tmp_path / "none")


def kill_at(point: str, path: Path) -> int:
    """Fork a process that writes state 2 over states 0 and 1 and is killed at ``point``; returns the state after it."""
    file = StateFile.create(path, stored(0), tensors(0))
    file.write(stored(1), tensors(1))

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        written = tensors(2)
        if point.startswith("tensor"):
            written[int(point[-1])] = mock.Mock(numel=written[int(point[-1])].numel, reshape=die)
        elif point == "before the header":
            state_slots._checksum = die  # type: ignore[assignment]
        elif point == "within the header":
            header = state_slots._HEADER

            def halved(*fields: object) -> bytes:
                target = file._slots[1 - file._newest]
                target[: header.size // 2] = list(header.pack(*fields)[: header.size // 2])
                die()
                return b""

            state_slots._HEADER = mock.Mock(size=header.size, pack=halved)
        file.write(stored(2), written)
        die()
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return opened(path)


POINTS = {
    "tensor 0": 1, "tensor 3": 1, "before the header": 1, "within the header": 1, "after the write": 2,
}  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_within_a_write_leaves_the_state_before(point: str, tmp_path: Path) -> None:
    assert kill_at(point, tmp_path / "state") == POINTS[point]


def test_kills_at_any_moment_leave_the_last_reported_state_or_the_next(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for kill in range(12):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            file = StateFile.create(path, stored(0), tensors(0))
            for sequence in itertools.count(1):
                written = tensors(sequence)
                file.write(stored(sequence), written)
                os.write(writer, sequence.to_bytes(4))
        os.close(writer)
        reports = os.read(reader, 4)
        time.sleep(kill / 2000)  # another moment of its life each time
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(reader, 1 << 16):
            reports += part
        os.close(reader)
        assert opened(path) - int.from_bytes(reports[-4:]) in (0, 1)


@pytest.mark.parametrize("byte", [0, 9, 20, 60, 4096, 5000, 16383])
def test_a_torn_slot_gives_the_state_before_and_two_a_typed_error(byte: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    file = StateFile.create(path, stored(4), tensors(4))
    file.write(stored(5), tensors(5))
    slot_bytes = path.stat().st_size // 2
    with path.open("r+b") as raw:
        for slot in (1, 0):
            raw.seek(slot * slot_bytes + byte)
            value = raw.read(1)
            raw.seek(slot * slot_bytes + byte)
            raw.write(bytes([value[0] ^ 1]))
            raw.flush()
            if slot == 1:
                assert opened(path) == 4
    with pytest.raises(StorageFailed, match="neither of its two states"):
        StateFile.open(path)


def test_a_full_disk_and_a_damaged_file_are_typed_errors(tmp_path: Path) -> None:
    path = tmp_path / "state"
    StateFile.create(path, stored(1), tensors(1))
    full = mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(StorageFailed, match="No space left"):
        StateFile.create(path, stored(2), tensors(2))
    assert opened(path) == 1
    file = StateFile.open(path)
    assert file is not None
    with pytest.raises(StorageFailed, match="3072 numbers, where its adapter has 5"):
        file.read([torch.empty(5)])
    path.write_bytes(b"")
    with pytest.raises(StorageFailed):
        StateFile.open(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(StorageFailed):
        StateFile.open(path)
