"""Every objective with every aggregation against values computed by hand, gradients by hand and by finite differences.

Six loss tokens of three samples, and a fourth sample without any; u = theta/behav, u' = theta/prox, w = prox/behav:

    sample token  behav  prox  theta    A     u     u'    w    |theta - behav|
      0      0     0.5   0.6    0.9    +1   1.80  1.50  1.20   0.4
      0      1     0.5   0.4    0.4    +1   0.80  1.00  0.80   0.1
      1      2     0.4   0.1    0.2    -2   0.50  2.00  0.25   0.2
      1      3     0.3   0.75   0.3    -2   1.00  0.40  2.50   0
      1      4     0.8   0.2    0.2    -2   0.25  1.00  0.25   0.6
      2      5     0.2   0.4    0.4    -1   2.00  1.00  2.00   0.2

Clip range 0.7 .. 1.28; cap of the weights 1.5; divergence limit 0.25; at most 10 response tokens.
"""

from __future__ import annotations

import math
from math import log

import numpy as np
import pytest
import torch
from finite_differences import central_differences
from flat_batch import all_loss, arrays_of

from headway.algorithms.aggregation import weighting
from headway.trainer.losses import LOSSES, LossSettings, TokenTerms, binary_kl

BEHAVIOUR = [0.5, 0.5, 0.4, 0.3, 0.8, 0.2]
PROXIMAL = [0.6, 0.4, 0.1, 0.75, 0.2, 0.4]
CURRENT = [0.9, 0.4, 0.2, 0.3, 0.2, 0.4]
ADVANTAGES = [1.0, 1.0, -2.0, -2.0, -2.0, -1.0]
RATIOS = [1.8, 0.8, 0.5, 1.0, 0.25, 2.0]
SAMPLES = [0, 0, 1, 1, 1, 2]
SETTINGS = LossSettings(
    clip_low=0.3,
    clip_high=0.28,
    behaviour_weight_cap=1.5,
    divergence_limit=0.25,
    temperature_positive=1.0,
    temperature_negative=2.0,
    beta=0.4,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# sapo: sigmoid(u - 1) of tokens 0, 1 (A > 0), sigmoid(2 (u - 1)) of the others: u - 1 = 0.8 -0.2 -0.5 0 -0.75 1
GATES = [sigmoid(0.8), sigmoid(-0.2), sigmoid(-1.0), 0.5, sigmoid(-1.5), sigmoid(2.0)]

G0, G1 = math.sqrt(0.8) * math.exp(0.14), math.exp(-0.2)  # gmpo's ratios of samples 0 and 1

# loss -> value of each token, its gradient, clipped tokens
TOKENS = {
    # max(-u A, -clip(u) A):  0: -1.28  1: -0.8  2: 0.7*2  3: 2  4: 0.7*2  5: 2;  0, 2, 4 are clipped
    # times min(1, 1.5/u):    0: 1.5/1.8 = 5/6, -1.28*5/6 = -16/15            5: 1.5/2, so 1.5
    "ppo_clip": ([-16 / 15, -0.8, 1.4, 2.0, 1.4, 1.5], [0.0, -0.8, 0.0, 2.0, 0.0, 1.5], {0, 2, 4}),
    # the same of u':         0: -1.28  1: -1    2: 4      3: 0.7*2  4: 2  5: 1;  0, 3 are clipped
    # times min(w, 1.5):      0: -1.536 1: -0.8  2: 1      3: 2.1    4: 0.5  5: 1.5
    "decoupled_ppo": ([-1.536, -0.8, 1.0, 2.1, 0.5, 1.5], [0.0, -0.8, 1.0, 0.0, 0.5, 1.5], {0, 3}),
    # Geometric means of u:   sample 0: sqrt(1.8*0.8) = 1.2   1: cbrt(0.5*1*0.25) = 0.5, clipped to 0.7   2: 2
    # Each token of a sample has its value; n tokens of 1/n of the gradient each make it -ratio A for each.
    "gspo": ([-1.2, -1.2, 1.4, 1.4, 1.4, 2.0], [-1.2, -1.2, 0.0, 0.0, 0.0, 2.0], {2, 3, 4}),
    # log u, bounded: sample 0: 0.28 (of log 1.8) and log 0.8, ratio sqrt(0.8) e^0.14   2: 2, its A is negative
    #   sample 1: -0.3 (of log 0.5), 0, -0.3 (of log 0.25), ratio e^-0.2; clipped tokens have no gradient of their own
    "gmpo": (
        [-G0, -G0, 2 * G1, 2 * G1, 2 * G1, 2.0],
        [0.0, -G0, 0.0, 2 * G1, 0.0, 2.0],
        {0, 2, 4},
    ),
    # values -(4 / t) gate A; gradients -4 gate (1 - gate) u A
    "sapo": (
        [-4 * GATES[0], -4 * GATES[1], 4 * GATES[2], 2.0, 4 * GATES[4], 2 * GATES[5]],
        [
            -7.2 * GATES[0] * (1 - GATES[0]),
            -3.2 * GATES[1] * (1 - GATES[1]),
            4 * GATES[2] * (1 - GATES[2]),
            2.0,
            2 * GATES[4] * (1 - GATES[4]),
            8 * GATES[5] * (1 - GATES[5]),
        ],
        set(),
    ),
    # -min(u, 1.28) A log theta, gradient -min(u, 1.28) A: the weights of tokens 0 and 5 are cut
    "cispo": (
        [-1.28 * log(0.9), -0.8 * log(0.4), log(0.2), 2 * log(0.3), 0.5 * log(0.2), 1.28 * log(0.4)],
        [-1.28, -0.8, 1.0, 2.0, 0.5, 1.28],
        set(),
    ),
    # the same with min(u, 1.5)
    "reinforce": (
        [-1.5 * log(0.9), -0.8 * log(0.4), log(0.2), 2 * log(0.3), 0.5 * log(0.2), 1.5 * log(0.4)],
        [-1.5, -0.8, 1.0, 2.0, 0.5, 1.5],
        set(),
    ),
    # 0.2 (log u)^2 - A log theta, gradient 0.4 log u - A
    "dro": (
        [0.2 * log(u) ** 2 - a * log(p) for u, a, p in zip(RATIOS, ADVANTAGES, CURRENT, strict=True)],
        [0.4 * log(1.8) - 1, 0.4 * log(0.8) - 1, 2 - 0.4 * log(2), 2.0, 2 - 0.8 * log(2), 1 + 0.4 * log(2)],
        set(),
    ),
    # Away from behav are 0 (u > 1, A > 0), 2 and 4 (u < 1, A < 0); 2 only by 0.2.
    "dppo": (
        [0.0, -0.8 * log(0.4), log(0.2), 2 * log(0.3), 0.0, 1.5 * log(0.4)],
        [0.0, -0.8, 1.0, 2.0, 0.0, 1.5],
        {0, 4},
    ),
}

# What each token's loss counts for. token_mean: 6 tokens. fixed: 4 samples x 10 tokens. seq_mean_*: the 3 samples that
# have a loss token, of 2, 3 and 1 tokens.
FACTORS = {
    "token_mean": [1 / 6] * 6,
    "fixed": [1 / 40] * 6,
    "seq_mean_token_sum": [1 / 3] * 6,
    "seq_mean_token_mean": [1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3],
}

L2, L3, L4, L9 = log(0.2), log(0.3), log(0.4), log(0.9)
LOGS = {  # sums of the columns above
    "cispo": -1.28 * L9 + 0.48 * L4 + 1.5 * L2 + 2 * L3,
    "reinforce": -1.5 * L9 + 0.7 * L4 + 1.5 * L2 + 2 * L3,
    "dppo": 0.7 * L4 + L2 + 2 * L3,
}
SAPO = -4 * (GATES[0] + GATES[1]) + 4 * (GATES[2] + GATES[4]) + 2 + 2 * GATES[5]
TOTALS = {
    # samples -16/15 - 0.8 = -28/15, 4.8 and 1.5: 133/30; means -14/15, 1.6 and 1.5: 13/6
    "ppo_clip": (133 / 180, 133 / 1200, 133 / 90, 13 / 18),
    # samples -2.336, 3.6 and 1.5: 2.764; means -1.168, 1.2 and 1.5: 1.532
    "decoupled_ppo": (2.764 / 6, 0.0691, 2.764 / 3, 1.532 / 3),
    # samples -2.4, 4.2 and 2: 3.8; means -1.2, 1.4 and 2: 2.2
    "gspo": (3.8 / 6, 0.095, 3.8 / 3, 2.2 / 3),
    # samples -2 G0, 6 G1 and 2; means -G0, 2 G1 and 2
    "gmpo": (
        (6 * G1 - 2 * G0 + 2) / 6,
        (6 * G1 - 2 * G0 + 2) / 40,
        (6 * G1 - 2 * G0 + 2) / 3,
        (2 * G1 - G0 + 2) / 3,
    ),
    "sapo": (
        SAPO / 6,
        SAPO / 40,
        SAPO / 3,
        (-2 * (GATES[0] + GATES[1]) + (4 * GATES[2] + 2 + 4 * GATES[4]) / 3 + 2 * GATES[5]) / 3,
    ),
    # the last: halves of sample 0, thirds of sample 1
    "cispo": (
        LOGS["cispo"] / 6,
        LOGS["cispo"] / 40,
        LOGS["cispo"] / 3,
        (-0.64 * L9 + 0.88 * L4 + 0.5 * L2 + 2 / 3 * L3) / 3,
    ),
    "reinforce": (
        LOGS["reinforce"] / 6,
        LOGS["reinforce"] / 40,
        LOGS["reinforce"] / 3,
        (-0.75 * L9 + 1.1 * L4 + 0.5 * L2 + 2 / 3 * L3) / 3,
    ),
    # 0.2 times log 1.8 ^2 + log 0.8 ^2 of sample 0, (1 + 4) log 2 ^2 of sample 1, log 2 ^2 of sample 2
    "dro": (
        (0.2 * (log(1.8) ** 2 + log(0.8) ** 2 + 6 * log(2) ** 2) - L9 + 2 * L3 + 4 * L2) / 6,
        (0.2 * (log(1.8) ** 2 + log(0.8) ** 2 + 6 * log(2) ** 2) - L9 + 2 * L3 + 4 * L2) / 40,
        (0.2 * (log(1.8) ** 2 + log(0.8) ** 2 + 6 * log(2) ** 2) - L9 + 2 * L3 + 4 * L2) / 3,
        (
            0.1 * (log(1.8) ** 2 + log(0.8) ** 2)
            - (L9 + L4) / 2
            + log(2) ** 2 / 3
            + (4 * L2 + 2 * L3) / 3
            + 0.2 * log(2) ** 2
            + L4
        )
        / 3,
    ),
    "dppo": (LOGS["dppo"] / 6, LOGS["dppo"] / 40, LOGS["dppo"] / 3, (1.1 * L4 + L2 / 3 + 2 / 3 * L3) / 3),
}
every_loss = pytest.mark.parametrize("loss", TOKENS)
every_aggregation = pytest.mark.parametrize("aggregation", FACTORS)


def logs(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def terms(current: torch.Tensor, keep: list[bool] | None = None) -> TokenTerms:
    return TokenTerms(
        logprobs_m=current,
        proximal_m=logs(PROXIMAL),
        behaviour_m=logs(BEHAVIOUR),
        advantages_m=torch.tensor(ADVANTAGES, dtype=torch.float64),
        sequence_m=torch.tensor(SAMPLES),
        keep_m=None if keep is None else torch.tensor(keep),
    )


def aggregated(loss: str, aggregation: str, current: torch.Tensor) -> torch.Tensor:
    """As the trainer does it."""
    weights = weighting(aggregation, all_loss(2, 3, 1, 0), np.arange(4), max_response_tokens=10)
    loss_m = LOSSES[loss](terms(current), SETTINGS).loss_m
    return (loss_m * torch.from_numpy(weights.weights_s)[torch.tensor(SAMPLES)]).sum() / weights.divisor


def test_nothing_is_left_out() -> None:
    assert TOKENS.keys() == TOTALS.keys() == LOSSES.keys()


@every_loss
def test_tokens(loss: str) -> None:
    values, gradient, clipped = TOKENS[loss]
    current = logs(CURRENT).requires_grad_()
    result = LOSSES[loss](terms(current), SETTINGS)
    result.loss_m.sum().backward()
    assert result.loss_m.tolist() == pytest.approx(values, abs=1e-12)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(gradient, abs=1e-12)
    assert set(torch.nonzero(result.clipped_m).flatten().tolist()) == clipped


@every_loss
@every_aggregation
def test_totals_and_gradients(loss: str, aggregation: str) -> None:
    current = logs(CURRENT).requires_grad_()
    total = aggregated(loss, aggregation, current)
    total.backward()
    assert float(total.detach()) == pytest.approx(TOTALS[loss][list(FACTORS).index(aggregation)], abs=1e-12)
    assert current.grad is not None
    expected = [factor * value for factor, value in zip(FACTORS[aggregation], TOKENS[loss][1], strict=True)]
    assert current.grad.tolist() == pytest.approx(expected, abs=1e-12)


def by_definition(loss: str, now: list[float], start: list[float]) -> list[float]:
    """Token losses in plain numbers, log-probabilities ``now``; constants of the objective are taken at ``start``."""
    behav, prox = [log(p) for p in BEHAVIOUR], [log(p) for p in PROXIMAL]
    u = [math.exp(a - b) for a, b in zip(now, behav, strict=True)]
    held = [math.exp(a - b) for a, b in zip(start, behav, strict=True)]

    def surrogate(ratio: float, advantage: float) -> float:
        return -min(ratio * advantage, min(max(ratio, 0.7), 1.28) * advantage)

    found = []
    for i, a in enumerate(ADVANTAGES):
        if loss == "ppo_clip":
            found.append(min(1.0, 1.5 / held[i]) * surrogate(u[i], a))
        elif loss == "decoupled_ppo":
            found.append(min(1.5, math.exp(prox[i] - behav[i])) * surrogate(math.exp(now[i] - prox[i]), a))
        elif loss == "gspo":
            mates = [u[j] for j in range(6) if SAMPLES[j] == SAMPLES[i]]
            found.append(surrogate(math.prod(mates) ** (1 / len(mates)), a))
        elif loss == "gmpo":
            mates = [u[j] for j in range(6) if SAMPLES[j] == SAMPLES[i]]
            bounded = [min(r, math.exp(0.28)) if a > 0 else max(r, math.exp(-0.3)) for r in mates]
            found.append(-a * math.prod(bounded) ** (1 / len(mates)))
        elif loss == "dro":
            found.append(0.2 * (now[i] - behav[i]) ** 2 - a * now[i])
        elif loss == "sapo":
            temperature = 1.0 if a > 0 else 2.0
            found.append(-a * 4 / temperature * sigmoid(temperature * (u[i] - 1)))
        elif loss == "dppo" and (held[i] - 1) * a > 0 and abs(math.exp(start[i]) - BEHAVIOUR[i]) > 0.25:
            found.append(0.0)
        else:
            found.append(-min(held[i], 1.28 if loss == "cispo" else 1.5) * a * now[i])
    return found


@every_loss
@every_aggregation
@pytest.mark.parametrize("seed", [3, 4])
def test_gradient_by_finite_differences_through_the_softmax(loss: str, aggregation: str, seed: int) -> None:
    """d loss / d logits at T = 0.7, six rows of a vocabulary of five, against central differences of the definition."""
    temperature, targets = 0.7, torch.tensor([0, 3, 1, 4, 2, 2])
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def logprobs(values: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(values / temperature, -1).gather(-1, targets[:, None]).squeeze(-1)

    start = logprobs(logits).tolist()

    def total(values: torch.Tensor) -> float:
        losses = by_definition(loss, logprobs(values).tolist(), start)
        return sum(factor * value for factor, value in zip(FACTORS[aggregation], losses, strict=True))

    leaf = logits.clone().requires_grad_()
    found = aggregated(loss, aggregation, logprobs(leaf))
    found.backward()
    assert float(found.detach()) == pytest.approx(total(logits), abs=1e-12)
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) > 0.003
    assert torch.allclose(leaf.grad, central_differences(total, logits), atol=1e-8, rtol=1e-6)


def test_sapo_is_the_policy_gradient_on_policy_and_fades_away_from_it() -> None:
    def gradient(current: list[float]) -> list[float]:
        leaf = logs(current).requires_grad_()
        LOSSES["sapo"](terms(leaf), SETTINGS).loss_m.sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    assert gradient(BEHAVIOUR) == pytest.approx([-a for a in ADVANTAGES], abs=1e-12)
    # Token 0, u = 1.8: -7.2 s (1 - s), s = 0.6899744811276125. Token 5, u = 2: 8 s (1 - s), s = 0.8807970779778823.
    assert gradient(CURRENT)[0] == pytest.approx(-1.5401498149, abs=1e-9)
    assert gradient(CURRENT)[5] == pytest.approx(0.8399486832, abs=1e-9)


def test_dppo_measures_probabilities_not_ratios() -> None:
    # With limit 0.15 token 2 goes too (0.2 away); token 5 is as far and stays, because its gradient brings it back;
    # token 3 stays although its advantage is large, token 1 is 0.1 away.
    tighter = LossSettings(behaviour_weight_cap=1.5, divergence_limit=0.15)
    result = LOSSES["dppo"](terms(logs(CURRENT)), tighter)
    assert result.clipped_m.tolist() == [True, False, True, False, True, False]
    assert result.loss_m.tolist() == pytest.approx([0, -0.8 * L4, 0, 2 * L3, 0, 1.5 * L4], abs=1e-12)


# KL of (behav, 1 - behav) to (theta, 1 - theta), token by token: the fourth didn't move.
BINARY_KL = [
    0.5 * log(0.5 / 0.9) + 0.5 * log(0.5 / 0.1),
    0.5 * log(0.5 / 0.4) + 0.5 * log(0.5 / 0.6),
    0.4 * log(0.4 / 0.2) + 0.6 * log(0.6 / 0.8),
    0.0,
    0.8 * log(0.8 / 0.2) + 0.2 * log(0.2 / 0.8),
    0.2 * log(0.2 / 0.4) + 0.8 * log(0.8 / 0.6),
]


def test_dppo_by_kl() -> None:
    assert binary_kl(logs(BEHAVIOUR), logs(CURRENT)).tolist() == pytest.approx(BINARY_KL, abs=1e-12)

    # 0.5108, 0.0204, 0.1046, 0, 0.8318, 0.0915: of those that move away (0, 2, 4) the farthest go first.
    def removed(limit: float) -> list[int]:
        by_kl = LossSettings(behaviour_weight_cap=1.5, divergence="kl", divergence_limit=limit)
        leaf = logs(CURRENT).requires_grad_()
        result = LOSSES["dppo"](terms(leaf), by_kl)
        result.loss_m.sum().backward()
        gone = torch.nonzero(result.clipped_m).flatten().tolist()
        assert leaf.grad is not None
        free = TOKENS["reinforce"][1]
        assert leaf.grad.tolist() == pytest.approx([0 if i in gone else free[i] for i in range(6)], abs=1e-12)
        return gone

    assert removed(0.9) == []
    assert removed(0.52) == [4]
    assert removed(0.5) == [0, 4]
    assert removed(0.1) == [0, 2, 4]
    assert removed(0.01) == [0, 2, 4]  # their gradients bring tokens 1 and 5 back


def test_binary_kl_of_certain_and_of_impossible_tokens_is_finite() -> None:
    every = torch.tensor([0.0, -1e-9, -1.0, -500.0])
    found = binary_kl(every.repeat_interleave(4), every.repeat(4))
    assert torch.isfinite(found).all()
    assert float(found.min()) > -1e-6
    assert found.view(4, 4).diagonal().tolist() == [0.0] * 4
    assert float(found.view(4, 4)[2, 3]) == pytest.approx(exp_times(-1.0, 499.0), rel=1e-4)


def exp_times(logprob: float, away: float) -> float:
    return math.exp(logprob) * away - (1 - math.exp(logprob)) * -log(1 - math.exp(logprob))


def test_gspo_leaves_masked_tokens_out_of_its_mean() -> None:
    # Without token 0 sample 0 has ratio 0.8, of one token; sample 1, wholly masked, has 1 (and no loss: the trainer
    # clears masked tokens); sample 2 is as before.
    current = logs(CURRENT).requires_grad_()
    keep = [False, True, False, False, False, True]
    result = LOSSES["gspo"](terms(current, keep), SETTINGS)
    assert result.loss_m.tolist() == pytest.approx([-0.8, -0.8, 2, 2, 2, 2], abs=1e-12)
    torch.where(torch.tensor(keep), result.loss_m, 0.0).sum().backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([0, -0.8, 0, 0, 0, 2], abs=1e-12)
    # Without sequences all tokens are of one: 1.8 * 0.8 * 0.5 * 1 * 0.25 * 2 = 0.36.
    alone = TokenTerms(
        logprobs_m=current, proximal_m=current, behaviour_m=logs(BEHAVIOUR), advantages_m=torch.ones(6).double()
    )
    assert LOSSES["gspo"](alone, SETTINGS).loss_m.tolist() == pytest.approx([-(0.36 ** (1 / 6))] * 6, abs=1e-12)


def test_gmpo_leaves_masked_tokens_out_of_its_mean() -> None:
    # Sample 0 without token 0: 0.8. Sample 1 without token 2: sqrt(1 * e^-0.3). Sample 2, wholly masked: 1.
    keep = [False, True, False, True, True, False]
    result = LOSSES["gmpo"](terms(logs(CURRENT), keep), SETTINGS)
    rest = 2 * math.exp(-0.15)
    assert result.loss_m.tolist() == pytest.approx([-0.8, -0.8, rest, rest, rest, 1.0], abs=1e-12)


def test_weights_and_divisors() -> None:
    arrays = arrays_of([False, True, True, False], [False, False], [True, True, True, True], [False, True])
    two = np.array([0, 1])  # one optimiser step of two: 2 loss tokens, in one sample of the two
    expected = {"token_mean": 2.0, "fixed": 20.0, "seq_mean_token_sum": 1.0, "seq_mean_token_mean": 1.0}
    for name, divisor in expected.items():
        weights = weighting(name, arrays, two, max_response_tokens=10)  # type: ignore[arg-type]
        assert weights.divisor == divisor
        assert weights.weights_s.tolist() == ([0.5, 1, 0.25, 1] if name == "seq_mean_token_mean" else [1, 1, 1, 1])


@every_aggregation
@pytest.mark.parametrize("arrays", [all_loss(), arrays_of([False, False], [False])])
def test_no_loss_token_divides_by_at_least_one(aggregation: str, arrays) -> None:
    weights = weighting(aggregation, arrays, np.arange(arrays.samples), max_response_tokens=10)
    assert weights.divisor == (10.0 * arrays.samples if aggregation == "fixed" and arrays.samples else 1.0)
    assert np.isfinite(weights.weights_s).all()


EXTREMES = [-1e-9, -500.0]


@every_loss
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("keep", [True, False])
def test_huge_ratios_stay_finite_in_float32(loss: str, cap: float | None, advantage: float, keep: bool) -> None:
    """Log-ratios of 0, +500 and -500 to either policy, in every combination, in samples of two tokens."""
    every = [(a, b, c) for a in EXTREMES for b in EXTREMES for c in EXTREMES]
    columns = torch.tensor(every, dtype=torch.float32).T
    current = columns[0].clone().requires_grad_()
    result = LOSSES[loss](
        TokenTerms(
            logprobs_m=current,
            proximal_m=columns[1],
            behaviour_m=columns[2],
            advantages_m=torch.full((8,), advantage),
            sequence_m=torch.arange(8) // 2,
            keep_m=torch.full((8,), keep),
        ),
        LossSettings(behaviour_weight_cap=cap, dual_clip=3.0 if cap else None),
    )
    result.loss_m.sum().backward()
    assert current.grad is not None
    assert torch.isfinite(result.loss_m).all()
    assert torch.isfinite(current.grad).all()
    if advantage == 0.0 and loss != "dro":
        assert result.loss_m.abs().max() == current.grad.abs().max() == 0.0


@every_loss
@pytest.mark.parametrize("sequences", [True, False])
def test_no_token_is_a_finite_zero(loss: str, sequences: bool) -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(0, requires_grad=True)
    result = LOSSES[loss](
        TokenTerms(
            logprobs_m=empty,
            proximal_m=nothing,
            behaviour_m=nothing,
            advantages_m=nothing,
            sequence_m=none if sequences else None,
            keep_m=none.bool() if sequences else None,
        ),
        SETTINGS,
    )
    assert result.loss_m.shape == result.clipped_m.shape == (0,)
    assert float(result.loss_m.detach().sum()) == 0.0
