"""A model folder that is in order for whoever doesn't read its weights: it has none."""

from __future__ import annotations

import json
from pathlib import Path

from headway.tokens.tokenizer_training import train_byte_fallback_tokenizer


def write_bare_model(folder: Path) -> Path:
    """Write a tokenizer of 300 tokens, a configuration and a file without tensors; returns ``folder``."""
    tokenizer = train_byte_fallback_tokenizer(["1+2=3", "40+50=90"], 300, folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    return folder
