"""Checkpoints: whole or absent, at any instant; corruption is named and stepped over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_trainer import Context, make_batch, make_experiment, make_model, optimiser_tensors

from headway.algorithms.samples import lay_out
from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.trainer import checkpoints
from headway.trainer.checkpoints import (
    CheckpointState,
    checkpoint_path,
    find_checkpoints,
    keep_last,
    latest_valid,
    read_state,
    recover_folder,
    remove_leftovers,
    require_replaceable,
    verify,
    write_folder,
)
from headway.trainer.service import TrainerService

torch.set_num_threads(1)


def fill_with(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "optimizer").write_text(text * 3)

    return fill


def write(run: Path, version: int, text: str = "") -> Path:
    path = checkpoint_path(run, version)
    write_folder(path, fill_with(text or f"v{version}"), CheckpointState(version=version, consumed={version - 1: [7]}))
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    state = verify(path)
    assert (state.version, state.consumed) == (3, {2: [7]})
    assert set(state.files) == {"model/weights", "optimizer"}
    assert find_checkpoints(tmp_path) == [path]
    assert latest_valid(tmp_path) == path


def test_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path) == []
    assert latest_valid(tmp_path) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state"])
def test_corruption_names_the_file_and_falls_back(tmp_path: Path, damage: str) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    file = newer / ("state.json" if damage == "state" else "model/weights")
    if damage == "remove":
        file.unlink()
    else:
        file.write_text({"flip": "v3", "truncate": "", "state": "{"}[damage])
    with pytest.raises(CheckpointCorrupt, match=str(file)):
        verify(newer)
    told: list[CheckpointCorrupt] = []
    assert latest_valid(tmp_path, told.append) == older
    assert len(told) == 1
    shutil.rmtree(older)
    with pytest.raises(CheckpointCorrupt):
        latest_valid(tmp_path)


def test_keep_last(tmp_path: Path) -> None:
    paths = [write(tmp_path, version) for version in (1, 2, 3, 4)]
    assert keep_last(tmp_path, 2) == paths[:2]
    assert find_checkpoints(tmp_path) == paths[2:]
    with pytest.raises(ValueError, match="at least one"):
        keep_last(tmp_path, 0)


def test_failed_write_leaves_the_previous_and_no_rubbish(tmp_path: Path) -> None:
    path = write(tmp_path, 1, "old")

    def full_disk(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder(path, full_disk, CheckpointState(version=1))
    assert (path / "model" / "weights").read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_leftovers_are_removed_at_the_next_start(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path.parent / "step_00000002.tmp" / "model").mkdir(parents=True)
    (tmp_path / "best.tmp").mkdir()
    assert {p.name for p in remove_leftovers(tmp_path)} == {"step_00000002.tmp", "best.tmp"}
    assert find_checkpoints(tmp_path) == [path]


def test_a_folder_is_replaced_only_when_all_of_it_was_written_so(tmp_path: Path) -> None:
    free, empty, ours = tmp_path / "free", tmp_path / "empty", write(tmp_path, 1)
    empty.mkdir()
    for path in (free, empty, ours):
        require_replaceable(path, "sft.output")
    (ours / "notes.txt").write_text("mine")
    others = tmp_path / "models"
    (others / "another").mkdir(parents=True)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("")
    link.symlink_to(empty)
    for path in (ours, others, file, link):
        with pytest.raises(ConfigurationError, match=f"sft.output = '{path}' exists.*valid: a new folder"):
            require_replaceable(path, "sft.output")


@pytest.mark.parametrize("suffix", [".old", ".tmp"])
def test_what_stands_beside_a_folder_is_not_taken_for_a_leftover(tmp_path: Path, suffix: str) -> None:
    beside = tmp_path / f"tiny{suffix}"
    beside.mkdir()
    require_replaceable(tmp_path / "tiny", "sft.output")  # nothing is lost with an empty folder
    (beside / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=f"sft.output = '{tmp_path}/tiny' would remove {beside}"):
        require_replaceable(tmp_path / "tiny", "sft.output")


@pytest.mark.parametrize("path", ["", ".", "..", "models/..", "/"])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="own name"):
        require_replaceable(path, "sft.output")


def test_a_state_with_fields_of_another_release_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, 3) / "state.json"
    file.write_text(file.read_text().replace('"version"', '"config_hash": "abc",\n "version"'))
    assert read_state(file.parent).version == 3


def killed_at(call: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a child that is gone at its n-th step towards the disk; True when it got to the end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done = 0

    def dying(original: Callable) -> Callable:
        def step(*args, **kwargs):
            nonlocal done
            if done == call:
                os._exit(9)
            done += 1
            return original(*args, **kwargs)

        return step

    os.fsync, os.rename, os.unlink, os.mkdir = map(dying, (os.fsync, os.rename, os.unlink, os.mkdir))  # type: ignore[assignment]
    checkpoints.shutil.rmtree = dying(shutil.rmtree)
    action()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [True, False])
def test_kill_at_any_instant_leaves_old_or_new(tmp_path: Path, replaces: bool) -> None:
    """Replacing one checkpoint (a replay after resume), or writing the next and pruning: every step may be the last."""
    outcomes = set()
    for call in range(60):
        run = tmp_path / str(call)
        write(run, 1, "old")
        write(run, 2, "old")

        def action(run: Path = run) -> None:
            write(run, 2 if replaces else 3, "new")
            keep_last(run, 2)

        finished = killed_at(call, action)
        remove_leftovers(run)
        path = latest_valid(run)
        assert path is not None
        text = (path / "model" / "weights").read_text()
        outcomes.add((path.name, text))
        expected = {("step_00000002", "old"), ("step_00000002" if replaces else "step_00000003", "new")}
        assert (path.name, text) in expected
        assert all(p in find_checkpoints(run) for p in (run / "checkpoints").iterdir())
        for path in find_checkpoints(run):
            verify(path)
        if finished:
            assert text == "new"
            break
    else:
        raise AssertionError("never got to the end")
    assert len(outcomes) == 2
    assert call > 8


def test_what_a_kill_leaves_of_an_output_is_known_as_ours(tmp_path: Path) -> None:
    """Replacing a folder: whatever step is the last, the next one may go on, and finds the old content or the new."""
    left, texts = set(), set()
    for call in range(60):
        folder = write(tmp_path / str(call), 1, "old")
        finished = killed_at(call, lambda call=call: write(tmp_path / str(call), 1, "new"))
        left |= {entry.name.removeprefix(folder.name) for entry in folder.parent.iterdir()}
        require_replaceable(folder, "sft.output")
        recover_folder(folder)
        assert os.listdir(folder.parent) == [folder.name]
        verify(folder)
        texts.add((folder / "model" / "weights").read_text())
        if finished:
            break
    else:
        raise AssertionError("never got to the end")
    assert (left, texts) == ({"", ".tmp", ".old"}, {"old", "new"})
    assert call > 8


@pytest.fixture
def experiment(tmp_path: Path) -> dict:
    model = make_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return make_experiment(model, tmp_path / "run", trainer={"warmup_steps": 3})


def parameters(trainer: TrainerService) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.learner.parameters]


def test_resumed_training_is_bit_identical(experiment: dict, tmp_path: Path) -> None:
    straight = TrainerService(Context, experiment=experiment, run_id="a")
    for step in range(4):
        straight.train_step(lay_out(make_batch(step, step=step)))
        if step == 1:
            path = str(checkpoint_path(tmp_path / "run", 2))
            assert straight.save_checkpoint(path, {0: [0, 1], 1: [2]}).version == 2
    resumed = TrainerService(Context, experiment=experiment, run_id="b")
    assert resumed.load_checkpoint(path) == 2
    assert read_state(path).consumed == {0: [0, 1], 1: [2]}
    for step in (2, 3):
        report = resumed.train_step(lay_out(make_batch(step, step=step)))
    assert report.metrics["learning_rate"] == pytest.approx(1e-3)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_checkpoint_before_the_first_step_and_pruning(experiment: dict, tmp_path: Path) -> None:
    trainer = TrainerService(Context, experiment=experiment, run_id="a")
    for version in range(4):
        trainer.save_checkpoint(str(checkpoint_path(tmp_path / "run", version)), {})
        trainer.train_step(lay_out(make_batch(version, step=version)))
    assert [p.name for p in find_checkpoints(tmp_path / "run")] == ["step_00000002", "step_00000003"]
    fresh = TrainerService(Context, experiment=experiment, run_id="b")
    fresh.save_checkpoint(str(tmp_path / "other" / "checkpoints" / "step_00000000"), {})
    assert trainer.load_checkpoint(str(tmp_path / "other" / "checkpoints" / "step_00000000")) == 0
    assert all(torch.equal(a, b) for a, b in zip(parameters(trainer), parameters(fresh), strict=True))
    assert optimiser_tensors(trainer.learner) == {}


def test_corrupt_checkpoint_is_refused_before_anything_changes(experiment: dict, tmp_path: Path) -> None:
    trainer = TrainerService(Context, experiment=experiment, run_id="a")
    trainer.train_step(lay_out(make_batch(0)))
    path = checkpoint_path(tmp_path / "run", 1)
    trainer.save_checkpoint(str(path), {})
    trainer.train_step(lay_out(make_batch(1, step=1)))
    before = parameters(trainer)
    with (path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        trainer.load_checkpoint(str(path))
    assert trainer.version == 2
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(trainer), strict=True))


def test_best_is_a_model_folder_with_state(experiment: dict, tmp_path: Path) -> None:
    trainer = TrainerService(Context, experiment=experiment, run_id="a")
    best = tmp_path / "run" / "best"
    trainer.save_weights(str(best), {"solve_rate": 0.5})
    trainer.train_step(lay_out(make_batch(0)))
    trainer.save_weights(str(best), {"solve_rate": 0.75})
    state = verify(best)
    assert (state.version, state.metrics) == (1, {"solve_rate": 0.75})
    assert {"config.json", "model.safetensors", "tokenizer.json", "state.json"} <= {p.name for p in best.iterdir()}
    after = parameters(trainer)
    trainer.train_step(lay_out(make_batch(1, step=1)))
    trainer.load_weights(str(best))
    assert all(torch.equal(a, b) for a, b in zip(after, parameters(trainer), strict=True))
    assert trainer.version == 2


@pytest.mark.slow
def test_a_flipped_bit_of_state_json_is_found(tmp_path: Path) -> None:
    """Of the version, an admission index, a checksum, a key: whatever is still JSON is refused, or changes nothing."""
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    file = newer / "state.json"
    whole, state = file.read_bytes(), verify(newer)
    for position in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            file.write_bytes(bytes(flipped))
            try:
                found = verify(newer)
            except CheckpointCorrupt:
                continue
            assert msgspec.structs.replace(found, checksum=state.checksum) == state
    file.write_bytes(whole.replace(b'"version": 2', b'"version": 3'))
    told: list[CheckpointCorrupt] = []
    assert latest_valid(tmp_path, told.append) == older
    assert "state.json: checksum" in str(told[0])


def test_a_state_of_another_folders_version_or_without_a_checksum_is_refused(tmp_path: Path) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    shutil.rmtree(newer)
    older.rename(newer)
    with pytest.raises(CheckpointCorrupt, match=r"state\.json: version 1, in the folder of another version"):
        verify(newer)
    path = write(tmp_path, 3)
    raw = json.loads((path / "state.json").read_text())
    del raw["checksum"]
    (path / "state.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointCorrupt, match=r"state\.json: checksum , expected"):
        verify(path)
