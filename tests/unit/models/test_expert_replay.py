"""Routing replay in the model: the recorded experts are taken, with the router's own weights and exact gradients."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from headway.models.decoder import Decoder
from headway.models.experts import ExpertReplay, route
from tests.conformance.reference import random_model
from tests.golden.finite_differences import central_differences

torch.set_num_threads(1)
LENGTHS = [5, 3, 6]
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7])


def mixture(*, normalised: bool = True, fixed_shapes: bool = False) -> Decoder:
    model = random_model(3, family="qwen3_moe").double()
    kinds = dataclasses.replace(model.config.mixture, normalised=normalised)  # type: ignore[type-var]
    model.config = dataclasses.replace(model.config, mixture=kinds)
    for layer in model.layers:
        layer.config, layer.fixed_shapes = model.config, fixed_shapes
    return model


def own_experts(model: Decoder) -> Tensor:
    """[N, layers, K] as the model's routers choose."""
    for layer in model.layers:
        layer.routed = []
    with torch.no_grad():
        model.forward_packed(IDS, LENGTHS)
    found = torch.stack([layer.routed[0] for layer in model.layers], 1)
    for layer in model.layers:
        layer.routed = None
    return found


def other_experts(seed: int = 0) -> Tensor:
    """Two of four experts for each token in each of two layers, at random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(IDS), 2, 4, generator=generator).argsort(-1)[..., :2]


def loss_of(model: Decoder, replay: ExpertReplay | None) -> Tensor:
    logits = model.head(model.forward_packed(IDS, LENGTHS, None, replay))
    return torch.log_softmax(logits, -1)[:-1].gather(-1, IDS[1:, None]).sum()


def gradients(model: Decoder, replay: ExpertReplay | None) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, replay).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("fixed_shapes", [True, False])
def test_replaying_ones_own_choice_changes_nothing(normalised: bool, fixed_shapes: bool) -> None:
    model = mixture(normalised=normalised, fixed_shapes=fixed_shapes)
    replay = ExpertReplay.of(own_experts(model))
    plain = gradients(model, None)
    again = gradients(model, replay)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert replay.counts.tolist() == [[len(IDS), 0, 0]] * 2
    backwards = ExpertReplay.of(own_experts(model).flip(-1).to(torch.int16))  # in another order, and narrow
    again = gradients(model, backwards)
    assert all(torch.allclose(plain[name], again[name], rtol=1e-10, atol=1e-12) for name in plain)
    assert backwards.counts.tolist() == [[len(IDS), 0, 0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("normalised", [True, False])
def test_the_gates_gradient_equals_finite_differences(normalised: bool) -> None:
    """With experts that the router wouldn't choose: their weights are its scores before top-k, which top-k would have
    made zeros."""
    model, experts = mixture(normalised=normalised), other_experts()
    exact = gradients(model, replay := ExpertReplay.of(experts))
    known, disagree, astray = replay.counts.sum(0).tolist()
    assert (known, astray) == (2 * len(IDS), 0)
    assert disagree > len(IDS)
    for layer in (0, 1):
        parameter = model.layers[layer].router_weight
        at = parameter.detach().clone()

        def total(value: Tensor, parameter: Tensor = parameter) -> float:
            with torch.no_grad():
                parameter.copy_(value)
                return float(loss_of(model, ExpertReplay.of(experts)))

        numeric = central_differences(total, at)
        with torch.no_grad():
            parameter.copy_(at)
        analytic = exact[f"layers.{layer}.router_weight"]
        assert analytic.abs().max() > 1e-3
        assert torch.allclose(analytic, numeric, rtol=1e-6, atol=1e-7)


def test_checkpointed_layers_replay_as_well() -> None:
    model, experts = mixture(), other_experts()
    plain = gradients(model, ExpertReplay.of(experts))
    model.checkpointing = "full"
    again = gradients(model, replay := ExpertReplay.of(experts))
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert replay.counts[:, 0].tolist() == [len(IDS)] * 2  # counted once


def test_tokens_without_a_record_are_routed_by_the_trainer() -> None:
    model = mixture()
    experts = torch.where(torch.arange(len(IDS))[:, None, None] % 2 == 0, other_experts(), -1)
    experts[1] = torch.tensor([[2, -1], [-1, 2]])  # half a record is none
    replay = ExpertReplay.of(experts)
    for layer in model.layers:
        layer.routed = []
    model.forward_packed(IDS, LENGTHS, None, replay)
    (first,), own = model.layers[0].routed, own_experts(model)[:, 0]
    assert torch.equal(first[::2], experts[::2, 0])
    assert torch.equal(first[1::2], own[1::2])
    assert replay.counts[:, 0].tolist() == [len(IDS) // 2] * 2


def test_a_layer_without_experts_has_no_place_in_a_record() -> None:
    model = random_model(3, family="qwen3_moe")
    sparse = dataclasses.replace(model.config.mixture, dense_layers=(0,))  # type: ignore[type-var]
    config = dataclasses.replace(model.config, mixture=sparse)
    assert (config.sparse_layers, config.routing.layers) == ((1,), 1)  # type: ignore[union-attr]
    from headway.models.loading import build

    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    model.forward_packed(IDS, LENGTHS, None, replay := ExpertReplay.of(other_experts()[:, :1]))
    assert replay.counts[:, [0, 2]].tolist() == [[len(IDS), 0]]
    assert random_model(1).config.routing is None


def test_the_recorded_experts_weights_are_their_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, router = torch.randn(6, 5, generator=generator), torch.randn(4, 5, generator=generator)
    probabilities = torch.softmax(hidden @ router.T, -1)
    recorded = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2], [1, 3]])
    replay = ExpertReplay.of(recorded[:, None]).layer(0)
    chosen, weights = route(hidden, router, 2, False, None, replay)
    assert torch.equal(chosen, recorded)
    assert torch.allclose(weights, probabilities.gather(-1, recorded))
    assert (weights > 0).all()
    copied = copy.deepcopy(replay.counts).tolist()
    assert copied[0] == 6
