"""Ranks' rows of tensors, without ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.models.shards.shard import Shard


def rank_rows(rows: int, rank: int, ranks: int) -> range:
    """The indices of the first dimension that a rank has, as `torch.chunk` divides them: the last ranks may have fewer
    or none."""
    share = -(-rows // ranks)
    return range(min(rows, rank * share), min(rows, (rank + 1) * share))


def rank_shards(tensors: dict[str, Tensor], rank: int, ranks: int, fill: float | None = None) -> list[Shard]:
    """The rows of a rank as FSDP2 divides parameters; ``fill``: with these values in their place."""
    shards: list[Shard] = []
    for name, tensor in tensors.items():
        rows = rank_rows(tensor.shape[0], rank, ranks)
        part = tensor[rows.start : rows.stop].clone()
        first = rows.start * (tensor[0].numel() // tensor.shape[-1] if tensor.ndim > 1 else 1)
        part = part if fill is None else torch.full_like(part, fill)
        shards.append(Shard(name=name, shape=tuple(tensor.shape), first=first, tensor=part))
    return shards
