"""A base in 4 and 8 bits: what the trainer computes with codes, the engine computes with plain matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packages import needs
from test_models_families import MIXTURE, random_decoder, small
from test_models_lora import adapter_for, loss_of

from headway.config.model import ModelConfig
from headway.models.loading import load_model, save_model
from headway.models.lora import use
from headway.models.quantization import load_frozen, load_sampled
from headway.records.errors import ConfigurationError

needs("bitsandbytes")
CPU = torch.device("cpu")
HOW = pytest.mark.parametrize("how", ["4bit", "8bit"])


@HOW
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_trainer_and_engine_compute_with_the_same_weights(tmp_path: Path, how: str, family: str) -> None:
    mixture = MIXTURE if family == "qwen3_moe" else None
    save_model(random_decoder(small(family, mixture=mixture)), tmp_path)
    frozen, sampled = load_frozen(tmp_path, how, CPU), load_sampled(tmp_path, how, "float32", CPU)
    exact = load_model(tmp_path)
    losses = []
    for model in (frozen, sampled, exact):
        lora = adapter_for(model)
        use(model, lora.layers)
        model.requires_grad_(False)
        loss = loss_of(model)
        loss.backward()
        losses.append((loss.detach(), {name: one.grad for name, one in lora.parameters.items()}))
    (mine, my_gradients), (its, its_gradients), (plain, _) = losses
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)
    assert float((mine - plain).abs()) > 1e-6  # it is another model than the one in the folder
    for name, gradient in my_gradients.items():
        torch.testing.assert_close(gradient, its_gradients[name], rtol=1e-4, atol=1e-7)


@HOW
def test_codes_take_the_memory_they_should(tmp_path: Path, how: str) -> None:
    save_model(random_decoder(small("llama", width=128, heads=8, head_dim=16, intermediate=256)), tmp_path)
    model = load_frozen(tmp_path, how, CPU)
    weight = model.layers[0].gate_up_weight
    bits = 8 * weight.nbytes / weight.shape.numel()
    assert bits <= {"4bit": 4.51, "8bit": 8.26}[how]  # a float32 scale for 64 or 256 values
    assert not [name for name, _ in model.named_parameters() if "qkv" in name or "gate_up" in name]


def test_a_gradient_through_codes_keeps_no_matrix_for_the_backward(tmp_path: Path) -> None:
    save_model(random_decoder(small("llama")), tmp_path)
    model = load_frozen(tmp_path, "8bit", CPU)
    use(model, adapter_for(model).layers)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        loss_of(model).backward()
    assert model.layers[0].gate_up_weight.shape not in kept


def test_a_quantised_base_is_not_trained() -> None:
    with pytest.raises(ValueError, match=r"without model\.adapter"):
        ModelConfig(path="m", quantization="4bit")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(random_decoder(small("llama")), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigurationError, match=r"model.quantization needs .*headway\[qlora\]"):
        load_frozen(tmp_path, "4bit", CPU)
