"""The rows of a tensor that one rank holds.

A row is what the last dimension runs over: those of [experts, 2f, d] are numbered over both other dimensions, and those
of a vector or a single number are its elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive rows of a tensor. A tensor that isn't divided is one shard from row 0.

    Example: of [4, 6, 8], rank 1 of 2 holds the indices 2 and 3 of the first dimension: first = 12, tensor [2, 6, 8].
    """

    name: str
    shape: tuple[int, ...]  # of the undivided tensor
    first: int  # number of the first row
    tensor: Tensor  # the rows, contiguous; its memory is the rank's own

    @property
    def rows(self) -> int:
        return self.tensor.numel() // row_width(self.shape)

    def matrix(self) -> Tensor:
        """The rows as a view [rows, width]."""
        return self.tensor.view(-1, row_width(self.shape))

    def copied(self) -> Shard:
        """A shard of the same rows, in new memory of the host."""
        copy = self.tensor.cpu()
        return replace(self, tensor=copy.clone() if copy.data_ptr() == self.tensor.data_ptr() else copy)


def row_width(shape: tuple[int, ...]) -> int:
    """The elements of a row of a tensor of this shape."""
    return shape[-1] if len(shape) > 1 else 1


def shards_of(tensors: Mapping[str, Tensor]) -> list[Shard]:
    """The rows that this rank holds of each tensor, by name and without copying: all of a plain tensor, the local ones
    of a DTensor. Raises ValueError for a DTensor that is divided elsewhere than in its first dimension."""
    return [_local(name, tensor.detach()) for name, tensor in tensors.items()]


def by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """The shards of each tensor."""
    shards_by_name: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        shards_by_name[shard.name].append(shard)
    return dict(shards_by_name)


def _local(name: str, tensor: Tensor) -> Shard:
    shape, row, local = tuple(tensor.shape), 0, tensor
    if hasattr(tensor, "device_mesh"):  # a DTensor: one rank alone doesn't import what defines it
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        distributed = cast("Any", tensor)
        local = distributed.to_local()
        layout = shape, distributed.device_mesh, distributed.placements
        local_shape, offsets = compute_local_shape_and_global_offset(*layout)
        if local_shape[1:] != shape[1:] or tuple(local.shape) != tuple(local_shape):
            raise ValueError(
                f"{name} {list(shape)} is divided as {distributed.placements}: valid: by its first dimension"
            )
        row = min(offsets[0], shape[0]) if shape else 0
    return Shard(name=name, shape=shape, first=row * (prod(shape[1:]) // row_width(shape)), tensor=local)
