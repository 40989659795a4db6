"""The model families that the decoder computes, with the names used in their ``config.json``; torch-free.

A row holds the properties shared by every model of a family; those of a single model (sizes, windows, caps) are in its
`DecoderConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headway.records.errors import ConfigurationError

Activation = Literal["silu", "gelu_tanh"]

_SILU = ("silu", "swish")
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """A layer's tensors of a mixture, after ``model.layers.N.``; ``{}`` stands for the expert's number."""

    router: str
    gate: str
    up: str
    down: str
    # All experts of a layer in one tensor, as transformers 5 holds them in memory; read if a file has them.
    fused_gate_up: str = "mlp.experts.gate_up_proj"  # [experts, 2 * intermediate, width]
    fused_down: str = "mlp.experts.down_proj"  # [experts, width, intermediate]
    fused_router: str = "mlp.gate.weight"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The properties shared by all models of one ``architectures`` name."""

    name: str  # value of `headway init-model --family`
    architecture: str
    model_type: str
    # --- what is computed
    activation: Activation = "silu"  # activation of the gate
    qk_norm: bool = False  # RMSNorm over each head's query and key
    attention_bias: bool | None = None  # query, key and value have a bias; None: config.json's attention_bias decides
    output_bias: bool = True  # the attention's output has a bias if query, key and value have one
    mlp_bias: bool = False  # config.json's mlp_bias decides; else there is none
    norm_offset: float = 0.0  # added to a norm's stored weight
    output_norms: bool = False  # outputs of attention and MLP are normed before they join the residual stream
    scaled_embedding: bool = False  # embeddings times sqrt(width), rounded to the weights' dtype
    local_rope: bool = False  # layers with a window have a separate rotary embedding
    attention_softcap: bool = False
    final_softcap: bool = False
    query_scale: bool = False  # scores are divided by sqrt(query_pre_attn_scalar), not by sqrt(head_dim)
    # The layers that a sliding window covers without layer_types: all, those from max_window_layers on, or all but
    # every n-th.
    windowed: Literal["none", "all", "upper"] | int = "none"
    window_switch: bool = False  # sliding_window counts only with use_sliding_window
    experts: ExpertNames | None = None
    expert_size_key: str = "moe_intermediate_size"
    # --- defaults of keys that config.json leaves out
    activation_key: str = "hidden_act"
    other_activations: tuple[str, ...] = ()  # names with which files of this family mean its activation
    default_head_dim: int | None = None  # None: width / heads
    default_max_positions: int = 32768
    default_theta: float = 10000.0
    default_window: int | None = 4096  # of families with windows
    default_tied: bool = False
    default_epsilon: float = 1e-6

    @property
    def activation_names(self) -> tuple[str, ...]:
        """The names in config.json of this family's activation; the first is written."""
        return _SILU if self.activation == "silu" else (*_GELU_TANH, *self.other_activations)

    def norm_names(self) -> dict[str, str]:
        """Map the decoder's names of a layer's norms to Hugging Face's names."""
        if not self.output_norms:
            return {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
        return {
            "input_norm": "input_layernorm",
            "attention_output_norm": "post_attention_layernorm",
            "post_norm": "pre_feedforward_layernorm",
            "mlp_output_norm": "post_feedforward_layernorm",
        }


_QWEN_EXPERTS = ExpertNames(
    router="mlp.gate.weight",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
_MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)
_GEMMA: dict[str, Any] = dict(
    activation="gelu_tanh",
    norm_offset=1.0,
    scaled_embedding=True,
    default_head_dim=256,
    default_max_positions=8192,
    default_tied=True,
)

_ROWS = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        model_type="llama",
        mlp_bias=True,
        default_max_positions=2048,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        model_type="mistral",
        attention_bias=False,
        windowed="all",
        default_max_positions=131072,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        attention_bias=True,
        output_bias=False,
        windowed="upper",
        window_switch=True,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm=True,
        windowed="upper",
        window_switch=True,
        default_head_dim=128,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        qk_norm=True,
        windowed="all",
        window_switch=True,
        experts=_QWEN_EXPERTS,
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        attention_bias=False,
        windowed="all",
        default_window=None,
        experts=_MIXTRAL_EXPERTS,
        expert_size_key="intermediate_size",
        default_max_positions=131072,
        default_theta=1e6,
        default_epsilon=1e-5,
    ),
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        model_type="gemma",
        other_activations=("gelu",),  # the first release says gelu and means the approximation
        **_GEMMA,
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        activation_key="hidden_activation",
        output_norms=True,
        attention_softcap=True,
        final_softcap=True,
        query_scale=True,
        windowed=2,
        **_GEMMA,
    ),
    Family(
        name="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        activation_key="hidden_activation",
        output_norms=True,
        qk_norm=True,
        final_softcap=True,
        query_scale=True,
        local_rope=True,
        windowed=6,
        default_theta=1e6,
        **{**_GEMMA, "default_max_positions": 131072},
    ),
)
FAMILIES: dict[str, Family] = {row.architecture: row for row in _ROWS}
BY_NAME: dict[str, Family] = {row.name: row for row in _ROWS}

_INSTEAD = {
    "Gemma3ForConditionalGeneration": "it reads images; the text-only Gemma3ForCausalLM is supported",
    "Mistral3ForConditionalGeneration": "it reads images; the text-only MistralForCausalLM is supported",
    "MinistralForCausalLM": "a Mistral with windows on some layers only; MistralForCausalLM is supported",
    "Qwen2MoeForCausalLM": "it has a shared expert; Qwen3MoeForCausalLM is supported",
}


def family_from(raw: dict[str, Any]) -> Family:
    """The family that a ``config.json`` names. Raises ConfigurationError, with the supported ones, for any other."""
    architectures = raw.get("architectures") or []
    if not architectures:
        architectures = [family.architecture for family in _ROWS if family.model_type == raw.get("model_type")]
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    named_kind = raw.get("architectures") or raw.get("model_type")
    hint = next((f" ({_INSTEAD[name]})" for name in architectures if name in _INSTEAD), "")
    raise ConfigurationError(f"architectures = {named_kind!r} is not supported{hint}; supported: {', '.join(FAMILIES)}")


def family_named(name: str) -> Family:
    """The family named by `headway init-model --family`. Raises ConfigurationError for an unknown name."""
    if name not in BY_NAME:
        raise ConfigurationError(f"family = {name!r} is not supported; supported: {', '.join(BY_NAME)}")
    return BY_NAME[name]


def refuse_unsupported(raw: dict[str, Any], family: Family) -> None:
    """Raise ConfigurationError (key, value, valid values) for settings that the decoder does not compute."""
    keys = dict.fromkeys((family.activation_key, "hidden_act", "hidden_activation"))
    activation = next(((key, raw[key]) for key in keys if raw.get(key) is not None), None)
    if activation is not None and activation[1] not in family.activation_names:
        valid_names = ", ".join(repr(name) for name in family.activation_names)
        raise ConfigurationError(
            f"{activation[0]} = {activation[1]!r} is not supported in {family.architecture}; supported: {valid_names}"
        )
    if raw.get("quantization_config"):
        raise ConfigurationError("quantization_config: quantised weights are not supported; supported: float weights")
    if raw.get("use_bidirectional_attention"):
        raise ConfigurationError("use_bidirectional_attention = true is not supported; supported: causal attention")
    if raw.get("attn_logit_softcapping") is not None and not family.attention_softcap:
        raise ConfigurationError(
            f"attn_logit_softcapping = {raw['attn_logit_softcapping']!r} is not computed by {family.architecture}; "
            "supported: null"
        )
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigurationError("partial_rotary_factor: only whole-head rotation (1.0) is supported")


def read_window(raw: dict[str, Any], family: Family, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window in tokens (None: no window), and the layers it covers."""
    tokens = raw.get("sliding_window", family.default_window)
    if family.window_switch and not raw.get("use_sliding_window", False):
        tokens = None
    types = raw.get("layer_types")
    if types is not None:
        _check_layer_types(types, layers)
    covered_flags = _covered(raw, family, layers) if types is None else [kind == "sliding_attention" for kind in types]
    if family.windowed == "none" and any(covered_flags):
        raise ConfigurationError(
            f"layer_types has 'sliding_attention', which {family.architecture} does not compute; "
            "supported: full_attention in every layer"
        )
    if family.windowed == "all" and tokens is not None and not all(covered_flags):
        raise ConfigurationError(
            f"layer_types has 'full_attention' beside sliding_window = {tokens!r}; supported in {family.architecture}: "
            "sliding_attention in every layer, or sliding_window = null"
        )
    if tokens is None or not any(covered_flags):
        return None, ()
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigurationError(f"sliding_window = {tokens!r}: a positive number of tokens is needed, or null")
    return tokens, tuple(index for index, windowed in enumerate(covered_flags) if windowed)


def _check_layer_types(types: Any, layers: int) -> None:
    known_types = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigurationError(f"layer_types: a list of {layers} layer types is needed, one for each layer")
    if unknown_types := [kind for kind in types if kind not in known_types]:
        raise ConfigurationError(
            f"layer_types has {unknown_types[0]!r}, which is not supported; supported: {', '.join(known_types)}"
        )


def _covered(raw: dict[str, Any], family: Family, layers: int) -> list[bool]:
    if family.windowed == "all":
        return [True] * layers
    if family.windowed == "upper":
        first_windowed = int(raw.get("max_window_layers", 28))
        return [index >= first_windowed for index in range(layers)]
    if family.windowed == "none":
        return [False] * layers
    period = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or family.windowed)
    return [(index + 1) % period != 0 for index in range(layers)]
