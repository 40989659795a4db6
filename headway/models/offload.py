"""Offloading of tensors: from a GPU to pinned host memory, from a CPU to a file on disk.

The tensors stay the same objects, as do views and ties; only their storages are emptied, and filled again later.
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
from headway.runtime.devices import resident_bytes

PREFIX = "headway-offload-"


class OffloadedTensors:
    """Tensors that can be offloaded together.

    Lifecycle: `offload` -> `onload`, repeatedly. Offloaded tensors must not be used. The file has no name, so that the
    system removes it when its process ends in any way.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        """``directory``: of the file, by default the machine's temporary folder; a tmpfs would free no memory."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._offloaded: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []  # storage, bytes, copy on the host

    @property
    def offloaded(self) -> bool:
        return bool(self._offloaded)

    def offload(self, tensors: Iterable[Tensor], drop: Callable[[], None] = lambda: None) -> MemoryMove:
        """Empty the tensors' storages; no-op while they are offloaded. Raises StorageFailed, before any change, if the
        disk is full or can't be written. ``drop`` frees objects derived from the tensors, after these are stored."""
        if self._offloaded:
            return MemoryMove(moved_bytes=0, seconds=0.0)
        started, used_before_bytes = time.perf_counter(), used_bytes()
        storages = _resizable_storages(list(tensors))
        host_by_address: dict[int, Tensor] = {}
        for storage in storages:
            if storage.device.type != "cpu":
                host_copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                host_by_address[storage.data_ptr()] = host_copy.copy_(_bytes_of(storage))
        self._write([storage for storage in storages if storage.device.type == "cpu"])
        self._offloaded = [(storage, storage.nbytes(), host_by_address.get(storage.data_ptr())) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        drop()
        _release_freed_memory()
        moved_bytes = sum(size for _, size, _ in self._offloaded)
        seconds = time.perf_counter() - started
        return MemoryMove(moved_bytes=moved_bytes, seconds=seconds, freed_bytes=used_before_bytes - used_bytes())

    def onload(self) -> MemoryMove:
        """Fill the storages again, bit for bit; no-op while nothing is offloaded. Raises StorageFailed if the file
        can't be read."""
        started, moved_bytes = time.perf_counter(), 0
        try:
            if self._file is not None:
                self._file.seek(0)
            for storage, size_bytes, host_copy in self._offloaded:
                storage.resize_(size_bytes)
                if host_copy is not None:
                    _bytes_of(storage).copy_(host_copy)
                elif self._file is not None:
                    _fill(self._file.fileno(), _view(storage))
                moved_bytes += size_bytes
        except OSError as error:
            raise StorageFailed(f"what was offloaded can't be read back: {error}") from error
        self._offloaded = []
        self._close_file()
        return MemoryMove(moved_bytes=moved_bytes, seconds=time.perf_counter() - started, onload=True)

    def close(self) -> None:
        """Remove the file; offloaded values are lost."""
        self._offloaded = []
        self._close_file()

    def _write(self, storages: list[torch.UntypedStorage]) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix=PREFIX, dir=self._directory, buffering=0)  # noqa: SIM115
            for storage in storages:
                remaining_view = _view(storage)
                while remaining_view:
                    remaining_view = remaining_view[self._file.write(remaining_view) :]
        except OSError as error:
            self._close_file()
            size = sum(storage.nbytes() for storage in storages)
            raise StorageFailed(
                f"offloading {size / 1e6:.1f} MB to {self._directory or 'the temporary folder'}: {error}; what was to "
                "leave stays in memory"
            ) from error

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _resizable_storages(tensors: list[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages of the tensors. A storage that can't be emptied, because its memory belongs to a mapped
    file or an array, is replaced by a copy."""
    storages: dict[int, torch.UntypedStorage] = {}
    pairs: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # old, kept so that no address recurs; new
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        if not storage.resizable():
            original = storage
            if original.data_ptr() not in pairs:
                pairs[original.data_ptr()] = original, _bytes_of(original).clone().untyped_storage()
            storage = pairs[original.data_ptr()][1]
            with torch.no_grad():
                tensor.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # pyright: ignore[reportArgumentType]
        storages[storage.data_ptr()] = storage
    return list(storages.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _view(storage: torch.UntypedStorage) -> memoryview:
    """A CPU storage's memory, without NumPy, which would keep the storage from being emptied."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _fill(descriptor: int, target: memoryview) -> None:
    while target:
        if not (read_bytes := os.readv(descriptor, [target])):
            raise OSError("the file ended early")
        target = target[read_bytes:]


def _release_freed_memory() -> None:
    """Return freed memory to the system, since the C library is set to keep it (runtime/devices.py)."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def used_bytes() -> int:
    """The resident memory of this process, including shared memory; with a GPU, the memory of torch's allocator."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_reserved()
    return resident_bytes()
