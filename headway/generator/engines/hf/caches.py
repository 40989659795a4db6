"""Joins rows of transformers' caches to one batch, and takes rows out: keys and values, and recurrent states too.

Shapes: n rows, h heads, t positions, c head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_POSITIONS = ("keys", "values")  # [n, h, t, c] each; a sliding window's have the newest t alone
_STATES = ("conv_states", "recurrent_states")  # tensors [n, ...] by number
_KNOWN = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


def joinable(cache: Any) -> bool:
    """Whether `join` and `take` know every layer of this cache."""
    kinds = (type(cache), *map(type, getattr(cache, "layers", ())))
    plain = all(kind.__module__ == "transformers.cache_utils" for kind in kinds)
    return plain and kinds[0].__name__ == "DynamicCache" and all(kind.__name__ in _KNOWN for kind in kinds[1:])


def join(caches: Sequence[Any]) -> Any:
    """Make one cache with the rows of all; the keys of the shorter ones are padded on the left."""

    def positions(parts: list[Tensor]) -> Tensor:
        longest = max(part.shape[-2] for part in parts)
        return torch.cat([functional.pad(part, (0, 0, longest - part.shape[-2], 0)) for part in parts])

    return _mapped(caches, positions, torch.cat, max)


def take(cache: Any, rows: Sequence[int], tokens: int) -> Any:
    """Make a cache with these rows, in this order; the longest has ``tokens`` tokens. A row may repeat."""

    def states(parts: list[Tensor]) -> Tensor:
        return parts[0].index_select(0, torch.tensor(rows, device=parts[0].device))

    return _mapped(
        [cache], lambda parts: states(parts)[..., -tokens:, :], states, lambda lengths: min(*lengths, tokens)
    )


def tensors_of(cache: Any) -> list[Tensor]:
    """Return all tensors of a cache's layers, which are on the model's device."""
    tensors: list[Tensor] = []
    for layer in getattr(cache, "layers", ()):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else (value,)
            tensors += [part for part in parts if isinstance(part, Tensor) and part.ndim]
    return tensors


def _mapped(
    caches: Sequence[Any],
    positions: Callable[[list[Tensor]], Tensor],
    states: Callable[[list[Tensor]], Tensor],
    length: Callable[[list[int]], int],
) -> Any:
    """Make a cache from others: these functions combine their keys and values, their states and their lengths."""
    made = copy.copy(caches[0])
    made.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        for name, value in vars(layers[0]).items():
            parts = [getattr(source, name) for source in layers]
            if name in _STATES:
                each = {key: [part[key] for part in parts] for key in value}
                setattr(layer, name, {key: None if rows[0] is None else states(rows) for key, rows in each.items()})
            elif name in _POSITIONS and value is not None:
                setattr(layer, name, positions(parts))
            elif name == "cumulative_length":
                setattr(layer, name, length(parts))
        made.layers.append(layer)
    return made
