"""Exchanges of rows between ranks, with exact gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from headway.runtime.stalls.collectives import COLLECTIVES


@contextmanager
def counted(name: str, tensor: Tensor) -> Iterator[None]:
    """Count the block as a collective operation on ``tensor``, in which this rank waits until its device has ended it:
    NCCL only enqueues it."""
    with COLLECTIVES.inside(name):
        yield
    if tensor.is_cuda:
        event = torch.cuda.Event()
        event.record()
        COLLECTIVES.enqueue(event.query)


class RankGroup:
    """Ranks that exchange rows. All call the same methods in the same order, also where they have no rows."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self  # a copy of a model computes with the same ranks

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the first ``sent[0]`` of ``rows`` to the group's rank 0, the next ``sent[1]`` to rank 1 and so on.
        Returns the rows from all ranks, in their order; ``received``: how many come from each. Differentiable."""
        return _Exchange.apply(rows, sent, received, self)  # pyright: ignore[reportReturnType]

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """`exchange` without gradient."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        with counted("all_to_all", arrived):
            torch.distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, self._group)
        return arrived


class _Exchange(torch.autograd.Function):
    """`RankGroup.exchange`; its transpose is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], ranks: RankGroup) -> Tensor:
        ctx.back = received, sent
        ctx.ranks = ranks
        return ranks.all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.all_to_all(grads[0], *ctx.back), None, None, None
