"""The policy as it acts: one forward pass in NumPy or torch, by weights of one version."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from made_fragments import CONTINUOUS, DISCRETE, PICTURE, experiment, observations

from headway.embodied.learner import FragmentLearner
from headway.embodied.policies import ActorCritic, LanePolicy
from headway.embodied.records import Box, Spaces

PICTURES = Spaces(PICTURE, CONTINUOUS.actions)
CHANCE = np.random.default_rng(5)


def opened(spaces: Spaces, **policy) -> tuple[LanePolicy, FragmentLearner]:
    settings = experiment(policy=policy)
    acting, learner = LanePolicy(spaces, settings.policy), FragmentLearner(settings, spaces, "cpu:0")
    mean = np.zeros(()) if spaces.observations.is_picture else np.arange(1.0, 6.0)
    weights = learner.weights()._replace(observation_mean=mean, observation_deviation=mean + 2.0)
    noise = 0.3 * np.random.default_rng(0).standard_normal(weights.parameters_p.shape)
    acting.load(weights._replace(parameters_p=weights.parameters_p + noise.astype(np.float32)))
    return acting, learner


def noise_of(spaces: Spaces, lanes: int) -> np.ndarray:
    if isinstance(spaces.actions, Box):
        return CHANCE.standard_normal((lanes, *spaces.actions.shape), np.float32)
    return CHANCE.random(lanes, np.float32)


@pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE, PICTURES])
@pytest.mark.parametrize("hidden", [(), (7,), (8, 6)])
def test_tensors_get_the_actions_of_numpy_as_tensors(spaces, hidden):
    policy, _ = opened(spaces, hidden=list(hidden))
    lanes = observations(spaces, (4,), CHANCE)
    noise = noise_of(spaces, 4)
    actions, logprobs, values = policy.act(lanes, noise)
    assert actions.shape == (4, *getattr(spaces.actions, "shape", ()))
    assert [array.dtype for array in (logprobs, values)] == [np.float32] * 2
    policy.load(policy._weights)
    tensors = policy.act(torch.from_numpy(lanes), noise)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    for tensor, array in zip(tensors, (actions, logprobs, values), strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-4, atol=1e-5)
    evaluated = policy.act_in_evaluation(torch.from_numpy(lanes), noise)
    np.testing.assert_allclose(evaluated.numpy(), tensors[0].numpy(), atol=6.0)


def test_perceptron_computes_tanh_layers_of_normalised_observations():
    policy, _ = opened(CONTINUOUS)
    lanes, noise = observations(CONTINUOUS, (4,), CHANCE), noise_of(CONTINUOUS, 4)
    lanes[0, 0] = 1e6  # is clipped at ten deviations
    weights = policy._weights
    views = ActorCritic(CONTINUOUS, experiment().policy).views(weights.parameters_p.astype(np.float64))
    x = np.clip((lanes - weights.observation_mean) / weights.observation_deviation, -10, 10)
    actor, critic = x, x
    for layer in range(2):
        actor = np.tanh(actor @ views[f"hidden{layer}"][0] + views[f"hidden{layer}_bias"][0])
        critic = np.tanh(critic @ views[f"hidden{layer}"][1] + views[f"hidden{layer}_bias"][1])
    means = actor @ views["actor"] + views["actor_bias"]
    actions, _, values = policy.act(lanes, noise)
    np.testing.assert_allclose(actions, means + np.exp(views["log_deviations"]) * noise, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(values, (critic @ views["critic"] + views["critic_bias"])[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.act_in_evaluation(lanes, noise), means, rtol=1e-4, atol=1e-5)


def test_actions_are_equal_bit_by_bit_wherever_the_observations_lie_in_memory():
    policy, _ = opened(CONTINUOUS)
    lanes, noise = observations(CONTINUOUS, (8,), CHANCE), noise_of(CONTINUOUS, 8)
    expected = [array.copy() for array in policy.act(lanes, noise)]
    for offset in range(1, 9):
        memory = np.empty(lanes.size + offset)
        memory[offset:] = lanes.ravel()
        moved = policy.act(memory[offset:].reshape(lanes.shape), noise.copy())
        assert all(np.array_equal(array, other) for array, other in zip(expected, moved, strict=True))


def test_unnormalised_observations_are_taken_as_they_are():
    policy, _ = opened(CONTINUOUS, normalize=False)
    lanes, noise = observations(CONTINUOUS, (4,), CHANCE), noise_of(CONTINUOUS, 4)
    expected = policy.act(lanes, noise)
    policy.load(policy._weights._replace(observation_mean=np.full(5, 9.0)))
    assert all(np.array_equal(array, other) for array, other in zip(expected, policy.act(lanes, noise), strict=True))


def test_likeliest_action_of_several_is_taken_in_evaluations():
    policy, _ = opened(DISCRETE)
    lanes = observations(DISCRETE, (1,), CHANCE)
    drawn = [int(policy.act(lanes, np.array([noise], np.float32))[0][0]) for noise in np.linspace(0, 0.999, 200)]
    assert np.bincount(drawn).argmax() == int(policy.act_in_evaluation(lanes, np.zeros(1, np.float32))[0])


@pytest.mark.parametrize("side", [5, 10, 35, 36, 84])
def test_convolutions_fit_pictures_of_any_size(side):
    picture = Box(np.zeros((side, side + 1, 4), np.uint8), np.full((side, side + 1, 4), 255, np.uint8))
    network = ActorCritic(Spaces(picture, CONTINUOUS.actions), experiment().policy, torch, torch.as_tensor)
    size = sum(int(np.prod(shape)) for shape in network.shapes.values())
    outputs, values = network.forward(
        network.views(torch.zeros(size)), torch.zeros(2, side, side + 1, 4, dtype=torch.uint8)
    )
    assert outputs.shape == (2, 3)
    assert values.shape == (2,)


def test_pictures_may_have_their_channels_first():
    stack = Box(np.zeros((4, 84, 90), np.uint8), np.full((4, 84, 90), 255, np.uint8))
    lasts = Box(stack.low.transpose(1, 2, 0), stack.high.transpose(1, 2, 0))
    first, last = (
        ActorCritic(Spaces(box, CONTINUOUS.actions), experiment().policy, torch, torch.as_tensor)
        for box in (stack, lasts)
    )
    assert first.shapes == last.shapes
    parameters = first.views(0.05 * torch.randn(sum(int(np.prod(shape)) for shape in first.shapes.values())))
    pictures = torch.randint(0, 256, (2, 4, 84, 90), dtype=torch.uint8)
    values = first.forward(parameters, pictures)[1], last.forward(parameters, pictures.permute(0, 2, 3, 1))[1]
    torch.testing.assert_close(*values)


def test_actions_of_several_dimensions_keep_their_shape():
    actions = Box(np.full((2, 3), -1.0, np.float32), np.full((2, 3), 1.0, np.float32))
    spaces = Spaces(CONTINUOUS.observations, actions)
    policy, _ = opened(spaces, squash=True)
    drawn, logprobs, _ = policy.act(observations(spaces, (4,), CHANCE), noise_of(spaces, 4))
    assert drawn.shape == (4, 2, 3)
    assert logprobs.shape == (4,)


def test_loaded_weights_replace_all_former_ones():
    policy, learner = opened(CONTINUOUS)
    lanes, noise = observations(CONTINUOUS, (4,), CHANCE), noise_of(CONTINUOUS, 4)
    former = policy.act(lanes, noise)
    policy.load(learner.weights())
    assert not np.array_equal(former[2], policy.act(lanes, noise)[2])


def test_perceptrons_act_without_torch():
    code = "import sys, headway.embodied.policies; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_weights_are_copies_that_later_steps_leave_as_they_are():
    _, learner = opened(CONTINUOUS)
    weights = learner.weights()
    kept = weights.parameters_p.copy()
    learner._parameters_p.add_(1.0)
    np.testing.assert_array_equal(weights.parameters_p, kept)
