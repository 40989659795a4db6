"""The layer structure of each architecture, for counting weights and cached values; torch-free.

`families.FAMILIES` lists the architectures that the decoder computes, and their rows here are derived from it. The
others can be planned and priced, but not trained by Headway's decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.models.families import FAMILIES, Family


@dataclass(frozen=True, kw_only=True)
class SizeRules:
    """Rules by which a ``config.json`` of one ``model_type`` determines shapes.

    A value of None means that config.json's key decides. ``defaults``: values of keys that files leave out.
    """

    attention: Literal["grouped", "latent"] = "grouped"  # latent: MLA, which caches one compressed vector
    linear: Literal["none", "delta", "mamba"] = "none"  # kind of its layers without keys and values
    qk_norm: Literal["none", "head", "whole"] = "none"  # norms over each head's query and key, or over all heads
    query_bias: bool | None = None  # of query, key and value; None: attention_bias
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    output_gate: bool = False  # the query projection makes a gate of the same size
    sinks: bool = False  # a trained logit for each head
    indexer: bool = False  # DeepSeek Sparse Attention: a small key is cached with the latent
    norms: int = 2  # of each layer, of the model's width
    gated_mlp: bool = True  # three matrices; else two
    expert_bias: bool = False  # experts and router have biases
    shared_gate: bool = False  # the shared expert's output is scaled by a product with one row
    expert_size_key: str = "moe_intermediate_size"
    shared_size_key: str = ""  # key of the shared expert's size; "": n_shared_experts times an expert
    always_shared: bool = False  # the shared expert stands in every layer, and is the only feed-forward of dense models
    window_every: int | None = None  # without layer_types: all layers have a window but every n-th; 1: all have it
    linear_every: int | None = None  # without layer_types: all layers are linear but every n-th
    mamba_keys: str = ""  # heads, head dim, state, groups, kernel, bias of projections, of the convolution
    defaults: dict[str, Any] = field(default_factory=lambda: {})
    family: Family | None = None  # row of an architecture that the decoder computes


def _of_family(row: Family) -> SizeRules:
    return SizeRules(
        qk_norm="head" if row.qk_norm else "none",
        query_bias=row.attention_bias,
        output_bias=None if row.output_bias and row.attention_bias is None else False,
        mlp_bias=None if row.mlp_bias else False,
        norms=4 if row.output_norms else 2,
        expert_size_key=row.expert_size_key,
        defaults={
            "tie_word_embeddings": row.default_tied,
            "head_dim": row.default_head_dim,
            "max_position_embeddings": row.default_max_positions,
            **({"attn_logit_softcapping": 50.0} if row.attention_softcap else {}),
        },
        family=row,
    )


_LATENT = SizeRules(attention="latent")
_SPARSE_LATENT = SizeRules(attention="latent", indexer=True)
_SHARED = "shared_expert_intermediate_size"
_HYBRID = SizeRules(
    linear="delta", qk_norm="head", output_gate=True, shared_gate=True, shared_size_key=_SHARED, linear_every=4,
    defaults={"head_dim": 256, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4},
)  # fmt: skip
_WHOLE = SizeRules(qk_norm="whole")
_BAMBA = "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv mamba_proj_bias mamba_conv_bias"
_NEMOTRON = "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel use_bias use_conv_bias"
_MAMBA = "num_heads head_dim state_size n_groups conv_kernel use_bias use_conv_bias"

# model_type -> rules
RULES: dict[str, SizeRules] = {
    **{row.model_type: _of_family(row) for row in FAMILIES.values()},
    "qwen2_moe": SizeRules(query_bias=True, output_bias=False, shared_gate=True, shared_size_key=_SHARED),
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,  # DeepSeek V3's architecture under its own name
    "deepseek_v32": _SPARSE_LATENT,
    "glm_moe_dsa": _SPARSE_LATENT,
    "glm4": SizeRules(norms=4, output_bias=False, defaults={"attention_bias": True}),
    "glm4_moe": SizeRules(output_bias=False),
    "gpt_oss": SizeRules(
        sinks=True, expert_bias=True, expert_size_key="intermediate_size", window_every=2,
        defaults={"attention_bias": True},
    ),
    "phi3": SizeRules(query_bias=False, output_bias=False, window_every=1),
    "smollm3": SizeRules(mlp_bias=None, defaults={"tie_word_embeddings": True}),
    "seed_oss": SizeRules(output_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "olmo2": _WHOLE,
    "olmo3": replace(_WHOLE, window_every=4),
    "olmoe": replace(_WHOLE, expert_size_key="intermediate_size"),
    "minimax_m2": replace(_WHOLE, query_bias=False, output_bias=False, expert_size_key="intermediate_size"),
    "bamba": SizeRules(linear="mamba", mlp_bias=None, mamba_keys=_BAMBA),
    "granitemoehybrid": SizeRules(
        linear="mamba", expert_size_key="intermediate_size", shared_size_key="shared_intermediate_size",
        always_shared=True, mamba_keys=_BAMBA,
    ),
    "nemotron_h": SizeRules(
        linear="mamba", query_bias=False, output_bias=False, mlp_bias=None, norms=1, gated_mlp=False,
        shared_size_key="moe_shared_expert_intermediate_size", mamba_keys=_NEMOTRON,
    ),
    "mamba2": SizeRules(
        linear="mamba", norms=1, mamba_keys=_MAMBA, defaults={"num_attention_heads": 1, "intermediate_size": 0}
    ),
}  # fmt: skip
