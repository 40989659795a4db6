"""Model folders in Hugging Face's layout, and the exchange of weights in the decoder's own layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.models.configuration import DecoderConfig, read_json
from headway.models.decoder import Decoder, DecoderLayer
from headway.records.errors import ConfigurationError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """A dtype by its configuration name. Raises ConfigurationError for an unknown one."""
    if isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ConfigurationError(f"dtype = {name!r}: valid are {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(path: str | Path, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu") -> Decoder:
    """The decoder in folder ``path`` (config.json, one or several *.safetensors), cast to ``dtype``, on ``device``.

    Raises ConfigurationError naming the file and tensor for anything missing, unreadable, unexpected or misshapen.
    """
    folder = Path(path)
    model = build(DecoderConfig.from_pretrained(folder), dtype, device)
    targets = dict(hugging_face_entries(model))
    with torch.no_grad():
        for name, file in _locate(folder, model.config, set(targets)):
            try:
                with safe_open(file, framework="pt") as content:
                    _fill(targets, name, content, file)
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    return model


def build(config: DecoderConfig, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu") -> Decoder:
    """A decoder of ``config`` whose matrices are still uninitialised memory."""
    with torch.device(device):
        return Decoder(config).to(parse_dtype(dtype))


def _fill(targets: Mapping[str, Tensor], names: list[str], content, file: Path) -> None:
    for name in names:
        stored = content.get_tensor(name)
        if stored.shape != targets[name].shape:
            raise ConfigurationError(
                f"{file}: {name} has shape {list(stored.shape)}, config.json implies {list(targets[name].shape)}"
            )
        targets[name].copy_(stored)


def _locate(folder: Path, config: DecoderConfig, wanted: set[str]) -> Iterator[tuple[list[str], Path]]:
    """Which file holds which wanted tensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = {name: folder / file for name, file in read_json(index).get("weight_map", {}).items()}
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigurationError(f"{folder}: no *.safetensors file (other weight formats are not read)")
        where = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as content:
                    where.update(dict.fromkeys(content.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    if missing := sorted(wanted - where.keys()):
        raise ConfigurationError(f"{folder}: tensors missing: {_some(missing)}")
    extra = sorted(n for n in where.keys() - wanted if not _ignorable(n, config))
    if extra:
        raise ConfigurationError(f"{folder}: tensors this architecture does not have: {_some(extra)}")
    by_file: dict[Path, list[str]] = {}
    for name in sorted(wanted):
        by_file.setdefault(where[name], []).append(name)
    for file, names in by_file.items():
        yield names, file


def _ignorable(name: str, config: DecoderConfig) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def hugging_face_entries(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensor names, each with a view of the parameter that holds it. A tied head is not repeated."""
    yield "model.embed_tokens.weight", model.embedding_weight.detach()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        for name, tensor in _layer_entries(layer):
            yield f"model.layers.{index}.{name}", tensor.detach()
    yield "model.norm.weight", model.final_norm.detach()
    if model.head_weight is not None:
        yield "lm_head.weight", model.head_weight.detach()


def _layer_entries(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    config = layer.config
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv, gate_up = (query, key, key), (config.intermediate, config.intermediate)
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    for kind, attention, output, up, down in (
        ("weight", layer.qkv_weight, layer.output_weight, layer.gate_up_weight, layer.down_weight),
        ("bias", layer.qkv_bias, layer.output_bias, layer.gate_up_bias, layer.down_bias),
    ):
        if attention is not None:
            for name, part in zip("qkv", attention.split(qkv), strict=True):
                yield f"self_attn.{name}_proj.{kind}", part
        if output is not None:
            yield f"self_attn.o_proj.{kind}", output
        if up is not None:
            for name, part in zip(("gate", "up"), up.split(gate_up), strict=True):
                yield f"mlp.{name}_proj.{kind}", part
        if down is not None:
            yield f"mlp.down_proj.{kind}", down
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm


def save_model(model: Decoder, path: str | Path, tokenizer_source: str | Path | None = None) -> None:
    """Write folder ``path`` (replacing it whole) so that transformers and `load_model` can read it.

    The folder appears complete or not at all: it is written beside, flushed to disk, then renamed.
    ``tokenizer_source``: a model folder whose tokenizer files are copied along.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in hugging_face_entries(model)}
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    dtype = str(model.dtype).removeprefix("torch.")
    config = json.dumps(model.config.to_mapping(dtype), indent=2, ensure_ascii=False)
    (scratch / "config.json").write_text(config + "\n", encoding="utf-8")
    if tokenizer_source is not None:
        copy_tokenizer(tokenizer_source, scratch)
    commit_folder(scratch, target)


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer files of one model folder into another."""
    for name in TOKENIZER_FILES:
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, Path(target) / name)


def commit_folder(scratch: Path, target: Path) -> None:
    """Flush every file of ``scratch`` to disk and rename it to ``target``, replacing what is there."""
    for file in [*scratch.iterdir(), scratch]:
        _flush(file)
    retired = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(retired)
    scratch.rename(target)
    _flush(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """Every parameter once, by the decoder's own names, without copying: what is published."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_weights(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters in place from what `weights_of` gave, casting to the model's dtype and device.

    All names and shapes are checked before anything is written. Raises ConfigurationError when they differ.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        raise ConfigurationError(f"weights differ in names: {_some(sorted(parameters.keys() ^ tensors.keys()))}")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ConfigurationError(
                f"{name}: shape {list(tensors[name].shape)} does not fit the model's {list(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
