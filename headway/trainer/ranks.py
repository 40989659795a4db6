"""The trainer's data-parallel ranks, and sums over them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor

from headway.records.errors import HeadwayError, RanksDiffer
from headway.runtime.addresses import split_address
from headway.runtime.stalls.collectives import COLLECTIVES

T = TypeVar("T")

_SIOCGIFADDR = 0x8915  # ioctl: an interface's IPv4 address


class Ranks:
    """A data-parallel rank. A single rank starts no process group, and its sums are identities.

    ``rendezvous``: equal for all ranks and new at every start: ``file://PATH`` of a file that doesn't exist yet, or
    ``tcp://HOST:PORT`` on which rank 0 will listen, for ranks on several machines.
    """

    def __init__(self, rank: int = 0, size: int = 1, rendezvous: str = "", device: torch.device | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank = {rank} must be in 0 .. {size - 1}")
        self.rank = rank
        self.size = size
        if size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(rendezvous))
            if rendezvous.startswith("tcp://"):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_to(rendezvous))
            torch.distributed.init_process_group(
                "nccl" if device is not None and device.type == "cuda" else "gloo",
                init_method=rendezvous,
                rank=rank,
                world_size=size,
                timeout=timedelta(hours=1),  # a dead rank is detected by its supervisor, not here
            )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` in place over the ranks; returns it."""
        if self.size > 1:
            with COLLECTIVES.inside("all_reduce"):
                torch.distributed.all_reduce(tensor)
                if tensor.is_cuda:  # NCCL only enqueues it: without this, no stall report would show the wait
                    torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place over the ranks, with one all-reduce."""
        if self.size == 1 or not tensors:
            return
        flat_sum = self.sum_(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = flat_sum.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, any small object, rank 0's first."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        with COLLECTIVES.inside("all_gather"):
            torch.distributed.all_gather_object(values, value)
        return cast("list[T]", values)

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
        if self.size > 1:
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
