"""Loading and saving of model folders in Hugging Face's layout, and the exchange of weights in the decoder's layout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.shards.row_map import decoder_tensors
from headway.models.shards.shard import Shard, by_name, shards_of
from headway.models.shards.tensor_files import check_shapes, fill, held_rows, write_model_files
from headway.models.weight_files import stored_tensors, untied, weight_files
from headway.records.errors import ConfigurationError
from headway.runtime.devices import cpu_multiplies_bfloat16

P = TypeVar("P", bound=Tensor)

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

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
    model = build(DecoderConfig.from_pretrained(path), dtype, device)
    load_shards(path, model.config, shards_of(weights_of(model)))
    return model


def load_shards(path: str | Path, config: DecoderConfig, shards: Iterable[Shard]) -> None:
    """Fill ``shards`` of a decoder's parameters from folder ``path``, cast to their dtype, and read no other rows.

    Raises ConfigurationError as `load_model` does; values that aren't finite are found after some have been written.
    """
    folder, shards_by_name = Path(path), by_name(shards)
    stored_by_name = stored_tensors(weight_files(folder))
    tensors = decoder_tensors(config, stored_by_name)
    _check_names(folder, config, set(tensors), set(stored_by_name))
    check_shapes(tensors, stored_by_name, "config.json")
    fill(tensors, stored_by_name, shards_by_name, require_finite_tensors)
    if config.tied and (head := stored_by_name.get(_HEAD)) is not None:
        embedding = tensors[_EMBEDDING]
        for shard in shards_by_name.get(embedding.parameter, ()) if tuple(head.shape) == embedding.shape else ():
            for places, rows in held_rows(embedding, head, shard):
                if not torch.equal(rows.to(shard.tensor.device, shard.tensor.dtype), shard.matrix()[places]):
                    raise untied(folder, _HEAD, head)


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


def _check_names(folder: Path, config: DecoderConfig, expected: set[str], stored: set[str]) -> None:
    if missing_names := sorted(expected - stored):
        raise ConfigurationError(f"{folder}: tensors missing: {_first_names(missing_names)}")
    extra_names = sorted(name for name in stored - expected if not _ignorable(name, config))
    if extra_names:
        raise ConfigurationError(f"{folder}: tensors this architecture does not have: {_first_names(extra_names)}")


def _ignorable(name: str, config: DecoderConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == _HEAD)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def save_model(model: Decoder, path: str | Path, tokenizer_source: str | Path | None = None) -> None:
    """Write ``model`` into the folder ``path`` so that transformers and `load_model` can read it. Not atomic: callers
    write into a scratch folder and rename it.

    ``tokenizer_source``: a model folder whose tokenizer files are copied too.
    """
    save_shards(path, model.config, shards_of(weights_of(model)), tokenizer_source=tokenizer_source)


def save_shards(
    path: str | Path,
    config: DecoderConfig,
    shards: Iterable[Shard],
    rank: int = 0,
    ranks: int = 1,
    tokenizer_source: str | Path | None = None,
) -> None:
    """Write this rank's rows of a decoder's parameters into the folder ``path``. When all ``ranks`` ranks have done so,
    in any order, it is a folder as of `save_model`, with about as many files of weights. Raises OSError."""
    folder, shards_by_name = Path(path), by_name(shards)
    folder.mkdir(parents=True, exist_ok=True)
    write_model_files(folder, decoder_tensors(config).values(), shards_by_name, rank, ranks)
    if rank == 0:
        dtype = shards_by_name["embedding_weight"][0].tensor.dtype
        save_decoder_configuration(config, folder, dtype, tokenizer_source)


def save_decoder_configuration(
    config: DecoderConfig, folder: Path, dtype: torch.dtype, tokenizer_source: str | Path | None = None
) -> None:
    """Write config.json of a folder whose weights are ``dtype``, and copy the tokenizer files of
    ``tokenizer_source``."""
    folder.mkdir(parents=True, exist_ok=True)
    config_text = json.dumps(config.to_mapping(str(dtype).removeprefix("torch.")), indent=2, ensure_ascii=False)
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


class OverwrittenValues(NamedTuple):
    """Values of one parameter that an update changes, in its dtype and on its device."""

    name: str
    positions: Tensor  # int64, in the flat parameter
    values: Tensor


def overwritten_values(
    model: nn.Module, tensors: Mapping[str, Tensor], changes: Iterable[tuple[str, Tensor, Tensor, Any]]
) -> list[OverwrittenValues] | None:
    """Prepare ``changes``, (name, positions in the flat tensor, values, any) that lead from the present parameters to
    ``tensors``, for `adopt_weights`; None where that takes the tensors themselves, or has to copy them."""
    parameters = dict(model.named_parameters())
    if _are_adoptable(parameters, tensors) or not all(parameter.is_contiguous() for parameter in parameters.values()):
        return None
    return [
        OverwrittenValues(name, positions.to(parameter.device), values.to(parameter.device, parameter.dtype))
        for name, positions, values, _ in changes
        for parameter in (parameters[name],)
    ]


def adopt_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], changes: Iterable[OverwrittenValues] | None = None
) -> bool:
    """Take over ``tensors`` without copying if they have the model's dtype and device, else copy as `copy_weights`.
    ``changes``: those from the present parameters, if known, of which a later one counts: these alone are copied then.

    Returns True if the tensors have become the parameters; the caller must not change them then.
    """
    parameters = checked(dict(model.named_parameters()), tensors)
    if _are_adoptable(parameters, tensors):
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        return True
    if changes is None:
        copy_weights(model, tensors)
    for name, positions, values in changes or ():
        parameters[name].data.view(-1).scatter_(0, positions, values)
    return False


def _are_adoptable(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> bool:
    pairs = ((parameter, tensors[name]) for name, parameter in parameters.items())
    return all((old.dtype, old.device) == (new.dtype, new.device) for old, new in pairs)


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
