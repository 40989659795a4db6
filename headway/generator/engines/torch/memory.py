"""An engine's memory off its device for a while: weights and KV move as they are, what is made of them is made anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
from torch import Tensor

from headway.models.offload import OffloadedTensors, used_bytes
from headway.records.execution import MemoryMove
from headway.weights.shared_memory import Subscriber


class EngineMemory:
    """Weights, adapters and KV of an engine of this package; requests in flight go on as if they had never left."""

    def __init__(
        self,
        subscriber: Subscriber,
        tensors: Callable[[], Iterable[Tensor]],
        drop: Callable[[], None] = lambda: None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """``tensors``: those that leave. ``drop`` frees what was made of them; ``loaded`` makes it anew once they are
        back, at other addresses. What ``subscriber`` fetched is dropped too."""
        self.directory: str | None = None  # of the file
        self._subscriber, self._tensors = subscriber, tensors
        self._drop_made, self._loaded = drop, loaded
        self._offloaded = OffloadedTensors()

    @property
    def away(self) -> bool:
        return self._offloaded.away

    def offload(self) -> MemoryMove:
        """See `Engine.offload`."""
        if self.away:
            return MemoryMove(moved_bytes=0, seconds=0.0)
        started, before = time.perf_counter(), used_bytes()
        self._offloaded = OffloadedTensors(self.directory)
        moved = self._offloaded.offload(self._tensors(), self._drop)
        seconds = time.perf_counter() - started
        return msgspec.structs.replace(moved, seconds=seconds, freed_bytes=before - used_bytes())

    def onload(self) -> MemoryMove:
        """See `Engine.onload`."""
        if not self.away:
            return MemoryMove(moved_bytes=0, seconds=0.0, onload=True)
        started, moved = time.perf_counter(), self._offloaded.onload()
        self._loaded()
        return msgspec.structs.replace(moved, seconds=time.perf_counter() - started)

    def _drop(self) -> None:
        self._drop_made()
        self._subscriber.forget()
