"""Tiny random models of architectures that transformers has, as folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from headway.models.loading import TOKENIZER_FILES

VOCABULARY = 61
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=16)
_BOTH = ["sliding_attention", "full_attention"]
# Class of transformers before Config and ForCausalLM -> options. Windows are shorter than the longest test document.
PACKED: dict[str, dict[str, Any]] = {
    "Phi": dict(partial_rotary_factor=0.5),
    "Phi3": {"sliding_window": 16},
    "Olmo2": {},
    "Olmo3": dict(sliding_window=16, layer_types=_BOTH),
    "Glm4": dict(head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "Granite": dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "GptOss": dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, layer_types=_BOTH),
    "DeepseekV3": dict(
        q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, n_routed_experts=4,
        n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, num_key_value_heads=4, **_EXPERTS,
    ),
    "Cohere2": dict(sliding_window=16, layer_types=_BOTH, logit_scale=0.3),
    "GPT2": {},  # learned positions
    "StableLm": dict(partial_rotary_factor=0.5),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "Llama4Text": dict(
        head_dim=8, attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"], num_local_experts=2,
        num_experts_per_tok=1, intermediate_size_mlp=48, attn_temperature_tuning=False,
    ),
    "OPT": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.1),  # its layers drop values themselves
}  # fmt: skip
ONE_A_ROW: dict[str, dict[str, Any]] = {
    "Qwen3Next": dict(
        head_dim=8, num_experts=4, shared_expert_intermediate_size=16, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"], **_EXPERTS,
    ),
    "FalconH1": dict(**_MAMBA, head_dim=8, mamba_d_ssm=64),
    "Bamba": dict(**_MAMBA, attn_layer_indices=[1]),
    "Jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4,
        num_experts_per_tok=2, mamba_d_state=8, use_mamba_kernels=False,
    ),
}  # fmt: skip


def randomise(model: torch.nn.Module, std: float = 0.2) -> Any:
    """Weights large enough that a document which sees another one shows; what is made with a meaning stays."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def make_hub_model(folder: Path, kind: str, **changes: Any) -> str:
    """Write a random model of this kind; returns its path."""
    import transformers

    options = {**SIZES, **(PACKED | ONE_A_ROW)[kind], **changes}
    config = getattr(transformers, f"{kind}Config")(**options)
    name = {"Llama4Text": "Llama4ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    randomise(getattr(transformers, name)(config)).save_pretrained(folder)
    return str(folder)


def write_hub_inputs(folder: Path, kind: str, **sizes: int) -> None:
    """The inputs of the tiny runs with a random model of this kind and their tokenizer."""
    import tiny_run

    tiny_run.write_inputs(folder)
    own = (folder / "model").rename(folder / "tokenizer")
    make_hub_model(folder / "model", kind, **vocabulary_of(own), **sizes)
    copy_tokenizer(own, folder / "model")


def vocabulary_of(model: Path) -> dict[str, int]:
    """The keys of a model's configuration that belong to its tokenizer."""
    known = json.loads((model / "config.json").read_text())
    return {key: known[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer of a model folder into another model's."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def make_seeing_model(folder: Path) -> str:
    """Write a random model that reads images and text."""
    import transformers

    text = {**SIZES, "head_dim": 8, "sliding_window": 16, "layer_types": _BOTH}
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCABULARY
    )
    randomise(transformers.Gemma3ForConditionalGeneration(config)).save_pretrained(folder)
    return str(folder)
