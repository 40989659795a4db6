"""Folders of published models by their shapes alone: config.json and a small tokenizer, without weights."""

from __future__ import annotations

import json
from pathlib import Path

from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer

# Qwen3's config.json: hidden, layers, heads, KV heads, intermediate, tied
QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}


def write_shape(size: str, folder: Path) -> Path:
    """Write the folder of a Qwen3 of ``size``; returns it."""
    hidden, layers, heads, kv_heads, intermediate, tied = QWEN3[size]
    train_byte_fallback_tokenizer(["1+2=3", "40+50=90"], 300, folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128,
        "intermediate_size": intermediate, "max_position_embeddings": 40960, "tie_word_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
