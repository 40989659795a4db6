"""Architecture and sizes of a decoder, read from a Hugging Face ``config.json``; torch-free."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.models.families import FAMILIES, Family, family_from, read_window, refuse_unsupported
from headway.models.rope import RopeScaling, frequencies, read_rope
from headway.records.errors import ConfigurationError
from headway.records.tokens import ExpertRouting

__all__ = ["DecoderConfig", "LayerKind", "ExpertMixture", "RopeScaling", "Scores", "SlidingWindow", "read_json"]


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """A sliding window. In the layers it covers, a token attends to itself and the ``tokens - 1`` tokens before it."""

    tokens: int
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertMixture:
    """A mixture of experts. Each token goes through the ``per_token`` experts with the highest router probability."""

    experts: int
    per_token: int
    intermediate: int  # feed-forward size of one expert
    normalised: bool = True  # the chosen experts' weights add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with one feed-forward of DecoderConfig.intermediate instead


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The computation of a layer's attention scores from queries and keys."""

    scale: float  # factor on the product of query and key
    window: int | None = None  # tokens a query sees, including itself; None: all before it
    softcap: float | None = None  # cap c: a score s becomes c tanh(s / c) (Gemma 2)


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The settings that differ from layer to layer."""

    scores: Scores
    rope: int  # index of the rotary embedding it uses
    sparse: bool  # its feed-forward is a mixture of experts


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder; ``family`` holds the properties that its architecture fixes."""

    vocabulary_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    architecture: str = "Qwen3ForCausalLM"
    tied: bool = True  # the output head is the embedding matrix
    qk_norm: bool = True  # RMSNorm over each head's query and key
    attention_bias: bool = False  # query, key and value have a bias
    mlp_bias: bool = False
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # theta of layers with a window, never scaled; None: as all others
    window: SlidingWindow | None = None
    query_scale: float | None = None  # scores are divided by its square root; None: by sqrt(head_dim)
    attention_softcap: float | None = None  # soft cap c of the attention scores
    final_softcap: float | None = None  # c: a logit z becomes c tanh(z / c)
    mixture: ExpertMixture | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "intermediate"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigurationError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigurationError(f"head_dim = {self.head_dim}: rotary embedding needs an even number")
        if self.architecture not in FAMILIES:
            raise ConfigurationError(
                f"architecture = {self.architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        if (m := self.mixture) is not None and not 1 <= m.per_token <= m.experts:
            raise ConfigurationError(f"{m.per_token} experts for each token of {m.experts}: must be 1 to {m.experts}")
        if m is not None and m.intermediate < 1:
            raise ConfigurationError(f"an expert's intermediate = {m.intermediate}: must be at least 1")

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def output_bias(self) -> bool:
        return self.attention_bias and self.family.output_bias

    def layer(self, index: int) -> LayerKind:
        is_windowed = self.window is not None and index in self.window.layers
        window_tokens = self.window.tokens if self.window is not None and is_windowed else None
        scale = (self.query_scale or self.head_dim) ** -0.5
        return LayerKind(
            scores=Scores(scale=scale, window=window_tokens, softcap=self.attention_softcap),
            rope=1 if is_windowed and self.local_rope_theta is not None else 0,
            sparse=self.mixture is not None and index not in self.mixture.dense_layers,
        )

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The indices of the layers with experts."""
        return tuple(index for index in range(self.layers) if self.layer(index).sparse)

    @property
    def routing(self) -> ExpertRouting | None:
        """The shape of a token's experts; None: the model has none."""
        if self.mixture is None or not (layer_count := len(self.sparse_layers)):
            return None
        return ExpertRouting(layers=layer_count, per_token=self.mixture.per_token, experts=self.mixture.experts)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> DecoderConfig:
        """Read ``path/config.json``. Raises ConfigurationError for settings that this decoder doesn't compute."""
        raw = read_json(Path(path) / "config.json")
        try:
            return cls.from_mapping(raw)
        except ConfigurationError as error:
            raise ConfigurationError(f"{Path(path) / 'config.json'}: {error}") from None

    @classmethod
    def from_mapping(cls, raw: dict[str, Any]) -> DecoderConfig:
        """Read the content of a ``config.json``; missing keys take the architecture's defaults."""
        family = family_from(raw)
        refuse_unsupported(raw, family)
        width, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
        layers = _integer(raw, "num_hidden_layers")
        kv_heads = raw.get("num_key_value_heads")
        max_positions = int(raw.get("max_position_embeddings") or family.default_max_positions)
        bias = family.attention_bias
        window_tokens, windowed_layers = read_window(raw, family, layers)
        window = None if window_tokens is None else SlidingWindow(tokens=window_tokens, layers=windowed_layers)
        eos_ids = raw.get("eos_token_id")
        return cls(
            architecture=family.architecture,
            vocabulary_size=_integer(raw, "vocab_size"),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=int(raw.get("head_dim") or family.default_head_dim or width // heads),
            intermediate=_integer(raw, "intermediate_size"),
            max_positions=max_positions,
            tied=bool(raw.get("tie_word_embeddings", family.default_tied)),
            qk_norm=family.qk_norm,
            attention_bias=bool(raw.get("attention_bias", False)) if bias is None else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family.mlp_bias,
            norm_epsilon=float(raw.get("rms_norm_eps", family.default_epsilon)),
            window=window,
            **_ropes(raw, family, max_positions, window),
            **_scores(raw, family),
            mixture=_mixture(raw, family, layers),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=tuple(eos_ids) if isinstance(eos_ids, list) else eos_ids,
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_mapping(self, dtype: str) -> dict[str, Any]:
        """The content of a ``config.json`` that transformers (4 and 5) and `from_mapping` read as the same model."""
        family = self.family
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            family.activation_key: family.activation_names[0],
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.norm_epsilon,
            **self._rope_mapping(),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
            **self._window_mapping(),
            **self._score_mapping(),
            **self._mixture_mapping(),
        }
        if family.mlp_bias:
            raw["mlp_bias"] = self.mlp_bias
        return raw

    def _rope_mapping(self) -> dict[str, Any]:
        scaling = {"rope_type": "default"} if self.rope_scaling is None else self.rope_scaling.to_mapping()
        parameters: dict[str, Any] = {"rope_theta": self.rope_theta, **scaling}
        raw = {"rope_theta": self.rope_theta, "rope_scaling": None if self.rope_scaling is None else scaling}
        if not self.family.local_rope:
            return {**raw, "rope_parameters": parameters}
        local_theta = self.rope_theta if self.local_rope_theta is None else self.local_rope_theta
        ropes = {"full_attention": parameters, "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"}}
        return {**raw, "rope_local_base_freq": local_theta, "rope_parameters": ropes}

    def _window_mapping(self) -> dict[str, Any]:
        family, window = self.family, self.window
        if family.windowed == "none":
            return {}
        raw: dict[str, Any] = {"sliding_window": None if window is None else window.tokens}
        if family.window_switch:
            raw["use_sliding_window"] = window is not None
        if isinstance(family.windowed, int) or (window is not None and family.windowed == "upper"):
            windows = (self.layer(index).scores.window for index in range(self.layers))
            raw["layer_types"] = ["full_attention" if tokens is None else "sliding_attention" for tokens in windows]
        if window is not None and family.windowed == "upper":
            raw["max_window_layers"] = window.layers[0]
        return raw

    def _score_mapping(self) -> dict[str, Any]:
        raw: dict[str, Any] = {}
        if self.family.query_scale:
            scale = float(self.query_scale or self.head_dim)
            raw["query_pre_attn_scalar"] = int(scale) if scale.is_integer() else scale  # transformers 5 wants an int
        if self.family.attention_softcap:
            raw["attn_logit_softcapping"] = self.attention_softcap
        if self.family.final_softcap:
            raw["final_logit_softcapping"] = self.final_softcap
        return raw

    def _mixture_mapping(self) -> dict[str, Any]:
        mixture, family = self.mixture, self.family
        if mixture is None:
            return {} if family.experts is None else {"num_experts": 0, "num_local_experts": 0}
        raw: dict[str, Any] = {"num_local_experts": mixture.experts, "num_experts_per_tok": mixture.per_token}
        if family.expert_size_key != "intermediate_size":
            raw["num_experts"] = mixture.experts  # transformers 4 reads this one, 5 either
            raw["norm_topk_prob"] = mixture.normalised
            raw["decoder_sparse_step"] = 1
            raw["mlp_only_layers"] = list(mixture.dense_layers)
        raw[family.expert_size_key] = mixture.intermediate
        return raw

    def rope_frequencies(self) -> list[list[float]]:
        """Angular frequency of each rotary pair, in radians per position: [1 or 2][head_dim / 2]. The second row is for
        layers with a window, if these have a separate embedding."""
        frequency_rows = [frequencies(self.rope_theta, self.head_dim, self.rope_scaling)]
        if self.local_rope_theta is not None:
            frequency_rows.append(frequencies(self.local_rope_theta, self.head_dim, None))
        return frequency_rows

    def rope_magnitudes(self) -> list[float]:
        """The factor on rotated queries and keys, for each embedding of `rope_frequencies`."""
        return [1.0 if self.rope_scaling is None else self.rope_scaling.magnitude, 1.0][: len(self.rope_frequencies())]

    def matmul_parameters(self, index: int, *, active: bool = False) -> int:
        """The number of weights of layer ``index`` in matrix products; ``active``: only those that a token uses."""
        attention_weights = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.width
        if (mixture := self.mixture) is None or not self.layer(index).sparse:
            return attention_weights + 3 * self.width * self.intermediate
        expert_count = mixture.per_token if active else mixture.experts
        return attention_weights + self.width * mixture.experts + expert_count * 3 * self.width * mixture.intermediate

    @property
    def cached_values(self) -> int:
        """The number of values cached per token in all layers."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    @property
    def has_experts(self) -> bool:
        return self.mixture is not None

    def flops(self, lengths: list[int], head_tokens: int | None = None, continues: list[int] | None = None) -> float:
        """Model FLOP of one forward pass over documents of ``lengths`` tokens (causal: half the square; with a
        window: only the pairs it covers; in a mixture: only the experts that a token uses).

        ``head_tokens``: positions whose logits are computed; default all. ``continues``: for each piece the index of
        the earlier piece that it continues, or -1; a piece attends to all rows before it in its document. The backward
        costs twice as much.
        """
        tokens = sum(lengths)
        prefix_tokens = prefix_lengths(lengths, continues or [-1] * len(lengths))
        pair_count = sum(
            count * (attended_pairs(first + n, window) - attended_pairs(first, window))
            for window, count in self._layers_by_window.items()
            for first, n in zip(prefix_tokens, lengths, strict=True)
        )
        product_flops = self.product_flops(tokens, tokens if head_tokens is None else head_tokens)
        return float(4 * self.heads * self.head_dim * pair_count + product_flops)

    def product_flops(self, tokens: int, head_tokens: int) -> int:
        """The part of `flops` in products with weights, which the weights' gradients cost again."""
        return 2 * self._active_parameters * tokens + 2 * self.vocabulary_size * self.width * head_tokens

    @cached_property
    def _active_parameters(self) -> int:
        return sum(self.matmul_parameters(index, active=True) for index in range(self.layers))

    @cached_property
    def _layers_by_window(self) -> Counter[int | None]:
        return Counter(self.layer(index).scores.window for index in range(self.layers))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigurationError for a missing file or other content."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing = file.parent if not file.parent.is_dir() else file
        raise ConfigurationError(f"no such {'folder' if missing == file.parent else 'file'}: {missing}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{file}: a JSON object is needed, not {type(raw).__name__}")
    return raw


def prefix_lengths(lengths: Sequence[int], continues: Sequence[int]) -> list[int]:
    """The number of tokens before each piece in its document: those of the piece it continues and of that piece's
    prefix. ``continues``: the index of an earlier piece, or -1."""
    prefixes: list[int] = []
    for parent in continues:
        prefixes.append(0 if parent < 0 else prefixes[parent] + lengths[parent])
    return prefixes


def attended_pairs(length: int, window: int | None) -> int:
    """The number of (query, key) pairs in a causal document of ``length`` tokens."""
    reach = length if window is None else min(length, window)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def _integer(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{key} = {value!r}: a positive integer is needed")
    return value


def _ropes(raw: dict[str, Any], family: Family, max_positions: int, window: SlidingWindow | None) -> dict[str, Any]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope_parameters: dict[str, Any] = raw.get("rope_parameters") or {}
    local_parameters: dict[str, Any] = {}
    if family.local_rope:
        local_parameters = rope_parameters.get("sliding_attention") or {}
        rope_parameters = rope_parameters.get("full_attention") or {}
    default_theta = float(raw.get("rope_theta") or family.default_theta)
    theta, scaling = read_rope({**(raw.get("rope_scaling") or {}), **rope_parameters}, default_theta, max_positions)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if family.local_rope and window is not None:
        local_default = float(raw.get("rope_local_base_freq") or 10000.0)
        fields["local_rope_theta"], local_scaling = read_rope(local_parameters, local_default, max_positions)
        if local_scaling is not None:
            raise ConfigurationError("rope_parameters.sliding_attention: only rope type 'default' is supported there")
    return fields


def _scores(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """Scale and soft caps of scores and logits; a missing cap defaults to Gemma 2's value for Gemma 2, else to None."""
    fields: dict[str, Any] = {}
    if family.query_scale:
        fields["query_scale"] = _positive(raw, "query_pre_attn_scalar", 256.0)
    if family.attention_softcap:
        fields["attention_softcap"] = _positive(raw, "attn_logit_softcapping", 50.0)
    if family.final_softcap:
        fields["final_softcap"] = _positive(raw, "final_logit_softcapping", 30.0 if family.attention_softcap else None)
    return fields


def _positive(raw: dict[str, Any], key: str, default: float | None) -> float | None:
    value = raw.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigurationError(f"{key} = {value!r}: a positive number is needed")
    return float(value)


def _mixture(raw: dict[str, Any], family: Family, layers: int) -> ExpertMixture | None:
    if family.experts is None:
        return None
    key = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"  # transformers 4, 5
    if raw.get(key) == 0:
        return None
    sparse_step = int(raw.get("decoder_sparse_step") or 1)
    dense_layers = {int(index) for index in raw.get("mlp_only_layers") or ()}
    normalised = family.expert_size_key == "intermediate_size" or bool(raw.get("norm_topk_prob", False))
    return ExpertMixture(
        experts=_integer(raw, key),
        per_token=_integer(raw, "num_experts_per_tok"),
        intermediate=_integer(raw, family.expert_size_key),
        normalised=normalised,
        dense_layers=tuple(i for i in range(layers) if i in dense_layers or (i + 1) % sparse_step),
    )
