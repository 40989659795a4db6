"""Loading and saving of the rows of a transformers model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.models.hf.model import HfModel, stored_parts
from headway.models.loading import parse_dtype, require_finite_tensors
from headway.models.shards.row_map import FileTensor, RowNumbers
from headway.models.shards.shard import Shard, by_name
from headway.models.shards.tensor_files import check_shapes, fill, write_model_files
from headway.models.weight_files import stored_tensors, weight_files
from headway.records.errors import ConfigurationError


def meta_module(folder: str | Path, dtype: str | torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The text model in ``folder`` on the meta device, without weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=parse_dtype(dtype), trust_remote_code=trust_remote_code)


def load_hf_shards(folder: str | Path, module: PreTrainedModel, shards: Iterable[Shard]) -> None:
    """Fill ``shards`` of the parameters and buffers that a module's files have, cast to their dtype, and compute its
    other buffers. Raises ConfigurationError for tensors that are missing, misshapen or not finite, and for a model
    whose tensors in files aren't made of its parameters' rows."""
    module.tie_weights()  # `to_empty` made two of one tensor
    stored_by_name, tensors = stored_tensors(weight_files(Path(folder))), hf_tensors(module)
    if missing_names := sorted(tensors.keys() - stored_by_name.keys()):
        raise ConfigurationError(
            f"{folder}: tensors missing: {', '.join(missing_names[:4])} ({len(missing_names)} in all)"
        )
    check_shapes(tensors, stored_by_name, "config.json")
    fill(tensors, stored_by_name, by_name(shards), require_finite_tensors)
    for part in module.state_dict(keep_vars=True).values():
        part._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    module.initialize_weights()  # of what is in no file alone: buffers such as rotary frequencies


def save_hf_shards(
    path: str | Path, model: HfModel, shards: Iterable[Shard], rank: int, ranks: int, source: str | Path | None = None
) -> None:
    """Write this rank's rows of the module's parameters, and of the buffers that its files have, into the folder
    ``path``, as `save_shards` does for a decoder. Raises OSError."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_model_files(folder, hf_tensors(model.module).values(), by_name(shards), rank, ranks)
    if rank == 0:
        model.save_configuration(folder, source)


def hf_tensors(module: PreTrainedModel) -> dict[str, FileTensor]:
    """The tensors of the module's folder, by name. Raises ConfigurationError as `RowNumbers.locate` does."""
    numbers = RowNumbers(stored_parts(module))
    columns = revert_weight_conversion(module, numbers.columns())
    return {name: numbers.locate(name, column) for name, column in columns.items()}
