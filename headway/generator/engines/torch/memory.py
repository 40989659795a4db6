"""Offloads an engine's memory: weights and KV move unchanged, and data derived from them is derived again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
from torch import Tensor

from headway.models.offload import OffloadedTensors, used_bytes
from headway.records.execution import MemoryMove
from headway.weights.shared_memory import Subscriber


class EngineMemory:
    """Weights, adapters and KV of an engine of this package; requests in flight continue as if never offloaded."""

    def __init__(
        self,
        subscriber: Subscriber,
        tensors: Callable[[], Iterable[Tensor]],
        drop: Callable[[], None] = lambda: None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """``tensors`` yields those to offload. ``drop`` frees data derived from them; ``loaded`` derives it again once
        they are back, at other addresses. The last fetch of ``subscriber`` is dropped too."""
        self.directory: str | None = None  # of the file
        self._subscriber, self._tensors = subscriber, tensors
        self._drop_made, self._loaded = drop, loaded
        self._offloaded = OffloadedTensors()

    @property
    def offloaded(self) -> bool:
        return self._offloaded.offloaded

    def offload(self) -> MemoryMove:
        """See `Memory.offload`."""
        if self.offloaded:
            return MemoryMove(moved_bytes=0, seconds=0.0)
        started_s, initial_bytes = time.perf_counter(), used_bytes()
        self._offloaded = OffloadedTensors(self.directory)
        memory_move = self._offloaded.offload(self._tensors(), self._drop)
        seconds = time.perf_counter() - started_s
        return msgspec.structs.replace(memory_move, seconds=seconds, freed_bytes=initial_bytes - used_bytes())

    def onload(self) -> MemoryMove:
        """See `Memory.onload`."""
        if not self.offloaded:
            return MemoryMove(moved_bytes=0, seconds=0.0, onload=True)
        started_s, memory_move = time.perf_counter(), self._offloaded.onload()
        self._loaded()
        return msgspec.structs.replace(memory_move, seconds=time.perf_counter() - started_s)

    def _drop(self) -> None:
        self._drop_made()
        self._subscriber.forget()
