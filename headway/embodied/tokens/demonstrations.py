"""Demonstrations of robots as conversations: folders of LeRobot and Minari, by their formats, with a policy's codes.

``python -m headway.embodied.tokens.demonstrations EXPERIMENT.toml FOLDER`` prints lines of JSON, for ``sft.data``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import dataset, parquet

from headway.config.load import load_file
from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import seed_of
from headway.embodied.records import Array
from headway.embodied.simulators.opening import open_simulator
from headway.embodied.tokens.codes import ActionCode, ObservationCode
from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_extra

_OBSERVATIONS, _ACTIONS = "observation.state", "action"  # columns of LeRobot's robots without pictures


def conversations(experiment: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yield a conversation for each chunk of each episode in a folder: the coded observation, and the coded actions.

    ``experiment``: the file whose ``[policy]`` has the codes, for its simulator's spaces. Raises ConfigurationError for
    a folder of another format, and for observations or actions of other sizes than the simulator's."""
    settings = load_file(experiment, [], SimulatorExperiment)
    simulator = open_simulator(settings.simulator, 1, partial(seed_of, settings.run.seed, 0, 0))
    spaces = simulator.spaces
    simulator.close()
    observing, acting = (
        ObservationCode(settings.policy, spaces.observations),
        ActionCode(settings.policy, spaces.actions),
    )
    repeat, steps = settings.policy.repeat, settings.policy.chunk * settings.policy.repeat
    for observations, actions in episodes_of(Path(folder)):
        actions_td = actions.reshape(len(actions), -1).astype(np.float64)
        sizes, valid = (observations[0].size, actions_td.shape[1]), (spaces.observations.low.size, acting.dimensions)
        if sizes != valid:
            raise ConfigurationError(f"{folder}: observations and actions have {sizes} numbers; valid: {valid}")
        prompts = observing.texts(observations[: len(actions) : steps])
        for prompt, first in zip(prompts, range(0, len(actions), steps), strict=True):
            idx_t = np.minimum(np.arange(first, first + steps), len(actions) - 1)  # the last action lasts
            means_cd = actions_td[idx_t].reshape(-1, repeat, actions_td.shape[1]).mean(1)
            answer = {"role": "assistant", "content": acting.text(means_cd.reshape(-1))}
            yield {"messages": [{"role": "user", "content": prompt}, answer]}


def episodes_of(folder: Path) -> Iterator[tuple[Array, Array]]:
    """Yield the observations [t, ...] or [t + 1, ...] and the actions [t, ...] of each episode, in order. Raises
    ConfigurationError for a folder of another format."""
    data = folder / "data"
    if (folder / "meta" / "info.json").is_file():
        yield from _lerobot(data)
    elif (data / "main_data.hdf5").is_file():
        h5py = import_extra("h5py", "minari", "demonstrations of Minari in HDF5")
        with h5py.File(data / "main_data.hdf5") as file:
            for number in range(sum(name.startswith("episode_") for name in file)):
                episode = file[f"episode_{number}"]
                if not hasattr(episode["observations"], "shape"):
                    raise ConfigurationError(f"{folder}: observations are no array; valid: a Box of numbers")
                yield np.asarray(episode["observations"]), np.asarray(episode["actions"])
    elif (data / "metadata.json").is_file():
        yield from _minari_tables(data, json.loads((data / "metadata.json").read_text())["data_format"])
    else:
        raise ConfigurationError(
            f"{folder} holds no demonstrations; valid: LeRobot's (meta/info.json) or Minari's (data/main_data.hdf5, or "
            "data/metadata.json with Arrow or Parquet files)"
        )


def _lerobot(data: Path) -> Iterator[tuple[Array, Array]]:
    """The episodes of LeRobot's Parquet files: one in each (version 2), or several one after another (version 3)."""
    for file in sorted(data.rglob("*.parquet")):
        names = parquet.read_schema(file).names
        if missing := {_OBSERVATIONS, _ACTIONS, "episode_index"} - {*names}:
            raise ConfigurationError(f"{file}: no column {sorted(missing)[0]!r}; it has: {', '.join(names)}")
        table = parquet.read_table(file, columns=[_OBSERVATIONS, _ACTIONS, "episode_index"])
        observations, actions = (_stacked(table[name]) for name in (_OBSERVATIONS, _ACTIONS))
        ends = np.flatnonzero(np.diff(table["episode_index"].to_numpy())) + 1
        yield from zip(np.split(observations, ends), np.split(actions, ends), strict=True)


def _minari_tables(data: Path, form: str) -> Iterator[tuple[Array, Array]]:
    """The episodes of Minari's Arrow or Parquet files, a folder each; the last row has the last observation alone."""
    for folder in sorted((path for path in data.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
        table = dataset.dataset(str(folder), format=form, ignore_prefixes=["_", ".", "metadata.json"]).to_table()
        yield _stacked(table["observations"]), _stacked(table["actions"])[:-1]


def _stacked(column: pa.ChunkedArray) -> Array:
    """A column of lists of equal lengths, or of numbers, as one array."""
    return np.array(column.to_pylist())


if __name__ == "__main__":
    for row in conversations(*sys.argv[1:3]):
        print(json.dumps(row))
