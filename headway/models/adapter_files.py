"""Loading and saving of adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.config.adapter import AdapterConfig
from headway.models.adapter_targets import (
    BASE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdaptedTarget,
    adapted_targets,
    base_digest,
    stored_metadata,
    stored_targets,
)
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.lora import Lora, merge
from headway.models.quantization import load_sampled
from headway.records.errors import ConfigurationError

_PREFIX = "base_model.model."
_QUANTIZATION = "base_quantization"  # key of the base's quantization in training, in the metadata of the weights' file


def open_adapter(
    model: str | Path,
    config: DecoderConfig,
    settings: AdapterConfig,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Lora:
    """The adapter of a run on the model folder ``model`` before the first step: a new one, or the adapter in
    ``settings.path``. Raises ConfigurationError."""
    targets = adapted_targets(config, settings)
    if settings.path:
        return load_adapter(settings.path, model, config, device=device, dtype=dtype)
    lora = Lora(targets, device, dtype, seed)
    lora.base = base_digest(model)
    return lora


def load_adapter(
    folder: str | Path,
    model: str | Path,
    config: DecoderConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Lora:
    """Load the adapter in ``folder``. Raises ConfigurationError, which names file and key or tensor, for an adapter
    that was trained on another base than the folder ``model``, and for unsupported parts."""
    folder = Path(folder)
    targets = stored_targets(folder, config)
    weights_file = folder / WEIGHTS_FILE
    metadata = stored_metadata(folder, model)
    lora = Lora(targets, device, dtype)
    lora.base, lora.quantization = metadata.get(BASE) or base_digest(model), metadata.get(_QUANTIZATION)
    lora.copy_weights(_from_peft(weights_file, targets, load_file(weights_file)))
    return lora


def save_adapter(lora: Lora, folder: str | Path, model: str | Path) -> None:
    """Write the adapter of the model folder ``model`` so that PEFT and `load_adapter` can read it. Not atomic: callers
    write into a scratch folder and rename it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _peft_tensors(lora).items()}
    metadata = {"format": "pt", BASE: lora.base or base_digest(model)}
    if lora.quantization is not None:
        metadata[_QUANTIZATION] = lora.quantization
    save_file(tensors, folder / WEIGHTS_FILE, metadata=metadata)
    config_text = json.dumps(_peft_config(lora, model), indent=2)
    (folder / CONFIG_FILE).write_text(config_text + "\n", encoding="utf-8")


def merge_decoder(model: str | Path, adapter: str | Path, dtype: torch.dtype) -> Decoder:
    """The decoder in the folder ``model``, in ``dtype``, with the adapter in the folder ``adapter`` merged. Raises
    ConfigurationError for an adapter of another model."""
    lora = load_adapter(adapter, model, DecoderConfig.from_pretrained(Path(model)))
    merged = load_sampled(model, lora.quantization, torch.float32 if lora.quantization else dtype, torch.device("cpu"))
    merge(merged, lora)
    return merged.to(dtype)


def _peft_tensors(lora: Lora) -> dict[str, Tensor]:
    """The adapter's matrices under PEFT's names, with rows in PEFT's order."""
    tensors: dict[str, Tensor] = {}
    prefixes = _prefixes(lora.targets)
    for pair in lora.pairs():
        prefix, (a, b) = prefixes[pair.target.name], (pair.a.detach(), pair.b.detach())
        if pair.target.experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        elif (rotary_dim := pair.target.rotary_dim) is not None:
            b = b.unflatten(0, (-1, rotary_dim // 2, 2)).transpose(1, 2).reshape(b.shape)
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    return tensors


def _from_peft(file: Path, targets: tuple[AdaptedTarget, ...], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `_peft_tensors`. Raises ConfigurationError for a missing, unexpected or misshapen tensor."""
    tensors: dict[str, Tensor] = {}
    known_names: set[str] = set()
    prefixes = _prefixes(targets)
    for adapted in targets:
        target, rank = adapted.target, adapted.rank
        names = [f"{prefixes[target.name]}.lora_{letter}.weight" for letter in "AB"]
        known_names |= set(names)
        for name, shape in zip(
            names, ((target.parts * rank, target.columns), (target.rows, target.parts * rank)), strict=True
        ):
            if name not in stored:
                raise ConfigurationError(f"{file}: {name} is missing")
            if tuple(stored[name].shape) != shape:
                raise ConfigurationError(
                    f"{file}: {name} has shape {list(stored[name].shape)}, model and rank imply {list(shape)}"
                )
        a, b = (stored[name] for name in names)
        if target.experts:
            a, b = a.unflatten(0, (target.experts, -1)), b.unflatten(1, (-1, target.experts)).permute(2, 0, 1)
        elif target.rotary_dim is not None:
            b = b.unflatten(0, (-1, 2, target.rotary_dim // 2)).transpose(1, 2).reshape(b.shape)
        tensors |= {f"{target.name}.lora_A": a, f"{target.name}.lora_B": b}
    if extra_names := sorted(stored.keys() - known_names):
        raise ConfigurationError(f"{file}: tensors that {CONFIG_FILE} doesn't explain: {', '.join(extra_names[:4])}")
    return tensors


def _prefixes(targets: Sequence[AdaptedTarget]) -> dict[str, str]:
    """PEFT's names of the targets, by ours. A parameter of a mixture has the name of its module; PEFT wraps the first
    of a module's two parameters in the second."""
    prefixes: dict[str, str] = {}
    target_by_module: dict[str, str] = {}  # a mixture's module -> the target that has its name at this point
    for target in (adapted.target for adapted in targets):
        module_name = target.name.rpartition(".")[0] if target.experts else target.name
        if module_name in target_by_module:
            prefixes[target_by_module[module_name]] += ".base_layer"
        prefixes[target.name], target_by_module[module_name] = _PREFIX + module_name, target.name
    return prefixes


def _peft_config(lora: Lora, model: str | Path) -> dict[str, Any]:
    (rank, alpha), _ = Counter((adapted.rank, adapted.alpha) for adapted in lora.targets).most_common(1)[0]
    other_targets = [adapted for adapted in lora.targets if (adapted.rank, adapted.alpha) != (rank, alpha)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": lora.targets[0].rslora,
        "rank_pattern": {re.escape(adapted.target.name): adapted.rank for adapted in other_targets},
        "alpha_pattern": {re.escape(adapted.target.name): adapted.alpha for adapted in other_targets},
        "lora_dropout": lora.dropout.rate,
        "target_modules": sorted(adapted.target.name for adapted in lora.targets if not adapted.target.experts),
        "target_parameters": sorted(adapted.target.name for adapted in lora.targets if adapted.target.experts) or None,
        "bias": "none",
        "inference_mode": True,
    }
