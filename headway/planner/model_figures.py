"""A model's figures for the rate models, from the sizes that `models/sizes.py` reads."""

from __future__ import annotations

from collections import Counter

from headway.control.rates.specs import ModelFigures
from headway.models.sizes import ModelSizes

_TOKENS = 1024  # over which activations are counted


def model_figures(sizes: ModelSizes) -> ModelFigures:
    cached_by_window: Counter[int | None] = Counter()
    for layer in sizes.layers:
        if layer.cached:
            cached_by_window[layer.window] += layer.cached
    expert_parameters = sum(layer.experts for layer in sizes.layers)
    idle_parameters = sum(layer.idle for layer in sizes.layers)
    return ModelFigures(
        parameters=sizes.parameters,
        active=sizes.active_parameters - (0 if sizes.tied else sizes.vocabulary_size * sizes.width),
        expert_parameters=expert_parameters,
        active_experts=1.0 - idle_parameters / expert_parameters if expert_parameters else 1.0,
        experts_per_token=sizes.routed,
        layers=len(sizes.layers),
        width=sizes.width,
        vocabulary=sizes.vocabulary_size,
        kv_heads=sizes.kv_heads,
        attended=sum(layer.output for layer in sizes.layers if layer.cached),
        cached=tuple((count, window) for window, count in cached_by_window.items()),
        state=sum(layer.state for layer in sizes.layers),
        kept=sizes.activation_bytes(_TOKENS, 2) / _TOKENS,
        kept_again=sizes.activation_bytes(_TOKENS, 2, "full") / _TOKENS,
    )
