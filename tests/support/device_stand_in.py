"""A stand-in for a GPU's memory, in which processes share weights: files that each process maps."""

from __future__ import annotations

import mmap
import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import WeightsCorrupt


class SharedDevice:
    """`DeviceMemory` in a folder. The content outlives its process, as a GPU's doesn't: `SlotLock` must notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pinned: list[int] = []
        self._exported: dict[int, str] = {}

    def allocate(self, size: int) -> Tensor:
        path = self.folder / f"device-{os.getpid()}-{uuid.uuid4().hex}"
        with path.open("x+b") as file:
            file.truncate(size)
            memory = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8))
        self._exported[memory.data_ptr()] = str(path)
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
