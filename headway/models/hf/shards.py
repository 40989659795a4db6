"""Loading and saving of the rows of a transformers model that one rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from headway.models.hf.model import HfConfig, HfModel, auto_class_of, choose_packing, stored_parts, with_interface
from headway.models.loading import parse_dtype, require_finite_tensors
from headway.models.shards.row_map import FileTensor, RowNumbers
from headway.models.shards.shard import Shard, by_name, shards_of
from headway.models.shards.tensor_files import check_shapes, fill
from headway.models.weight_files import stored_tensors, weight_files
from headway.records.errors import ConfigurationError


def open_hf_on_meta(folder: str | Path, dtype: str | torch.dtype, trust_remote_code: bool = False) -> HfModel:
    """The model in ``folder`` on the meta device, as of `load_hf` but without weights. Raises ConfigurationError."""
    path = Path(folder)
    config = HfConfig.from_pretrained(path, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code}
    module_config = AutoConfig.from_pretrained(path, local_files_only=True, **options)
    with torch.device("meta"):
        module = auto_class_of(path).from_config(module_config, dtype=parse_dtype(dtype), **options)
    return with_interface(module, config, path)


@torch.no_grad()
def fill_hf(model: HfModel, folder: str | Path) -> None:
    """Read the weights of a model of `open_hf_on_meta` that has memory for them, or for this rank's rows; compute its
    other buffers, and choose whether it packs documents. A call of all ranks that divide it. Raises
    ConfigurationError."""
    model.module.tie_weights()  # `to_empty` may have made two of one tensor
    load_hf_shards(folder, model.module, shards_of(stored_parts(model.module)))
    for part in model.module.state_dict(keep_vars=True).values():
        part._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    model.module.initialize_weights()  # of what is in no file alone: buffers such as rotary frequencies
    choose_packing(model)


def load_hf_shards(folder: str | Path, module: PreTrainedModel, shards: Iterable[Shard]) -> None:
    """Fill ``shards`` of the parameters and buffers that a module's files have, cast to their dtype. Raises
    ConfigurationError for tensors that are missing, misshapen or not finite, and for a model whose tensors in files
    aren't made of its parameters' rows."""
    stored_by_name, tensors = stored_tensors(weight_files(Path(folder))), hf_tensors(module)
    if missing_names := sorted(tensors.keys() - stored_by_name.keys()):
        raise ConfigurationError(
            f"{folder}: tensors missing: {', '.join(missing_names[:4])} ({len(missing_names)} in all)"
        )
    check_shapes(tensors, stored_by_name, "config.json")
    fill(tensors, stored_by_name, by_name(shards), require_finite_tensors)


def hf_tensors(module: PreTrainedModel) -> dict[str, FileTensor]:
    """The tensors of the module's folder, by name. Raises ConfigurationError as `RowNumbers.locate` does."""
    numbers = RowNumbers(stored_parts(module))
    columns = revert_weight_conversion(module, numbers.columns())
    return {name: numbers.locate(name, column) for name, column in columns.items()}
