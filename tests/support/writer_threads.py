"""Ranks that publish together as threads of this process, with what each of them writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from model_shards import rank_shards
from torch import Tensor

from headway.models.shards.shard import row_width
from headway.weights.layout import TensorRows

LIMIT_S = 20.0


class ThreadWriter:
    """One of the ranks, as `writers.Writers`. ``calls`` has the names of its calls."""

    def __init__(self, ranks: WriterThreads, rank: int) -> None:
        self._ranks, self.rank, self.nodes = ranks, rank, ranks.nodes
        self.calls: list[str] = []
        self.on_call: Callable[[ThreadWriter], None] = lambda writer: None

    def all_gather(self, value: Any) -> list[Any]:
        self._note("all_gather")
        self._ranks.values[self.rank] = value
        self._ranks.barrier.wait()
        values = list(self._ranks.values)
        self._ranks.barrier.wait()
        return values

    def exchange(self, transfers: Iterable[tuple[int, int, Tensor]]) -> None:
        self._note("exchange")
        received = [(tag, memory) for tag, (*pair, memory) in enumerate(transfers) if self._sent(tag, *pair, memory)]
        for tag, memory in received:
            memory.copy_(self._ranks.message(tag).get(timeout=LIMIT_S))

    def _sent(self, tag: int, source: int, target: int, memory: Tensor) -> bool:
        if source == self.rank:
            self._ranks.message(tag).put(memory.clone())
            self._ranks.sent_bytes += len(memory)
        return target == self.rank

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(self)


class WriterThreads:
    """``nodes``: of each rank. A rank that fails breaks the others' calls, as a dead one breaks connections."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes
        self.values: list[Any] = [None] * len(nodes)
        self.barrier = threading.Barrier(len(nodes), timeout=LIMIT_S)
        self.writers = [ThreadWriter(self, rank) for rank in range(len(nodes))]
        self.sent_bytes = 0
        self._messages: dict[int, queue.Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def message(self, tag: int) -> queue.Queue[Tensor]:
        with self._lock:
            return self._messages.setdefault(tag, queue.Queue())

    def run(self, function: Callable[[ThreadWriter], Any]) -> list[Any]:
        """``function(writer)`` in a thread for each rank; results, or exceptions, in their order."""

        def call(writer: ThreadWriter) -> Any:
            try:
                return function(writer)
            except Exception as error:
                self.barrier.abort()
                return error

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(call, self.writers))


def rows_of(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, TensorRows]:
    """The rows of a rank as FSDP2 divides parameters. What can't be divided is rank 0's."""
    divided = {name: tensor for name, tensor in tensors.items() if tensor.ndim and tensor.numel()}
    rows = {
        shard.name: TensorRows(shard.tensor, shard.shape, shard.first * row_width(shard.shape))
        for shard in rank_shards(divided, rank, ranks)
    }
    for name in tensors.keys() - divided.keys():
        tensor = tensors[name] if rank == 0 else torch.empty(0, dtype=tensors[name].dtype)
        rows[name] = TensorRows(tensor, tuple(tensors[name].shape))
    return {name: rows[name] for name in tensors}
