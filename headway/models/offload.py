"""Tensors moved off their device for a while: to pinned host memory from a GPU, to a file on disk from a CPU.

The tensors stay the objects that they are, as do views and ties: only their storages are emptied, and filled again.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from headway.records.errors import StorageFailed
from headway.records.execution import MemoryMove

PREFIX = "headway-offload-"


class OffloadedTensors:
    """Tensors that can leave their device together.

    Lifecycle: `offload` -> `onload`, again and again. While they are away the tensors must not be used. The file has
    no name: it ends with its process, however that ends.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        """``directory``: of the file, by default the machine's temporary folder; memory is not a disk."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []  # storage, bytes, its copy on the host

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor], drop: Callable[[], None] = lambda: None) -> MemoryMove:
        """Empty the tensors' storages; no-op while they are away. Raises StorageFailed, with nothing changed, when the
        disk is full or can't be written. ``drop`` frees what is made of them, once they are safe."""
        if self._away:
            return MemoryMove(moved_bytes=0, seconds=0.0)
        started, before = time.perf_counter(), used_bytes()
        storages = _own_storages(list(tensors))
        hosts: dict[int, Tensor] = {}
        for storage in storages:
            if storage.device.type != "cpu":
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                hosts[storage.data_ptr()] = host.copy_(_bytes_of(storage))
        self._write([storage for storage in storages if storage.device.type == "cpu"])
        self._away = [(storage, storage.nbytes(), hosts.get(storage.data_ptr())) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        drop()
        _give_back()
        moved = sum(size for _, size, _ in self._away)
        seconds = time.perf_counter() - started
        return MemoryMove(moved_bytes=moved, seconds=seconds, freed_bytes=before - used_bytes())

    def onload(self) -> MemoryMove:
        """Fill the storages again, bit by bit as they were; no-op while nothing is away. Raises StorageFailed when the
        file can't be read."""
        started, moved = time.perf_counter(), 0
        try:
            if self._file is not None:
                self._file.seek(0)
            for storage, size, host in self._away:
                storage.resize_(size)
                if host is not None:
                    _bytes_of(storage).copy_(host)
                elif self._file is not None:
                    _fill(self._file.fileno(), _view(storage))
                moved += size
        except OSError as error:
            raise StorageFailed(f"what was offloaded can't be read back: {error}") from error
        self._away = []
        self._forget_file()
        return MemoryMove(moved_bytes=moved, seconds=time.perf_counter() - started, onload=True)

    def close(self) -> None:
        """Remove the file; what is away is lost."""
        self._away = []
        self._forget_file()

    def _write(self, storages: list[torch.UntypedStorage]) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix=PREFIX, dir=self._directory, buffering=0)  # noqa: SIM115
            for storage in storages:
                rest = _view(storage)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._forget_file()
            size = sum(storage.nbytes() for storage in storages)
            raise StorageFailed(
                f"offloading {size / 1e6:.1f} MB to {self._directory or 'the temporary folder'}: {error}; what was to "
                "leave stays in memory"
            ) from error

    def _forget_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _own_storages(tensors: list[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages of the tensors, each made one that can be emptied: not those over another's memory (a
    mapped file, an array)."""
    found: dict[int, torch.UntypedStorage] = {}
    made: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # what it was kept: no address comes twice
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        if not storage.resizable():
            before = storage
            if before.data_ptr() not in made:
                made[before.data_ptr()] = before, _bytes_of(before).clone().untyped_storage()
            storage = made[before.data_ptr()][1]
            with torch.no_grad():
                tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore[reportArgumentType]
        found[storage.data_ptr()] = storage
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _view(storage: torch.UntypedStorage) -> memoryview:
    """A CPU storage's memory. Not by NumPy: a storage that it has seen can't be emptied."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _fill(descriptor: int, target: memoryview) -> None:
    while target:
        if not (count := os.readv(descriptor, [target])):
            raise OSError("the file ended early")
        target = target[count:]


def _give_back() -> None:
    """Return freed memory to the machine: the C library keeps it (runtime/devices.py asks it to)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def used_bytes() -> int:
    """Resident memory of this process, shared memory included; on a GPU what the allocator has of it."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_reserved()
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")
