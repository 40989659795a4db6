"""The durable states of a tenant's adapter: two slots of a mapped file, of which any kill leaves one complete.

A write goes to the older slot, whose checksum is wrong until it is complete. A killed process loses nothing, since the
kernel has what was written to the mapping. After a power cut the newer slot may be torn: the state before is read then,
if that is complete.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from headway.records.errors import StorageFailed
from headway.records.tenants.protocols import AppliedState
from headway.runtime.scratch import flush

_MAGIC = b"HEADWAYT"
_HEADER = struct.Struct("<8sqQ16s")  # magic, sequence, bytes of the description, checksum
_CHECKED = struct.Struct("<qQ")
_PAGE = 4096  # bytes before the tensors: header and description


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a durable state; the tensors lie beside it."""

    applied: AppliedState
    version: int  # completed optimiser steps
    alpha: float  # of the adapter: alpha / rank scales it


class StateFile:
    """The file of an adapter's last two durable states, float32 tensors in a fixed order.

    Lifecycle: `create` or `open` -> `write` any number of times. It is unmapped when the object is dropped.
    """

    def __init__(self, path: Path, newest: int, stored: StoredState) -> None:
        """``newest``: index of the slot with ``stored``."""
        self.stored = stored
        self._path, self._newest = path, newest
        self._slots = _mapped(path)

    @classmethod
    def create(cls, path: Path, stored: StoredState, tensors: Sequence[Tensor]) -> StateFile:
        """Replace the file by one with this state, durable when it returns. Raises StorageFailed; the file is then as
        it was."""
        scratch_file = path.with_name(path.name + ".new")
        size_bytes = 2 * (_PAGE + 4 * sum(tensor.numel() for tensor in tensors))
        with _reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(scratch_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)  # a write to a mapped page without disk is a SIGBUS
            finally:
                os.close(descriptor)
            _write_slot(_mapped(scratch_file)[0], stored, tensors)
            flush(scratch_file)
            scratch_file.rename(path)
            flush(path.parent)
        return cls(path, 0, stored)

    @classmethod
    def open(cls, path: Path) -> StateFile | None:
        """Open the file at its newest complete state; None: there is none. Raises StorageFailed for an unreadable file,
        and one without a complete state."""
        if not path.exists():
            return None
        with _reporting(path):
            slots = _mapped(path)
        for index in sorted((0, 1), key=lambda index: _sequence(slots[index]), reverse=True):
            if (stored := _read_description(slots[index])) is not None:
                return cls(path, index, stored)
        raise StorageFailed(f"{path}: neither of its two states is complete")

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Copy the newest state into ``tensors``. Raises StorageFailed for those of another adapter."""
        payload_n = torch.from_numpy(self._slots[self._newest, _PAGE:].view(np.float32))
        if len(payload_n) != (count := sum(tensor.numel() for tensor in tensors)):
            raise StorageFailed(f"{self._path}: {len(payload_n)} numbers, where its adapter has {count}")
        for tensor, part_n in zip(tensors, _parts(payload_n, tensors), strict=True):
            tensor.copy_(part_n.view(tensor.shape))

    def write(self, stored: StoredState, tensors: Sequence[Tensor]) -> None:
        """Write the next state, which is durable when this returns: the process may be killed, not the machine."""
        _write_slot(self._slots[1 - self._newest], stored, tensors)
        self._newest, self.stored = 1 - self._newest, stored


def flush_state(path: Path) -> None:
    """Flush the states in a file, if it exists, to disk, where they survive a power cut. Raises StorageFailed."""
    if path.exists():
        with _reporting(path):
            flush(path)


def _mapped(path: Path) -> np.ndarray:
    """Map the file, uint8 [2, bytes]. Raises OSError, ValueError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(2, -1)
    finally:
        os.close(descriptor)


def _parts(payload_n: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return payload_n.split([tensor.numel() for tensor in tensors])


def _write_slot(slot: np.ndarray, stored: StoredState, tensors: Sequence[Tensor]) -> None:
    description = msgspec.json.encode(stored)
    if len(description) > _PAGE - _HEADER.size:
        raise StorageFailed(f"a state's description has {len(description)} bytes: valid: {_PAGE - _HEADER.size}")
    with torch.no_grad():
        payload_n = torch.from_numpy(slot[_PAGE:].view(np.float32))
        for tensor, part_n in zip(tensors, _parts(payload_n, tensors), strict=True):
            part_n.copy_(tensor.reshape(-1))
    slot[_HEADER.size : _HEADER.size + len(description)] = np.frombuffer(description, np.uint8)
    sequence, size_bytes = stored.applied.sequence, len(description)
    header = _HEADER.pack(_MAGIC, sequence, size_bytes, _checksum(slot, sequence, size_bytes))
    slot[: _HEADER.size] = np.frombuffer(header, np.uint8)


def _sequence(slot: np.ndarray) -> int:
    """The sequence in the slot's header, which may be torn; -1: it is none."""
    magic, sequence, *_ = _HEADER.unpack(slot[: _HEADER.size].tobytes())
    return sequence if magic == _MAGIC else -1


def _read_description(slot: np.ndarray) -> StoredState | None:
    """The description of the slot's state; None: it isn't complete."""
    magic, sequence, size_bytes, checksum = _HEADER.unpack(slot[: _HEADER.size].tobytes())
    if magic != _MAGIC or size_bytes > _PAGE - _HEADER.size or checksum != _checksum(slot, sequence, size_bytes):
        return None
    return msgspec.json.decode(slot[_HEADER.size : _HEADER.size + size_bytes].tobytes(), type=StoredState)


def _checksum(slot: np.ndarray, sequence: int, size_bytes: int) -> bytes:
    hasher = xxhash.xxh3_128(_CHECKED.pack(sequence, size_bytes))
    hasher.update(slot[_HEADER.size : _HEADER.size + size_bytes].data)
    hasher.update(slot[_PAGE:].data)
    return hasher.digest()


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise StorageFailed(f"{path}: {error}") from None
