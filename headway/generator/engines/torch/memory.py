"""The torch engine's memory off its device for a while: weights and KV move as they are, what is made of them is made
anew."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from torch import Tensor

from headway.generator.engines.torch.model_runner import ModelRunner
from headway.models.offload import OffloadedTensors, used_bytes
from headway.records.execution import MemoryMove
from headway.weights.shared_memory import Subscriber


class EngineMemory:
    """Weights, adapters and KV of a torch engine; requests in flight go on as if they had never left."""

    def __init__(self, runner: ModelRunner, subscriber: Subscriber) -> None:
        self.directory: str | None = None  # of the file
        self._runner, self._subscriber = runner, subscriber
        self._offloaded = OffloadedTensors()

    @property
    def away(self) -> bool:
        return self._offloaded.away

    def offload(self) -> MemoryMove:
        """See `Engine.offload`. The kernels' own copies of the weights are dropped, and so is what was fetched."""
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
        self._runner.weights_changed()  # their addresses have
        return msgspec.structs.replace(moved, seconds=time.perf_counter() - started)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._runner.model.parameters()
        yield from self._runner.model.buffers()
        yield self._runner.cache.all

    def _drop(self) -> None:
        self._runner.forget_panels()
        self._subscriber.forget()
