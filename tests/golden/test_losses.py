"""Policy losses against values computed by hand, gradients against the same and against finite differences.

Seven tokens, probabilities chosen so that every ratio is a short decimal. w = prox/behav, u = theta/prox:

    token   behav  prox  theta    A     w     u    theta/behav
      0      0.5   0.5   0.5     +1   1.00  1.00     1.00
      1      0.4   0.5   0.7     +2   1.25  1.40     1.75
      2      0.5   0.2   0.3     +1   0.40  1.50     0.60
      3      0.1   0.5   0.45    -1   5.00  0.90     4.50
      4      0.6   0.3   0.6     -2   0.50  2.00     1.00
      5      0.2   0.4   0.1     -1   2.00  0.25     0.50
      6      0.5   0.5   0.25    +1   1.00  0.50     0.50

Clip range 0.8 .. 1.28; cap of the behaviour weight 2; dual clip 1.5.
"""

import math

import numpy as np
import pytest
import torch
from finite_differences import central_differences
from flat_batch import all_loss

from headway.algorithms.aggregation import weighting
from headway.records.errors import ConfigurationError
from headway.trainer.losses import LossSettings, TokenTerms, decoupled_ppo, ppo_clip, resolve

BEHAVIOUR = [0.5, 0.4, 0.5, 0.1, 0.6, 0.2, 0.5]
PROXIMAL = [0.5, 0.5, 0.2, 0.5, 0.3, 0.4, 0.5]
CURRENT = [0.5, 0.7, 0.3, 0.45, 0.6, 0.1, 0.25]
ADVANTAGES = [1.0, 2.0, 1.0, -1.0, -2.0, -1.0, 1.0]


def settings(cap: float | None = None, dual: float | None = None) -> LossSettings:
    return LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=dual, behaviour_weight_cap=cap)


# -min(u A, clip(u) A):  0: -1   1: -1.28*2   2: -1.28   3: 0.9   4: 2*2 = 4   5: 0.8   6: -0.5
# times w:               0: -1   1: -3.2      2: -0.512  3: 4.5   4: 2         5: 1.6   6: -0.5
# gradient -w u A where not clipped: 0: -1  3: 4.5  4: 2  6: -0.5; clipped: 1, 2, 5.
DECOUPLED = [-1.0, -3.2, -0.512, 4.5, 2.0, 1.6, -0.5]
DECOUPLED_GRADIENT = [-1.0, 0.0, 0.0, 4.5, 2.0, 0.0, -0.5]
# The same with u = theta/behav:  0: -1  1: -2.56 clipped  2: -0.6  3: 4.5  4: 2  5: 0.8 clipped  6: -0.5
NAIVE = [-1.0, -2.56, -0.6, 4.5, 2.0, 0.8, -0.5]
NAIVE_GRADIENT = [-1.0, 0.0, -0.6, 4.5, 2.0, 0.0, -0.5]


def changed(values: list[float], changes: dict[int, float]) -> list[float]:
    return [changes.get(index, value) for index, value in enumerate(values)]


CASES = [
    # loss, settings, value of each token, its gradient, clipped tokens
    (decoupled_ppo, settings(), DECOUPLED, DECOUPLED_GRADIENT, {1, 2, 5}),
    # Token 3's weight 5 is cut to 2: 2 * 0.9. Token 5's is exactly 2.
    (decoupled_ppo, settings(cap=2.0), changed(DECOUPLED, {3: 1.8}), changed(DECOUPLED_GRADIENT, {3: 1.8}), {1, 2, 5}),
    # Token 4: 4 is cut to 1.5 * 2 = 3, times 0.5; token 3's 0.9 stays under 1.5.
    (
        decoupled_ppo,
        settings(cap=2.0, dual=1.5),
        changed(DECOUPLED, {3: 1.8, 4: 1.5}),
        changed(DECOUPLED_GRADIENT, {3: 1.8, 4: 0.0}),
        {1, 2, 4, 5},
    ),
    (ppo_clip, settings(), NAIVE, NAIVE_GRADIENT, {1, 5}),
    # Token 3: min(4.5, 2) * 1, and the gradient has that size too. Token 1's 1.75 is under the cap.
    (ppo_clip, settings(cap=2.0), changed(NAIVE, {3: 2.0}), changed(NAIVE_GRADIENT, {3: 2.0}), {1, 5}),
    # The cap leaves both clips alone. Token 3: 4.5 is cut to 3 by the dual clip, times 2 / 4.5.
    (ppo_clip, settings(cap=2.0, dual=3.0), changed(NAIVE, {3: 4 / 3}), changed(NAIVE_GRADIENT, {3: 0.0}), {1, 3, 5}),
    # Token 1 stays clipped: 2.56 / 1.75. Token 3: 4.5 / 4.5.
    (
        ppo_clip,
        settings(cap=1.0),
        changed(NAIVE, {1: -2.56 / 1.75, 3: 1.0}),
        changed(NAIVE_GRADIENT, {3: 1.0}),
        {1, 5},
    ),
    (ppo_clip, settings(dual=1.5), changed(NAIVE, {3: 1.5}), changed(NAIVE_GRADIENT, {3: 0.0}), {1, 3, 5}),
]


def terms(current: torch.Tensor) -> TokenTerms:
    return TokenTerms(
        logprobs_m=current,
        proximal_m=torch.tensor(PROXIMAL, dtype=torch.float64).log(),
        behaviour_m=torch.tensor(BEHAVIOUR, dtype=torch.float64).log(),
        advantages_m=torch.tensor(ADVANTAGES, dtype=torch.float64),
    )


@pytest.mark.parametrize(("loss", "config", "values", "gradient", "clipped"), CASES)
def test_values_and_gradients(loss, config, values, gradient, clipped) -> None:
    current = torch.tensor(CURRENT, dtype=torch.float64).log().requires_grad_()
    result = loss(terms(current), config)
    result.loss_m.sum().backward()
    assert result.loss_m.tolist() == pytest.approx(values, abs=1e-12)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert {index for index, is_clipped in enumerate(result.clipped_m.tolist()) if is_clipped} == clipped


# Sums of the columns above: decoupled with cap 2: -1 - 3.2 - 0.512 + 1.8 + 2 + 1.6 - 0.5 = 0.188;
# naive without cap: -1 - 2.56 - 0.6 + 4.5 + 2 + 0.8 - 0.5 = 2.64.
@pytest.mark.parametrize(
    ("loss", "config", "aggregation", "expected"),
    [
        (decoupled_ppo, settings(cap=2.0), "token_mean", 0.188 / 7),  # 7 loss tokens
        (decoupled_ppo, settings(cap=2.0), "fixed", 0.0047),  # 2 samples x 20 tokens
        (ppo_clip, settings(), "token_mean", 0.37714285714285717),
        (ppo_clip, settings(), "fixed", 0.066),
    ],
)
def test_aggregations(loss, config, aggregation, expected) -> None:
    weights = weighting(aggregation, all_loss(4, 3), np.arange(2), max_response_tokens=20)
    assert weights.weights_s.tolist() == [1.0, 1.0]
    total = loss(terms(torch.tensor(CURRENT, dtype=torch.float64).log()), config).loss_m.sum() / weights.divisor
    assert float(total) == pytest.approx(expected, abs=1e-12)


def test_denominators() -> None:
    nothing, two = np.zeros(0, np.int64), np.arange(2)
    assert weighting("token_mean", all_loss(), nothing, max_response_tokens=5).divisor == 1.0
    assert weighting("fixed", all_loss(2, 1), two, max_response_tokens=5).divisor == 10.0


@pytest.mark.parametrize("loss", [ppo_clip, decoupled_ppo])
@pytest.mark.parametrize("config", [settings(), settings(dual=1.5)])
def test_gradient_by_finite_differences_through_the_softmax(loss, config) -> None:
    """d loss / d logits at T = 0.7, seven rows of a vocabulary of five, against central differences."""
    temperature, targets = 0.7, torch.tensor([0, 3, 1, 4, 2, 2, 0])
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def total(values: torch.Tensor) -> torch.Tensor:
        logprobs = torch.log_softmax(values / temperature, -1).gather(-1, targets[:, None]).squeeze(-1)
        return loss(terms(logprobs), config).loss_m.sum() / 7

    leaf = logits.clone().requires_grad_()
    total(leaf).backward()
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) > 0.01
    assert torch.allclose(leaf.grad, central_differences(total, logits), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("loss", [ppo_clip, decoupled_ppo])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("logprobs", [(-1e-9, -200.0, -1e-9), (-200.0, -1e-9, -1e-9), (-1e-9, -1e-9, -500.0)])
def test_huge_ratios_stay_finite_in_float32(loss, cap, advantage, logprobs) -> None:
    current = torch.tensor([logprobs[0]], requires_grad=True)
    result = loss(
        TokenTerms(
            logprobs_m=current,
            proximal_m=torch.tensor([logprobs[1]]),
            behaviour_m=torch.tensor([logprobs[2]]),
            advantages_m=torch.tensor([advantage]),
        ),
        settings(cap=cap),
    )
    result.loss_m.sum().backward()
    assert current.grad is not None
    assert math.isfinite(float(result.loss_m.detach()))
    assert math.isfinite(float(current.grad))


@pytest.mark.parametrize("loss", [ppo_clip, decoupled_ppo])
def test_no_token_is_a_finite_zero(loss) -> None:
    empty = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    result = loss(
        TokenTerms(logprobs_m=empty, proximal_m=nothing, behaviour_m=nothing, advantages_m=nothing), settings(cap=2.0)
    )
    assert float(result.loss_m.detach().sum()) == 0.0


def test_own_loss_by_name() -> None:
    assert resolve("headway.trainer.losses:ppo_clip").function is ppo_clip
    with pytest.raises(
        ConfigurationError,
        match="cispo, decoupled_ppo, dppo, dro, gmpo, gspo, ppo_clip, reinforce, sapo or module:function",
    ):
        resolve("headway.trainer.losses:nothing")
