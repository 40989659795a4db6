"""Training an adapter: the model stays, the adapter alone is trained, published, saved and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_trainer import Context, make_batch, make_experiment, make_model, optimiser_tensors

from headway.algorithms.samples import build_arrays, lay_out
from headway.models import adapter_files, adapter_targets
from headway.models.adapter_files import load_adapter
from headway.models.kernels import norm_rotate, rms_norm
from headway.models.loading import load_model
from headway.models.lora import use
from headway.models.run_model import merge_folders
from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.records.generation import POLICY_ADAPTER
from headway.trainer.service import TrainerService
from headway.trainer.supervised import SupervisedService
from headway.weights.shared_memory import Subscriber

torch.set_num_threads(1)
ADAPTER = {"rank": 4, "alpha": 8.0}
Build = Callable[..., TrainerService]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture
def build(model: str) -> Build:
    def made(adapter: dict[str, Any] | None = ADAPTER, **sections: Any) -> TrainerService:
        own = {"path": model} | ({} if adapter is None else {"adapter": adapter}) | sections.pop("model", {})
        sections["trainer"] = {"learning_rate": 1e-2} | sections.get("trainer", {})
        return TrainerService(
            Context, experiment=make_experiment(model, Path("/nowhere"), model=own, **sections), run_id="t"
        )

    return made


def adapter_of(trainer: TrainerService) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in trainer.learner.weights().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_only_the_adapter_is_trained_and_published(build: Build, model: str) -> None:
    trainer, plain = build(), load_model(model)
    before = adapter_of(trainer)
    for step in range(2):
        trainer.train_step(lay_out(make_batch(step, step=step)))
    after = adapter_of(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in after)
    for name, weight in plain.named_parameters():
        assert torch.equal(trainer.learner.model.get_parameter(name), weight)
    published = trainer.publish(2)
    assert published.adapter == POLICY_ADAPTER
    assert same({name: one.clone() for name, one in Subscriber().fetch(published).items()}, after)
    assert published.size_bytes < 1.1 * 4 * sum(one.numel() for one in after.values()) + 64 * len(after)
    trainer.close()


@pytest.mark.parametrize("quantization", [None, "8bit"])
def test_a_resumed_run_goes_on_bit_for_bit(build: Build, tmp_path: Path, quantization: str | None) -> None:
    sections: dict[str, Any] = {"model": {"quantization": quantization}}
    one = build(**sections)
    one.train_step(lay_out(make_batch(0, step=0)))
    one.save_checkpoint(str(tmp_path / "checkpoints" / "step_00000001"), {0: [0]})
    other = build(**sections, run={"seed": 9})
    assert not same(adapter_of(one), adapter_of(other))
    assert other.load_checkpoint(str(tmp_path / "checkpoints" / "step_00000001")) == 1
    for trainer in (one, other):
        trainer.train_step(lay_out(make_batch(1, step=1)))
    assert same(adapter_of(one), adapter_of(other))
    files = {file.name for file in (tmp_path / "checkpoints" / "step_00000001").rglob("*") if file.is_file()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "state-1-of-1.safetensors", "state.json"}


def test_checkpoints_of_the_other_kind_are_refused_before_anything_is_changed(build: Build, tmp_path: Path) -> None:
    whole, adapter = build(None), build()
    for name, trainer in (("whole", whole), ("adapter", adapter)):
        trainer.train_step(lay_out(make_batch(0, step=0)))
        trainer.save_checkpoint(str(tmp_path / name / "step_00000001"), {})
    before = adapter_of(adapter), adapter_of(whole)
    with pytest.raises(ConfigurationError, match="trained a whole model"):
        adapter.load_checkpoint(str(tmp_path / "whole" / "step_00000001"))
    with pytest.raises(ConfigurationError, match="trained an adapter"):
        whole.load_checkpoint(str(tmp_path / "adapter" / "step_00000001"))
    with pytest.raises(ConfigurationError, match="not an adapter"):
        adapter.load_weights(str(tmp_path / "whole" / "step_00000001" / "model"))
    assert same(before[0], adapter_of(adapter))
    assert same(before[1], adapter_of(whole))


def test_adapters_of_another_rank_or_scale_are_refused_before_anything_is_changed(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.train_step(lay_out(make_batch(0, step=0)))
    before, state = adapter_of(trainer), optimiser_tensors(trainer.learner)
    for name, changes, words in (
        ("rank", {"rank": 2, "alpha": 4.0}, "does not fit"),
        ("scale", {"rank": 4, "alpha": 4.0}, "scaled by 1 at"),
    ):
        other = build(changes)
        other.train_step(lay_out(make_batch(0, step=0)))
        other.save_checkpoint(str(tmp_path / name / "step_00000001"), {})
        with pytest.raises(ConfigurationError, match=words):
            trainer.load_checkpoint(str(tmp_path / name / "step_00000001"))
        assert same(before, adapter_of(trainer))
        assert same(state, optimiser_tensors(trainer.learner))


def test_a_checkpoint_of_another_base_is_refused_before_anything_is_changed(build: Build, tmp_path: Path) -> None:
    other = build(model={"path": make_model(tmp_path / "other", seed=1)})
    other.save_checkpoint(str(tmp_path / "step_00000000"), {})
    trainer = build()
    before = adapter_of(trainer)
    with pytest.raises(ConfigurationError, match="of another base"):
        trainer.load_checkpoint(str(tmp_path / "step_00000000"))
    assert same(before, adapter_of(trainer))


def test_an_adapter_belongs_to_the_base_that_was_loaded(
    build: Build, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "base")
    trainer = build(model={"path": str(tmp_path / "base")})
    make_model(tmp_path / "other", seed=1)
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "other").rename(tmp_path / "base")
    monkeypatch.setattr(adapter_files, "base_digest", None)  # saving doesn't read the base again
    for name in ("one", "two"):
        trainer.save_weights(str(tmp_path / name))
        with safe_open(tmp_path / name / "adapter_model.safetensors", "pt") as content:
            assert content.metadata()["base_digest"] == adapter_targets.base_digest(model)


def test_a_frozen_norm_has_no_gradient(model: str) -> None:
    frozen = load_model(model).requires_grad_(False)
    layer: Any = frozen.layers[0]
    qkv, turn = torch.randn(3, layer.qkv_weight.shape[0], requires_grad=True), torch.ones(3, 1, 4)
    sizes = (2, 1, 8, 1e-6)
    turned = norm_rotate(qkv * 1.0, layer.q_norm, layer.k_norm, turn, torch.zeros(3, 1, 4), sizes)
    normed = rms_norm(torch.randn(3, 16, requires_grad=True), layer.input_norm, 1e-6)
    for out, inputs in ((turned, 3), (normed, 2)):
        node: Any = out.grad_fn
        found = type(node)._forward_cls.backward(node, torch.ones_like(out), None)
        assert [one is None for one in found[:inputs]] == [False, *[True] * (inputs - 1)]


def test_a_damaged_adapter_is_found(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.save_checkpoint(str(tmp_path / "step_00000000"), {})
    file = tmp_path / "step_00000000" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointCorrupt):
        trainer.load_checkpoint(str(tmp_path / "step_00000000"))


def test_the_reference_is_the_model_without_its_adapter(build: Build, model: str) -> None:
    trainer = build(algorithm={"kl_coefficient": 0.1})
    assert trainer.learner.reference is not None
    assert not list(trainer.learner.reference.parameters())  # no second copy
    assert trainer.train_step(lay_out(make_batch(0, step=0))).metrics["kl_reference"] == 0.0
    assert trainer.train_step(lay_out(make_batch(1, step=1))).metrics["kl_reference"] > 0.0
    ids = torch.tensor([3, 4, 5])
    assert torch.equal(trainer.learner.reference(ids, [3]), load_model(model)(ids, [3]))


def test_parts_give_the_gradient_of_the_batch(build: Build) -> None:
    whole, apart = build(), build()
    batch = make_batch(1, step=0)
    whole.train_step(lay_out(batch))
    middle = len(batch.samples) // 2
    for samples in (batch.samples[:middle], batch.samples[middle:]):
        apart.forward_backward(lay_out(type(batch)(step=0, samples=samples)))
    apart.optim_step()
    for name, one in adapter_of(whole).items():
        torch.testing.assert_close(one, adapter_of(apart)[name], rtol=1e-3, atol=1e-5)


def test_the_work_of_a_step_has_no_gradients_of_frozen_matrices(build: Build) -> None:
    whole, beside = (trainer.train_step(lay_out(make_batch(0))).flops for trainer in (build(None), build()))
    assert 2 / 3 < beside / whole < 0.75  # products with weights cost two thirds, attention the same


def test_gradient_checkpointing_changes_nothing(build: Build) -> None:
    trainers = build(), build(trainer={"gradient_checkpointing": "full"})
    for trainer in trainers:
        trainer.train_step(lay_out(make_batch(0, step=0)))
    assert same(adapter_of(trainers[0]), adapter_of(trainers[1]))


def test_an_adapter_is_continued(build: Build, tmp_path: Path) -> None:
    first = build()
    first.train_step(lay_out(make_batch(0, step=0)))
    first.save_weights(str(tmp_path / "best"))
    again = build({"path": str(tmp_path / "best")})
    assert same(adapter_of(first), adapter_of(again))
    assert again.version == 0


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_a_merged_folder_is_what_was_trained(
    build: Build, model: str, tmp_path: Path, quantization: str | None
) -> None:
    trainer = build(model={"quantization": quantization})
    trainer.train_step(lay_out(make_batch(0, step=0)))
    trainer.save_weights(str(tmp_path / "best"))
    merge_folders(model, tmp_path / "best", tmp_path / "merged")
    ids = torch.arange(3, 20)
    with torch.no_grad():
        apart, merged = trainer.learner.model(ids, [17]), load_model(tmp_path / "merged")(ids, [17])
    torch.testing.assert_close(apart, merged, rtol=1e-4, atol=1e-5)
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids[None]).logits[0], merged, rtol=1e-3, atol=1e-4)
    with pytest.raises(ConfigurationError, match="exists"):
        merge_folders(model, tmp_path / "best", tmp_path / "merged")
    assert {file.name for file in tmp_path.iterdir()} == {"best", "merged"}


def supervised(model: str, **adapter: Any) -> SupervisedService:
    own = {"path": model, "adapter": ADAPTER | adapter}
    sft = {"data": "none", "output": "none", "steps": 4, "batch_sequences": 4}
    raw = make_experiment(model, Path("/nowhere"), model=own, sft=sft, trainer={"micro_batch_tokens": 40})
    service = SupervisedService(Context, experiment=raw, run_id="t")
    lengths = np.array([11, 7, 9, 13, 8, 12])
    rng = np.random.default_rng(0)
    learned = np.ones(int(lengths.sum()), np.bool_)
    learned[np.cumsum(lengths) - lengths] = False
    service.prepare(rng.integers(3, 20, int(lengths.sum())).astype(np.int32), learned, lengths, held_out=1)
    return service


def test_dropout_is_counted_not_drawn(model: str) -> None:
    plain, first, again = supervised(model), supervised(model, dropout=0.5), supervised(model, dropout=0.5)
    again.learner.model.checkpointing = "full"  # layers are computed again in the backward: the same masks
    torch.manual_seed(1)
    first.steps(3)
    torch.manual_seed(2)
    again.steps(3)
    plain.steps(3)
    weights = [{name: one.clone() for name, one in s.learner.weights().items()} for s in (plain, first, again)]
    assert same(weights[1], weights[2])
    assert not same(weights[0], weights[1])
    losses = {first.held_out_loss(), first.held_out_loss()}
    assert len(losses) == 1  # none is dropped


def test_supervised_training_saves_an_adapter(model: str, tmp_path: Path) -> None:
    service = supervised(model, dropout=0.25)
    service.steps(3)
    service.save(str(tmp_path / "sft"))
    config = json.loads((tmp_path / "sft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert config["lora_dropout"] == 0.25  # for PEFT, where it is continued there
    whole = load_model(model)
    use(whole, load_adapter(tmp_path / "sft", model, whole.config).layers)
    ids = torch.arange(3, 12)
    assert torch.equal(whole(ids, [9]), service.learner.model(ids, [9]))


def test_two_batches_in_a_row_leave_no_gradient_on_the_model(build: Build) -> None:
    trainer = build()
    trainer.policy.accumulate_gradients(build_arrays(make_batch(0)))
    assert all(one.grad is None for one in trainer.learner.model.parameters())
    assert all(one.grad is not None for one in trainer.learner.parameters)
