"""Mapping of Hugging Face's names and shapes of a model's tensors to the decoder's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from headway.models.decoder import Decoder, DecoderLayer


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's name and shape in Hugging Face's layout, and the view of the decoder's parameter in that order."""

    name: str
    shape: tuple[int, ...]
    view: Tensor  # the same elements in the same flat order; not contiguous if rotary pairs are reordered


def hugging_face_entries(model: Decoder) -> Iterator[TensorEntry]:
    """Yield every tensor of the model under Hugging Face's name. A tied head is not repeated."""
    yield _entry("model.embed_tokens.weight", model.embedding_weight)
    for prefix, decoder_layer in _layers(model):
        yield from _layer_entries(decoder_layer, prefix)
        if decoder_layer.kind.sparse:
            yield from _expert_entries(decoder_layer, prefix)
    yield _entry("model.norm.weight", model.final_norm)
    if model.head_weight is not None:
        yield _entry("lm_head.weight", model.head_weight)


def fused_expert_entries(model: Decoder) -> Iterator[tuple[TensorEntry, list[str]]]:
    """Yield the tensors of mixtures as transformers 5 holds them in memory, with all experts of a layer in one, each
    with the names of the per-expert tensors on disk that it replaces."""
    for prefix, layer in _layers(model):
        names = layer.family.experts
        if names is None or not layer.kind.sparse:
            continue
        numbers = range(len(layer.gate_up_weight))
        gate_up_names = [prefix + name.format(number) for number in numbers for name in (names.gate, names.up)]
        yield _entry(prefix + names.fused_gate_up, layer.gate_up_weight), gate_up_names
        yield _entry(prefix + names.fused_down, layer.down_weight), [prefix + names.down.format(n) for n in numbers]
        if names.fused_router != names.router:
            yield _entry(prefix + names.fused_router, layer.router_weight), [prefix + names.router]


def matrix_rows(model: Decoder) -> dict[str, list[int]]:
    """The rows of each matrix that a parameter of the layers has, one below the other, by the parameter's name: query,
    key and value, and gate and up, of each expert too. Routers aren't among them."""
    rows_by_name: dict[str, list[int]] = {}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        query_rows, key_rows = (heads * layer.config.head_dim for heads in (layer.config.heads, layer.config.kv_heads))
        rows_by_name |= {
            f"layers.{index}.qkv_weight": [query_rows, key_rows, key_rows],
            f"layers.{index}.output_weight": [layer.config.width],
            f"layers.{index}.gate_up_weight": [layer.gate_up_weight.shape[-2] // 2] * 2,
            f"layers.{index}.down_weight": [layer.config.width],
        }
    return rows_by_name


def _layers(model: Decoder) -> Iterator[tuple[str, DecoderLayer]]:
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        yield f"model.layers.{index}.", layer


def _entry(name: str, parameter: Tensor, rotary_dim: int | None = None) -> TensorEntry:
    """``rotary_dim``: the head dimension, if the first axis runs over heads whose rotary pairs are neighbours in the
    decoder and are in the first and second half of a head in Hugging Face's order."""
    view = parameter.detach()
    shape = tuple(view.shape)
    if rotary_dim is not None:
        view = view.unflatten(0, (-1, rotary_dim // 2, 2)).transpose(1, 2)
    return TensorEntry(name, shape, view)


def _layer_entries(layer: DecoderLayer, prefix: str) -> Iterator[TensorEntry]:
    config, is_sparse = layer.config, layer.kind.sparse
    query_rows, key_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, hf_name in layer.family.norm_names().items():
        yield _entry(f"{prefix}{hf_name}.weight", getattr(layer, name))
    for kind, qkv, output, gate_up, down in (
        ("weight", layer.qkv_weight, layer.output_weight, layer.gate_up_weight, layer.down_weight),
        ("bias", layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
    ):
        if qkv is not None:
            q, k, v = qkv.split((query_rows, key_rows, key_rows))
            yield _entry(f"{prefix}self_attn.q_proj.{kind}", q, config.head_dim)
            yield _entry(f"{prefix}self_attn.k_proj.{kind}", k, config.head_dim)
            yield _entry(f"{prefix}self_attn.v_proj.{kind}", v)
        if output is not None:
            yield _entry(f"{prefix}self_attn.o_proj.{kind}", output)
        if gate_up is not None and not is_sparse:
            gate, up = gate_up.chunk(2)
            yield _entry(f"{prefix}mlp.gate_proj.{kind}", gate)
            yield _entry(f"{prefix}mlp.up_proj.{kind}", up)
        if down is not None and not is_sparse:
            yield _entry(f"{prefix}mlp.down_proj.{kind}", down)
    if layer.q_norm is not None and layer.k_norm is not None:
        yield _entry(prefix + "self_attn.q_norm.weight", layer.q_norm, config.head_dim)
        yield _entry(prefix + "self_attn.k_norm.weight", layer.k_norm, config.head_dim)


def _expert_entries(layer: DecoderLayer, prefix: str) -> Iterator[TensorEntry]:
    names = layer.family.experts
    assert names is not None
    yield _entry(prefix + names.router, layer.router_weight)
    for number, (gate_up, down) in enumerate(zip(layer.gate_up_weight, layer.down_weight, strict=True)):
        gate, up = gate_up.chunk(2)
        yield _entry(prefix + names.gate.format(number), gate)
        yield _entry(prefix + names.up.format(number), up)
        yield _entry(prefix + names.down.format(number), down)
