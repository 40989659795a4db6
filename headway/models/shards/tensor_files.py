"""Reading and writing of the rows that one rank holds, in files of safetensors."""

from __future__ import annotations

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.models.shards.row_map import FileTensor
from headway.models.shards.shard import Shard, row_width
from headway.models.weight_files import INDEX_FILE, SINGLE_FILE, StoredTensor
from headway.records.errors import ConfigurationError

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def check_shapes(tensors: Mapping[str, FileTensor], stored: Mapping[str, StoredTensor], source: str) -> None:
    """Raise ConfigurationError unless the stored tensors have these shapes, which ``source`` implies, in complete files
    with numbers that are read."""
    for file in sorted({stored[name].file for name in tensors}):
        try:
            with safe_open(file, framework="pt"):
                pass  # its header is valid, and the file is complete
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"{file}: not a readable safetensors file: {error}") from None
    for name, tensor in tensors.items():
        file, dtype, shape = stored[name][:3]
        if tuple(shape) != tensor.shape:
            raise ConfigurationError(f"{file}: {name} has shape {shape}, {source} implies {list(tensor.shape)}")
        if dtype not in _TYPES:
            raise ConfigurationError(f"{file}: {name} has numbers of type {dtype}; valid: {', '.join(_TYPES)}")


def fill(
    tensors: Mapping[str, FileTensor],
    stored: Mapping[str, StoredTensor],
    shards: Mapping[str, list[Shard]],
    check: Callable[[str, Mapping[str, Tensor]], None] = lambda file, values: None,
) -> None:
    """Read the rows that ``shards`` (by parameter) hold, cast to their dtype, tensor by tensor as the files have them.
    ``check`` is called for values by name. Raises ConfigurationError as `held_rows` does."""
    for name in sorted(tensors, key=lambda name: (str(stored[name].file), stored[name].start)):
        for shard in shards.get(tensors[name].parameter, ()):
            matrix = shard.matrix()
            for places, rows in held_rows(tensors[name], stored[name], shard):
                if isinstance(places, slice):
                    values = matrix[places].copy_(rows)
                else:
                    values = rows.to(matrix.device, matrix.dtype)
                    matrix.index_copy_(0, places.to(matrix.device), values)
                check(str(stored[name].file), {name: values})


def held_rows(tensor: FileTensor, stored: StoredTensor, shard: Shard) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """Read the rows that ``shard`` holds, some at a time: their places in `Shard.matrix`, and the rows, which are
    overwritten by the next. Of a shard of all rows they are a mapping of the file, which is faster; else no others are
    read. Raises ConfigurationError for a file that ends early."""
    dtype, width = _TYPES[stored.dtype], row_width(tensor.shape)
    buffer, row_bytes, content = torch.empty(0, width, dtype=dtype), width * dtype.itemsize, stored.content
    if shard.tensor.numel() == prod(shard.shape) and content.ctypes.data % dtype.itemsize == 0 < len(content):
        mapped = torch.frombuffer((ctypes.c_char * len(content)).from_address(content.ctypes.data), dtype=dtype)
        for first, count, places in tensor.held_by(shard, 4 * shard.tensor.nbytes):
            yield places, mapped.view(-1, width)[first : first + count]
        return
    with stored.file.open("rb", buffering=0) as file:
        for first, count, places in tensor.held_by(shard):
            buffer = buffer if len(buffer) >= count else torch.empty(count, width, dtype=dtype)
            file.seek(stored.start + first * row_bytes)
            if file.readinto(_bytes_of(buffer[:count])) != count * row_bytes:
                raise ConfigurationError(f"{stored.file}: {tensor.name} is incomplete: the file is truncated")
            yield places, buffer[:count]


def write_tensors(
    file: Path,
    tensors: Iterable[FileTensor],
    shards: Mapping[str, list[Shard]],
    metadata: Mapping[str, str],
    *,
    header: bool = True,
) -> int:
    """Write the rows of ``tensors`` that ``shards`` (by parameter) hold into ``file``, and flush it to disk.

    Other ranks may write theirs at the same time; one of them writes the header (``header``). Returns the bytes of all
    tensors, including other ranks' rows. Raises OSError.
    """
    entries: dict[str, dict[str, object]] = {"__metadata__": dict(metadata)}
    starts, stop = dict[str, int](), 0
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    for tensor in ordered:
        dtype, starts[tensor.name] = shards[tensor.parameter][0].tensor.dtype, stop
        stop += prod(tensor.shape) * dtype.itemsize
        offsets = starts[tensor.name], stop
        entries[tensor.name] = {"dtype": _TYPE_NAMES[dtype], "shape": tensor.shape, "data_offsets": offsets}
    header_bytes = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if header:
            os.ftruncate(descriptor, 8 + len(header_bytes) + stop)  # of a longer file that was there
            _write(descriptor, len(header_bytes).to_bytes(8, "little") + header_bytes, 0)
        for tensor in ordered:
            start = 8 + len(header_bytes) + starts[tensor.name]
            for shard in shards[tensor.parameter]:
                row_bytes = row_width(shard.shape) * shard.tensor.itemsize
                for first, _, places in tensor.held_by(shard):
                    rows = shard.matrix()[places].cpu().contiguous()
                    _write(descriptor, _bytes_of(rows), start + first * row_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return stop


def write_model_files(
    folder: Path, tensors: Iterable[FileTensor], shards: Mapping[str, list[Shard]], rank: int, ranks: int
) -> None:
    """Write this rank's rows of a model folder's weights: at most ``ranks`` files of about equal size, and their index,
    or one file. Raises OSError."""
    tensors, groups, preceding = list(tensors), defaultdict[int, list[FileTensor]](list), 0
    elements = sum(prod(tensor.shape) for tensor in tensors)
    for tensor in tensors:
        groups[preceding * ranks // elements].append(tensor)
        preceding += prod(tensor.shape)
    file_by_tensor, total_bytes = dict[str, str](), 0
    for number, group in enumerate(groups.values()):
        file_name = f"model-{number + 1:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else SINGLE_FILE
        total_bytes += write_tensors(folder / file_name, group, shards, {"format": "pt"}, header=number % ranks == rank)
        file_by_tensor |= {tensor.name: file_name for tensor in group}
    if rank == 0 and len(groups) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_by_tensor.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes_of(rows: Tensor) -> memoryview:
    """A host tensor's memory, without NumPy, which would keep its storage from being emptied (`models/offload.py`)."""
    return memoryview((ctypes.c_char * rows.nbytes).from_address(rows.data_ptr())).cast("B")


def _write(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    remaining = memoryview(content)
    while remaining:
        written_bytes = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[written_bytes:], offset + written_bytes
