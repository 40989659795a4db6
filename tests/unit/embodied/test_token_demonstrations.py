"""Demonstrations: folders of LeRobot's and Minari's formats as conversations."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet
from token_runs import token_experiment

from headway.embodied.tokens.demonstrations import conversations, episodes_of
from headway.records.errors import ConfigurationError

LENGTHS = (3, 7)  # steps of episodes
OBSERVATIONS = [np.arange(2 * n + 2, dtype=np.float32).reshape(-1, 2) / 20 for n in LENGTHS]  # and one behind the last
ACTIONS = [np.linspace(-1, 1, n, dtype=np.float32)[:, None] for n in LENGTHS]


def lerobot(folder: Path, *, one_file: bool) -> Path:
    """Version 3 has several episodes in a file, version 2 one."""
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps({"codebase_version": "v3.0" if one_file else "v2.1"}))
    tables = [
        pa.table(
            {
                "observation.state": list(seen[:-1]),
                "action": list(actions),
                "episode_index": [index] * len(actions),
                "frame_index": range(len(actions)),
            }
        )
        for index, (seen, actions) in enumerate(zip(OBSERVATIONS, ACTIONS, strict=True))
    ]
    chunk = folder / "data" / "chunk-000"
    chunk.mkdir(parents=True)
    for index, table in enumerate([pa.concat_tables(tables)] if one_file else tables):
        name = f"file-{index:03d}" if one_file else f"episode_{index:06d}"
        parquet.write_table(table, chunk / f"{name}.parquet")
    return folder


def minari(folder: Path, form: str) -> Path:
    """As Minari 0.5 writes it: a row more than there are actions in its tables, none more in HDF5."""
    data = folder / "data"
    data.mkdir(parents=True)
    (data / "metadata.json").write_text(json.dumps({"data_format": form}))
    if form == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(data / "main_data.hdf5", "w") as file:
            for index, (seen, actions) in enumerate(zip(OBSERVATIONS, ACTIONS, strict=True)):
                group = file.create_group(f"episode_{index}")
                group["observations"], group["actions"] = seen, actions
        return folder
    for index, (seen, actions) in enumerate(zip(OBSERVATIONS, ACTIONS, strict=True)):
        padded = np.concatenate([actions, np.zeros((1, 1), np.float32)])
        columns = {"episode_id": [index] * len(seen), "observations": list(seen), "actions": list(padded)}
        dataset.write_dataset(
            pa.table(columns),
            data,
            format=form,
            partitioning=["episode_id"],
            existing_data_behavior="overwrite_or_ignore",
        )
        (data / str(index) / "metadata.json").write_text(json.dumps({"id": index}))
    return folder


def experiment_file(folder: Path, **policy: Any) -> str:
    experiment = token_experiment(folder / "run", "none", policy=policy)
    keys = experiment.model_dump(mode="json", exclude_unset=True)
    lines = [line for section, table in keys.items() for line in (f"[{section}]", *map(_line, table.items()))]
    text = "\n".join(lines)
    assert tomllib.loads(text)
    file = folder / "experiment.toml"
    file.write_text(text)
    return str(file)


def _line(pair: tuple[str, Any]) -> str:
    return f"{pair[0]} = {json.dumps(pair[1])}"


def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "LeRobot 2": lerobot(tmp_path / "2", one_file=False),
        "LeRobot 3": lerobot(tmp_path / "3", one_file=True),
        **{form: minari(tmp_path / form, form) for form in ("arrow", "parquet")},
    }


def require_episodes(folder: Path) -> None:
    episodes = [*episodes_of(folder)]
    for (seen, actions), all_seen, all_actions in zip(episodes, OBSERVATIONS, ACTIONS, strict=True):
        np.testing.assert_allclose(seen, all_seen[: len(seen)])
        assert len(seen) >= len(all_actions)
        np.testing.assert_allclose(actions, all_actions)


def test_episodes_of_every_format_are_read(tmp_path: Path):
    for folder in folders(tmp_path).values():
        require_episodes(folder)


def test_episodes_of_minari_in_hdf5_are_read(tmp_path: Path):
    require_episodes(minari(tmp_path / "h", "hdf5"))


def test_each_chunk_is_a_conversation_with_the_means_of_its_steps(tmp_path: Path):
    file = experiment_file(tmp_path, chunk=2, repeat=2, action_bins=5)
    rows = [*conversations(file, str(lerobot(tmp_path / "l", one_file=True)))]
    texts = [[message["content"] for message in row["messages"]] for row in rows]
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * 3
    assert texts[0] == ["go k", "b e"]  # means of -1, 0 and of 1, 1: the last action lasts
    assert [answer for _, answer in texts[1:]] == ["a c", "d e"]  # -0.83, -0.17; 0.5, 1


def test_folders_and_sizes_that_dont_fit_are_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"holds no demonstrations; valid: LeRobot's"):
        next(episodes_of(tmp_path))
    folder = lerobot(tmp_path / "l", one_file=True)
    file = folder / "data" / "chunk-000" / "file-000.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.drop_columns(["action"]), file)
    with pytest.raises(ConfigurationError, match=r"no column 'action'; it has: observation\.state"):
        next(episodes_of(folder))
    wide = [np.zeros(2, np.float32)] * len(table)
    parquet.write_table(table.drop_columns(["action"]).append_column("action", pa.array(wide)), file)
    with pytest.raises(ConfigurationError, match=r"have \(2, 2\) numbers; valid: \(2, 1\)"):
        next(conversations(experiment_file(tmp_path), str(folder)))
