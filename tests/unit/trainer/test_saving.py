"""Saving and loading by rows, by any number of ranks: what is written is the state of its begin, a fault of one rank is
that of all, and model folders equal their source."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from rank_processes import loaded, processes, state_of
from rank_saves import (
    completed,
    differing_folder,
    full_disk,
    loaded_weights,
    refused_checkpoint,
    saved_at_the_start,
    saved_beside_a_step,
)
from safetensors.torch import load_file, save_file
from tiny_trainer import Context, make_batch, make_experiment, make_model, optimiser_tensors

from headway.algorithms.samples import lay_out
from headway.models.loading import load_model, weights_of
from headway.records.errors import StorageFailed
from headway.trainer import saving
from headway.trainer.checkpoints import CheckpointState, commit_folder, read_state, scratch_of, verify
from headway.trainer.service import TrainerService
from tests.unit.trainer.test_sharding import experiment_of

torch.set_num_threads(1)
pytestmark = pytest.mark.real
LAYOUTS = {"1 rank": (1, 1), "2 shards": (2, 2), "2 copies of 2": (4, 2), "2 copies": (2, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerService:
    experiment = make_experiment(make_model(tmp_path / "model"), tmp_path / "run")
    trainer = TrainerService(Context, experiment=experiment, run_id="saving")
    trainer.train_step(lay_out(make_batch(0)))
    return trainer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_beside_a_step_is_the_state_of_its_begin(folder: Path, tmp_path: Path, layout: str) -> None:
    (size, shards), path = LAYOUTS[layout], tmp_path / "checkpoints" / "step_00000001"
    states = processes(size).call(saved_beside_a_step, folder, experiment_of(folder, "plain", shards), str(path))
    assert verify(path).version == 1
    writers = 1 if layout == "2 copies" else shards
    names = {file.name for file in path.glob("*.safetensors")}
    assert names == {f"state-{rank + 1}-of-{writers}.safetensors" for rank in range(writers)}
    (one,) = processes(1).call(
        loaded, folder, experiment_of(folder, "plain"), str(path), str(tmp_path / "x" / "step_1")
    )
    assert one["state"].keys() == states[0].keys()
    assert all(np.array_equal(values, states[0][name]) for name, values in one["state"].items())


@pytest.mark.parametrize("case", ["plain", "untied", pytest.param("mixture", marks=pytest.mark.slow), "transformers"])
def test_the_model_folder_of_four_ranks_equals_its_source(folder: Path, tmp_path: Path, case: str) -> None:
    experiment, target = experiment_of(folder, case, 4), tmp_path / "best"
    processes(4).call(saved_at_the_start, folder, experiment, str(target))
    source = Path(experiment["model"]["path"])
    expected = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    written = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    modules = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, target)
    ]
    ids = torch.arange(7)[None]
    assert torch.equal(*(module.eval()(ids).logits for module in modules))
    if case != "transformers":
        models = [weights_of(load_model(path)) for path in (source, target)]
        assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.parametrize("case", ["plain", "transformers"])
def test_ranks_load_the_weights_of_a_model_folder_by_rows(folder: Path, case: str) -> None:
    experiment = experiment_of(folder, case, 2)
    ((first, _),) = processes(1).call(loaded_weights, folder, experiment_of(folder, case), experiment["model"]["path"])
    for stepped, state in processes(2).call(loaded_weights, folder, experiment, experiment["model"]["path"]):
        moments = [name for name in state if "/exp_avg" in name]
        assert all(np.array_equal(state[name], stepped[name]) for name in moments)
        weights = sorted(state.keys() - moments)
        assert not all(np.array_equal(state[name], stepped[name]) for name in weights)
        assert first.keys() == state.keys()
    source = Path(experiment["model"]["path"])
    if case == "plain":
        expected = weights_of(load_model(source))
        assert all(np.array_equal(state[name], expected[name].numpy()) for name in weights)


def test_a_checkpoint_of_an_earlier_release_is_resumed_by_two_ranks(
    folder: Path, tmp_path: Path, trainer: TrainerService
) -> None:
    path = tmp_path / "checkpoints" / "step_00000001"
    trainer.save_checkpoint(str(path), {})
    scratch_of(path).mkdir()
    shutil.copytree(path / "model", scratch_of(path) / "model")
    (scratch_of(path) / "headway-is-writing-here").touch()
    save_file({name: tensor.clone() for name, tensor in optimiser_tensors(trainer.learner).items()},
              scratch_of(path) / "optimizer.safetensors")  # fmt: skip
    commit_folder(path, CheckpointState(version=1, random_state=read_state(path).random_state))
    assert {file.name for file in path.glob("*.safetensors")} == {"optimizer.safetensors"}
    raw = make_experiment(str(tmp_path / "model"), tmp_path / "run", trainer={"devices": ["cpu:0"] * 2, "shards": 2})
    expected = state_of(trainer)
    for actual in processes(2).call(loaded, tmp_path, raw, str(path), str(tmp_path / "x" / "step_00000001")):
        assert all(np.array_equal(values, actual["state"][name]) for name, values in expected.items())


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "weights"])
def test_a_damaged_file_is_named_by_all_ranks_and_nothing_changes(folder: Path, tmp_path: Path, damage: str) -> None:
    path, experiment = tmp_path / "checkpoints" / "step_00000001", experiment_of(folder, "plain", 4)
    processes(4).call(saved_beside_a_step, folder, experiment, str(path))
    file = path / ("model/model-00002-of-00004.safetensors" if damage == "weights" else "state-2-of-4.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        content[-1] ^= 1
        file.write_bytes(content[:-8] if damage == "cut" else content)
    for message, unchanged in processes(4).call(refused_checkpoint, folder, experiment, str(path)):
        assert message.startswith(str(file))
        assert unchanged


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_keeps_all_from_saving(folder: Path, tmp_path: Path, rank: int) -> None:
    path, experiment = tmp_path / "checkpoints" / "step_00000001", experiment_of(folder, "plain", 2)
    for message in processes(2).call(full_disk, folder, experiment, str(path), rank):
        assert "step_00000001 can't be written: [Errno 28] No space left on device; free some space" in message
    assert verify(path).version == 1


def test_ranks_with_differing_model_folders_dont_start(folder: Path, tmp_path: Path) -> None:
    experiment = experiment_of(folder, "plain", 2)
    other = make_model(tmp_path / "other", vocabulary=41)
    for message in processes(2).call(differing_folder, tmp_path, experiment, [experiment["model"]["path"], other]):
        assert "the trainer's ranks differ in start: model.path = " in message


def test_begin_does_not_wait_for_the_disk_and_the_next_begin_does(trainer: TrainerService, tmp_path: Path) -> None:
    permit, paths = threading.Event(), [tmp_path / str(number) / "step_00000001" for number in range(2)]
    write = saving.write_state

    def slow(*arguments: Any) -> str:
        assert permit.wait(60)
        return write(*arguments)

    with mock.patch.object(saving, "write_state", slow):
        trainer.begin_checkpoint(str(paths[0]), {})
        assert not trainer.checkpoint_written().done()
        threading.Timer(0.2, permit.set).start()
        trainer.begin_checkpoint(str(paths[1]), {})
        assert permit.is_set()
    completed(trainer)
    assert not any(tmp_path.glob("0/*")), "what was begun and not committed is removed"
    assert verify(paths[1]).version == 1
    trainer.close()


def test_a_discarded_checkpoint_leaves_the_one_before(trainer: TrainerService, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_00000001"
    trainer.save_checkpoint(str(path), {})
    trainer.begin_checkpoint(str(path), {0: [7]})
    trainer.discard_checkpoint()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert read_state(path).consumed == {}
    with mock.patch.object(saving, "write_state", side_effect=OSError(28, "No space left on device")):
        trainer.begin_checkpoint(str(path), {0: [7]})
        with pytest.raises(StorageFailed, match="step_00000001 can't be written"):
            trainer.checkpoint_written().result()
    trainer.save_checkpoint(str(path), {0: [8]})
    assert read_state(path).consumed == {0: [8]}
    assert json.loads((path / "model" / "config.json").read_text())["dtype"] == "float32"
    trainer.close()
