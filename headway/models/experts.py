"""A mixture of experts on packed tokens: each token goes through the few experts with the highest router probability.

Tokens are sorted by expert and multiplied group by group, so that only chosen experts are computed. Autograd computes
all gradients, including the router's.

Shape suffixes: n packed tokens, d width, x experts, k experts of a token, m = n * k (token, expert) pairs,
f intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headway.models.kernels import QuantizedMatrix, frozen_product
from headway.models.parallel.experts import ExpertRanks


class LayerAdapter(Protocol):
    """Additions to the products of a decoder's layer. In `lora.LayerLora` all rows have the same adapter."""

    def add(self, product: str, out_nf: Tensor, x_nd: Tensor) -> Tensor: ...

    def add_experts(self, product: str, out_mf: Tensor, x_md: Tensor, expert_m: Tensor, row_m: Tensor) -> Tensor: ...


class ExpertReplay(NamedTuple):
    """Recorded experts of sampled tokens, which the routers choose again (routing replay, R3, arXiv 2510.11370). It
    covers all layers with experts; ``layer`` selects one."""

    chosen: Tensor  # integers [N, layers, K], of a layer [N, K]; -1: unknown, so that the router chooses
    # int64 [layers, 3], written by `route`: the number of routers with a record; of these, the number that would have
    # chosen other experts by their own scores, and the number whose tokens went to other experts
    counts: Tensor

    @classmethod
    def of(cls, chosen: Tensor) -> ExpertReplay:
        return cls(chosen, torch.zeros(chosen.shape[1], 3, dtype=torch.int64, device=chosen.device))

    def padded(self, tokens: int) -> ExpertReplay:
        """With unknown experts of further tokens, up to ``tokens``."""
        return self._replace(chosen=functional.pad(self.chosen, (0, 0, 0, 0, 0, tokens - len(self.chosen)), value=-1))

    def layer(self, index: int, rows: slice = slice(None)) -> ExpertReplay:
        return ExpertReplay(self.chosen[rows, index], self.counts[index])


def route(
    hidden_nd: Tensor,
    router_xd: Tensor,
    per_token: int,
    normalised: bool,
    adapter: LayerAdapter | None = None,
    replay: ExpertReplay | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, int64 and float [N, K]: the router's own by descending probability,
    recorded ones as recorded.

    Weights are probabilities of the softmax over all experts; ``normalised`` makes those of the chosen experts add up
    to 1. They are computed in float32 (float64 if the hidden states are) from bfloat16 too, because a rounding error
    here selects another expert. With ``replay`` of this layer, recorded experts are chosen if there are any; their
    weights still come from these scores, so that gradients reach the router. It also writes ``replay.counts``.
    """
    wide_dtype = torch.promote_types(hidden_nd.dtype, torch.float32)
    hidden_nd = hidden_nd.to(wide_dtype)
    logits_nx = functional.linear(hidden_nd, router_xd.to(wide_dtype))
    if adapter is not None:
        logits_nx = adapter.add("router", logits_nx, hidden_nd)
    probabilities_nx = torch.softmax(logits_nx, dim=-1)
    weights_nk, chosen_nk = probabilities_nx.topk(per_token, dim=-1)
    if replay is not None:
        own_nk, recorded_nk = chosen_nk, replay.chosen.long()
        known_n1 = (recorded_nk >= 0).all(-1, keepdim=True)
        chosen_nk = torch.where(known_n1, recorded_nk, own_nk)
        weights_nk = probabilities_nx.gather(-1, chosen_nk)  # of all experts, since top-k may lack recorded ones
        replay.counts.copy_(_disagreement(recorded_nk, known_n1[:, 0], own_nk, chosen_nk))
    if normalised:
        weights_nk = weights_nk / weights_nk.sum(-1, keepdim=True)
    return chosen_nk, weights_nk


def _disagreement(recorded_nk: Tensor, known_n: Tensor, own_nk: Tensor, chosen_nk: Tensor) -> Tensor:
    """The layer's `ExpertReplay.counts`; the order of a token's experts doesn't matter."""
    sorted_nk = recorded_nk.sort(-1).values
    disagreeing = [known_n & (sorted_nk != other_nk.sort(-1).values).any(-1) for other_nk in (own_nk, chosen_nk)]
    return torch.stack([known_n, *disagreeing]).sum(-1)


def mix(
    hidden_nd: Tensor,
    chosen_nk: Tensor,
    weights_nk: Tensor,
    gate_up_xfd: Tensor | QuantizedMatrix,
    down_xdf: Tensor | QuantizedMatrix,
    gated: Callable[[Tensor], Tensor],
    adapter: LayerAdapter | None = None,
    ranks: ExpertRanks | None = None,
) -> Tensor:
    """The weighted sum of each token's expert outputs, [N, d].

    ``gate_up_xfd`` [X, 2f, d] and ``down_xdf`` [X, d, f]: all experts' matrices, or this rank's of ``ranks``;
    ``gated``: [M, 2f] to [M, f].
    """
    n, k = chosen_nk.shape
    sorted_m, order_m = torch.sort(chosen_nk.reshape(-1), stable=True)
    row_m = order_m // k
    count = len(gate_up_xfd)
    experts = count if ranks is None else count * ranks.ranks.size
    first = 0 if ranks is None else ranks.rows(experts).start

    def compute(x_md: Tensor, expert_m: Tensor, row_m: Tensor) -> Tensor:
        # Where each expert's rows end; a bincount would make the host wait for a GPU.
        ends_x = torch.searchsorted(expert_m, torch.arange(first, first + count, device=expert_m.device), right=True)

        def product(name: str, x_md: Tensor, weights: Tensor | QuantizedMatrix) -> Tensor:
            out = grouped_linear(x_md, weights, ends_x)
            return out if adapter is None else adapter.add_experts(name, out, x_md, expert_m, row_m)

        return product("down", gated(product("gate_up", x_md, gate_up_xfd)), down_xdf)

    x_md = hidden_nd.index_select(0, row_m)
    out_md = compute(x_md, sorted_m, row_m) if ranks is None else ranks.outputs(x_md, sorted_m, experts, compute)
    # Rows return to the tokens' order before the sum, so that the bits don't depend on how the pairs were sorted.
    position_m = torch.empty_like(order_m).scatter_(0, order_m, torch.arange(n * k, device=order_m.device))
    out_nkd = out_md.index_select(0, position_m).view(n, k, -1)
    return (out_nkd * weights_nk[..., None].to(out_nkd.dtype)).sum(1)


def mix_in_fixed_shapes(
    hidden_nd: Tensor,
    chosen_nk: Tensor,
    weights_nk: Tensor,
    gate_up_xfd: Tensor,
    down_xdf: Tensor,
    gated: Callable[[Tensor], Tensor],
    adapter: LayerAdapter | None = None,
) -> Tensor:
    """`mix` with products whose shapes don't depend on the routing, as every chosen expert is computed on all rows. It
    is slower, but a row's bits don't depend on the routing of other rows."""
    out_nd = torch.zeros_like(hidden_nd)
    weights_nx = weights_nk.new_zeros(len(hidden_nd), len(gate_up_xfd)).scatter_(1, chosen_nk, weights_nk)
    row_n = torch.arange(len(hidden_nd), device=hidden_nd.device)

    def product(name: str, x_nd: Tensor, weights: Tensor, expert: int) -> Tensor:
        out = functional.linear(x_nd, weights[expert])
        return out if adapter is None else adapter.add_experts(name, out, x_nd, torch.full_like(row_n, expert), row_n)

    for expert in torch.unique(chosen_nk).tolist():
        inner_nf = gated(product("gate_up", hidden_nd, gate_up_xfd, expert))
        weight_n1 = weights_nx[:, expert, None].to(hidden_nd.dtype)
        mine_nd = product("down", inner_nf, down_xdf, expert) * weight_n1
        out_nd += torch.where(weight_n1 > 0, mine_nd, 0.0)
    return out_nd


def grouped_linear(rows_md: Tensor, weights_xfd: Tensor | QuantizedMatrix, ends_x: Tensor) -> Tensor:
    """Multiply rows [M, d], those before ``ends_x[0]`` by the first matrix and so on, to [M, f]."""
    if isinstance(weights_xfd, QuantizedMatrix):
        return frozen_product(rows_md, weights_xfd, lambda rows, weights: grouped_linear(rows, weights, ends_x))
    weights_xfd = weights_xfd.to(rows_md.dtype)
    if aligned(weights_xfd):
        return functional.grouped_mm(rows_md, weights_xfd.transpose(1, 2), offs=ends_x.to(torch.int32))
    parts = rows_md.tensor_split(ends_x[:-1].tolist())
    return torch.cat([functional.linear(part, w_fd) for part, w_fd in zip(parts, weights_xfd.unbind(0), strict=True)])


def aligned(weights_xfd: Tensor) -> bool:
    """Whether torch's grouped product takes these weights: rows of a multiple of 16 bytes, elements of at most 4."""
    number_bytes = weights_xfd.element_size()
    return number_bytes <= 4 and all(size * number_bytes % 16 == 0 for size in weights_xfd.shape[1:])
