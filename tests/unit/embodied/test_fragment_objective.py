"""Targets and loss of fragments against stable-baselines3's formulas and the corrections', written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_fragments import CONTINUOUS, DISCRETE, experiment, fragment

from headway.embodied.learner import FragmentLearner
from headway.embodied.objective import Transitions, minibatch_loss, ratio_changes, returns_of, steps_of
from headway.embodied.policies import ActorCritic, make_policy

DISCOUNT, DECAY = 0.97, 0.9


def algorithm(correction: str = "none", **keys):
    return experiment(algorithm={"correction": correction, "discount": DISCOUNT, "decay": DECAY, **keys}).algorithm


@pytest.fixture(scope="module", params=range(4))
def made(request):
    policy = make_policy(CONTINUOUS, experiment())
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


def chance_rows(count: int = 40) -> tuple[torch.Tensor, torch.Tensor, Transitions]:
    generator = torch.Generator().manual_seed(2)
    logprobs, values, *terms = 0.5 * torch.randn(7, count, generator=generator, dtype=torch.float64)
    return logprobs, values, Transitions(torch.zeros(count, 0), torch.zeros(count), torch.stack(terms))


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_loss_is_ppos_with_weights_of_stale_actions_cut(value_clip):
    logprobs, values, rows = chance_rows()
    settings = algorithm("vtrace", value_clip=value_clip, entropy_coefficient=0.01, behaviour_weight_cap=1.3)
    loss = minibatch_loss(logprobs, values, torch.tensor(2.5).double(), rows, settings)
    behaviour, proximal, advantages, targets, start = rows.terms_5n.numpy()
    ratios = np.exp(logprobs.numpy() - proximal)
    scaled = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    surrogate = np.minimum(ratios * scaled, np.clip(ratios, 0.8, 1.2) * scaled)
    policy_loss = -(np.minimum(np.exp(proximal - behaviour), 1.3) * surrogate).mean()
    errors = (values.numpy() - targets) ** 2
    if value_clip is not None:
        near = start + np.clip(values.numpy() - start, -value_clip, value_clip)
        errors = np.maximum(errors, (near - targets) ** 2)
    assert float(loss.loss) == pytest.approx(policy_loss + 0.5 * errors.mean() - 0.01 * 2.5, rel=1e-12)
    assert float(loss.policy_loss) == pytest.approx(policy_loss, rel=1e-12)
    assert float(loss.value_loss) == pytest.approx(errors.mean(), rel=1e-12)
    kl, deviation = ratio_changes(loss.log_ratios_m)
    assert float(kl) == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-12)
    assert float(deviation) == pytest.approx(np.abs(ratios - 1).mean(), rel=1e-12)
    outside = np.clip(ratios, 0.8, 1.2) * scaled < ratios * scaled
    np.testing.assert_array_equal(loss.clipped_m.numpy(), outside)


def test_single_transition_has_a_finite_loss():
    logprobs, values, rows = chance_rows()
    loss = minibatch_loss(logprobs[:1], values[:1], torch.tensor(0.0), rows.rows(torch.tensor([0])), algorithm())
    assert torch.isfinite(loss.loss)


@pytest.mark.parametrize(("spaces", "squash"), [(CONTINUOUS, False), (CONTINUOUS, True), (DISCRETE, False)])
@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_gradient_of_the_loss_is_that_of_finite_differences(spaces, squash, value_clip):
    settings = experiment(policy={"hidden": [3, 2], "squash": squash})
    network = ActorCritic(spaces, settings.policy, torch, lambda array: torch.as_tensor(array, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    size = sum(int(np.prod(shape)) for shape in network.shapes.values())
    parameters = 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)
    inputs, terms = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((9, 5), (5, 9)))
    actions = torch.arange(9) % 4 if spaces is DISCRETE else 0.9 * torch.rand(9, 3, generator=generator).double()
    keys = algorithm("recompute", entropy_coefficient=0.1, value_clip=value_clip, clip=0.5)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        views = network.views(flat)
        outputs, values = network.forward(views, inputs)
        logprobs, entropy = network.distribution.scores(outputs, views["log_deviations"], actions)
        rows = Transitions(inputs, actions, torch.stack([logprobs0 - 0.1, logprobs0, *terms[2:]]))
        return minibatch_loss(logprobs, values, entropy, rows, keys).loss

    views = network.views(parameters)
    outputs, _ = network.forward(views, inputs)
    logprobs0 = network.distribution.scores(outputs, views["log_deviations"], actions)[0] + 0.05 * terms[0]
    assert torch.autograd.gradcheck(loss, (parameters.requires_grad_(),), eps=1e-6, atol=1e-7)
