"""Publishing of the weights under training: by rank 0, or by all ranks that divide them, each its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import get_world_size

from headway.config.services.policy_sections import PolicySections
from headway.models.loading import DTYPES
from headway.models.shards.shard import row_width, shards_of
from headway.runtime.devices import parse_device
from headway.runtime.stalls.collectives import COLLECTIVES
from headway.runtime.transport.paths import Location, choose_path
from headway.trainer.checkpoints import DELTAS, find_checkpoints, version_of
from headway.trainer.learner import Learner
from headway.trainer.sharding import is_divided, own_rows_of
from headway.weights.delta_archive import DeltaArchive
from headway.weights.device_memory import CudaMemory
from headway.weights.layout import TensorRows
from headway.weights.publication import Publication
from headway.weights.shared_memory import Publisher

T = TypeVar("T")


class PublishingRanks:
    """The ranks of a model's first copy as `writers.Writers`, in a process group of their own in host memory.

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
        # The counts of all ranks' main threads are compared, and the ranks of other copies don't publish.
        is_main, is_every_rank = threading.current_thread() is threading.main_thread(), len(values) == get_world_size()
        with COLLECTIVES.inside("all_gather") if is_main and is_every_rank else nullcontext():
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


def archive_of(experiment: PolicySections) -> DeltaArchive:
    """The deltas that are kept with a run's checkpoints."""
    run = experiment.run.directory

    def oldest_checkpoint() -> int:
        return min(map(version_of, find_checkpoints(run)), default=-1)

    return DeltaArchive(Path(run) / DELTAS, experiment.checkpoint.delta_bytes, oldest_checkpoint)


def publishes(learner: Learner) -> bool:
    """Whether this rank publishes: one of those that divide the first copy; rank 0, if each has all trained weights."""
    return learner.ranks.rank < (learner.ranks.shards if _divides(learner) else 1)


class WeightPublisher:
    """Publishes what a rank has of the weights under training, beside the other ranks that publish."""

    def __init__(self, learner: Learner, experiment: PolicySections, run_id: str, *, exports: bool) -> None:
        """Versions are in this GPU's memory with ``exports`` (see `ModelService`) if that has space and all replicas
        read it, else in shared memory. Made by all ranks that publish together."""
        generator, devices = experiment.generator, learner.settings.devices
        in_host_memory = learner.settings.host_memory == "all"
        memory = None if in_host_memory else CudaMemory.of(learner.device)
        trainer_at, dtype = Location.of(devices[0]), DTYPES[generator.dtype]
        readers = [Location.of(name) for name in generator.devices if exports]
        routes = {choose_path(trainer_at, reader, CudaMemory.reaches) for reader in readers}
        self._learner, self._divided, writers = learner, _divides(learner), None
        if self._divided and learner.ranks.shards > 1:
            nodes = tuple(parse_device(name).node for name in devices[: learner.ranks.shards])
            writers = PublishingRanks(learner.ranks.rank, nodes)
        archive = archive_of(experiment) if experiment.checkpoint.delta_bytes and learner.lora is None else None
        exports = memory is not None and writers is None and routes == {"cuda ipc"} and archive is None
        # Masters are float32, and the model computes with them rounded.
        self._rounds = self._divided and learner.dtype != dtype
        # A side that takes turns computes nothing beside the copy to the host.
        options: dict[str, Any] = {"exports": exports, "snapshots": not experiment.run.offload, "writers": writers}
        options["archive"] = archive
        fetches = any(Location.of(name).machine != trainer_at.machine for name in generator.devices)
        options["whole_every"] = experiment.weights.whole_every if fetches else 1
        # The newest announced version stays while the next is written.
        self._publisher = Publisher(run_id, 2 if exports else 3, dtype=dtype, memory=memory, **options)
        # Of each tensor, the undivided shape and the first element of this rank's rows; they don't change.
        shards = shards_of(learner.weights())
        self._places = {shard.name: (shard.shape, shard.first * row_width(shard.shape)) for shard in shards}

    def begin(self, version: int) -> Publication:
        """See `Publisher.begin_rows`."""
        weights = dict(self._learner.model.named_parameters()) if self._divided else self._learner.weights()
        rows: dict[str, TensorRows] = {}
        for name, weight in weights.items():
            own = own_rows_of(weight)
            if self._learner.ranks.rank > 0 and not is_divided(weight):
                own = own.flatten()[:0]  # rank 0 has it too
            rows[name] = TensorRows(own.to(self._learner.dtype) if self._rounds else own, *self._places[name])
        return self._publisher.begin_rows(version, rows)

    def close(self) -> None:
        """Unlink the published weights."""
        self._publisher.close()


def _divides(learner: Learner) -> bool:
    """Whether the ranks divide the published weights; an adapter's are complete on every rank."""
    return learner.ranks.mesh is not None and learner.lora is None
