"""KL estimators against values computed by hand, and their expectations against the KL itself.

Four tokens, r = ref/theta, w = theta/behav:

    token  behav  ref   theta    r     w
      0     0.5   0.25   0.5    0.5   1.0
      1     0.1   0.4    0.2    2.0   2.0
      2     0.6   0.3    0.3    1.0   0.5
      3     0.8   0.1    0.4    0.25  0.5
"""

from __future__ import annotations

from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.trainer.kl import adapted_coefficient, kl_estimate

BEHAVIOUR = [0.5, 0.1, 0.6, 0.8]
REFERENCE = [0.25, 0.4, 0.3, 0.1]
CURRENT = [0.5, 0.2, 0.3, 0.4]
LN2 = log(2)

# estimator -> value of each token, its gradient by log theta (of r: -r)
TOKENS = {
    # -log r: ln 2, -ln 2, 0, 2 ln 2
    "k1": ([LN2, -LN2, 0, 2 * LN2], [1, 1, 1, 1]),
    # its square over 2; gradient -log r
    "k2": ([LN2**2 / 2, LN2**2 / 2, 0, 2 * LN2**2], [LN2, -LN2, 0, 2 * LN2]),
    # r - 1 - log r: 0.5 - 1 + ln 2, 2 - 1 - ln 2, 0, 0.25 - 1 + 2 ln 2; gradient 1 - r
    "k3": ([LN2 - 0.5, 1 - LN2, 0, 2 * LN2 - 0.75], [0.5, -1, 0, 0.75]),
    # w k1; gradient w (k1 + 1)
    "k1_unbiased": ([LN2, -2 * LN2, 0, LN2], [LN2 + 1, 2 - 2 * LN2, 0.5, LN2 + 0.5]),
    # w k3; gradient w (k3 + 1 - r) = -w log r
    "k3_unbiased": ([LN2 - 0.5, 2 - 2 * LN2, 0, LN2 - 0.375], [LN2, -2 * LN2, 0, LN2]),
}
every_estimator = pytest.mark.parametrize("estimator", TOKENS)


def logs(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


@every_estimator
def test_values_and_gradients(estimator) -> None:
    values, gradient = TOKENS[estimator]
    current = logs(CURRENT).requires_grad_()
    found = kl_estimate(estimator, current, logs(REFERENCE), logs(BEHAVIOUR))
    found.sum().backward()
    assert found.tolist() == pytest.approx(values, abs=1e-12)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(gradient, abs=1e-12)


@every_estimator
def test_gradient_by_finite_differences(estimator) -> None:
    reference, behaviour, step = logs(REFERENCE), logs(BEHAVIOUR), 1e-6
    current = logs(CURRENT).requires_grad_()
    kl_estimate(estimator, current, reference, behaviour).sum().backward()
    up = kl_estimate(estimator, current.detach() + step, reference, behaviour)
    down = kl_estimate(estimator, current.detach() - step, reference, behaviour)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(((up - down) / (2 * step)).tolist(), abs=1e-8)


# --- expectations over a whole distribution, of the module's documented properties ------------------------

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.4, 0.3, 0.1, 0.2], dtype=torch.float64)
OTHER_V = torch.tensor([0.1, 0.5, 0.3, 0.1], dtype=torch.float64)


def divergence(first_v: torch.Tensor, second_v: torch.Tensor) -> torch.Tensor:
    return (first_v * (first_v / second_v).log()).sum()


def expected(estimator, sampled_v: torch.Tensor | None) -> tuple[float, list[float]]:
    """Mean of the estimator over all tokens, sampled from ``sampled_v`` (None: from the policy itself), and the mean
    of its gradient by the logits: the sampling probabilities are constants, as they are of sampled tokens."""
    logits = LOGITS.clone().requires_grad_()
    logprobs_v = torch.log_softmax(logits, -1)
    behaviour_v = logprobs_v.detach() if sampled_v is None else sampled_v.log()
    mean = (behaviour_v.exp() * kl_estimate(estimator, logprobs_v, REFERENCE_V.log(), behaviour_v)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    return float(mean.detach()), gradient.tolist()


def truth(reverse: bool = False) -> tuple[float, list[float]]:
    """KL(policy || reference), or the reverse, and its gradient by the logits."""
    logits = LOGITS.clone().requires_grad_()
    policy_v = torch.softmax(logits, -1)
    kl = divergence(REFERENCE_V, policy_v) if reverse else divergence(policy_v, REFERENCE_V)
    (gradient,) = torch.autograd.grad(kl, logits)
    return float(kl.detach()), gradient.tolist()


def test_the_true_gradient_is_the_textbooks() -> None:
    # d KL(p || ref) / d z_j = p_j (log(p_j / ref_j) - KL); d KL(ref || p) / d z_j = p_j - ref_j
    policy_v, (kl, gradient) = torch.softmax(LOGITS, -1), truth()
    assert gradient == pytest.approx((policy_v * ((policy_v / REFERENCE_V).log() - kl)).tolist(), abs=1e-12)
    assert truth(reverse=True)[1] == pytest.approx((policy_v - REFERENCE_V).tolist(), abs=1e-12)


@pytest.mark.parametrize("sampled_v", [None, OTHER_V])
@pytest.mark.parametrize("estimator", ["k1_unbiased", "k3_unbiased"])
def test_unbiased_estimators_have_value_and_gradient_of_the_kl_on_policy_and_off(estimator, sampled_v) -> None:
    (value, gradient), (kl, kl_gradient) = expected(estimator, sampled_v), truth()
    assert value == pytest.approx(kl, abs=1e-12)
    assert gradient == pytest.approx(kl_gradient, abs=1e-12)


def test_on_policy_values_and_gradients_of_the_others() -> None:
    kl, kl_gradient = truth()
    assert expected("k1", None)[0] == pytest.approx(kl, abs=1e-12)
    assert expected("k1", None)[1] == pytest.approx([0.0] * 4, abs=1e-12)
    assert abs(expected("k2", None)[0] - kl) > 0.01  # biased
    assert expected("k2", None)[1] == pytest.approx(kl_gradient, abs=1e-12)
    assert expected("k3", None)[0] == pytest.approx(kl, abs=1e-12)
    assert expected("k3", None)[1] == pytest.approx(truth(reverse=True)[1], abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_off_policy_the_others_are_biased(estimator) -> None:
    (value, gradient), (kl, kl_gradient) = expected(estimator, OTHER_V), truth()
    assert abs(value - kl) > 0.01
    assert max(abs(a - b) for a, b in zip(gradient, kl_gradient, strict=True)) > 0.01


# --- degenerate inputs ------------------------------------------------------------------------------------


@every_estimator
def test_huge_ratios_stay_finite_in_float32(estimator) -> None:
    extremes = [-1e-9, -500.0]
    columns = torch.tensor([(a, b, c) for a in extremes for b in extremes for c in extremes]).T
    current = columns[0].clone().requires_grad_()
    found = kl_estimate(estimator, current, columns[1], columns[2])
    found.sum().backward()
    assert current.grad is not None
    assert torch.isfinite(found).all()
    assert torch.isfinite(current.grad).all()
    if estimator in ("k2", "k3", "k3_unbiased"):
        assert (found >= 0).all()


# What the sign of a token's gradient by log theta is, of x = log theta - log ref
SIGNS = {
    "k1": lambda x: torch.ones_like(x),
    "k2": torch.sign,
    "k3": torch.sign,
    "k1_unbiased": lambda x: torch.sign(x + 1),
    "k3_unbiased": torch.sign,
}


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_gradients_are_finite_and_keep_their_sign_at_any_log_ratio(estimator, dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def spread() -> torch.Tensor:  # log-ratios of all sizes, of both signs
        size = torch.empty(4000, dtype=dtype).uniform_(-3, 3, generator=generator)
        return 10**size * (torch.randint(2, (4000,), generator=generator) * 2 - 1)

    reference = -torch.rand(4000, dtype=dtype, generator=generator)
    current = (reference + spread()).requires_grad_()
    found = kl_estimate(estimator, current, reference, current.detach() + spread())
    found.sum().backward()
    assert current.grad is not None
    assert torch.isfinite(found).all()
    assert torch.isfinite(current.grad).all()
    ratio = current.detach() - reference
    assert torch.equal(torch.sign(current.grad), SIGNS[estimator](ratio)), ratio[
        torch.sign(current.grad) != SIGNS[estimator](ratio)
    ]


@pytest.mark.parametrize("estimator", ["k3", "k3_unbiased"])
def test_k3_grows_without_a_jump_where_it_becomes_its_tangent(estimator) -> None:
    away = torch.linspace(15.9, 20.1, 421, dtype=torch.float64)
    current = (-away).requires_grad_()
    found = kl_estimate(estimator, current, torch.zeros_like(away), current.detach())
    found.sum().backward()
    assert (found.diff() > 0).all()
    assert (found.diff()[1:] / found.diff()[:-1]).max() < 1.02
    assert current.grad is not None
    assert (current.grad.diff() <= 0).all()


@every_estimator
def test_no_token_and_the_reference_itself_are_zero(estimator) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    assert kl_estimate(estimator, nothing, torch.zeros(0), torch.zeros(0)).shape == (0,)
    same = torch.tensor([-0.1, -3.0, -200.0])
    assert kl_estimate(estimator, same, same, torch.tensor([-1.0, -2.0, -3.0])).tolist() == [0.0] * 3


def test_k3_is_never_negative_where_policy_and_reference_are_close() -> None:
    # exp(d) - 1 - d = d^2/2 + ...: of d = 1e-4 it is 5e-9, less than the rounding of exp(d) in float32.
    differences = torch.linspace(-1e-3, 1e-3, 4001)
    found = kl_estimate("k3", torch.zeros(4001), differences, torch.zeros(4001))
    assert (found >= 0).all()
    assert found[2200].item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),  # on target
        (0.11, 1 + 0.1 * 0.05),  # a tenth above it, K = 32 / 640 = 0.05
        (0.092, 1 - 0.08 * 0.05),
        (0.12, 1.01),  # a fifth: the most that counts
        (5.0, 1.01),
        (0.08, 0.99),
        (0.0, 0.99),
        (-0.5, 0.99),  # an estimate may be negative
    ],
)
def test_the_coefficient_moves_towards_its_target(kl: float, factor: float) -> None:
    found = adapted_coefficient(0.04, kl, target=0.1, samples=32, horizon=640.0)
    assert found == pytest.approx(0.04 * factor, abs=1e-15)


def test_the_coefficient_is_never_negative() -> None:
    assert adapted_coefficient(0.04, 0.0, target=0.1, samples=640, horizon=64.0) == 0.0
    assert adapted_coefficient(0.04, 0.0, target=0.1, samples=0, horizon=64.0) == 0.04
