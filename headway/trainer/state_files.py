"""The optimiser's state on disk, a file for each rank: AdamW's moments and step counters.

``state-R-of-N.safetensors``, R from 1, holds the rows of one rank: tensor ``NAME@FIRST`` has the rows of NAME from row
FIRST on, and the metadata the undivided shapes and the number of the save. Any number of ranks, in any layout, reads
what N ranks wrote. A checkpoint of an earlier release has all tensors in one ``optimizer.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.models.shards.row_map import FileTensor
from headway.models.shards.shard import Shard, by_name, row_width
from headway.models.shards.tensor_files import fill, write_tensors
from headway.models.weight_files import StoredTensor, stored_tensors
from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.trainer.checkpoints import checksum_of

_WHOLE_FILE = "optimizer.safetensors"  # of earlier releases
ATTACHED = "critic/"  # what the names of an `AttachedState` begin with


class AttachedState(Protocol):
    """State that is trained beside a model, in the same files from the first checkpoint on."""

    def shards(self) -> list[Shard]:
        """This rank's rows, in its memory."""
        ...

    def resident(self) -> list[Tensor]:
        """All tensors that stay on the device between two steps."""
        ...


def state_file(rank: int, ranks: int) -> str:
    """The name of a rank's file; ``rank`` counts from 0."""
    return f"state-{rank + 1}-of-{ranks}.safetensors"


def write_state(folder: Path, shards: Iterable[Shard], rank: int, ranks: int, save: int) -> str:
    """Write this rank's file and flush it to disk. ``save``: a number that all files of a save have, and no other save
    of the run. Returns the file's checksum as `checkpoints.checksum_of` does. Raises OSError."""
    shards_by_name = by_name(shards)
    tensors = [
        _file_tensor(f"{shard.name}@{shard.first}", tuple(shard.tensor.shape), shard.first)
        for shards in shards_by_name.values()
        for shard in shards
    ]
    shapes = {name: shards[0].shape for name, shards in shards_by_name.items()}
    file = folder / state_file(rank, ranks)
    write_tensors(file, tensors, shards_by_name, {"save": str(save), "shapes": json.dumps(shapes)})
    return checksum_of(file)


class StateFiles:
    """The state in a checkpoint's folder, whose files' checksums have been verified (`checkpoints.verify`).

    Lifecycle: its construction reads no rows; `fill` reads those of the given shards.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises CheckpointCorrupt, which names the file, for files that are missing, damaged or of several saves."""
        self._folder, save = Path(folder), None
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the undivided tensors, by name
        self._tensors: dict[str, FileTensor] = {}  # that have rows, by name in the files
        self._stored: dict[str, StoredTensor] = {}
        for file in _files(self._folder):
            stored, metadata = _read_header(file)
            if save not in (None, file_save := metadata.get("save", "")):
                raise CheckpointCorrupt(f"{file}: of save {file_save}, the files before it of save {save}")
            save = file_save
            self.shapes |= {name: tuple(shape) for name, shape in json.loads(metadata.get("shapes", "{}")).items()}
            for full_name, tensor in stored.items():
                name, _, first = full_name.rpartition("@") if "save" in metadata else (full_name, "", "0")
                self.shapes.setdefault(name, tuple(tensor.shape))
                if len(tensor.content):
                    self._tensors[full_name] = _file_tensor(full_name, tuple(tensor.shape), int(first), name)
                    self._stored[full_name] = tensor

    def fill(self, shards: Sequence[Shard]) -> None:
        """Read the rows of ``shards``: those that this rank holds of every tensor in `shapes`. Raises
        CheckpointCorrupt, before any change, for the state of another model, and for rows that are in no file."""
        shards_by_name = by_name(shards)
        if differing_names := sorted(shards_by_name.keys() ^ self.shapes.keys()):
            raise CheckpointCorrupt(f"{self._folder}: state of another model: {differing_names[0]} isn't in both")
        bounds_by_name: dict[str, list[tuple[int, int]]] = {name: [] for name in self.shapes}
        for tensor in self._tensors.values():
            bounds_by_name[tensor.parameter].append((int(tensor.rows[0]), int(tensor.rows[-1]) + 1))
        for shard in shards:
            if shard.shape != (stored_shape := self.shapes[shard.name]):
                reason = f"{shard.name} has shape {list(stored_shape)}, the model's has {list(shard.shape)}"
                raise CheckpointCorrupt(f"{self._folder}: state of another model: {reason}")
            next_row = shard.first
            for first, stop in sorted(bounds_by_name[shard.name]):
                next_row = max(next_row, stop) if first <= next_row else next_row
            if next_row < shard.first + shard.rows:
                raise CheckpointCorrupt(f"{self._folder}: row {next_row} of {shard.name} is in no file")
        try:
            fill(self._tensors, self._stored, shards_by_name)
        except (OSError, ConfigurationError) as error:
            raise CheckpointCorrupt(f"{self._folder}: {error}") from None


def _file_tensor(full_name: str, shape: tuple[int, ...], first: int, name: str = "") -> FileTensor:
    rows = int(np.prod(shape)) // row_width(shape)
    return FileTensor(full_name, shape, name or full_name.rpartition("@")[0], np.arange(first, first + rows))


def _files(folder: Path) -> list[Path]:
    files = {file.name: file for file in folder.glob("state-*-of-*.safetensors")}
    if not files:
        return [folder / _WHOLE_FILE]
    ranks = int(min(files).removesuffix(".safetensors").rpartition("-")[2])
    names = {state_file(rank, ranks) for rank in range(ranks)}
    if other_names := sorted(names ^ files.keys()):
        reason = "is missing" if other_names[0] in names else f"is of a save by another number of ranks than {ranks}"
        raise CheckpointCorrupt(f"{folder / other_names[0]}: {reason}; valid: the {ranks} files of one save")
    return sorted(files.values())


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as reader:
            metadata = reader.metadata() or {}
        return stored_tensors([file]), metadata
    except (SafetensorError, OSError, ConfigurationError) as error:
        raise CheckpointCorrupt(f"{file}: {error}") from None
