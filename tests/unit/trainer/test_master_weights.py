"""Training in bfloat16: weights are rounded masters, gradients are summed in float32, and a resume loses no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_trainer import Context, make_batch, make_experiment, optimiser_tensors
from torch import Tensor, nn

from headway.algorithms.samples import lay_out
from headway.models.loading import save_model
from headway.models.sizes import sizes_of
from headway.records.errors import ConfigurationError, StepRefused
from headway.trainer.learner import token_logprobs
from headway.trainer.master_weights import MasterWeights
from headway.trainer.service import TrainerService
from headway.weights.shared_memory import Subscriber
from tests.conformance.reference import random_model

torch.set_num_threads(1)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {"family": "qwen3_moe"},
    "untied": {"tied": False},
    "adapter": {"model": {"adapter": {"rank": 4, "alpha": 8.0}}},
    "checkpointing": {"trainer": {"gradient_checkpointing": "full"}},
    "selective": {"trainer": {"gradient_checkpointing": "selective"}},
    "transformers": {"model": {"implementation": "transformers"}},
    "adapter of transformers": {"model": {"implementation": "transformers", "adapter": {"rank": 4, "alpha": 8.0}}},
}


def service(folder: Path, kind: str = "dense", dtype: str = "bfloat16") -> TrainerService:
    sections = dict(KINDS[kind])
    if "transformers" in kind:
        pytest.importorskip("peft")
    family, tied = sections.pop("family", "qwen3"), sections.pop("tied", True)
    path = folder / f"{family}-{tied}"
    if not path.exists():
        save_model(random_model(0, family=family, tied=tied), path)
    sections["trainer"] = {"learning_rate": 1e-3, "dtype": dtype} | sections.get("trainer", {})
    sections["generator"] = {"dtype": dtype}
    experiment = make_experiment(str(path), folder / "run", **sections)
    return TrainerService(Context, experiment=experiment, run_id=f"masters-{folder.name}")


def step(trainer: TrainerService, number: int) -> None:
    assert not trainer.train_step(lay_out(make_batch(number, step=number))).skipped


def state_of(trainer: TrainerService) -> dict[str, Tensor]:
    masters = {f"master/{name}": one.clone() for name, one in trainer.learner.masters.tensors.items()}
    weights = {f"weight/{name}": one.clone() for name, one in trainer.learner.weights().items()}
    return masters | weights | optimiser_tensors(trainer.learner)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def require_rounded(trainer: TrainerService) -> None:
    weights = trainer.learner.weights()
    for name, master in trainer.learner.masters.tensors.items():
        assert (master.dtype, weights[name].dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(weights[name], master.to(torch.bfloat16)), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_rounded_masters_and_are_published_as_they_are(tmp_path: Path, kind: str) -> None:
    trainer = service(tmp_path, kind)
    require_rounded(trainer)
    before = {name: one.clone() for name, one in trainer.learner.masters.trained().items()}
    for number in range(2):
        step(trainer, number)
        require_rounded(trainer)
        assert all(one.grad is None for one in trainer.learner.model.parameters())
    masters = trainer.learner.masters.trained()
    assert any(not torch.equal(one, before[name]) for name, one in masters.items())
    assert any(not torch.equal(one, one.to(torch.bfloat16).float()) for one in masters.values())
    published = Subscriber().fetch(trainer.publish(2))
    assert all(torch.equal(published[name], one) for name, one in trainer.learner.weights().items())
    trainer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_bit_identical(tmp_path: Path, kind: str) -> None:
    stayed, resumed = service(tmp_path, kind), service(tmp_path, kind)
    for number in range(2):
        step(stayed, number)
    checkpoint = tmp_path / "checkpoints" / "step_00000002"
    stayed.save_checkpoint(str(checkpoint), {})
    require_rounded(stayed)
    assert resumed.load_checkpoint(str(checkpoint)) == 2
    assert same(state_of(stayed), state_of(resumed))
    for trainer in (stayed, resumed):
        step(trainer, 2)
    assert same(state_of(stayed), state_of(resumed))
    stored = [load_file(file) for file in checkpoint.glob("*/*.safetensors")]
    assert {one.dtype for tensors in stored for one in tensors.values()} == {torch.float32}


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=16), min_size=3, max_size=3), min_size=1, max_size=8),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
@settings(max_examples=60, deadline=None)
def test_gradients_are_summed_in_float32(rows: list[list[float]], within: torch.dtype) -> None:
    """``within``: the dtype of the sums of one backward, float32 for the vocabulary's matrices."""
    weight = nn.Parameter(torch.zeros(1, 3))
    masters = MasterWeights({"w": weight}, torch.bfloat16)
    if within == torch.float32:
        masters.sum_in_float32(1)
    expected = torch.zeros(1, 3)
    for row in rows:
        gradient = torch.tensor([row]).to(torch.bfloat16)
        (weight * gradient).sum().backward()
        expected = expected + gradient.float()
    found = masters.tensors["w"].grad
    assert found is not None
    assert torch.equal(found, expected)
    masters.clear_gradients()
    assert (masters.tensors["w"].grad, weight.grad) == (None, None)


def test_parts_add_up_in_float32(tmp_path: Path) -> None:
    both, one, other = (service(tmp_path) for _ in range(3))
    for trainers, seed in (((both, one), 1), ((both, other), 2)):
        for trainer in trainers:
            trainer.forward_backward(lay_out(make_batch(seed, groups=1, members=1)))
    sums = zip(both.learner.gradients(), one.learner.gradients(), other.learner.gradients(), strict=True)
    assert all(torch.equal(total, a + b) for total, a, b in sums)
    both.optim_step()
    require_rounded(both)
    with pytest.raises(StepRefused):
        both.optim_step()


def test_chunks_of_the_head_add_up_in_float32(tmp_path: Path) -> None:
    """The head's gradient over a hundred chunks differs from that of one by no more than the chunks' rounding."""
    gradients = []
    for chunk_logits in (1 << 20, 40):
        learner = service(tmp_path, "untied").learner
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(100, 32, generator=generator).to(torch.bfloat16)
        targets = torch.randint(0, 40, (100,), generator=generator)
        token_logprobs(learner.model, hidden, targets, 1.0, chunk_logits=chunk_logits)[0].sum().backward()
        gradients.append(learner.masters.tensors["head_weight"].grad)
    whole, chunked = gradients
    assert whole is not None
    assert chunked is not None
    assert float((whole - chunked).norm() / whole.norm()) < 2**-8


def test_a_skipped_step_changes_neither_masters_nor_weights(tmp_path: Path) -> None:
    trainer = service(tmp_path)
    step(trainer, 0)
    before = state_of(trainer)
    trainer.forward_backward(lay_out(make_batch(1, step=1)))
    trainer.learner.gradients()[0][0, 0] = float("nan")
    assert trainer.optim_step().skipped
    assert same(before, state_of(trainer))


def test_a_failed_load_leaves_the_weights(tmp_path: Path) -> None:
    trainer = service(tmp_path)
    step(trainer, 0)
    before = state_of(trainer)
    with pytest.raises(ConfigurationError, match="no such folder"):
        trainer.load_weights(str(tmp_path / "nothing"))
    assert same(before, state_of(trainer))
    require_rounded(trainer)


@pytest.mark.parametrize(("dtype", "bytes_of_weight"), [("float32", 16), ("bfloat16", 18)])
def test_a_trained_weight_takes_what_check_says(tmp_path: Path, dtype: str, bytes_of_weight: int) -> None:
    trainer = service(tmp_path, dtype=dtype)
    step(trainer, 0)
    trainer.forward_backward(lay_out(make_batch(1, step=1)))
    learner = trainer.learner
    state_bytes = sum(one.nbytes for one in learner.resident() if one.numel() > 1)  # without step counters
    buffers = sum(one.nbytes for one in learner.model.buffers())
    assert state_bytes - buffers == bytes_of_weight * sizes_of(tmp_path / "qwen3-True").parameters


def test_float32_has_no_second_copy(tmp_path: Path) -> None:
    learner = service(tmp_path, dtype="float32").learner
    assert all(learner.masters.tensors[name] is one for name, one in learner.model.named_parameters())
