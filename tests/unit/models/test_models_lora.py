"""Adapters apart against the same adapters merged: outputs, gradients, targets by PEFT's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models_families import LENGTHS, MIXTURE, random_decoder
from test_models_families import small as small_config

from headway.config.adapter import AdapterConfig
from headway.models.adapter_targets import AdaptedTarget, adapted_targets, chosen_targets, targets_of
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.families import BY_NAME
from headway.models.lora import Lora, merge, use
from headway.records.errors import ConfigurationError

torch.set_num_threads(1)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "mixtral")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def small(family: str) -> DecoderConfig:
    mixture = MIXTURE if BY_NAME[family].experts is not None else None
    return small_config(family, mixture=mixture)


def adapter_for(model: Decoder, **changes: Any) -> Lora:
    """An adapter beside every matrix, with random B."""
    experts, router = (EXPERTS, ("mlp.gate",)) if model.config.mixture is not None else ((), ())
    settings = AdapterConfig(
        **{"rank": 3, "alpha": 6.0, "targets": ("all-linear", *router), "target_parameters": experts} | changes
    )
    lora = Lora(adapted_targets(model.config, settings), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in lora.parameters.items():
        if name.endswith("lora_B"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return lora


def loss_of(model: Decoder) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(model.config.vocabulary_size, (sum(LENGTHS),), generator=generator)
    logits = model(ids, LENGTHS)
    return (logits * torch.randn(logits.shape, generator=generator)).mean()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_an_adapter_computes_what_merged_weights_would(family: str, fixed_shapes: bool) -> None:
    model, merged = random_decoder(small(family)), random_decoder(small(family))
    lora = adapter_for(model)
    merge(merged, lora)
    for layer in [*model.layers, *merged.layers]:
        layer.fixed_shapes = fixed_shapes
    before = loss_of(model)
    use(model, lora.layers)
    with torch.no_grad():
        apart, together = loss_of(model), loss_of(merged)
    assert abs(float(apart - together)) < 1e-6
    assert abs(float(apart - before.detach())) > 1e-5
    use(model, None)
    assert torch.equal(loss_of(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_merged_matrices_by_the_chain_rule(family: str) -> None:
    model, merged = random_decoder(small(family)), random_decoder(small(family))
    lora = adapter_for(model)
    merge(merged, lora)
    use(model, lora.layers)
    model.requires_grad_(False)
    loss_of(model).backward()
    loss_of(merged).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for number, layer in lora.layers.items():
        for product, pairs in layer.products.items():
            whole = getattr(merged.layers[number], f"{product}_weight").grad
            for target, scale, a, b in pairs:
                part = whole.narrow(-2, target.first, target.rows)
                for found, expected in ((a.grad, scale * b.mT @ part), (b.grad, scale * part @ a.mT)):
                    assert found is not None
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_beside_a_model_in_bfloat16(family: str, dtype: torch.dtype) -> None:
    """``dtype``: of the adapter, whose gradients have it."""
    model = random_decoder(small(family))
    lora = adapter_for(model)
    use(model, lora.layers)
    exact = loss_of(model).detach()
    model.to(torch.bfloat16)
    for parameter in lora.parameters.values():
        parameter.data = parameter.data.to(dtype)
    rounded = loss_of(model)
    rounded.backward()
    assert abs(float(rounded.detach() - exact)) < 0.02
    assert all(one.grad is not None and one.grad.dtype == dtype for one in lora.parameters.values())


def test_a_new_adapter_changes_nothing_and_depends_on_its_seed_alone() -> None:
    model = random_decoder(small("qwen3"))
    before = loss_of(model)
    targets = adapted_targets(model.config, AdapterConfig(rank=2, alpha=1.0))
    first, again, other = (Lora(targets, seed=seed) for seed in (5, 5, 6))
    use(model, first.layers)
    assert torch.equal(loss_of(model), before)
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(first.parameters[name], again.parameters[name])
    assert not torch.equal(first.parameters[name], other.parameters[name])


def test_targets_are_chosen_as_peft_chooses_them() -> None:
    config = small("qwen3_moe")
    names = {one.name for one in chosen_targets(config, ("q_proj", "self_attn.o_proj"))}
    assert names == {f"model.layers.{n}.self_attn.{p}_proj" for n in range(config.layers) for p in "qo"}
    (single,) = chosen_targets(config, r".*layers\.1\..*v_proj")
    assert single.name == "model.layers.1.self_attn.v_proj"
    assert not any(one.experts for one in chosen_targets(config, ("all-linear",)))
    assert sum(one.experts > 0 for one in chosen_targets(config, (), EXPERTS)) == 2 * config.layers
    first = next(targets_of(config))
    assert AdaptedTarget(target=first, rank=2, alpha=2.0).size == 2 * (first.rows + first.columns)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": ("q_porj",)}, "q_porj.*nearest: .*q_proj"),
        ({"target_parameters": ("mlp.experts.gate_up_proj",)}, "no layer has"),
    ],
)
def test_a_target_that_no_layer_has_is_refused_with_the_nearest(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        adapted_targets(small("qwen3"), AdapterConfig(rank=2, alpha=1.0, **changes))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0, "alpha": 1}, "greater than or equal to 1"),
        ({"rank": 4}, "alpha is missing"),
        ({"path": "x", "rank": 4}, "path and rank"),
        ({"rank": 4, "alpha": 1, "targets": ()}, "no weights would be trained"),
    ],
)
def test_incomplete_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdapterConfig(**given)


def test_an_adapters_settings_are_valid_again_as_a_worker_is_given_them() -> None:
    for given in (AdapterConfig(path="somewhere"), AdapterConfig(rank=4, alpha=8.0)):
        assert AdapterConfig.model_validate(given.model_dump(mode="json")) == given


def test_other_weights_are_refused_before_anything_is_changed() -> None:
    model = random_decoder(small("qwen3"))
    lora = adapter_for(model)
    weights = {name: tensor.clone() for name, tensor in lora.weights().items()}
    first = next(iter(weights))
    with pytest.raises(ConfigurationError, match="differ in names"):
        lora.copy_weights({name: one for name, one in weights.items() if name != first})
    with pytest.raises(ConfigurationError, match="does not fit"):
        lora.copy_weights(weights | {first: weights[first][:1]})
    assert all(torch.equal(lora.parameters[name], one) for name, one in weights.items())
