"""Loading and saving of model folders in Hugging Face's layout, and the exchange of weights in the decoder's layout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.layout import TensorEntry, fused_expert_entries, hugging_face_entries
from headway.models.weight_files import require_tied, stored_tensors, weight_files
from headway.records.errors import ConfigurationError
from headway.runtime.devices import cpu_multiplies_bfloat16

P = TypeVar("P", bound=Tensor)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "generation_config.json",
)


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """The dtype with a configuration name. Raises ConfigurationError for an unknown name."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigurationError(f"dtype = {name!r}: valid: {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(path: str | Path, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu") -> Decoder:
    """Load the decoder in folder ``path`` (config.json, one or more *.safetensors), cast to ``dtype``, on ``device``.

    Raises ConfigurationError, which names file and tensor, for missing, unreadable, unexpected or misshapen parts.
    """
    folder = Path(path)
    model = build(DecoderConfig.from_pretrained(folder), dtype, device)
    stored_by_name = stored_tensors(weight_files(folder))
    if model.config.tied:
        require_tied(folder, stored_by_name)
    file_by_name = {name: tensor.file for name, tensor in stored_by_name.items()}
    targets = _targets(model, file_by_name)
    _check_names(folder, model.config, set(targets), set(file_by_name))
    names_by_file: dict[Path, list[str]] = {}
    for name in sorted(targets):
        names_by_file.setdefault(file_by_name[name], []).append(name)
    with torch.no_grad():
        for file, names in names_by_file.items():
            try:
                with safe_open(file, framework="pt") as reader:
                    _fill(targets, names, reader, file)
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    return model


def load_for_generation(path: str | Path, dtype: str | torch.dtype, device: str | torch.device) -> Decoder:
    """Load as `load_model` does, but widen bfloat16 weights to float32 on a CPU without bfloat16 instructions, where
    products then take a tenth of the time and no weight changes."""
    model = load_model(path, dtype, device)
    if torch.device(device).type == "cpu" and model.dtype == torch.bfloat16 and not cpu_multiplies_bfloat16():
        return model.to(torch.float32)
    return model


def build(config: DecoderConfig, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu") -> Decoder:
    """A decoder of ``config`` with uninitialised matrices."""
    with torch.device(device):
        return Decoder(config).to(parse_dtype(dtype))


def _fill(targets: Mapping[str, TensorEntry], names: list[str], content: Any, file: Path) -> None:
    for name in names:
        target, stored_tensor = targets[name], content.get_tensor(name)
        if tuple(stored_tensor.shape) != target.shape:
            raise ConfigurationError(
                f"{file}: {name} has shape {list(stored_tensor.shape)}, config.json implies {list(target.shape)}"
            )
        target.view.copy_(stored_tensor.view(target.view.shape))
        require_finite_tensors(str(file), {name: target.view})


def _targets(model: Decoder, stored: Mapping[str, Path]) -> dict[str, TensorEntry]:
    """The tensors to read, by name; mixtures expert by expert, or as one tensor if the files hold them fused."""
    targets = {entry.name: entry for entry in hugging_face_entries(model)}
    for fused_entry, replaced_names in fused_expert_entries(model):
        if fused_entry.name in stored:
            targets[fused_entry.name] = fused_entry
            for name in replaced_names:
                del targets[name]
    return targets


def _check_names(folder: Path, config: DecoderConfig, expected: set[str], stored: set[str]) -> None:
    if missing_names := sorted(expected - stored):
        raise ConfigurationError(f"{folder}: tensors missing: {_first_names(missing_names)}")
    extra_names = sorted(name for name in stored - expected if not _ignorable(name, config))
    if extra_names:
        raise ConfigurationError(f"{folder}: tensors this architecture does not have: {_first_names(extra_names)}")


def _ignorable(name: str, config: DecoderConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def save_model(model: Decoder, path: str | Path, tokenizer_source: str | Path | None = None) -> None:
    """Write ``model`` into the folder ``path`` so that transformers and `load_model` can read it. Not atomic: callers
    write into a scratch folder and rename it.

    ``tokenizer_source``: a model folder whose tokenizer files are copied too.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {entry.name: entry.view.cpu().reshape(entry.shape).contiguous() for entry in hugging_face_entries(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(model.dtype).removeprefix("torch.")
    config_text = json.dumps(model.config.to_mapping(dtype), indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(config_text + "\n", encoding="utf-8")
    if tokenizer_source is not None:
        copy_tokenizer(Path(tokenizer_source), folder)


def copy_tokenizer(source: Path, folder: Path, further: Sequence[str] = ()) -> None:
    """Copy a model folder's tokenizer files, including chat templates, and the files ``further``."""
    template_names = [file.relative_to(source) for file in source.glob("additional_chat_templates/*.jinja")]
    for name in (*TOKENIZER_FILES, *further, *template_names):
        if (file := source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)


def require_finite_tensors(label: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigurationError, which names ``label`` and the tensor, for a NaN or an infinite number."""
    for name, tensor in tensors.items():
        if tensor.numel() and not all(map(math.isfinite, torch.stack(tensor.detach().aminmax()).tolist())):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigurationError(f"{label}: {name} holds NaN or infinite numbers as {dtype}; valid: finite weights")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The published weights: every parameter once, by the model's names, without copying."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters in place with the tensors of `weights_of`, cast to the model's dtype and device.

    All names and shapes are checked before anything is written. Raises ConfigurationError if they differ.
    """
    copy_into(dict(model.named_parameters()), tensors)


def copy_into(parameters: dict[str, P], tensors: Mapping[str, Tensor]) -> None:
    """Overwrite ``parameters``, by name. Raises ConfigurationError as `checked` does, before any change."""
    with torch.no_grad():
        for name, parameter in checked(parameters, tensors).items():
            parameter.copy_(tensors[name])


def adopt_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Take over ``tensors`` without copying if they have the model's dtype and device, else copy as `copy_weights`.

    Returns True if the tensors have become the parameters; the caller must not change them then.
    """
    parameters = checked(dict(model.named_parameters()), tensors)
    if any((old.dtype, old.device) != (tensors[name].dtype, tensors[name].device) for name, old in parameters.items()):
        copy_weights(model, tensors)
        return False
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    return True


def checked(parameters: dict[str, P], tensors: Mapping[str, Tensor]) -> dict[str, P]:
    """Return ``parameters``. Raises ConfigurationError unless ``tensors`` have their names and shapes."""
    if parameters.keys() != tensors.keys():
        raise ConfigurationError(f"weights differ in names: {_first_names(sorted(parameters.keys() ^ tensors.keys()))}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ConfigurationError(
                f"{name}: shape {list(tensors[name].shape)} does not fit the model's {list(parameter.shape)}"
            )
    return parameters
