"""What a dense Llama or Qwen3 decoder is made of, read from a Hugging Face ``config.json``; torch-free."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched, short ones kept, those between blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int

    def scale(self, frequency: float) -> float:
        """Scaled angular frequency (radians per position) of one rotary pair."""
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_positions / self.high_frequency_factor:
            return frequency
        if wavelength > self.original_max_positions / self.low_frequency_factor:
            return frequency / self.factor
        blend = (self.original_max_positions / wavelength - self.low_frequency_factor) / (
            self.high_frequency_factor - self.low_frequency_factor
        )
        return (1 - blend) * frequency / self.factor + blend * frequency


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder; the same fields for both architectures."""

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
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
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

    @classmethod
    def from_pretrained(cls, path: str | Path) -> DecoderConfig:
        """Read ``path/config.json``. Raises ConfigurationError for what this decoder does not compute."""
        raw = read_json(Path(path) / "config.json")
        try:
            return cls.from_mapping(raw)
        except ConfigurationError as error:
            raise ConfigurationError(f"{Path(path) / 'config.json'}: {error}") from None

    @classmethod
    def from_mapping(cls, raw: dict[str, Any]) -> DecoderConfig:
        """Read the content of a ``config.json``; missing keys take the architecture's own defaults."""
        architecture = _architecture(raw)
        qwen = ARCHITECTURES[architecture] == "qwen3"
        _refuse_unsupported(raw)
        width, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
        kv_heads = raw.get("num_key_value_heads")
        head_dim = raw.get("head_dim") or (128 if qwen else width // heads)
        theta, scaling = _rope(raw)
        eos = raw.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocabulary_size=_integer(raw, "vocab_size"),
            width=width,
            layers=_integer(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=heads if kv_heads is None else int(kv_heads),
            head_dim=int(head_dim),
            intermediate=_integer(raw, "intermediate_size"),
            max_positions=int(raw.get("max_position_embeddings") or (32768 if qwen else 2048)),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=qwen,
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)) and not qwen,
            norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_mapping(self, dtype: str) -> dict[str, Any]:
        """The content of a ``config.json`` that transformers (4 and 5) and `from_mapping` read alike."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if (scaling := self.rope_scaling) is not None:
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": ARCHITECTURES[self.architecture],
            "vocab_size": self.vocabulary_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
            "rope_scaling": None if self.rope_scaling is None else rope,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
        }
        if ARCHITECTURES[self.architecture] == "llama":
            raw["mlp_bias"] = self.mlp_bias
        else:
            raw["use_sliding_window"] = False
        return raw

    def rope_frequencies(self) -> list[float]:
        """Angular frequency of each rotary pair, [head_dim / 2], radians per position (RoFormer, Eq. 15)."""
        frequencies = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        return frequencies if self.rope_scaling is None else [self.rope_scaling.scale(f) for f in frequencies]

    @property
    def matmul_parameters_per_layer(self) -> int:
        """Weights that take part in a layer's matrix products."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.width
        return attention + 3 * self.width * self.intermediate

    def flops(self, lengths: list[int], head_tokens: int | None = None, continues: list[int] | None = None) -> float:
        """Model FLOP of one forward pass over documents of ``lengths`` tokens (causal: half the square).

        ``head_tokens``: positions whose logits are computed; default all. ``continues``: for each piece the index of
        the piece it continues and attends to as well, or -1. Backward costs twice as much again.
        """
        tokens = sum(lengths)
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        pairs += sum(n * lengths[of] for n, of in zip(lengths, continues or [], strict=False) if of >= 0)
        per_token = 2 * self.layers * self.matmul_parameters_per_layer
        per_pair = 4 * self.layers * self.heads * self.head_dim
        head = 2 * self.vocabulary_size * self.width * (tokens if head_tokens is None else head_tokens)
        return float(per_token * tokens + per_pair * pairs + head)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigurationError when it is missing or not one."""
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


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or []
    known = [name for name in named if name in ARCHITECTURES]
    if not known and not named:
        known = [name for name, model_type in ARCHITECTURES.items() if model_type == raw.get("model_type")]
    if not known:
        given = named or raw.get("model_type")
        raise ConfigurationError(f"architectures = {given!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return known[0]


def _integer(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{key} = {value!r}: a positive integer is needed")
    return value


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
        raise ConfigurationError("sliding-window attention is not supported; supported: full attention in every layer")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigurationError(f"hidden_act = {activation!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        raise ConfigurationError("quantization_config: quantised weights are not supported; supported: float weights")


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rope theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", raw.get("rope_theta") or 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigurationError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigurationError("partial_rotary_factor: only whole-head rotation (1.0) is supported")
    if kind == "default":
        return theta, None
    try:
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigurationError(f"rope type 'llama3' needs {error.args[0]!r}") from None
    return theta, scaling
