"""Training in bfloat16 against values computed by hand. Its spacing is 2^-8 in [0.5, 1) and 2^-7 in [1, 2)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.models.experts import route
from headway.models.kernels import linear, rms_norm, target_logprobs
from headway.records.training import OptimiserSettings
from headway.trainer.master_weights import MasterWeights
from headway.trainer.optimizer import AdamW

BF16 = torch.bfloat16


def test_small_gradients_add_up() -> None:
    """1 + 2^-9 + 2^-9: in bfloat16 each addition would be rounded to 1, in float32 the sum is exact."""
    weight = nn.Parameter(torch.ones(1))
    masters = MasterWeights({"w": weight}, BF16)
    for gradient in (1.0, 2**-9, 2**-9):
        (weight * torch.tensor([gradient], dtype=BF16)).sum().backward()
    assert masters.tensors["w"].grad is not None
    assert masters.tensors["w"].grad.tolist() == [1 + 2**-8]
    assert weight.grad is None


def test_small_steps_add_up() -> None:
    """AdamW with a constant gradient moves the master by the learning rate: 1, 0.999, 0.998. The weight is rounded to
    1 after the first step, and to 1 - 2^-8 = 0.99609375 after the second, since 0.998 is below 1 - 2^-9."""
    weight = nn.Parameter(torch.ones(1))
    masters = MasterWeights({"w": weight}, BF16)
    optimiser = AdamW(masters.tensors.values())
    weights = []
    for _ in range(2):
        weight.sum().backward()
        optimiser.step(OptimiserSettings(learning_rate=1e-3))
        masters.round()
        masters.clear_gradients()
        weights.append(float(weight.detach()))
    assert weights == [1.0, 0.99609375]
    assert float(masters.tensors["w"]) == pytest.approx(0.998, abs=1e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_the_norm_rounds_twice(grad: bool) -> None:
    """x = (3, 4), rms = sqrt(12.5): the unit vector (0.848528, 1.131371) becomes (217 x 2^-8, 145 x 2^-7); times (1.5,
    0.5) that is (1.271484, 0.566406), of which 163 x 2^-7 and 145 x 2^-8 are nearest."""
    x, weight = torch.tensor([[3.0, 4.0]], dtype=BF16), torch.tensor([1.5, 0.5], dtype=BF16)
    with torch.set_grad_enabled(grad):
        assert rms_norm(x, weight, 0.0).tolist() == [[163 * 2**-7, 145 * 2**-8]]


def test_the_residual_stream_is_rounded_once() -> None:
    """1 + (2^-8 + 2^-9): rounded with the product it is 1 + 2^-7. Stream and product stay in bfloat16."""
    stream, x = torch.ones(1, 1, dtype=BF16), torch.tensor([[2**-8, 2**-9]], dtype=BF16)
    out = linear(x, torch.ones(1, 2, dtype=BF16), add=stream)
    assert (out.dtype, out.tolist()) == (BF16, [[1 + 2**-7]])


def test_log_probabilities_are_float32_and_logits_gradients_bfloat16() -> None:
    """softmax(0, 1) = (0.268941421, 0.731058579); log-probability of the first: -1.313261688; its gradient is
    (0.731058579, -0.731058579), of which 187 x 2^-8 is nearest. Entropy: 0.582203."""
    logits = torch.tensor([[0.0, 1.0]], dtype=BF16, requires_grad=True)
    logprob, entropy = target_logprobs(logits, torch.tensor([0]), 1.0)
    assert (logprob.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert float(logprob.detach()) == pytest.approx(-1.313261688, abs=1e-6)
    assert float(entropy) == pytest.approx(0.582203, abs=1e-6)
    logprob.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[187 * 2**-8, -187 * 2**-8]]


def test_routers_scores_are_not_rounded() -> None:
    """Scores 256 and 257 are equal in bfloat16; in float32 the second expert has softmax(0, 1) = 0.731058579."""
    hidden, router = torch.tensor([[256.0, 1.0]], dtype=BF16), torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=BF16)
    chosen, weights = route(hidden, router, per_token=1, normalised=False)
    assert chosen.tolist() == [[1]]
    assert float(weights) == pytest.approx(0.731058579, abs=1e-6)
