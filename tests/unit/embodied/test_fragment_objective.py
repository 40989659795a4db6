"""Targets and loss of fragments against stable-baselines3's formulas and the corrections', written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_fragments import CONTINUOUS, DISCRETE, experiment, fragment

from headway.embodied.learner import FragmentLearner
from headway.embodied.objective import LossTerms, minibatch_loss, ratio_changes, returns_of, steps_of
from headway.embodied.policies import ActorCritic, LanePolicy
from headway.trainer.critic.value_loss import clipped_value_loss
from headway.trainer.losses import LossSettings, TokenTerms, decoupled_ppo

DISCOUNT, DECAY = 0.97, 0.9


def algorithm(correction: str = "none", **keys):
    return experiment(algorithm={"correction": correction, "discount": DISCOUNT, "decay": DECAY, **keys}).algorithm


@pytest.fixture(scope="module", params=range(4))
def made(request):
    policy = LanePolicy(CONTINUOUS, experiment().policy)
    policy.load(FragmentLearner(experiment(), CONTINUOUS, "cpu:0").weights())
    chance = np.random.default_rng(request.param)
    one = fragment(policy, CONTINUOUS, request.param, steps=20)
    shape = one.rewards_tb.shape
    return one, chance.standard_normal(shape), chance.standard_normal(4), chance.standard_normal(len(one.final_at))


def final_value(one, finals, step, lane):
    return finals[[tuple(position) for position in one.final_at].index((step, lane))]


def test_advantages_are_those_of_stable_baselines3(made):
    one, values, last_values, finals = made
    steps = steps_of(one, one.rewards_tb, values, last_values, finals)
    returns = returns_of(steps, np.ones_like(values), algorithm())
    for lane in range(4):
        running = 0.0
        for step in reversed(range(20)):
            if not one.counted_tb[step, lane]:
                continue
            is_end = one.terminated_tb[step, lane] or one.truncated_tb[step, lane]
            reward = one.rewards_tb[step, lane]
            if one.truncated_tb[step, lane]:  # as its rollouts add it to the reward
                reward += DISCOUNT * final_value(one, finals, step, lane)
            next_value = last_values[lane] if step == 19 else values[step + 1, lane]
            delta = reward + DISCOUNT * next_value * (1.0 - is_end) - values[step, lane]
            running = delta + DISCOUNT * DECAY * (1.0 - is_end) * running
            assert returns.advantages_t[step, lane] == pytest.approx(running, rel=1e-12, abs=1e-12)
            assert returns.targets_t[step, lane] == pytest.approx(running + values[step, lane], rel=1e-12, abs=1e-12)


def test_v_trace_is_its_recursion_step_by_step(made):
    one, values, last_values, finals = made
    ratios = np.exp(np.random.default_rng(1).standard_normal(values.shape))
    steps = steps_of(one, one.rewards_tb, values, last_values, finals)
    returns = returns_of(steps, ratios, algorithm("vtrace"))
    for lane in range(4):
        next_target = last_values[lane]
        next_value = last_values[lane]
        for step in reversed(range(20)):
            if not one.counted_tb[step, lane]:
                next_target = next_value = np.nan  # nothing reads behind it
                continue
            value, reward, cut = values[step, lane], one.rewards_tb[step, lane], min(ratios[step, lane], 1.0)
            if one.terminated_tb[step, lane]:
                behind = target_behind = correction = 0.0
            elif one.truncated_tb[step, lane]:
                behind = target_behind = final_value(one, finals, step, lane)
                correction = 0.0
            else:
                behind, target_behind, correction = next_value, next_target, next_target - next_value
            delta = cut * (reward + DISCOUNT * behind - value)
            target = value + delta + DISCOUNT * DECAY * cut * correction
            advantage = reward + DISCOUNT * (DECAY * target_behind + (1 - DECAY) * behind) - value
            assert returns.targets_t[step, lane] == pytest.approx(target, rel=1e-12, abs=1e-12)
            assert returns.advantages_t[step, lane] == pytest.approx(advantage, rel=1e-12, abs=1e-12)
            next_target, next_value = target, value


def test_v_trace_is_gae_where_nothing_is_stale(made):
    one, values, last_values, finals = made
    steps = steps_of(one, one.rewards_tb, values, last_values, finals)
    traced, estimated = (
        returns_of(steps, np.ones_like(values), algorithm(correction)) for correction in ("vtrace", "none")
    )
    for ours, theirs in zip(traced, estimated, strict=True):
        np.testing.assert_allclose(ours[one.counted_tb], theirs[one.counted_tb], rtol=1e-10, atol=1e-12)


def chance_terms(count: int = 40) -> tuple[np.ndarray, np.ndarray, LossTerms]:
    logprobs, values, proximal, weights, *others = 0.5 * np.random.default_rng(2).standard_normal((7, count))
    return logprobs, values, LossTerms(proximal, np.exp(weights), *others)


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_loss_is_that_of_the_trainers_losses(value_clip):
    logprobs, values, terms = chance_terms()
    loss = minibatch_loss(logprobs, values, terms, algorithm("vtrace", value_clip=value_clip))
    advantages = (terms.advantages_n - terms.advantages_n.mean()) / (terms.advantages_n.std(ddof=1) + 1e-8)
    settings = LossSettings(clip_low=0.2, clip_high=0.2, behaviour_weight_cap=None)
    behaviour = terms.proximal_n - np.log(terms.weights_n)
    arrays = {
        "logprobs_m": logprobs,
        "proximal_m": terms.proximal_n,
        "behaviour_m": behaviour,
        "advantages_m": advantages,
    }
    policy = decoupled_ppo(TokenTerms(**{key: torch.from_numpy(array) for key, array in arrays.items()}), settings)
    assert loss.policy_loss == pytest.approx(float(policy.loss_m.mean()), rel=1e-12)
    np.testing.assert_array_equal(loss.clipped_m, policy.clipped_m.numpy())
    errors = (values - terms.targets_n) ** 2
    if value_clip is not None:
        tensors = (torch.from_numpy(array) for array in (values, terms.start_values_n, terms.targets_n))
        errors = 2 * clipped_value_loss(*tensors, value_clip).numpy()
    assert loss.value_loss == pytest.approx(errors.mean(), rel=1e-12)
    ratios = np.exp(logprobs - terms.proximal_n)
    kl, deviation = ratio_changes(loss.log_ratios_m)
    assert kl == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-12)
    assert deviation == pytest.approx(np.abs(ratios - 1).mean(), rel=1e-12)


def test_single_transition_has_a_finite_loss():
    logprobs, values, terms = chance_terms()
    loss = minibatch_loss(logprobs[:1], values[:1], terms.rows(np.array([0])), algorithm())
    assert np.isfinite([loss.policy_loss, *loss.by_logprobs_m, *loss.by_values_m]).all()


def numeric_gradient(function, numbers: np.ndarray) -> np.ndarray:
    steps = 1e-6 * np.eye(len(numbers))
    return np.array([(function(numbers + step) - function(numbers - step)) / 2e-6 for step in steps])


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_derivatives_of_the_loss_are_those_of_finite_differences(value_clip):
    logprobs, values, terms = chance_terms()
    settings = algorithm("recompute", value_clip=value_clip, value_coefficient=0.7)
    loss = minibatch_loss(logprobs, values, terms, settings)
    by_logprobs = numeric_gradient(lambda x: minibatch_loss(x, values, terms, settings).policy_loss, logprobs)
    by_values = numeric_gradient(lambda x: 0.7 * minibatch_loss(logprobs, x, terms, settings).value_loss, values)
    np.testing.assert_allclose(loss.by_logprobs_m, by_logprobs, atol=1e-8, rtol=1e-6)
    np.testing.assert_allclose(loss.by_values_m, by_values, atol=1e-8, rtol=1e-6)
    assert 0 < loss.clipped_m.sum() < len(logprobs)
    assert (value_clip is None) == (loss.by_values_m != 0).all()


def test_values_within_the_clip_keep_their_gradient_in_float32():
    starts, values, targets = 0.1 * np.random.default_rng(0).uniform(-1, 1, (3, 2000)).astype(np.float32)
    zeros = np.zeros_like(starts)
    terms = LossTerms(zeros, zeros + 1, zeros, targets, starts)
    assert minibatch_loss(zeros, values, terms, algorithm(value_clip=0.2)).by_values_m.all()


def test_ratio_beyond_all_bounds_has_no_gradient():
    logprobs, values, terms = chance_terms()
    worse = int(terms.advantages_n.argmin())
    logprobs[worse] += 40.0  # a negative advantage isn't clipped from above
    loss = minibatch_loss(logprobs, values, terms, algorithm())
    assert not loss.clipped_m[worse]
    assert loss.by_logprobs_m[worse] == 0
    assert np.isfinite(loss.by_logprobs_m).all()


@pytest.mark.parametrize(("spaces", "squash"), [(CONTINUOUS, False), (CONTINUOUS, True), (DISCRETE, False)])
def test_scores_have_the_gradients_of_finite_differences(spaces, squash):
    settings = experiment(policy={"hidden": [3, 2], "squash": squash})
    network = ActorCritic(spaces, settings.policy, torch, lambda array: torch.as_tensor(array, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    size = sum(int(np.prod(shape)) for shape in network.shapes.values())
    parameters = 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)
    inputs = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    actions = torch.arange(9) % 4 if spaces is DISCRETE else 0.9 * torch.rand(9, 3, generator=generator).double()

    def scores(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = network.views(flat)
        outputs, values = network.forward(views, inputs)
        return *network.distribution.scores(outputs, views["log_deviations"], actions), values

    assert torch.autograd.gradcheck(scores, (parameters.requires_grad_(),), eps=1e-6, atol=1e-7)
