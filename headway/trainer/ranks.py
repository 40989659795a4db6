"""The trainer's data-parallel ranks, and sums over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor


class Ranks:
    """A data-parallel rank; ranks meet through a file. A single rank starts no process group; its sums are identities.

    ``rendezvous``: path of a file that doesn't exist yet, the same for all ranks and new at every start.
    """

    def __init__(self, rank: int = 0, size: int = 1, rendezvous: str = "", device: torch.device | None = None) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank = {rank} must be in 0 .. {size - 1}")
        self.rank = rank
        self.size = size
        if size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group(
                "nccl" if device is not None and device.type == "cuda" else "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=timedelta(hours=1),  # a dead rank is detected by its supervisor, not here
            )

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` in place over the ranks; returns it."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place over the ranks, with one all-reduce."""
        if self.size == 1 or not tensors:
            return
        flat = self.sum_(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()
