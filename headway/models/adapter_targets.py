"""The matrices of a decoder that an adapter can be put beside, under Hugging Face's names; torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from headway.config.adapter import AdapterConfig
from headway.models.configuration import DecoderConfig
from headway.records.errors import ConfigurationError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class AdapterTarget:
    """A matrix, or the matrices of all experts of a layer in one parameter."""

    name: str  # model.layers.0.self_attn.q_proj
    layer: int
    product: str  # the decoder's product that it is a part of: qkv, output, gate_up, down, router
    first: int  # its first row in that product's matrix
    rows: int  # output features
    columns: int  # input features
    rotary_dim: int | None = None  # head dimension, where rotary pairs are neighbours here: see `layout.py`
    experts: int = 0  # 0: no parameter of a mixture

    @property
    def parts(self) -> int:
        """How many matrices it holds."""
        return max(1, self.experts)


@dataclass(frozen=True, kw_only=True)
class AdaptedTarget:
    """A target with the adapter's rank and scale there: its product gains scale * B A x."""

    target: AdapterTarget
    rank: int
    scale: float

    @property
    def size(self) -> int:
        """Count of the adapter's weights there."""
        return self.target.parts * self.rank * (self.target.rows + self.target.columns)


def targets_of(config: DecoderConfig) -> Iterator[AdapterTarget]:
    """Every target of a decoder, layer by layer."""
    query, key, width = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.width
    rotary, names = config.head_dim, config.family.experts
    for layer in range(config.layers):
        target = partial(_target, layer)
        yield target("self_attn.q_proj", "qkv", 0, query, width, rotary_dim=rotary)
        yield target("self_attn.k_proj", "qkv", query, key, width, rotary_dim=rotary)
        yield target("self_attn.v_proj", "qkv", query + key, key, width)
        yield target("self_attn.o_proj", "output", 0, width, query)
        mixture = config.mixture if config.layer(layer).sparse else None
        if mixture is None or names is None:
            yield target("mlp.gate_proj", "gate_up", 0, config.intermediate, width)
            yield target("mlp.up_proj", "gate_up", config.intermediate, config.intermediate, width)
            yield target("mlp.down_proj", "down", 0, width, config.intermediate)
        else:
            inner, experts = mixture.intermediate, mixture.experts
            yield target(names.fused_router.removesuffix(".weight"), "router", 0, experts, width)
            yield target(names.fused_gate_up, "gate_up", 0, 2 * inner, width, experts=experts)
            yield target(names.fused_down, "down", 0, width, inner, experts=experts)


def _target(
    layer: int,
    name: str,
    product: str,
    first: int,
    rows: int,
    columns: int,
    rotary_dim: int | None = None,
    experts: int = 0,
) -> AdapterTarget:
    return AdapterTarget(
        name=f"model.layers.{layer}.{name}",
        layer=layer,
        product=product,
        first=first,
        rows=rows,
        columns=columns,
        rotary_dim=rotary_dim,
        experts=experts,
    )


def chosen_targets(
    config: DecoderConfig, targets: Sequence[str] | str, target_parameters: Collection[str] = ()
) -> list[AdapterTarget]:
    """The targets that PEFT would choose: names that equal one of ``targets`` or end with ``.`` and it, those that
    match it wholly where it is one regular expression, or ``all-linear``; parameters of mixtures by
    ``target_parameters`` alone.

    Raises ConfigurationError for an entry that no layer has, with the nearest names.
    """
    known = list(targets_of(config))
    matrices = [one for one in known if not one.experts]
    found = _found(matrices, targets, "targets")
    found |= _found([one for one in known if one.experts], tuple(target_parameters), "target_parameters")
    return [one for one in known if one.name in found]


def _found(known: Sequence[AdapterTarget], wanted: Sequence[str] | str, key: str) -> set[str]:
    if wanted == ALL_LINEAR or tuple(wanted) == (ALL_LINEAR,):
        return {one.name for one in known}
    if isinstance(wanted, str):
        found = {one.name for one in known if re.fullmatch(wanted, one.name)}
        if not found:
            raise ConfigurationError(f"model.adapter.{key} = {wanted!r} matches no layer of the model")
        return found
    found = set[str]()
    for entry in wanted:
        matching = {one.name for one in known if one.name == entry or one.name.endswith("." + entry)}
        if not matching:
            ends = sorted({one.name.partition("layers.")[2].partition(".")[2] for one in known})
            ends += sorted({end.rpartition(".")[2] for end in ends})
            nearest = get_close_matches(entry, ends, 3, 0.3) or ends[-7:]
            raise ConfigurationError(
                f"model.adapter.{key}: no layer has {entry!r}; "
                + (f"nearest: {', '.join(nearest)}" if known else "the model is no mixture of experts")
            )
        found |= matching
    return found


def adapted_targets(config: DecoderConfig, settings: AdapterConfig) -> tuple[AdaptedTarget, ...]:
    """The targets of a new adapter with their rank and scale. Raises ConfigurationError as `chosen_targets`."""
    assert settings.rank is not None
    assert settings.alpha is not None
    scale = settings.alpha / (math.sqrt(settings.rank) if settings.rslora else settings.rank)
    chosen = chosen_targets(config, settings.targets, settings.target_parameters)
    return tuple(AdaptedTarget(target=target, rank=settings.rank, scale=scale) for target in chosen)
