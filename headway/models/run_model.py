"""Opening of a run's model and its adapter in the configured implementation, and writing them to folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from headway.config.adapter import AdapterConfig
from headway.config.model import ModelConfig
from headway.models.adapter_files import load_adapter, merge_decoder, open_adapter, save_adapter
from headway.models.configuration import DecoderConfig, read_json
from headway.models.decoder import Decoder
from headway.models.hf.configuration import implementation_of
from headway.models.loading import (
    build,
    checked,
    load_model,
    load_shards,
    parse_dtype,
    require_finite_tensors,
    save_decoder_configuration,
    save_model,
    weights_of,
)
from headway.models.lora import Lora, disabled, use
from headway.models.packed_model import PackedModel, WithoutAdapter
from headway.models.quantization import load_frozen
from headway.models.shards.row_map import FileTensor, decoder_tensors
from headway.models.shards.shard import Shard, shards_of
from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_extra
from headway.runtime.scratch import ScratchFolder, flush, flush_folder

if TYPE_CHECKING:
    from headway.models.hf.adapter import HfAdapter
    from headway.models.hf.model import HfModel


def open_model(
    chosen: ModelConfig, dtype: str | torch.dtype, device: str | torch.device, path: str | Path | None = None
) -> PackedModel:
    """Load the model in ``path`` (default: that of ``chosen``) with the run's implementation. Raises
    ConfigurationError."""
    folder = Path(path or chosen.path)
    if implementation_of(folder, chosen.implementation) == "headway":
        return load_model(folder, dtype, device)
    from headway.models.hf.model import load_hf  # imports transformers, which the project's decoder doesn't need

    return load_hf(folder, dtype, device, chosen.trust_remote_code)


def open_on_meta(
    chosen: ModelConfig, dtype: str | torch.dtype, path: str | Path | None = None
) -> tuple[PackedModel, Callable[[], None]]:
    """The model in ``path``, as of `open_model`, on the meta device, and the function that reads its weights once it
    has memory: of parameters that ranks divide this rank's rows alone. Both raise ConfigurationError."""
    folder = Path(path or chosen.path)
    if implementation_of(folder, chosen.implementation) == "headway":
        decoder = build(DecoderConfig.from_pretrained(folder), dtype, "meta")
        return decoder, partial(read_weights, decoder, folder)
    from headway.models.hf.shards import fill_hf, open_hf_on_meta

    model = open_hf_on_meta(folder, dtype, chosen.trust_remote_code)
    return model, partial(fill_hf, model, folder)


def read_weights(model: PackedModel, path: str | Path) -> None:
    """Overwrite the weights, of which ranks may have rows alone, with those of a model folder of the same shapes.
    Raises ConfigurationError before any change, but for values that aren't finite."""
    if isinstance(model, Decoder):
        config, parameters = DecoderConfig.from_pretrained(path), weights_of(model)
        checked(parameters, weights_of(build(config, "float32", "meta")))
        load_shards(path, config, shards_of(parameters))
        return
    from headway.models.hf.shards import load_hf_shards

    load_hf_shards(path, cast("HfModel", model).module, folder_rows(model)[1])


def folder_rows(model: PackedModel) -> tuple[dict[str, FileTensor], list[Shard]]:
    """The tensors of the model's folder, by name, and this rank's rows of the parameters and buffers that they are made
    of, in the model's memory. Raises ConfigurationError for a model of transformers that has a tensor made
    otherwise."""
    if isinstance(model, Decoder):
        return decoder_tensors(model.config), shards_of(weights_of(model))
    from headway.models.hf.model import stored_parts
    from headway.models.hf.shards import hf_tensors

    module = cast("HfModel", model).module
    return hf_tensors(module), shards_of(stored_parts(module))


def write_narrow_model(chosen: ModelConfig, folder: str | Path, seed: int) -> str:
    """Write a random model of the architecture of ``chosen`` into ``folder``, with as many heads and experts, but
    narrow and of few layers. Returns why there is none, "" if it is written."""
    if implementation_of(chosen.path, chosen.implementation) == "headway":
        from headway.models.initialise import write_narrow_decoder  # trains tokenizers as well

        write_narrow_decoder(DecoderConfig.from_pretrained(chosen.path), folder, seed)
        return ""
    from headway.models.hf.narrow import write_narrow_hf

    return write_narrow_hf(chosen.path, folder, seed, chosen.trust_remote_code)


def open_base(chosen: ModelConfig, dtype: torch.dtype, device: torch.device) -> PackedModel:
    """The model of a run in ``dtype``, or quantised; frozen if an adapter is trained. Raises ConfigurationError."""
    if chosen.quantization is None:
        model = open_model(chosen, dtype, device)
    else:
        model = load_frozen(chosen.path, chosen.quantization, device).to(dtype)
    return model if chosen.adapter is None else model.requires_grad_(False)


def open_policy_adapter(model: PackedModel, chosen: ModelConfig, device: torch.device, seed: int) -> Lora | HfAdapter:
    """The adapter that is trained with the frozen ``model``, which computes with it, in float32. ``seed``: of a new
    adapter's weights. Raises ConfigurationError."""
    assert chosen.adapter is not None
    if not isinstance(model, Decoder):
        adapter = open_hf_adapter(model, chosen.path, chosen.adapter, seed)
        for parameter in adapter.parameters.values():  # of a rank whose weights are in host memory
            parameter.data = parameter.data.to(device)
        return adapter
    lora = open_adapter(chosen.path, model.config, chosen.adapter, seed=seed, device=device)
    lora.quantization = chosen.quantization
    lora.dropout.rate = chosen.adapter.dropout
    use(model, lora.layers)
    return lora


def open_hf_adapter(model: PackedModel, folder: str | Path, settings: AdapterConfig, seed: int) -> HfAdapter:
    """Put PEFT's adapter modules into a transformers model, loaded from ``folder``. Raises ConfigurationError, also if
    PEFT isn't installed."""
    import_extra("peft", "transformers", "model.adapter beside a model of transformers")
    from headway.models.hf.adapter import HfAdapter
    from headway.models.hf.model import HfModel

    assert isinstance(model, HfModel)
    return HfAdapter(model, folder, settings, seed)


def merge_folders(model: str | Path, adapter: str | Path, output: str | Path) -> None:
    """Write the model folder ``output``: ``model`` with ``adapter`` merged, in the dtype of its config.json, with its
    tokenizer. Raises ConfigurationError if ``output`` exists or the adapter is of another model."""
    target = Path(output)
    if target.exists():
        raise ConfigurationError(f"{output} exists: a merged model is written into a new folder")
    raw = read_json(Path(model) / "config.json")
    dtype = parse_dtype(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    if implementation_of(model, None) == "headway":
        merged: PackedModel = merge_decoder(model, adapter, dtype)
    else:
        merged = open_model(ModelConfig(path=str(model)), dtype, "cpu")
        merged = open_hf_adapter(merged, model, AdapterConfig(path=str(adapter)), 0).merged()
    require_finite_tensors(f"{model} with {adapter} merged", dict(merged.named_parameters()))
    target.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f".{target.name}-", directory=target.parent) as folder:
        save_policy(merged, None, folder, model)
        flush_folder(folder)
        folder.rename(target)
        flush(target.parent)


def save_policy(
    model: PackedModel,
    adapter: Lora | HfAdapter | None,
    path: str | Path,
    source: str | Path,
    *,
    by_rows: bool = False,
) -> None:
    """Write the adapter alone, or ``model`` with the tokenizer of its folder ``source``, into the folder ``path``. Not
    atomic: callers write into a scratch folder and rename it. ``by_rows``: without the tensors of `folder_rows`, which
    will be float32."""
    if isinstance(adapter, Lora):
        save_adapter(adapter, path, source)
    elif adapter is not None:
        adapter.save(path)
    elif isinstance(model, Decoder):
        if by_rows:
            save_decoder_configuration(model.config, Path(path), torch.float32, source)
        else:
            save_model(model, path, source)
    else:
        cast("HfModel", model).save(path, source, by_rows=by_rows)


def load_into(adapter: Lora | HfAdapter, model: PackedModel, path: str | Path, base: str | Path) -> None:
    """Overwrite ``adapter`` with the adapter in folder ``path`` of the model folder ``base``. Raises ConfigurationError
    before any change."""
    if not isinstance(adapter, Lora):
        adapter.load(path)
        return
    assert isinstance(model, Decoder)
    stored_lora = load_adapter(path, base, model.config)
    scale_by_target = {adapted.target.name: adapted.scale for adapted in adapter.targets}
    for adapted in stored_lora.targets:
        if (scale := scale_by_target.get(adapted.target.name, adapted.scale)) != adapted.scale:
            raise ConfigurationError(
                f"{path}: scaled by {adapted.scale:g} at {adapted.target.name}, the run's adapter by {scale:g}"
            )
    adapter.copy_weights(stored_lora.weights())


def without_adapter(model: PackedModel, adapter: Lora | HfAdapter) -> PackedModel:
    """The model without its adapter, which shares the weights' tensors."""
    if not isinstance(adapter, Lora):
        return adapter.base_model()
    assert isinstance(model, Decoder)
    return WithoutAdapter(model, partial(disabled, model, adapter))
