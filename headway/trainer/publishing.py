"""Publishing of the weights under training: by rank 0, or by all ranks that divide them, each its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor

from headway.config.schema import Experiment
from headway.models.loading import DTYPES
from headway.models.shards.shard import row_width, shards_of
from headway.runtime.devices import parse_device
from headway.runtime.stalls.collectives import COLLECTIVES
from headway.runtime.transport.paths import Location, choose_path
from headway.trainer.learner import Learner
from headway.trainer.sharding import is_divided
from headway.weights.device_memory import CudaMemory
from headway.weights.layout import TensorRows
from headway.weights.shared_memory import Publisher

T = TypeVar("T")


class PublishingRanks:
    """The ranks of a model's first copy as `publication.Writers`, in a process group of their own in host memory.

    Its calls may come from another thread than the training's, whose collectives they must not get in between.
    """

    def __init__(self, rank: int, nodes: tuple[str, ...]) -> None:
        """``nodes``: of each rank. Made by all of these ranks together."""
        self.rank, self.nodes = rank, nodes
        ranks = list(range(len(nodes)))
        self._group: Any = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def all_gather(self, value: T) -> list[T]:
        """See `Writers.all_gather`."""
        values: list[T | None] = [None] * len(self.nodes)
        is_main = threading.current_thread() is threading.main_thread()
        with COLLECTIVES.inside("all_gather") if is_main else nullcontext():  # those of the main thread are compared
            torch.distributed.all_gather_object(values, value, group=self._group)
        return cast("list[T]", values)

    def exchange(self, transfers: Iterable[tuple[int, int, Tensor]]) -> None:
        """See `Writers.exchange`."""
        works: list[Any] = []
        for tag, (source, target, memory) in enumerate(transfers):
            if source == self.rank:
                works.append(torch.distributed.isend(memory, target, group=self._group, tag=tag))
            elif target == self.rank:
                works.append(torch.distributed.irecv(memory, source, group=self._group, tag=tag))
        for work in works:
            work.wait()


def publishes(learner: Learner) -> bool:
    """Whether this rank publishes: one of those that divide the first copy; rank 0, if each has all trained weights."""
    return learner.ranks.rank < (learner.ranks.shards if _divides(learner) else 1)


def open_publisher(learner: Learner, experiment: Experiment, run_id: str, *, exports: bool) -> Publisher:
    """Open this rank's publisher: in its GPU's memory with ``exports`` (see `ModelService`) if that has space and all
    replicas read it, else in shared memory. A call of all ranks that publish."""
    generator, devices = experiment.generator, learner.settings.devices
    in_host_memory = learner.settings.host_memory == "all"
    memory = None if in_host_memory else CudaMemory.of(learner.device)
    trainer_at = Location.of(devices[0])
    readers = [Location.of(name) for name in generator.devices if exports]
    routes = {choose_path(trainer_at, reader, CudaMemory.reaches) for reader in readers}
    exports = memory is not None and routes == {"cuda ipc"}
    writers = None
    if _divides(learner) and learner.ranks.shards > 1:
        nodes = tuple(parse_device(name).node for name in devices[: learner.ranks.shards])
        writers = PublishingRanks(learner.ranks.rank, nodes)
    # A side that takes turns computes nothing beside the copy to the host.
    options: dict[str, Any] = {"exports": exports, "snapshots": not experiment.run.offload, "writers": writers}
    # The newest announced version stays while the next is written.
    return Publisher(run_id, 2 if exports else 3, dtype=DTYPES[generator.dtype], memory=memory, **options)


def published_rows(learner: Learner, dtype: str) -> Mapping[str, TensorRows]:
    """This rank's rows of each published tensor, as the model computes with them, for a publisher that casts them to
    ``dtype``. Of tensors that every rank has completely, rank 0 has all rows."""
    weights, rows, rank = learner.weights(), dict[str, TensorRows](), learner.ranks.rank
    for shard in shards_of(weights):
        tensor = shard.tensor if rank == 0 or is_divided(weights[shard.name]) else shard.tensor.flatten()[:0]
        if _divides(learner) and tensor.is_floating_point() and DTYPES[dtype] != learner.dtype:
            tensor = tensor.to(learner.dtype)  # masters are float32
        rows[shard.name] = TensorRows(tensor, shard.shape, shard.first * row_width(shard.shape))
    return rows


def _divides(learner: Learner) -> bool:
    """Whether the ranks divide the published weights; an adapter's are complete on every rank."""
    return learner.ranks.mesh is not None and learner.lora is None
