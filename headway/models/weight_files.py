"""Selection of the files of a model folder that hold its weights, and a check that they are unambiguous; torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.models.configuration import read_json
from headway.records.errors import ConfigurationError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_TWICE = (
    "{}: {} and {} hold two sets of weights, which differ in {}: transformers reads model.safetensors first, vLLM the "
    "index; remove the wrong files"
)


class StoredTensor(NamedTuple):
    """A tensor in a file: its type and shape from the header, and its bytes as a mapping of the file."""

    file: Path
    dtype: str  # "F32", "BF16", ...
    shape: list[int]
    content: np.ndarray[Any, Any]  # [bytes] uint8
    start: int  # of the content, in bytes from the start of the file

    def values(self) -> np.ndarray[Any, Any]:
        """The flat numbers; for other types than floats of two bytes or more, the bytes."""
        if self.dtype == "BF16":
            return (self.content.view("<u2").astype("<u4") << 16).view("<f4")
        return self.content.view(_FLOATS.get(self.dtype, "u1"))

    def equals(self, other: StoredTensor) -> bool:
        """Whether both have the same shape and numbers."""
        if self.dtype == other.dtype:
            return self.shape == other.shape and np.array_equal(self.content, other.content)
        return self.shape == other.shape and np.array_equal(self.values(), other.values())


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: those named by transformers_weights of config.json, else model.safetensors,
    else those of the index, else all *.safetensors.

    Raises ConfigurationError if there is none, if one is missing, or if model.safetensors and the index's files differ,
    because other programs read the index first.
    """
    configured_name = str(read_json(folder / "config.json").get("transformers_weights") or "")
    if configured_name.endswith(".safetensors"):
        return [folder / configured_name]
    single_file, index = folder / SINGLE_FILE, folder / (configured_name or INDEX_FILE)
    by_name = read_json(index).get("weight_map", {}) if index.is_file() else {}
    if not isinstance(by_name, dict) or not all(isinstance(name, str) for name in by_name.values()):
        raise ConfigurationError(f"{index}: weight_map = {str(by_name)[:80]}: valid: an object of file names by tensor")
    part_files = sorted({folder / name for name in by_name.values()})
    missing_names = [file.name for file in part_files if not file.is_file()]
    if single_file.is_file() and not configured_name:
        if part_files not in ([], [single_file]) and not missing_names:
            tensors = stored_tensors([single_file, *part_files])
            if lone := stored_tensors([single_file]).keys() ^ stored_tensors(part_files).keys():
                raise ConfigurationError(_TWICE.format(folder, SINGLE_FILE, tensors[min(lone)].file.name, min(lone)))
        return [single_file]
    if missing_names:
        raise ConfigurationError(
            f"{folder}: {len(missing_names)} of {len(part_files)} files are missing: {', '.join(missing_names[:4])}"
        )
    if not (files := part_files or sorted(folder.glob("*.safetensors"))):
        raise ConfigurationError(f"{folder}: no *.safetensors file (other weight formats are not read)")
    return files


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of ``files``, by name. Raises ConfigurationError for an unreadable file, and for different tensors of
    the same name."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            file_array = np.memmap(file, np.uint8, mode="r")
            data_start = 8 + int.from_bytes(file_array[:8].tobytes(), "little")
            header = json.loads(file_array[8:data_start].tobytes())
            for name in sorted(header.keys() - {"__metadata__"}):
                begin, end = header[name]["data_offsets"]
                content = file_array[data_start + begin : data_start + end]
                if len(content) != end - begin:
                    raise ValueError(f"{name} is incomplete: the file is truncated")
                start = data_start + begin
                tensor = StoredTensor(file, header[name]["dtype"], header[name]["shape"], content, start)
                if (earlier := tensors.setdefault(name, tensor)) is not tensor and not earlier.equals(tensor):
                    raise ConfigurationError(_TWICE.format(file.parent, earlier.file.name, file.name, name))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    return tensors


def tensor_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    """The shapes of all tensors in ``files``, by name. Raises as `stored_tensors` does."""
    return {name: tensor.shape for name, tensor in stored_tensors(files).items()}


def require_tied(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigurationError if the files of a model with a tied head hold a head that differs from its embedding."""
    for name, head in stored.items():
        tables = [tensor for other, tensor in stored.items() if _EMBEDDING.search(other) and tensor.shape == head.shape]
        if _HEAD.search(name) and tables and not any(head.equals(table) for table in tables):
            raise untied(folder, name, head)


def untied(folder: Path, name: str, head: StoredTensor) -> ConfigurationError:
    """The error about a head ``name`` that should be the embedding and is another matrix."""
    return ConfigurationError(
        f"{folder}: config.json ties the head to the embedding (tie_word_embeddings = true), and {name} in "
        f"{head.file.name} is another matrix; valid: tie_word_embeddings = false to use it, or files without it"
    )


def require_finite(file: Path) -> None:
    """Raise ConfigurationError for a NaN or an infinite number in ``file``."""
    for name, tensor in stored_tensors([file]).items():
        if not np.isfinite(tensor.values()).all():
            raise ConfigurationError(f"{file}: {name} holds NaN or infinite numbers; valid: finite weights")
