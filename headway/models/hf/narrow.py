"""Narrow random models of transformers' architectures, on which a division among ranks is compared with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from headway.models.hf.model import load_hf, stored_parts
from headway.models.initialise import NARROW_VOCABULARY

_LAYERS = 4  # beyond the dense layers that mixtures begin with
_MOST_PARAMETERS = 1 << 26  # of a copy of which only layers and vocabulary are fewer
_NARROW = {"intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
_HEAD_DIM = 8


def write_narrow_hf(source: str | Path, folder: str | Path, seed: int, trust_remote_code: bool = False) -> str:
    """Write a random model of the architecture in ``source`` into ``folder``: of few layers, and narrow if the
    architecture can be. Returns why there is none, "" if it is written. Uses torch's global random numbers."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(source, local_files_only=True, **options)
    if config.get_text_config() is not config:
        return f"{config.model_type} reads pictures as well"
    reason = ""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for narrow_config in _narrow_configs(config):
        torch.manual_seed(seed)
        try:
            with torch.device("meta"):
                meta_model = AutoModelForCausalLM.from_config(narrow_config, **options)
            if (size := sum(parameter.numel() for parameter in meta_model.parameters())) > _MOST_PARAMETERS:
                return reason or f"{_LAYERS} layers of {config.model_type} have {size:,} parameters"
            module = AutoModelForCausalLM.from_config(narrow_config, dtype=torch.float32, **options)
            # Not by save_pretrained, which writes on the first of several ranks alone.
            tensors = revert_weight_conversion(module, stored_parts(module))
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, Path(folder) / "model.safetensors")
            module.config.save_pretrained(folder)
            load_hf(folder, "float32", "cpu", trust_remote_code)
        except Exception as error:  # any error of an architecture's code for sizes that it wasn't made for
            reason = f"{config.model_type} isn't computed with other sizes ({type(error).__name__}: {str(error)[:80]})"
        else:
            return ""
    return reason


def _narrow_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the configuration of a narrow model, then of one that only has fewer layers and a smaller vocabulary."""
    layers = min(config.num_hidden_layers, _LAYERS)
    changes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": NARROW_VOCABULARY}
    changes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    for name, setting in config.to_dict().items():
        if isinstance(setting, list) and len(setting) == config.num_hidden_layers:  # one for each layer
            changes[name] = setting[:layers]
    sizes = {name: min(size, getattr(config, name)) for name, size in _NARROW.items() if getattr(config, name, None)}
    sizes["hidden_size"] = min(config.hidden_size, config.num_attention_heads * _HEAD_DIM)
    for narrow_sizes in (sizes, {}):
        yield type(config).from_dict(config.to_dict() | changes | narrow_sizes)
