"""Expert parallelism: ranks divide the experts of each mixture (GShard, Lepikhin et al. 2020, arXiv 2006.16668).

Each token's row is sent to the ranks that have its experts, without a capacity: no token is dropped.

Shape suffixes: m (token, expert) pairs of this rank's tokens, r pairs of this rank's experts, d width, c ranks,
x experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headway.models.parallel.exchange import RankGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ExpertRanks:
    """Ranks of which each has equally many neighbouring experts of every mixture. Their tokens differ."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """``mesh``: of one dimension, these ranks."""
        self._mesh = mesh
        self.ranks = RankGroup(mesh.get_group())

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertRanks:
        return self  # a copy of a model computes with the same ranks

    def divide(self, weight: nn.Parameter) -> nn.Parameter:
        """A parameter of this rank's experts alone, from one of all experts, [X, ...]: a DTensor of the same shape."""
        from torch.distributed.tensor import DTensor, Shard  # one rank alone needn't load it

        own_experts = weight.detach()[self.rows(len(weight))].clone()
        layout = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
        divided = DTensor.from_local(own_experts, self._mesh, [Shard(0)], **layout)
        return nn.Parameter(divided, requires_grad=weight.requires_grad)

    @staticmethod
    def own_experts(weight: Tensor) -> Tensor:
        """This rank's experts of a parameter of `divide`, with gradient."""
        return weight.to_local()  # pyright: ignore[reportAttributeAccessIssue]

    def rows(self, experts: int) -> slice:
        """This rank's experts of a mixture of ``experts``: rows of dimension 0 of the experts' tensors."""
        count = experts // self.ranks.size
        return slice(self.ranks.rank * count, (self.ranks.rank + 1) * count)

    def outputs(
        self, rows_md: Tensor, expert_m: Tensor, experts: int, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The output [M, d] of each pair's expert. ``expert_m``, ascending, is the pair's expert among ``experts``.
        ``compute``: from rows [R, d] for this rank's experts, the experts, ascending, and the rows' indices."""
        size, count = self.ranks.size, experts // self.ranks.size
        ends = torch.searchsorted(expert_m, torch.arange(experts, device=expert_m.device), right=True)
        counts_cx = ends.diff(prepend=ends.new_zeros(1)).view(size, count)
        arriving_cx = self.ranks.all_to_all(counts_cx, [1] * size, [1] * size)
        sent, received = torch.stack([counts_cx, arriving_cx]).sum(-1).tolist()
        arrived_rd = self.ranks.exchange(rows_md, sent, received)
        own = torch.arange(count, device=expert_m.device) + self.rows(experts).start
        expert_r = own.repeat(size).repeat_interleave(arriving_cx.flatten(), output_size=sum(received))
        sorted_r, order_r = torch.sort(expert_r, stable=True)
        out_rd = compute(arrived_rd.index_select(0, order_r), sorted_r, order_r)
        return self.ranks.exchange(out_rd.index_select(0, torch.argsort(order_r)), received, sent)
