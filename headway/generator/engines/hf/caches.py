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
    types = (type(cache), *map(type, getattr(cache, "layers", ())))
    official = all(kind.__module__ == "transformers.cache_utils" for kind in types)
    return official and types[0].__name__ == "DynamicCache" and all(kind.__name__ in _KNOWN for kind in types[1:])


def join(caches: Sequence[Any]) -> Any:
    """Make one cache with the rows of all; the keys of the shorter ones are padded on the left."""

    def positions(parts: list[Tensor]) -> Tensor:
        longest_tokens = max(part.shape[-2] for part in parts)
        return torch.cat([functional.pad(part, (0, 0, longest_tokens - part.shape[-2], 0)) for part in parts])

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
        for attribute in vars(layer).values():
            members = attribute.values() if isinstance(attribute, dict) else (attribute,)
            tensors += [member for member in members if isinstance(member, Tensor) and member.ndim]
    return tensors


def _mapped(
    caches: Sequence[Any],
    positions: Callable[[list[Tensor]], Tensor],
    states: Callable[[list[Tensor]], Tensor],
    length: Callable[[list[int]], int],
) -> Any:
    """Make a cache from others: these functions combine their keys and values, their states and their lengths."""
    new_cache = copy.copy(caches[0])
    new_cache.layers = []
    for source_layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(source_layers[0])
        for name, attribute in vars(source_layers[0]).items():
            source_parts = [getattr(source, name) for source in source_layers]
            if name in _STATES:
                by_key = {key: [part[key] for part in source_parts] for key in attribute}
                setattr(layer, name, {key: None if rows[0] is None else states(rows) for key, rows in by_key.items()})
            elif name in _POSITIONS and attribute is not None:
                setattr(layer, name, positions(source_parts))
            elif name == "cumulative_length":
                setattr(layer, name, length(source_parts))
        new_cache.layers.append(layer)
    return new_cache
