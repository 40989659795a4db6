"""The trainer on models that transformers runs: steps, checkpoints, adapters, supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_hub import make_hub_model
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.samples import lay_out
from headway.models.hf.model import HfModel
from headway.models.run_model import merge_folders
from headway.records.errors import ConfigurationError
from headway.trainer.service import TrainerService
from headway.trainer.supervised import SupervisedService

torch.set_num_threads(1)
ADAPTER = {"rank": 4, "alpha": 8.0}


def service(model: str, directory: Path, kind: type = TrainerService, /, **sections: Any) -> Any:
    return kind(Context, experiment=make_experiment(model, directory, **sections), run_id="test")


def weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save_weights(str(folder))
    return load_file(folder / "model.safetensors")


def test_a_step_is_that_of_the_own_decoder(tmp_path: Path) -> None:
    """With a penalty towards a reference: both models of it are run by transformers, or neither."""
    model = make_model(tmp_path / "m")
    found: list[dict[str, torch.Tensor]] = []
    for name in ("headway", "transformers"):
        keys = {"model": {"path": model, "implementation": name}, "algorithm": {"kl_coefficient": 0.1}}
        trainer = service(model, tmp_path, **keys)
        assert isinstance(trainer.learner.model, HfModel) == (name == "transformers")
        assert trainer.learner.shares_prefixes == (name == "headway")
        report = trainer.train_step(lay_out(make_batch(0)))
        assert report.flops > 0
        found.append(weights(trainer, tmp_path / name))
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["Olmo2", "Bamba"])
def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    model = make_hub_model(tmp_path / "m", kind)
    trainer = service(model, tmp_path)
    trainer.train_step(lay_out(make_batch(0)))
    path = tmp_path / "checkpoints" / "step_00000001"
    trainer.save_checkpoint(str(path), {})
    other = service(model, tmp_path)
    assert other.load_checkpoint(str(path)) == 1
    for one in (trainer, other):
        one.train_step(lay_out(make_batch(1, step=1)))
    mine, theirs = (weights(one, tmp_path / name) for one, name in ((trainer, "a"), (other, "b")))
    assert all(torch.equal(one, theirs[name]) for name, one in mine.items())
    assert any(not torch.equal(one, mine[name]) for name, one in load_file(Path(model) / "model.safetensors").items())
    published = trainer.publish(2)
    assert published.version == 2
    trainer.close()


def test_an_adapter_of_peft_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    import peft
    import transformers

    model = make_hub_model(tmp_path / "m", "Olmo2")
    keys = {"model": {"path": model, "adapter": ADAPTER}, "algorithm": {"kl_coefficient": 0.1}}
    trainer = service(model, tmp_path, **keys)
    assert 0 < sum(p.numel() for p in trainer.learner.parameters) < 5000
    before = {name: one.clone() for name, one in trainer.learner.model.named_parameters() if "lora" not in name}
    trainer.train_step(lay_out(make_batch(0)))
    assert trainer.train_step(lay_out(make_batch(1, step=1))).metrics["kl_reference"] > 0
    assert all(
        torch.equal(one, before[name]) for name, one in trainer.learner.model.named_parameters() if name in before
    )
    assert all("lora" in name for name in trainer.learner.weights())
    path = tmp_path / "checkpoints" / "step_00000002"
    trainer.save_checkpoint(str(path), {})

    ids = torch.randint(0, 31, (9,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trainer.learner.model(ids, [9])
        plain = transformers.AutoModelForCausalLM.from_pretrained(model)
        assert not torch.allclose(plain(input_ids=ids[None]).logits[0], expected, atol=1e-4)
        theirs = peft.PeftModel.from_pretrained(plain, path / "adapter").eval()
        torch.testing.assert_close(theirs(input_ids=ids[None]).logits[0], expected, rtol=1e-4, atol=1e-5)

    merge_folders(model, path / "adapter", tmp_path / "merged")
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(input_ids=ids[None]).logits[0], expected, rtol=1e-4, atol=1e-5)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == load_file(f"{model}/model.safetensors").keys()

    other = service(model, tmp_path, **keys)
    assert other.load_checkpoint(str(path)) == 2
    with torch.no_grad():
        assert torch.equal(other.learner.model(ids, [9]), expected)
    scaled = {"model": {"path": model, "adapter": {**ADAPTER, "alpha": 4.0}}}
    with pytest.raises(ConfigurationError, match=r"lora_alpha = 8\.0, the run's 4\.0"):
        service(model, tmp_path, **scaled).load_checkpoint(str(path))
    for adapter, match in (
        ({**ADAPTER, "targets": ["quux"]}, "PEFT refuses it: Target modules"),
        ({**ADAPTER, "dropout": 0.1}, "dropout = 0.1: valid beside transformers: 0"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            service(model, tmp_path, model={"path": model, "adapter": adapter})


def test_supervised_fine_tuning_learns_and_writes_a_folder(tmp_path: Path) -> None:
    import transformers

    model = make_hub_model(tmp_path / "m", "Phi")
    own = {"gradient_checkpointing": "full", "micro_batch_tokens": 40}
    sft = {"data": "unused.jsonl", "batch_sequences": 8, "steps": 40, "learning_rate": 1e-2}
    trainer = service(model, tmp_path, SupervisedService, sft=sft, trainer=own)
    sequences = [np.array([a, 40, (a + 1) % 8, 41], np.int32) for a in range(8)]
    learned = np.array([False, False, True, True])
    trainer.prepare(np.concatenate(sequences), np.tile(learned, 8), np.full(8, 4))
    first, last = trainer.steps(1), trainer.steps(39)
    assert last["loss"] < 0.1 < first["loss"]
    trainer.save(str(tmp_path / "out"))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["architectures"] == ["PhiForCausalLM"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    answers = plain(input_ids=torch.tensor([[a, 40] for a in range(8)])).logits[:, -1].argmax(-1)
    assert answers.tolist() == [(a + 1) % 8 for a in range(8)]
