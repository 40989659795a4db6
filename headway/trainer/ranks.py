"""The trainer's ranks, the mesh that they form, and collectives over it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.models.parallel.context import ContextRanks
from headway.models.parallel.division import Division
from headway.models.parallel.exchange import RankGroup
from headway.models.parallel.experts import ExpertRanks
from headway.records.errors import HeadwayError, RanksDiffer
from headway.runtime.addresses import split_address
from headway.runtime.stalls.collectives import COLLECTIVES

T = TypeVar("T")

_SIOCGIFADDR = 0x8915  # ioctl: an interface's IPv4 address


Dimension = Literal["all", "copies", "shards", "context"]  # of the mesh: which ranks a collective is over

_BUCKET_VALUES = 1 << 26  # that one all-reduce of `Ranks.sum_all_` sums, beside the tensors themselves


class Ranks:
    """A rank of the trainer's mesh: copies of the model, of which each is divided among ``shards`` ranks.

    Rank r is shard r % shards of copy r // shards. Of a copy's ranks, ``context`` neighbours compute the same samples
    and divide their tokens, and ``experts`` neighbours divide the experts of mixtures. A single rank starts no process
    group unless it is ``meshed``, and its sums are identities.

    ``rendezvous``: equal for all ranks and new at every start: ``file://PATH`` of a file that doesn't exist yet, or
    ``tcp://HOST:PORT`` on which rank 0 will listen, for ranks on several machines.
    ``meshed``: FSDP2 computes even where each rank has a whole copy.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        rendezvous: str = "",
        device: torch.device | None = None,
        shards: int = 1,
        context: int = 1,
        experts: int = 1,
        *,
        meshed: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank = {rank} must be in 0 .. {size - 1}")
        if size % shards or shards % context or shards % experts:
            raise ValueError(
                f"shards = {shards} must divide size = {size}, and be divided by context = {context} and experts = "
                f"{experts}"
            )
        self.rank, self.size, self.shards, self.context, self.experts = rank, size, shards, context, experts
        self._device = device or torch.device("cpu")
        self.mesh: DeviceMesh | None = None  # copies x shards; None: every rank has a whole copy, without FSDP2
        self.shard_mesh: DeviceMesh | None = None  # the shards of this copy
        self._context_mesh: DeviceMesh | None = None  # context groups x context
        if size > 1 or meshed:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # collectives of objects use the current one
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(rendezvous))
            if rendezvous.startswith("tcp://"):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_to(rendezvous))
            torch.distributed.init_process_group(
                "nccl" if self._device.type == "cuda" else "gloo",
                init_method=rendezvous,
                rank=rank,
                world_size=size,
                timeout=timedelta(hours=1),  # a dead rank is detected by its supervisor, not here
            )
        if shards > 1 or meshed:
            if experts == 1:
                self.mesh = self._open_mesh(copies=size // shards, fsdp=shards)
                self.shard_mesh = self.mesh["fsdp"]  # by this name PEFT knows that modules gather their matrices
            else:
                self.mesh = self._open_mesh(copies=size // shards, same_experts=shards // experts, experts=experts)
                self.shard_mesh = self.mesh["same_experts", "experts"]._flatten("shards")
        if context > 1:
            self._context_mesh = self._open_mesh(groups=size // context, context=context)

    def _open_mesh(self, **sizes: int) -> DeviceMesh:
        return init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data_size(self) -> int:
        """The number of parts of a batch, of which the ranks of a context group have the same one."""
        return self.size // self.context

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of a batch."""
        return self.rank // self.context

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its context group: its values and counts are those of the group."""
        return self.rank % self.context == 0

    def division(self) -> Division:
        """The ranks with which this one computes a model."""
        context, mesh = self._context_mesh, self.mesh
        return Division(
            context=None if context is None else ContextRanks(RankGroup(context.get_group("context"))),
            experts=None if mesh is None or self.experts == 1 else ExpertRanks(mesh["experts"]),
        )

    def count(self, dimension: Dimension = "all") -> int:
        """The number of ranks along a dimension of the mesh."""
        copies = self.size // self.shards
        return {"all": self.size, "copies": copies, "shards": self.shards, "context": self.context}[dimension]

    def sum_(self, tensor: Tensor, dimension: Dimension = "all") -> Tensor:
        """Sum ``tensor`` in place over the ranks of a dimension; returns it."""
        return self._all_reduce(tensor, dimension, torch.distributed.ReduceOp.SUM)

    def largest(self, number: int, dimension: Dimension = "all") -> int:
        """The largest ``number`` of the ranks of a dimension."""
        number_tensor = torch.tensor(number, device=self._device)
        return int(self._all_reduce(number_tensor, dimension, torch.distributed.ReduceOp.MAX))

    def _all_reduce(self, tensor: Tensor, dimension: Dimension, operation: Any) -> Tensor:
        if self.count(dimension) > 1:
            with COLLECTIVES.inside("all_reduce"):
                torch.distributed.all_reduce(tensor, operation, group=self._group(dimension))
                if tensor.is_cuda:  # NCCL only enqueues it: without this, no stall report would show the wait
                    torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor], dimension: Dimension = "all") -> None:
        """Sum tensors in place over the ranks of a dimension, with one all-reduce for many of them."""
        if self.count(dimension) == 1:
            return
        bucket: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            bucket.append(tensor)
            if index + 1 < len(tensors) and sum(member.numel() for member in bucket) < _BUCKET_VALUES:
                continue
            flat_sum = torch.cat([member.flatten() for member in bucket]).to(self._device)  # of host memory, perhaps
            parts = self.sum_(flat_sum, dimension).split([member.numel() for member in bucket])
            for member, part in zip(bucket, parts, strict=True):
                member.copy_(part.view_as(member))
            bucket = []

    def _group(self, dimension: Dimension) -> torch.distributed.ProcessGroup | None:
        if dimension == "shards":
            return None if self.shard_mesh is None else self.shard_mesh.get_group()
        mesh = self._context_mesh if dimension == "context" else self.mesh
        return None if mesh is None or dimension == "all" else mesh.get_group(dimension)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, any small object, rank 0's first."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with COLLECTIVES.inside("all_gather"):
            torch.distributed.all_gather_object(values, value)
        return cast("list[T]", values)

    def all_gather_data(self, value: T) -> list[T]:
        """Return ``value`` of every part of a batch, which the ranks of a context group have all."""
        return self.all_gather(value)[:: self.context]

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, any object, on rank 0, its own first; [] on all others."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size if self.rank == 0 else []
        with COLLECTIVES.inside("gather"):
            torch.distributed.gather_object(value, values or None)
        return cast("list[T]", values)

    def require_equal(self, call: str, facts: Mapping[str, Any]) -> None:
        """Compare a call and its ``facts`` over the ranks, before its first collective: ranks in different ones would
        mix up their tensors, silently if these have equal sizes. Raises RanksDiffer on every rank."""
        facts_by_rank = self.all_gather({"call": call, **facts})
        for name in dict.fromkeys(name for rank_facts in facts_by_rank for name in rank_facts):
            values = [rank_facts.get(name) for rank_facts in facts_by_rank]
            if values.count(values[0]) < len(values):
                values_text = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise RanksDiffer(f"the trainer's ranks differ in {call}: {name} = {values_text}")

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def interface_to(rendezvous: str) -> str:
    """The name of the network interface by which this machine reaches the ranks' rendezvous; "lo" for a file."""
    if not rendezvous.startswith("tcp://"):
        return "lo"
    host, port = split_address(rendezvous.removeprefix("tcp://"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect((host, port))  # sends nothing: the kernel chooses the route
        address = probe_socket.getsockname()[0]
        for _, interface_name in socket.if_nameindex():
            request = struct.pack("256s", interface_name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe_socket.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return interface_name
    raise HeadwayError(f"no network interface of this machine has the address {address}, by which it reaches {host}")
