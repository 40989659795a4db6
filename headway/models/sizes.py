"""Sizes of a model, read from its ``config.json``: weights, cached values, activations; torch-free.

It covers dense, grouped-query, latent (MLA) and windowed attention, mixtures with shared experts, and hybrids with
linear-attention layers, as `size_rules.RULES` describes them. The sizes of other architectures come from the shapes of
their tensors, if the folder holds the files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.config.schema import Checkpointing
from headway.models.configuration import read_json
from headway.models.families import FAMILIES, read_window
from headway.models.size_rules import RULES, SizeRules
from headway.models.weight_files import tensor_shapes, weight_files
from headway.records.errors import ConfigurationError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# A key's usual name -> its names in older architectures.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}
_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_KINDS = {
    _FULL: _FULL, "attention": _FULL, "*": _FULL, "indexed_attention": _FULL, _WINDOWED: _WINDOWED,
    _LINEAR: _LINEAR, "mamba": _LINEAR, "M": _LINEAR, "mlp": "dense", "-": "dense", "moe": "sparse", "E": "sparse",
}  # fmt: skip


CHUNK_LOGITS = 1 << 25  # of a trainer on a CPU: 128 MiB in float32
GPU_LOGIT_ROWS = 4096  # fewer would fill its products badly


def logit_rows(vocabulary: int, *, on_gpu: bool) -> int:
    """The rows of logits that exist at once in a trainer. More are computed in chunks, again in the backward."""
    return max(1, CHUNK_LOGITS // vocabulary, GPU_LOGIT_ROWS if on_gpu else 0)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Counts of one layer: weights, cached values, and activations per token."""

    parameters: int
    experts: int = 0  # weights of routed experts, which are part of parameters
    idle: int = 0  # of those, the weights that a token doesn't use
    cached: int = 0  # values cached per token
    window: int | None = None  # tokens whose values are kept; None: all
    state: int = 0  # values kept per sequence of any length
    joint: int = 0  # query, key and value of a token together
    output: int = 0  # the attention's output, before it is projected
    normed: int = 0  # query and key
    intermediate: int = 0  # feed-forward size that a token uses


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of one model. Weights are counted as in transformers: tied heads once, without extra prediction heads.

    Example, Qwen3-235B-A22B: 235.09 G parameters, 22.19 G of them active, 94 layers of 2 x 4 x 128 cached values, so
    ``kv_bytes_per_token(2)`` == 192,512.
    """

    model_type: str
    vocabulary_size: int
    width: int
    heads: int
    kv_heads: int  # parts that the cache can be divided into by tensor parallelism; 1 where it is compressed
    max_positions: int
    tied: bool
    attention_softcap: float | None = None
    routed: int = 0  # experts of a layer that a token goes to
    outside: int  # weights of embedding, head and last norm
    layers: tuple[LayerSizes, ...]

    @cached_property
    def parameters(self) -> int:
        return self.outside + sum(layer.parameters for layer in self.layers)

    @cached_property
    def active_parameters(self) -> int:
        """The number of weights that one token uses, including the complete embedding."""
        return self.parameters - sum(layer.idle for layer in self.layers)

    @property
    def dense_parameters(self) -> int:
        """The number of weights that products of few rows read: no experts, and no embedding used only for lookup."""
        embedding_weights = 0 if self.tied else self.vocabulary_size * self.width
        return self.parameters - embedding_weights - sum(layer.experts for layer in self.layers)

    @cached_property
    def cached_values(self) -> int:
        """The number of values cached per token in all layers, ignoring windows."""
        return sum(layer.cached for layer in self.layers)

    def kv_bytes_per_token(self, number_bytes: float) -> float:
        """The bytes that one more token adds to the cache while no window is full."""
        return self.cached_values * number_bytes

    def kv_bytes(self, tokens: int, number_bytes: float) -> float:
        """The cache's bytes for a sequence of ``tokens``: windowed layers keep only their window, and linear layers
        their state."""
        number_count = sum(layer.cached * min(tokens, layer.window or tokens) + layer.state for layer in self.layers)
        return number_count * number_bytes

    def activation_bytes(self, tokens: int, number_bytes: int, checkpointing: Checkpointing = "none") -> int:
        """The bytes that the backward of one micro-batch of ``tokens`` needs, without logits and soft-capped scores.

        Each layer of width d keeps per token, in numbers of ``number_bytes``: both norms' inputs and outputs 4·d;
        query, key and value, and again before norm and rotation; the attention's output o, which padded attention
        computes, joins and projects: 3·o; gate and up 2·f; their product f. The layer in its backward adds three times
        the largest of them. ``checkpointing`` "selective" keeps no outputs of norms and gates; with "full" each layer
        keeps only its input, d numbers per token, and one layer keeps all of the above.
        """
        kept_bytes = [self._kept_bytes(layer, number_bytes, checkpointing) for layer in self.layers]
        widest = max(max(2 * layer_sizes.intermediate, layer_sizes.joint) for layer_sizes in self.layers)
        transient_bytes = 3 * 4 * widest + 3 * 4 * self.width
        layer_bytes = sum(kept_bytes)
        if checkpointing == "full":
            layer_bytes = len(self.layers) * number_bytes * self.width + max(kept_bytes)
        return tokens * (layer_bytes + transient_bytes)

    def _kept_bytes(self, layer: LayerSizes, number_bytes: int, checkpointing: Checkpointing) -> int:
        """The bytes that a layer keeps of each token."""
        is_padded = number_bytes > 2 or self.attention_softcap is not None or layer.window is not None
        numbers = 2 * self.width + layer.joint + (3 if is_padded else 1) * layer.output + 2 * layer.intermediate
        if checkpointing == "selective":
            return number_bytes * numbers
        # C++ keeps queries and keys before the norm, in float32, and the operators all of the projection.
        unrotated_bytes = min(4 * layer.normed, number_bytes * layer.joint)
        return number_bytes * (numbers + 2 * self.width + layer.intermediate) + unrotated_bytes

    def score_bytes(
        self, tokens: int, longest_tokens: int, number_bytes: int, checkpointing: Checkpointing = "none"
    ) -> int:
        """The bytes that the backward needs for attention with capped scores, which is computed in full: for each query
        of each head and every key it might see, the capped score and its weight in float32, and the weight in the
        products' dtype too."""
        if self.attention_softcap is None:
            return 0
        bytes_per_score = 8 + (number_bytes if number_bytes < 4 else 0)
        layer_bytes = [self.heads * tokens * keys * bytes_per_score for keys in self.scored_keys(longest_tokens)]
        return max(layer_bytes) if checkpointing == "full" else sum(layer_bytes)

    def scored_keys(self, longest_tokens: int) -> list[int]:
        """The number of keys per query for which scores are computed, by layer; with a window, twice its size."""
        return [min(longest_tokens, 2 * (layer.window or longest_tokens)) for layer in self.layers]


def sizes_of(folder: str | Path) -> ModelSizes:
    """The sizes of the model in ``folder``, by its ``config.json``, or for an unknown architecture by the shapes of its
    ``*.safetensors``. Raises ConfigurationError, which names the deciding key."""
    file = Path(folder) / "config.json"
    raw = read_json(file)
    try:
        if _model_type(raw) in RULES or not any(Path(folder).glob("*.safetensors")):
            return sizes_from(raw)
        text = {**raw, **raw["text_config"]} if raw.get("text_config") else raw  # a multimodal model's language model
        return sizes_of_shapes({**text, "model_type": raw.get("model_type")}, tensor_shapes(weight_files(Path(folder))))
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from None


def sizes_from(raw: Mapping[str, Any]) -> ModelSizes:
    """The sizes by the content of a ``config.json``. Raises ConfigurationError for a missing key or an unknown
    architecture."""
    if raw.get("text_config"):
        raise ConfigurationError(
            "text_config: it has parts for images or sound, which aren't counted; valid: a config.json with "
            "the content of text_config"
        )
    name = _model_type(raw)
    if name not in RULES:
        raise ConfigurationError(
            f"model_type = {name!r} is of unknown shape; known: {', '.join(RULES)}; any other with its *.safetensors "
            "beside config.json"
        )
    rules = RULES[name]
    keys = _Keys(raw, rules.defaults)
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    tied, vocabulary = bool(keys.get("tie_word_embeddings", False)), keys.count("vocab_size")
    return ModelSizes(
        model_type=name,
        vocabulary_size=vocabulary,
        width=width,
        heads=heads,
        kv_heads=1 if rules.attention == "latent" else int(keys.get("num_key_value_heads", heads)),
        max_positions=int(keys.get("max_position_embeddings", 1 << 31)),
        tied=tied,
        attention_softcap=raw.get("attn_logit_softcapping", rules.defaults.get("attn_logit_softcapping")),
        routed=keys.any_of("num_experts_per_tok") if keys.any_of(*_EXPERTS) else 0,
        outside=vocabulary * width * (1 if tied else 2) + width,
        layers=tuple(_layer(keys, rules, index, kind) for index, kind in enumerate(_kinds(keys, rules))),
    )


def _model_type(raw: Mapping[str, Any]) -> str:
    """The model's name in `RULES`: its architecture's if the decoder computes it, else model_type."""
    known_types = [FAMILIES[name].model_type for name in raw.get("architectures") or () if name in FAMILIES]
    return known_types[0] if known_types else str(raw.get("model_type"))


class _Keys(dict[str, Any]):
    """The content of a config.json over its architecture's defaults, without null keys; ``raw``: including them."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__({**defaults, **{key: value for key, value in raw.items() if value is not None}})
        self.raw = dict(raw)

    def count(self, key: str, least: int = 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{key} = {value!r}: an integer of at least {least} is needed")
        return value

    def any_of(self, *names: str) -> int:
        """The count of the first present key of ``names``, else 0."""
        return next((self.count(name, 0) for name in names if name in self), 0)


# --- layers ----------------------------------------------------------------------------------------------


def _kinds(keys: _Keys, rules: SizeRules) -> list[str]:
    """The kind of each layer: full_attention, sliding_attention or linear_attention; dense or sparse for a feed-forward
    without attention."""
    layer_types = keys.get("layer_types") or keys.get("layers_block_type") or keys.get("hybrid_override_pattern")
    if rules.family is not None:
        layers = keys.count("num_hidden_layers")
        window_tokens, windowed_layers = read_window(keys.raw, rules.family, layers)
        keys["sliding_window"] = window_tokens
        return [_WINDOWED if window_tokens and index in windowed_layers else _FULL for index in range(layers)]
    if layer_types is not None:
        if len(layer_types) != (layers := keys.get("num_hidden_layers", len(layer_types))):
            raise ConfigurationError(f"layer_types has {len(layer_types)} layers, but num_hidden_layers = {layers}")
        if unknown_types := sorted(set(layer_types) - set(_KINDS)):
            raise ConfigurationError(f"layer_types has {unknown_types[0]!r}; known: {', '.join(_KINDS)}")
        return [_KINDS[kind] for kind in layer_types]
    layers = keys.count("num_hidden_layers")
    if rules.linear_every is not None:
        period = keys.any_of("full_attention_interval") or rules.linear_every
        return [_FULL if (index + 1) % period == 0 else _LINEAR for index in range(layers)]
    if "attn_layer_indices" in keys:
        return [_FULL if index in keys["attn_layer_indices"] else _LINEAR for index in range(layers)]
    period = rules.window_every if keys.get("sliding_window") else None
    if period is not None:
        return [_FULL if period > 1 and (index + 1) % period == 0 else _WINDOWED for index in range(layers)]
    return [_LINEAR if rules.linear == "mamba" else _FULL] * layers


def _layer(keys: _Keys, rules: SizeRules, index: int, kind: str) -> LayerSizes:
    feed_forward_only = kind in ("dense", "sparse")  # a feed-forward without attention
    counts = {"parameters": rules.norms * keys.count("hidden_size")}
    if not feed_forward_only:
        mixer_counts = _linear(keys, rules) if kind == _LINEAR else _attention(keys, rules, index)
        counts = {**mixer_counts, "parameters": counts["parameters"] + mixer_counts["parameters"]}
    if feed_forward_only or rules.norms > 1:  # with one norm a layer is either a mixer or a feed-forward
        is_sparse = kind == "sparse" if feed_forward_only else _is_sparse(keys, index)
        mlp_counts = _experts(keys, rules) if is_sparse else _dense(keys, rules)
        counts = {**counts, **mlp_counts, "parameters": counts["parameters"] + mlp_counts["parameters"]}
    return LayerSizes(window=keys.count("sliding_window") if kind == _WINDOWED else None, **counts)


def _attention(keys: _Keys, rules: SizeRules, index: int) -> dict[str, int]:
    if rules.attention == "latent":
        return _latent(keys, rules, index)
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads = keys.count("num_key_value_heads") if "num_key_value_heads" in keys else heads
    head_dim = int(keys.get("head_dim") or width // heads)
    query, key = heads * head_dim, kv_heads * head_dim
    projected = query * (2 if rules.output_gate else 1) + 2 * key
    biased = bool(keys.get("attention_bias", False)) if rules.query_bias is None else rules.query_bias
    output_biased = bool(keys.get("attention_bias", False)) if rules.output_bias is None else rules.output_bias
    weights = width * (projected + query) + biased * projected + output_biased * width + rules.sinks * heads
    norm_kind = "head" if keys.get("use_qk_norm") and rules.qk_norm == "none" else rules.qk_norm
    weights += {"none": 0, "head": 2 * head_dim, "whole": query + key}[norm_kind]
    cache_counts = {"cached": 2 * key, "joint": query + 2 * key, "output": query, "normed": query + key}
    return {"parameters": weights, **cache_counts}


def _latent(keys: _Keys, rules: SizeRules, index: int) -> dict[str, int]:
    """Multi-head latent attention (DeepSeek V2), which caches a compressed key and value and one rotary key."""
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    biased = bool(keys.get("attention_bias", False))
    latent, rotary = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
    query, value = keys.count("qk_nope_head_dim") + rotary, keys.count("v_head_dim")
    compressed = keys.any_of("q_lora_rank")
    weights = width * heads * query
    if compressed:
        weights = width * compressed + biased * compressed + compressed + compressed * heads * query
    weights += (width + biased) * (latent + rotary) + latent + latent * heads * (query - rotary + value)
    weights += heads * value * width + biased * width
    cached = latent + rotary
    if rules.indexer and _is_indexed(keys, index):
        indexer_heads, dim = keys.count("index_n_heads"), keys.count("index_head_dim")
        weights += compressed * indexer_heads * dim + width * dim + 2 * dim + width * indexer_heads
        cached += dim
    width_counts = {"joint": heads * (2 * query + value), "output": heads * value, "normed": 2 * heads * query}
    return {"parameters": weights, "cached": cached, **width_counts}


def _is_indexed(keys: _Keys, index: int) -> bool:
    """Whether the layer selects keys itself; the others reuse the selection of the previous layer."""
    if "indexer_types" in keys:
        return keys["indexer_types"][index] == "full"
    period, offset = max(1, keys.any_of("index_topk_freq")), int(keys.get("index_skip_topk_offset", 2))
    return max(index - offset + 1, 0) % period == 0


def _linear(keys: _Keys, rules: SizeRules) -> dict[str, int]:
    width = keys.count("hidden_size")
    if rules.linear == "delta":  # Gated DeltaNet
        value_heads, value_dim = keys.count("linear_num_value_heads"), keys.count("linear_value_head_dim")
        key_dim, kernel = keys.count("linear_key_head_dim"), keys.count("linear_conv_kernel_dim")
        key, value = keys.count("linear_num_key_heads") * key_dim, value_heads * value_dim
        convolved = 2 * key + value
        weights = width * (convolved + value + 2 * value_heads) + convolved * kernel + 2 * value_heads + value_dim
        state = convolved * kernel + value_heads * key_dim * value_dim
        widths = {"joint": convolved + value, "output": value, "normed": 2 * key}
        return {"parameters": weights + value * width, "state": state, **widths}
    names = rules.mamba_keys.split()
    heads, dim, state_size, groups, kernel = (keys.count(name) for name in names[:5])  # Mamba 2
    biased, convolution_biased = (bool(keys.get(name)) for name in names[5:])
    inner = heads * dim
    convolved = inner + 2 * groups * state_size
    projected = inner + convolved + heads
    weights = (width + biased) * projected + convolved * (kernel + convolution_biased) + 3 * heads + inner
    weights += (inner + biased) * width
    state_values = convolved * kernel + inner * state_size
    return {"parameters": weights, "state": state_values, "joint": projected, "output": inner}


def _is_sparse(keys: _Keys, index: int) -> bool:
    if not keys.any_of(*_EXPERTS):
        return False
    if "mlp_layer_types" in keys:
        return keys["mlp_layer_types"][index] == "sparse"
    is_dense = index < keys.any_of("first_k_dense_replace") or index in keys.get("mlp_only_layers", ())
    return not is_dense and (index + 1) % max(1, keys.any_of("decoder_sparse_step")) == 0


def _dense(keys: _Keys, rules: SizeRules) -> dict[str, int]:
    inner_width = keys.count(rules.shared_size_key if rules.always_shared else "intermediate_size", 0)
    return {"parameters": _feed_forward(keys, rules, inner_width, _is_biased(keys, rules)), "intermediate": inner_width}


def _is_biased(keys: _Keys, rules: SizeRules) -> bool:
    return bool(keys.get("mlp_bias", False)) if rules.mlp_bias is None else rules.mlp_bias


def _feed_forward(keys: _Keys, rules: SizeRules, size: int, biased: bool, width: int = 0) -> int:
    width, input_matrices = width or keys.count("hidden_size"), 2 if rules.gated_mlp else 1
    return (input_matrices + 1) * width * size + biased * (input_matrices * size + width)


def _experts(keys: _Keys, rules: SizeRules) -> dict[str, int]:
    width, experts, size = keys.count("hidden_size"), keys.any_of(*_EXPERTS), keys.count(rules.expert_size_key)
    per_token, latent_width = keys.count("num_experts_per_tok"), keys.any_of("moe_latent_size")
    per_expert, biased = _feed_forward(keys, rules, size, rules.expert_bias, latent_width), _is_biased(keys, rules)
    shared = keys.count(rules.shared_size_key, 0) if rules.shared_size_key else keys.any_of("n_shared_experts") * size
    weights = experts * per_expert + (width + rules.expert_bias) * experts  # and the router
    weights += _feed_forward(keys, rules, shared, biased) + width * rules.shared_gate if shared else 0
    weights += 2 * latent_width * width + biased * (latent_width + width) if latent_width else 0
    idle_counts = {"experts": experts * per_expert, "idle": (experts - per_token) * per_expert}
    return {"parameters": weights, **idle_counts, "intermediate": per_token * size + shared}


# --- shapes ----------------------------------------------------------------------------------------------


def sizes_of_shapes(raw: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> ModelSizes:
    """The sizes of any architecture by the ``shapes`` of its tensors (name -> shape), whose names number the layers.
    Experts per token and heads come from config.json. If no tensor projects to keys alone, every layer is assumed to
    cache them. Parts that read images count as outside of the layers."""
    keys = _Keys(raw, {})
    for usual_name, other_names in _OTHER_NAMES.items():
        if usual_name not in keys and (name := next((name for name in other_names if name in keys), None)):
            keys[usual_name] = keys[name]
    if "quantization_config" in keys:
        raise ConfigurationError("quantization_config: shapes of quantised tensors don't give the number of weights")
    experts, per_token = keys.any_of(*_EXPERTS), keys.any_of("num_experts_per_tok")
    if not experts and any(".experts." in name for name in shapes):
        raise ConfigurationError(
            f"num_experts: missing, but there are tensors of experts; known: {', '.join(_EXPERTS)}"
        )
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv_heads, vocabulary = keys.any_of("num_key_value_heads") or heads, keys.count("vocab_size")
    dim = int(keys.get("head_dim") or width // heads)
    inner_width = keys.any_of("moe_intermediate_size") * per_token or keys.any_of("intermediate_size") or 4 * width
    sizes = {"joint": (heads + 2 * kv_heads) * dim, "output": heads * dim, "normed": (heads + kv_heads) * dim}
    counts: dict[int, Counter[str]] = {index: Counter(parameters=0) for index in range(keys.count("num_hidden_layers"))}
    outside = 0
    for name, shape in shapes.items():
        weight_count, number_match = math.prod(shape), re.search(r"\.(\d+)\.", name)
        if number_match is None or int(number_match[1]) not in counts or "visual" in name or "vision" in name:
            outside += weight_count
            continue
        layer_counts = counts[int(number_match[1])]
        layer_counts["parameters"] += weight_count
        if ".experts." in name:
            layer_counts.update(experts=weight_count, idle=weight_count - weight_count * per_token // experts)
        if name.endswith(("k_proj.weight", "v_proj.weight", "kv_a_proj_with_mqa.weight")):
            layer_counts["cached"] += shape[0]
        if name.endswith("conv1d.weight"):  # of a recurrent layer, whose other states shapes don't tell
            layer_counts["state"] += weight_count
    if not any(layer_counts["cached"] for layer_counts in counts.values()):
        for layer_counts in counts.values():
            layer_counts["cached"] = 2 * kv_heads * dim
    return ModelSizes(
        model_type=str(raw.get("model_type")),
        vocabulary_size=vocabulary,
        width=width,
        heads=heads,
        kv_heads=1 if any("kv_a_proj" in name for name in shapes) else kv_heads,
        max_positions=int(keys.get("max_position_embeddings", 1 << 31)),
        tied=sum(list(shape) == [vocabulary, width] for shape in shapes.values()) < 2,
        routed=per_token if experts else 0,
        outside=outside,
        layers=tuple(LayerSizes(**layer_counts, **sizes, intermediate=inner_width) for layer_counts in counts.values()),
    )
