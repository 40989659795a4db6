"""Actor-critics: what they compute, in NumPy or torch, and `LanePolicy`, which acts in the simulators' workers.

NumPy acts on vectors: on eight lanes it takes half of torch's time, and its worker needs no torch. Pictures, and
tensors that a simulator keeps on a device, go through torch.

Shapes: n observations, b lanes of a block, w width of a layer, p all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from headway.config.simulation import PolicyConfig, SimulatorExperiment
from headway.embodied.distributions import distribution_of
from headway.embodied.records import Array, Box, LaneSimulator, PolicyWeights, Spaces
from headway.embodied.tokens.lanes import ChunkedLanes

CLIP = 10.0  # normalised observations and rewards are clipped to ± this many deviations

_NATURE = ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))  # channels, side, stride and padding (Mnih et al., 2015)
_NATURE_SIDE = 36  # pixels of the smallest picture that they fit
_SMALL = ((32, 3, 1, 1), (64, 3, 2, 1), (64, 3, 2, 1))  # for smaller ones
_PICTURE_FEATURES = 512


class ActorCritic:
    """Two towers of tanh layers with separate weights, the actor's and the critic's, computed side by side; in front of
    them, for pictures, convolutions that both share. Deviations of continuous actions are parameters.

    Example: for 17 numbers and 6 actions with hidden = (64, 64), ``shapes`` has hidden0 (2, 17, 64), hidden1
    (2, 64, 64), the heads (64, 6) and (64, 1), their biases, and 6 log-deviations."""

    def __init__(
        self, spaces: Spaces, settings: PolicyConfig, library: Any = np, convert: Callable[[Any], Any] = np.asarray
    ) -> None:
        """``library``: `numpy` or `torch`; ``convert`` brings NumPy's arrays to it. Raises ConfigurationError for
        squashed actions without bounds."""
        self.distribution = distribution_of(spaces.actions, settings.squash, library, convert)
        self.convert, self._library, self._layers = convert, library, range(len(settings.hidden))
        self.reads_pictures = spaces.observations.is_picture
        self._convolutions = ()
        shapes, width = dict[str, tuple[int, ...]](), math.prod(spaces.observations.shape)
        if self.reads_pictures:
            self._channels = 1 if spaces.observations.shape[0] < min(spaces.observations.shape[1:]) else 3  # dimension
            *sides, channels = np.moveaxis(spaces.observations.low, self._channels - 1, -1).shape
            self._convolutions = _NATURE if min(sides) >= _NATURE_SIDE else _SMALL
            for layer, (filters, side, stride, padding) in enumerate(self._convolutions):
                shapes |= {f"filters{layer}": (filters, channels, side, side), f"filters{layer}_bias": (filters,)}
                sides = [(length + 2 * padding - side) // stride + 1 for length in sides]
                channels = filters
            width = _PICTURE_FEATURES
            shapes |= {"features": (channels * math.prod(sides), width), "features_bias": (width,)}
        for layer, units in enumerate(settings.hidden):
            shapes |= {f"hidden{layer}": (2, width, units), f"hidden{layer}_bias": (2, 1, units)}
            width = units
        outputs = self.distribution.outputs
        shapes |= {"actor": (width, outputs), "actor_bias": (outputs,), "critic": (width, 1), "critic_bias": (1,)}
        shapes["log_deviations"] = (outputs if isinstance(spaces.actions, Box) else 0,)
        self.shapes = shapes

    def views(self, parameters_p: Any) -> dict[str, Any]:
        """The parameters by name, in the memory of ``parameters_p``."""
        views, first = dict[str, Any](), 0
        for name, shape in self.shapes.items():
            views[name] = parameters_p[first : first + math.prod(shape)].reshape(shape)
            first += math.prod(shape)
        return views

    def forward(self, parameters: Mapping[str, Any], observations_n: Any) -> tuple[Any, Any]:
        """Return what the actor puts out for the distribution [n, outputs], and values [n]. ``observations_n``: [n, w]
        of the parameters' type, normalised, or pictures of bytes, as `Box` has them."""
        features = self._features(parameters, observations_n) if self.reads_pictures else observations_n
        for layer in self._layers:
            weights, biases = parameters[f"hidden{layer}"], parameters[f"hidden{layer}_bias"]
            if self._library is np:
                sums = features @ weights + biases
            else:  # the same, with a faster gradient
                sums = self._library.baddbmm(biases, features.expand(2, *features.shape[-2:]), weights)
            features = self._library.tanh(sums)  # [2, n, units]
        actor_nw, critic_nw = features if self._layers else (features, features)
        values_n = (critic_nw @ parameters["critic"] + parameters["critic_bias"]).squeeze(-1)
        return actor_nw @ parameters["actor"] + parameters["actor_bias"], values_n

    def _features(self, parameters: Mapping[str, Any], pictures_n: Any) -> Any:
        functional = self._library.nn.functional
        x = pictures_n.movedim(self._channels, 1).to(parameters["features"].dtype) / 255.0
        for layer, (_, _, stride, padding) in enumerate(self._convolutions):
            weights, bias = parameters[f"filters{layer}"], parameters[f"filters{layer}_bias"]
            x = functional.conv2d(x, weights, bias, stride=stride, padding=padding).relu()
        return (x.flatten(1) @ parameters["features"] + parameters["features_bias"]).relu()


def normalised(observations_n: Any, mean: Any, deviation: Any) -> Any:
    """Observations in deviations from their mean, clipped at `CLIP`; in NumPy or torch, at the precision of the
    statistics."""
    return ((observations_n - mean) / deviation).clip(-CLIP, CLIP)


class EvaluatedPolicy(Protocol):
    """Chooses the actions of all lanes in evaluations."""

    def act_in_evaluation(self, observations_b: Any, noise_b: Array) -> Any:
        """Return the actions of lanes [b, ...]."""
        ...


class LanePolicy:
    """The policy as it acts in the lanes of a block.

    Lifecycle: built -> ``load`` of weights -> ``act`` any number of times, until the next ``load``. Equal observations,
    noise and number of lanes give equal bits on machines with equal instruction sets."""

    def __init__(self, spaces: Spaces, settings: PolicyConfig) -> None:
        """Raises ConfigurationError for squashed actions without bounds."""
        self._spaces, self._settings = spaces, settings
        self._network = ActorCritic(spaces, settings)
        self._weights: PolicyWeights | None = None
        self._parameters: Mapping[str, Any] = {}  # where the observations since the last ``load`` were
        self._mean = self._deviation = None  # of observations, flat, beside them

    def load(self, weights: PolicyWeights) -> None:
        """Act by these weights from now on."""
        self._weights, self._parameters = weights, {}

    def act(self, observations_b: Any, noise_b: Array) -> tuple[Any, Any, Any]:
        """Return actions of lanes [b, ...] before they are clipped, their log-probabilities [b] and the values [b] of
        the observations, all by one forward pass. ``noise_b``: standard normal as the actions are, or uniform [b] for
        one of several. Observations that are no NumPy array come by DLPack, and get tensors on their device."""
        outputs_b, values_b = self._forward(observations_b)
        if isinstance(self._spaces.actions, Box):
            noise_b = noise_b.reshape(len(noise_b), -1)
        network, log_deviations = self._network, self._parameters["log_deviations"]
        actions_b, logprobs_b = network.distribution.sample(outputs_b, log_deviations, network.convert(noise_b))
        convert = np.asarray if isinstance(observations_b, np.ndarray) else lambda tensor_b: tensor_b
        return convert(self._shaped(actions_b)), convert(logprobs_b), convert(values_b)

    def act_in_evaluation(self, observations_b: Any, noise_b: Array) -> Any:
        """Return the likeliest actions of lanes [b, ...] (of squashed ones the median), whatever the noise."""
        outputs_b, _ = self._forward(observations_b)
        actions_b = self._shaped(self._network.distribution.mode(outputs_b))
        return np.asarray(actions_b) if isinstance(observations_b, np.ndarray) else actions_b

    def take_tokens(self) -> None:
        """Return None: it has no tokens."""

    def _forward(self, observations_b: Any) -> tuple[Any, Any]:
        """Return what actor and critic put out."""
        in_numpy = isinstance(observations_b, np.ndarray) and not self._network.reads_pictures
        inputs_b: Any = observations_b
        if not in_numpy:
            import torch

            is_array = isinstance(observations_b, np.ndarray)
            inputs_b = torch.from_numpy(observations_b) if is_array else torch.from_dlpack(observations_b)
        if not self._parameters:
            self._load_beside(inputs_b)
        if not self._network.reads_pictures:
            inputs_b = inputs_b.reshape(len(inputs_b), -1)
            if self._settings.normalize:
                inputs_b = normalised(inputs_b, self._mean, self._deviation)
            inputs_b = inputs_b.astype(np.float32) if in_numpy else inputs_b.float()
        return self._network.forward(self._parameters, inputs_b)

    def _load_beside(self, inputs_b: Any) -> None:
        """Bring the weights to the library and device of ``inputs_b``."""
        weights, library, convert = self._weights, np, np.asarray
        assert weights is not None, "act before load"
        if not isinstance(inputs_b, np.ndarray):
            import torch

            library, convert = torch, partial(torch.as_tensor, device=inputs_b.device)
        self._network = ActorCritic(self._spaces, self._settings, library, convert)
        self._parameters = self._network.views(convert(weights.parameters_p))
        self._mean, self._deviation = (convert(array.reshape(-1)) for array in weights[2:4])

    def _shaped(self, actions_b: Any) -> Any:
        space = self._spaces.actions
        return actions_b.reshape(len(actions_b), *space.shape) if isinstance(space, Box) else actions_b


def open_policy(experiment: SimulatorExperiment, simulator: LaneSimulator, context: Any) -> Any:
    """Build the policy that acts in ``simulator``, by `open_lanes`: a `LanePolicy` or a `TokenPolicy`. ``context``: the
    worker's. Raises ConfigurationError."""
    if not isinstance(simulator, ChunkedLanes):
        return LanePolicy(simulator.spaces, experiment.policy)
    from headway.embodied.tokens.policy import TokenPolicy

    return TokenPolicy(simulator.spaces, experiment, simulator.code, context)
