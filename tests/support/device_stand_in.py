"""A stand-in for a GPU's memory, in which processes share weights: files that each process maps."""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import WeightsCorrupt


class SharedDevice:
    """`DeviceMemory` in a folder, of ``capacity_bytes``. The content outlives its process, as a GPU's doesn't:
    `SlotLock` must notice."""

    def __init__(self, folder: Path, capacity_bytes: float = float("inf")) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self._allocated: list[weakref.ref[Tensor]] = []
        self.pinned: list[int] = []
        self._exported: dict[int, str] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of what is allocated and still referred to."""
        return sum(len(memory) for reference in self._allocated if (memory := reference()) is not None)

    def allocate(self, size: int) -> Tensor:
        if self.used_bytes + size > self.capacity_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        path = self.folder / f"device-{os.getpid()}-{uuid.uuid4().hex}"
        with path.open("x+b") as file:
            file.truncate(size)
            memory = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8))
        self._exported[memory.data_ptr()] = str(path)
        self._allocated.append(weakref.ref(memory))
        return memory

    def export(self, memory: Tensor) -> str:
        return self._exported[memory.data_ptr()]

    def map(self, handle: str) -> Tensor:
        try:
            with Path(handle).open("r+b") as file:
                return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))
        except OSError as error:
            raise WeightsCorrupt(f"the weights' memory on the GPU can't be mapped: {error}") from error

    def pin(self, memory: np.ndarray) -> None:
        self.pinned.append(memory.nbytes)

    def after_present_work(self) -> AbstractContextManager[None]:
        return nullcontext()
