"""Memory of a device in which versions are published: other processes map it, and the device hashes it itself."""

from __future__ import annotations

import base64
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import WeightsCorrupt
from headway.runtime.transport.packing import Packed, pack
from headway.weights.checksums import LANE_BYTES, lane_keys

_CHUNK_LANES = 1024  # that are multiplied at a time: 64 MiB, and twice that of products


class DeviceMemory(Protocol):
    """The memory of one device. Tests have a stand-in of shared memory."""

    def allocate(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of zeros, [size] uint8, which other processes can map."""
        ...

    def export(self, memory: Tensor) -> str:
        """Make a handle by which another process maps this memory for as long as this one lives."""
        ...

    def map(self, handle: str) -> Tensor:
        """Map another process's memory. Raises WeightsCorrupt when that can't be done."""
        ...

    def pin(self, memory: np.ndarray) -> None:
        """Pin host memory for as long as it lives, which makes the device's copies faster."""
        ...

    def after_present_work(self) -> AbstractContextManager[None]:
        """Make a context for another thread: work in it follows that queued until now, beside what comes later, and is
        done at the context's end."""
        ...


class CudaMemory:
    """A GPU's memory: between processes by CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @staticmethod
    def of(device: torch.device) -> CudaMemory | None:
        """The memory of a GPU; None for a CPU."""
        return CudaMemory(device) if device.type == "cuda" else None

    @staticmethod
    def reaches(gpu: str, other: str) -> bool:
        """Whether a GPU of this machine reads another's memory: see `choose_path`."""
        gpu_index, other_index = torch.device(gpu).index, torch.device(other).index
        return gpu_index == other_index or torch.cuda.can_device_access_peer(gpu_index, other_index)

    def allocate(self, size: int) -> Tensor:
        """See `DeviceMemory.allocate`."""
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def export(self, memory: Tensor) -> str:
        """See `DeviceMemory.export`."""
        return base64.b64encode(pack(memory, "weights", one_gpu=True).pickled).decode()

    def map(self, handle: str) -> Tensor:
        """See `DeviceMemory.map`."""
        try:
            return Packed(base64.b64decode(handle), ()).load()
        except Exception as error:  # the boundary of the driver, whose errors have many types
            raise WeightsCorrupt(f"the weights' memory on the GPU can't be mapped: {error}") from error

    def pin(self, memory: np.ndarray) -> None:
        """See `DeviceMemory.pin`."""
        cuda_runtime: Any = torch.cuda.cudart()
        address = memory.ctypes.data
        if int(cuda_runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:  # else copies are only slower
            owner: Any = memory if memory.base is None else memory.base
            weakref.finalize(owner, cuda_runtime.cudaHostUnregister, address).atexit = False

    def after_present_work(self) -> AbstractContextManager[None]:
        """See `DeviceMemory.after_present_work`."""
        queued_event = torch.cuda.current_stream(self._device).record_event()

        @contextmanager
        def beside() -> Iterator[None]:
            stream: Any = torch.cuda.Stream(self._device)
            stream.wait_event(queued_event)
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()

        return beside()


@cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(lane_keys().view(np.int64)).to(device)


def lane_sums(payload: Tensor) -> np.ndarray:
    """The sums of a payload's lanes (`checksums`), [lanes] uint64, computed where it is: [bytes] uint8, whole lanes."""
    words, keys = payload.view(torch.int32).view(-1, LANE_BYTES // 4), _keys(payload.device)
    # int32 x int64 is one pass: the operator widens each word as it loads it, and wraps as the sum does.
    sums = [(words[first : first + _CHUNK_LANES] * keys).sum(1) for first in range(0, len(words), _CHUNK_LANES)]
    return torch.cat(sums).cpu().numpy().view(np.uint64)
