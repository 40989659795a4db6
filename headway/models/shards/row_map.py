"""The place of every row of a model folder's tensors in the model's parameters.

No family has a map of its own for this: what maps a model's tensors to files (`layout.py`, or transformers' own
conversion) is applied to a model whose parameters hold the numbers of their rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.layout import fused_expert_entries, hugging_face_entries
from headway.models.shards.shard import Shard, row_width
from headway.records.errors import ConfigurationError

_CHUNK_BYTES = 2 << 20  # of rows in memory at once, beside those of the rank


class FileTensor(NamedTuple):
    """A tensor in a file, whose rows are rows of one parameter, in any order."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    rows: np.ndarray[Any, Any]  # int64: the number of each row in the parameter

    def held_by(self, shard: Shard, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[int, int, slice | Tensor]]:
        """Yield the first row and the number of rows of each run of this tensor's rows that ``shard`` holds, of about
        ``chunk_bytes`` at most, and their places in `Shard.matrix`."""
        held = np.flatnonzero((self.rows >= shard.first) & (self.rows < shard.first + shard.rows))
        chunk_rows = max(1, chunk_bytes // (4 * row_width(self.shape)))
        for run in np.split(held, np.flatnonzero(np.diff(held) != 1) + 1):
            for start in range(0, len(run), chunk_rows):
                file_rows = run[start : start + chunk_rows]
                places = self.rows[file_rows] - shard.first
                first, count = int(places[0]), len(places)
                consecutive = count == 1 or bool((np.diff(places) == 1).all())
                yield int(file_rows[0]), count, slice(first, first + count) if consecutive else torch.from_numpy(places)


class RowNumbers:
    """Numbers for the rows of all parameters of a model, counted over all of them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
        counts = (prod(shape) // row_width(shape) for _, shape in self._parameters)
        self._starts = np.array(list(accumulate(counts, initial=0)))

    def columns(self) -> dict[str, Tensor]:
        """Each parameter's numbers: int64 of its shape, but 1 in the last of several dimensions."""
        return {
            name: torch.arange(start, stop).view((*shape[:-1], 1) if len(shape) > 1 else shape)
            for (name, shape), (start, stop) in zip(self._parameters, pairwise(self._starts.tolist()), strict=True)
        }

    def locate(self, name: str, column: Tensor) -> FileTensor:
        """The tensor ``name`` of a file, in which these numbers came to be. Raises ConfigurationError, which names it,
        if it doesn't consist of rows of one parameter."""
        numbers = column.flatten().numpy()
        position = int(np.searchsorted(self._starts, numbers.min(), "right")) - 1
        parameter, shape = self._parameters[position]
        turned = (column.ndim > 1) != (len(shape) > 1) or (column.ndim > 1 and column.shape[-1] != 1)
        if turned or numbers.max() >= self._starts[position + 1]:
            raise ConfigurationError(
                f"trainer.shards: {name} isn't made of rows of {parameter}, so that ranks can't read or write their "
                "share; valid: 1, with trainer.host_memory = 'none' or 'optimiser'"
            )
        file_shape = (*column.shape[:-1], shape[-1]) if column.ndim > 1 else tuple(column.shape)
        return FileTensor(name, file_shape, parameter, numbers - self._starts[position])


def decoder_tensors(config: DecoderConfig, stored: Collection[str] = ()) -> dict[str, FileTensor]:
    """The tensors of a decoder's folder, by name: experts one by one, or a layer's in one that ``stored`` names."""
    with torch.device("meta"):
        twin = Decoder(config).requires_grad_(False)
    parameters = dict(twin.named_parameters())
    numbers = RowNumbers(parameters)
    columns = numbers.columns()
    for name, column in columns.items():  # expanded, a column takes no more memory
        module_name, _, parameter_name = name.rpartition(".")
        wide = nn.Parameter(column.expand(parameters[name].shape), requires_grad=False)
        twin.get_submodule(module_name)._parameters[parameter_name] = wide
    entries = {entry.name: entry for entry in hugging_face_entries(twin)}
    for fused_entry, replaced_names in fused_expert_entries(twin):
        if fused_entry.name in stored:
            entries[fused_entry.name] = fused_entry
            for name in replaced_names:
                del entries[name]
    views = ((entry, entry.view[..., :1] if len(entry.shape) > 1 else entry.view) for entry in entries.values())
    return {entry.name: numbers.locate(entry.name, view.reshape((*entry.shape[:-1], -1))) for entry, view in views}
