"""Distributions of actions against their densities written out, in NumPy and torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from made_fragments import TORQUES

from headway.embodied.distributions import Categorical, DiagonalGaussian, SquashedGaussian, distribution_of
from headway.embodied.records import Box
from headway.records.errors import ConfigurationError

MEANS = np.array([[0.3, -0.2, 0.5], [1.0, 2.0, -4.0]])
LOG_DEVIATIONS = np.array([0.1, -0.7, 0.4])
NOISE = np.array([[0.5, -1.5, 0.1], [-0.4, 2.0, 1.0]])


def normal_logprobs(samples, means, log_deviations):
    deviations = np.exp(log_deviations)
    return (-0.5 * ((samples - means) / deviations) ** 2 - log_deviations - 0.5 * math.log(2 * math.pi)).sum(-1)


def test_gaussian_has_the_density_and_entropy_of_its_formula():
    gaussian = DiagonalGaussian(3, np)
    actions, logprobs = gaussian.sample(MEANS, LOG_DEVIATIONS, NOISE)
    np.testing.assert_allclose(actions, MEANS + np.exp(LOG_DEVIATIONS) * NOISE, rtol=1e-12)
    np.testing.assert_allclose(logprobs, normal_logprobs(actions, MEANS, LOG_DEVIATIONS), rtol=1e-12)
    scored, entropy = gaussian.scores(MEANS, LOG_DEVIATIONS, actions)
    np.testing.assert_allclose(scored, logprobs, rtol=1e-12)
    assert entropy == pytest.approx((0.5 + 0.5 * math.log(2 * math.pi) + LOG_DEVIATIONS).sum(), rel=1e-12)
    np.testing.assert_array_equal(gaussian.mode(MEANS), MEANS)


def test_squashed_gaussian_has_the_jacobian_and_finds_its_samples_again():
    squashed = SquashedGaussian(TORQUES, np, np.asarray)
    actions, logprobs = squashed.sample(MEANS, LOG_DEVIATIONS, NOISE)
    assert np.all((actions >= TORQUES.low) & (actions <= TORQUES.high))
    samples, half = MEANS + np.exp(LOG_DEVIATIONS) * NOISE, (TORQUES.high - TORQUES.low) / 2
    jacobian = np.log(half * (1 - np.tanh(samples) ** 2)).sum(-1)
    np.testing.assert_allclose(logprobs, normal_logprobs(samples, MEANS, LOG_DEVIATIONS) - jacobian, rtol=1e-9)
    scored, _ = squashed.scores(MEANS, LOG_DEVIATIONS, actions)
    np.testing.assert_allclose(scored, logprobs, rtol=1e-9)
    np.testing.assert_allclose(squashed.mode(np.zeros((1, 3)))[0], [0.0, 0.0, 2.0], atol=1e-7)


def test_squashed_density_integrates_to_one():
    box = Box(np.array([-1.0], np.float32), np.array([3.0], np.float32))
    squashed = SquashedGaussian(box, np, np.asarray)
    actions = np.linspace(-1, 3, 400_003)[1:-1, None]
    logprobs, _ = squashed.scores(np.full_like(actions, 0.4), np.array([0.3]), actions)
    assert np.trapezoid(np.exp(logprobs), actions[:, 0]) == pytest.approx(1.0, abs=1e-4)


def test_squashed_actions_at_their_bounds_have_finite_log_probabilities_that_are_found_again():
    squashed = SquashedGaussian(TORQUES, np, np.asarray)
    means = np.array([[40.0, -40.0, 5.5]], np.float32)
    log_deviations, noise = np.zeros(3, np.float32), np.zeros((1, 3), np.float32)
    actions, logprobs = squashed.sample(means, log_deviations, noise)
    assert actions.dtype == logprobs.dtype == np.float32
    assert np.isfinite(logprobs).all()
    scored, _ = squashed.scores(means, log_deviations, actions)
    np.testing.assert_allclose(scored, logprobs, atol=0.05)  # of 1156 nats: of a sample that was kept at 6


def test_squash_without_bounds_is_refused_by_key():
    unbounded = Box(np.full(2, -np.inf, np.float32), np.ones(2, np.float32))
    with pytest.raises(ConfigurationError, match=r"policy\.squash = true .*only false is valid"):
        distribution_of(unbounded, True, np, np.asarray)


def test_categorical_draws_each_action_by_its_share_of_the_noise():
    outputs = np.log(np.array([[0.2, 0.5, 0.0, 0.3]]) + 1e-30)
    categorical = Categorical(4, np)
    noise = (np.arange(1000) + 0.5) / 1000
    rows = np.repeat(outputs, 1000, 0)
    actions, logprobs = categorical.sample(rows, np.zeros(0), noise)
    np.testing.assert_array_equal(np.bincount(actions, minlength=4), [200, 500, 0, 300])
    np.testing.assert_allclose(logprobs, np.log([0.2, 0.5, 1.0, 0.3])[actions], rtol=1e-9)
    scored, entropy = categorical.scores(rows + 7.0, np.zeros(0), actions)  # a constant changes no probability
    np.testing.assert_allclose(scored, logprobs, rtol=1e-9)
    assert entropy == pytest.approx(-(0.2 * math.log(0.2) + 0.5 * math.log(0.5) + 0.3 * math.log(0.3)), rel=1e-9)
    assert categorical.mode(outputs)[0] == 1


def test_categorical_draws_no_action_beyond_the_last_one():
    noise = np.array([np.nextafter(np.float32(1), np.float32(0))])
    for count in range(2, 40):  # for some of them the probabilities sum up to less
        actions, _ = Categorical(count, np).sample(np.zeros((1, count), np.float32), None, noise)
        assert actions[0] == count - 1


@pytest.mark.parametrize("kind", ["gaussian", "squashed", "categorical"])
def test_numpy_and_torch_agree(kind):
    space, squash = (TORQUES, kind == "squashed") if kind != "categorical" else (None, False)
    in_numpy, in_torch = (
        Categorical(3, library) if space is None else distribution_of(space, squash, library, convert)
        for library, convert in ((np, np.asarray), (torch, torch.as_tensor))
    )
    noise = np.array([0.4, 0.9]) if kind == "categorical" else NOISE
    actions, logprobs = in_numpy.sample(MEANS, LOG_DEVIATIONS, noise)
    tensors = [torch.from_numpy(array) for array in (MEANS, LOG_DEVIATIONS, noise)]
    torch_actions, torch_logprobs = in_torch.sample(*tensors)
    np.testing.assert_allclose(torch_actions.numpy(), actions, rtol=1e-10)
    np.testing.assert_allclose(torch_logprobs.numpy(), logprobs, rtol=1e-10)
    scored, entropy = in_torch.scores(tensors[0], tensors[1], torch_actions)
    np.testing.assert_allclose(scored.numpy(), logprobs, rtol=1e-9)
    assert float(entropy) == pytest.approx(float(in_numpy.scores(MEANS, LOG_DEVIATIONS, actions)[1]), rel=1e-10)
