"""The moving average of weights as the reference of a KL penalty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import build_arrays, lay_out
from headway.config.load import validate_experiment
from headway.records.errors import ConfigurationError
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.service import TrainerService

torch.set_num_threads(1)
DECAY = 0.75


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "m"
    make_model(path)
    (path / "tokenizer.json").write_text("{}")
    return str(path)


def experiment(model: str, run: Path = Path("/nowhere"), /, **sections: Any) -> dict[str, Any]:
    algorithm = {"kl_coefficient": 0.2, "reference_decay": DECAY} | sections.pop("algorithm", {})
    trainer = {"learning_rate": 1e-2} | sections.pop("trainer", {})
    return make_experiment(model, run, algorithm=algorithm, trainer=trainer, **sections)


def service(model: str, run: Path = Path("/nowhere"), **sections: Any) -> TrainerService:
    return TrainerService(Context, experiment=experiment(model, run, **sections), run_id="test")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_average_of_all_weights_so_far(model: str, dtype: str) -> None:
    trainer = service(model, trainer={"dtype": dtype})
    learner = trainer.learner
    assert learner.average is not None
    expected = {name: p.detach().double() for name, p in learner.masters.trained().items()}
    assert trainer.train_step(lay_out(make_batch(0))).metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    for step in range(1, 6):
        for name, weights in learner.masters.trained().items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weights.double()
        for name, average in learner.average.tensors.items():
            assert torch.allclose(average.double(), expected[name], rtol=0, atol=1e-6)
        report = trainer.train_step(lay_out(make_batch(step, step=step)))
        assert report.metrics["kl_reference"] > 1e-6
    assert learner.reference is not None
    for name, parameter in learner.reference.named_parameters():
        assert parameter.dtype == learner.dtype
        assert torch.equal(parameter, learner.average.tensors[name].to(learner.dtype))
    sizes = {id(tensor): tensor.nbytes for tensor in learner.resident()}
    assert all(id(tensor) in sizes or dtype == "float32" for tensor in learner.average.tensors.values())


def test_a_teacher_of_the_same_folder_stays_as_it_was(model: str) -> None:
    trainer = service(model, algorithm={"teacher": "first"}, teachers={"first": {"path": model}})
    reference, teacher = trainer.learner.frozen
    assert reference is trainer.learner.reference
    stored = [parameter.clone() for parameter in teacher.parameters()]
    trainer.train_step(lay_out(make_batch(0)))
    trainer.train_step(lay_out(make_batch(1, step=1)))
    for kept, taught, averaged in zip(stored, teacher.parameters(), reference.parameters(), strict=True):
        assert torch.equal(taught, kept)
        assert not torch.equal(averaged, kept)


def test_a_skipped_step_moves_no_average(model: str) -> None:
    trainer = service(model, algorithm={"reference_decay": 0.0})
    average = trainer.learner.average
    assert average is not None
    trainer.policy.accumulate_gradients(build_arrays(make_batch(0)))
    trainer.learner.update(trainer.learner.optimiser_settings(1e-2), 0.0)
    stored = {name: tensor.clone() for name, tensor in average.tensors.items()}
    for name, weights in trainer.learner.masters.trained().items():
        assert torch.equal(weights, stored[name]), "without decay it is the weights"
    trainer.policy.accumulate_gradients(build_arrays(make_batch(1)))
    assert not trainer.learner.update(trainer.learner.optimiser_settings(1e-2), float("nan")).applied
    assert all(torch.equal(tensor, stored[name]) for name, tensor in average.tensors.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_same_average_and_bits(model: str, tmp_path: Path, dtype: str) -> None:
    straight = service(model, tmp_path, trainer={"dtype": dtype})
    paths = [str(checkpoint_path(tmp_path, version)) for version in (0, 2)]
    straight.save_checkpoint(paths[0], {})
    for step in range(4):
        straight.train_step(lay_out(make_batch(step, step=step)))
        if step == 1:
            straight.save_checkpoint(paths[1], {})
    for version, path in zip((2, 0), reversed(paths), strict=True):  # the second load goes back to the beginning
        resumed = service(model, tmp_path, trainer={"dtype": dtype})
        resumed.train_step(lay_out(make_batch(9)))
        assert resumed.load_checkpoint(path) == version
        for step in range(version, 4):
            resumed.train_step(lay_out(make_batch(step, step=step)))
        learners = straight.learner, resumed.learner
        for one, other in zip(*(learner.parameters for learner in learners), strict=True):
            assert torch.equal(one, other)
        first, second = (learner.average for learner in learners)
        assert first is not None
        assert second is not None
        assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"kl_coefficient": 0.0}}, "set algorithm.kl_coefficient above 0"),
        ({"model": {"reference": "elsewhere"}}, "leave model.reference out"),
        ({"model": {"adapter": {"rank": 2, "alpha": 4}}}, r"leave \[model.adapter\] out"),
    ],
)
def test_an_average_of_nothing_is_refused(model: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"algorithm.reference_decay = 0.75.*{message}"):
        validate_experiment(experiment(model, **sections), "test")
