"""Versions rebuilt from checkpoints and kept deltas are those that were published, bit for bit, or refused by name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import Context, make_batch, make_experiment, make_model
from torch import Tensor

from headway.algorithms.samples import lay_out
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.models.loading import load_model
from headway.records.errors import CheckpointCorrupt, ConfigurationError, WeightsCorrupt
from headway.services.published_version import rebuild
from headway.trainer.checkpoints import DELTAS, checkpoint_path
from headway.trainer.service import TrainerService
from headway.weights.shared_memory import Subscriber

torch.set_num_threads(1)


class TrainedRun:
    """A trainer that publishes each version, and the bits that readers got."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        raw = make_experiment(
            make_model(folder / "model"),
            self.folder,
            trainer={"learning_rate": 2e-6, "micro_batch_tokens": 64, "dtype": "float32"},
            generator={"dtype": "bfloat16"},
            checkpoint={"delta_bytes": 10**6, "keep_last": 3, **checkpoint},
        )
        self.experiment: Experiment = validate_experiment(raw, "test")
        self.service = TrainerService(Context, experiment=raw, run_id=folder.name)
        self.published: dict[int, dict[str, Tensor]] = {}
        self._subscriber = Subscriber()

    def publish(self) -> None:
        published = self.service.publish(self.service.version)
        assert published is not None
        tensors = self._subscriber.fetch(published)
        self.published[published.version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            version = self.service.version
            self.service.train_step(lay_out(make_batch(version, step=version)))
            self.publish()

    def checkpoint(self) -> None:
        version = self.service.version
        self.service.save_checkpoint(str(checkpoint_path(self.folder, version)), {})

    def rebuilt(self, version: int, output: Path) -> dict[str, Tensor]:
        rebuild(self.folder, self.experiment, version, output)
        return dict(load_model(output, "bfloat16").named_parameters())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainedRun]:
    trained = TrainedRun(tmp_path)
    yield trained
    trained.service.close()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    bits = ((left[name].view(torch.int16), right[name].view(torch.int16)) for name in right)
    return left.keys() == right.keys() and all(torch.equal(*pair) for pair in bits)


def test_versions_between_checkpoints_are_rebuilt_bit_for_bit(run: TrainedRun, tmp_path: Path):
    run.publish()
    for _ in range(3):
        run.train(10)
        run.checkpoint()
    run.train(4)
    versions = random.Random(0).sample(range(10, 35), 20)
    for version in versions:
        assert same(run.rebuilt(version, tmp_path / f"v{version}"), run.published[version]), version
    with pytest.raises(WeightsCorrupt, match="no delta to version 9"):
        run.rebuilt(9, tmp_path / "early")
    with pytest.raises(WeightsCorrupt, match="no delta to version 40"):
        run.rebuilt(40, tmp_path / "late")
    with pytest.raises(ConfigurationError, match="exists"):
        run.rebuilt(12, tmp_path / "v10" if 10 in versions else tmp_path / f"v{versions[0]}")
    assert not list(tmp_path.glob(".v*")), "nothing half-made is left"


def test_before_the_first_checkpoint_the_model_itself_is_the_base(run: TrainedRun, tmp_path: Path):
    run.publish()
    run.train(3)
    assert same(run.rebuilt(3, tmp_path / "v3"), run.published[3])


def test_damage_and_missing_deltas_are_named(run: TrainedRun, tmp_path: Path):
    run.publish()
    run.train(2)
    run.checkpoint()
    run.train(4)
    (delta,) = (run.folder / DELTAS).glob("00000004-*")
    content = bytearray(delta.read_bytes())
    refused = 0
    for position in range(3, len(content), len(content) // 40):
        flipped = bytearray(content)
        flipped[position] ^= 4
        delta.write_bytes(flipped)
        output = tmp_path / f"v5-{position}"
        try:  # what isn't used may be wrong: the table of a version between
            assert same(run.rebuilt(5, output), run.published[5])
        except WeightsCorrupt:
            refused += 1
            assert not output.exists()
    assert refused > 20
    delta.unlink()
    with pytest.raises(WeightsCorrupt, match="no delta to version 4"):
        run.rebuilt(5, tmp_path / "v5")
    model = next((checkpoint_path(run.folder, 2) / "model").glob("*.safetensors"))
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        run.rebuilt(3, tmp_path / "v3")


def test_steps_that_a_restart_undoes_leave_no_delta_that_is_used(run: TrainedRun, tmp_path: Path):
    run.publish()
    run.train(2)
    run.checkpoint()
    run.train(3)
    run.service.load_checkpoint(str(checkpoint_path(run.folder, 2)))
    run.publish()
    run.service.train_step(lay_out(make_batch(77, step=2)))
    run.publish()
    assert same(run.rebuilt(3, tmp_path / "v3"), run.published[3])
    with pytest.raises(WeightsCorrupt, match="no delta to version 5"):
        run.rebuilt(5, tmp_path / "v5")


def test_bytes_are_limited(tmp_path: Path):
    run = TrainedRun(tmp_path, delta_bytes=4_000)
    run.publish()
    run.train(30)
    sizes = [path.stat().st_size for path in (run.folder / DELTAS).iterdir()]
    run.service.close()
    assert 2 <= len(sizes) < 30
    assert sum(sizes) <= 4_000


def test_checkpoint_of_another_run_is_refused(run: TrainedRun, tmp_path: Path):
    run.publish()
    run.train(1)
    run.checkpoint()
    run.train(1)
    (other_folder := tmp_path / "other").mkdir()
    other = TrainedRun(other_folder)
    other.service.train_step(lay_out(make_batch(5, step=0)))
    other.checkpoint()
    other.service.close()
    shutil.rmtree(checkpoint_path(run.folder, 1))
    shutil.copytree(checkpoint_path(other.folder, 1), checkpoint_path(run.folder, 1))
    with pytest.raises(WeightsCorrupt, match="isn't the one that was published"):
        run.rebuilt(2, tmp_path / "v2")
