"""Distributions of actions, in NumPy or torch: the same lines serve the simulators' workers and the learner.

Shapes: n observations, d dimensions of an action or their number if it is one of several. ``library`` is the module
`numpy` or `torch`, of whose arrays the arguments are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headway.embodied.records import Box, Discrete
from headway.records.errors import ConfigurationError

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
# A squashed sample is kept this near to 0: float32 then has a tanh of it below 1, from which the sample follows.
_LIMIT = 6.0


class DiagonalGaussian:
    """Independent normal dimensions, by what the actor puts out, their means [n, d], and log-deviations [d].

    Actions aren't clipped, so a log-probability is that of the sample, not of what a simulator makes of it."""

    def __init__(self, dimensions: int, library: Any) -> None:
        self.outputs, self._library = dimensions, library

    def sample(self, outputs_nd: Any, log_deviations_d: Any, noise_nd: Any) -> tuple[Any, Any]:
        """Return actions [n, d], and their log-probabilities [n] in nats. ``noise_nd``: standard normal."""
        actions_nd = outputs_nd + self._library.exp(log_deviations_d) * noise_nd
        return actions_nd, self._logprobs(noise_nd, self._log_volume(log_deviations_d))

    def mode(self, outputs_nd: Any) -> Any:
        """Return the likeliest actions."""
        return outputs_nd

    def scores(self, outputs_nd: Any, log_deviations_d: Any, actions_nd: Any) -> tuple[Any, Any]:
        """Return log-probabilities [n] of actions, and the entropy: a number, both in nats."""
        noise_nd = (actions_nd - outputs_nd) * self._library.exp(-log_deviations_d)
        log_volume = self._log_volume(log_deviations_d)
        return self._logprobs(noise_nd, log_volume), log_volume + 0.5 * self.outputs

    def _log_volume(self, log_deviations_d: Any) -> Any:
        return log_deviations_d.sum() + self.outputs * _HALF_LOG_2PI

    def _logprobs(self, noise_nd: Any, log_volume: Any) -> Any:
        return -0.5 * (noise_nd * noise_nd).sum(-1) - log_volume


class SquashedGaussian:
    """A `DiagonalGaussian` u through tanh into the bounds of its space: a = centre + half · tanh(u), log p(a) =
    log p(u) - Σ log(half · (1 - tanh² u)). Methods are as that one's, but the mode is the median, and the entropy that
    of u."""

    def __init__(self, space: Box, library: Any, convert: Callable[[Any], Any]) -> None:
        """``convert``: a NumPy array to one of the library. Raises ConfigurationError for a space without bounds."""
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigurationError(f"policy.squash = true for actions of {space}: without bounds only false is valid")
        self._normal, self._library = DiagonalGaussian(low.size, library), library
        self.outputs = low.size
        half_d = (high.astype(np.float64) - low) / 2.0
        self._centre_d, self._half_d = convert((low + half_d).astype(np.float32)), convert(half_d.astype(np.float32))
        self._log_volume = float(np.log(half_d).sum())

    def sample(self, outputs_nd: Any, log_deviations_d: Any, noise_n: Any) -> tuple[Any, Any]:
        samples_nd = self._normal.sample(outputs_nd, log_deviations_d, noise_n)[0].clip(-_LIMIT, _LIMIT)
        logprobs_n, _ = self._normal.scores(outputs_nd, log_deviations_d, samples_nd)
        return self.mode(samples_nd), logprobs_n - self._log_slopes(samples_nd)

    def mode(self, outputs_nd: Any) -> Any:
        return self._centre_d + self._half_d * self._library.tanh(outputs_nd)

    def scores(self, outputs_nd: Any, log_deviations_d: Any, actions_n: Any) -> tuple[Any, Any]:
        limit = math.tanh(_LIMIT)
        samples_nd = self._library.arctanh(((actions_n - self._centre_d) / self._half_d).clip(-limit, limit))
        logprobs_n, entropy = self._normal.scores(outputs_nd, log_deviations_d, samples_nd)
        return logprobs_n - self._log_slopes(samples_nd), entropy

    def _log_slopes(self, samples_nd: Any) -> Any:
        """Σ log(half · (1 - tanh² u)), [n], where 1 - tanh² u = 4 e^(-2u) / (1 + e^(-2u))²."""
        doubled_nd = -2.0 * samples_nd
        softplus_nd = self._library.logaddexp(doubled_nd, 0.0 * doubled_nd)
        return (math.log(4.0) + doubled_nd - 2.0 * softplus_nd).sum(-1) + self._log_volume


class Categorical:
    """A choice among several actions, with probabilities softmax(outputs) [n, d]. Methods are as `DiagonalGaussian`'s,
    with actions [n], uniform noise [n] in [0, 1), and the mean entropy."""

    def __init__(self, count: int, library: Any) -> None:
        self.outputs, self._library = count, library

    def sample(self, outputs_nd: Any, log_deviations_d: Any, noise_n: Any) -> tuple[Any, Any]:
        logprobs_nd = self._logprobs(outputs_nd)
        sums_nd = self._library.cumsum(self._library.exp(logprobs_nd), -1)[:, :-1]  # the last is 1 but for rounding
        actions_n = (sums_nd <= noise_n[:, None]).sum(-1)
        return actions_n, self._chosen(logprobs_nd, actions_n)

    def mode(self, outputs_nd: Any) -> Any:
        return outputs_nd.argmax(-1)

    def scores(self, outputs_nd: Any, log_deviations_d: Any, actions_n: Any) -> tuple[Any, Any]:
        logprobs_nd = self._logprobs(outputs_nd)
        entropy = -(self._library.exp(logprobs_nd) * logprobs_nd).sum(-1).mean()
        return self._chosen(logprobs_nd, actions_n), entropy

    def _logprobs(self, outputs_nd: Any) -> Any:
        shifted_nd = outputs_nd - self._library.amax(outputs_nd, -1)[:, None]
        return shifted_nd - self._library.log(self._library.exp(shifted_nd).sum(-1))[:, None]

    def _chosen(self, logprobs_nd: Any, actions_n: Any) -> Any:
        return logprobs_nd[self._library.arange(len(logprobs_nd)), actions_n]


def distribution_of(
    space: Box | Discrete, squash: bool, library: Any, convert: Callable[[Any], Any]
) -> DiagonalGaussian | SquashedGaussian | Categorical:
    """The distribution of a space's actions, for arrays of ``library``, to which ``convert`` brings NumPy's. Raises
    ConfigurationError."""
    if isinstance(space, Discrete):
        return Categorical(space.count, library)
    if squash:
        return SquashedGaussian(space, library, convert)
    return DiagonalGaussian(math.prod(space.shape), library)
