"""Records that simulators, policies and the learner pass to each other: spaces, steps of lanes, fragments.

Shapes: t steps of a fragment, b lanes of a block, then the dimensions of one observation or action.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.records.generation import PublishedWeights

Array = NDArray[Any]
Seeds = Callable[[int, int], int]  # (lane, its episode from 0) -> the simulator's seed, 31 bits


def to_host(array: Any) -> Array:
    """Return a NumPy view of an array or of a tensor that supports DLPack, copied only from another device."""
    if isinstance(array, np.ndarray):
        return array
    return np.from_dlpack(array, device="cpu") if hasattr(array, "__dlpack__") else np.asarray(array)


def mismatch(array: Array, row: Array) -> str:
    """Describe why an array can't be written to ``row``; "": it has its shape, and a type that ``row`` can hold."""
    if array.shape == row.shape and (array.dtype is row.dtype or np.can_cast(array.dtype, row.dtype, "same_kind")):
        return ""
    return f"shape {array.shape}, {array.dtype}; valid: {row.shape}, {row.dtype}"


@dataclass(frozen=True, eq=False)
class Box:
    """Arrays of one shape, between bounds, maybe infinite. Pictures: uint8, channels last, or first if the fewest."""

    low: Array  # of the space's shape and dtype
    high: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def is_picture(self) -> bool:
        """Whether it is of three dimensions of bytes."""
        return self.low.dtype == np.uint8 and len(self.shape) == 3

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box) or self.low.dtype != other.low.dtype:
            return False
        return np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)

    def __str__(self) -> str:
        return f"Box{self.shape} of {self.low.dtype} in [{self.low.min():g}, {self.high.max():g}]"


@dataclass(frozen=True)
class Discrete:
    """The numbers from 0 to ``count`` - 1."""

    count: int


class Spaces(NamedTuple):
    """The spaces of a lane."""

    observations: Box
    actions: Box | Discrete

    def __str__(self) -> str:
        return f"observations {self.observations}, actions {self.actions}"


class LaneSteps(NamedTuple):
    """A step of all lanes of a block.

    Example: a lane whose episode is cut: ``truncated_b`` is true, ``final_observations[lane]`` the last observation of
    the episode, and ``observations_b[lane]`` the first one of the next, or, where the simulator resets in its next
    step, the last one again; that next step is then not ``counted_b``."""

    observations_b: Array  # [b, ...] on which the policy acts next
    rewards_b: NDArray[np.float64]
    terminated_b: NDArray[np.bool_]  # the episode ended by the simulator's rules: nothing comes behind it
    truncated_b: NDArray[np.bool_]  # it was cut; a lane that is both counts as terminated
    counted_b: NDArray[np.bool_]  # false: the step only reset the lane, its action was ignored: no transition
    final_observations: dict[int, Array]  # lane -> last observation of the episode that this step ended
    successes: dict[int, bool]  # lane -> success of the episode that this step ended, where the simulator reports it
    succeeded_b: NDArray[np.bool_] | None = None  # success so far of the episodes under way; None: not reported


class LaneSimulator(Protocol):
    """The lanes of one block, stepped by one call.

    Lifecycle: built once, with seeds -> ``reset`` -> ``step`` any number of times -> ``close``. Lanes begin their next
    episodes by themselves. Arrays are NumPy's, or tensors on a device that support DLPack: a policy on that device
    gets them as they are.
    """

    spaces: Spaces
    lanes: int
    constructions: int  # simulator objects built for it: 1 for a vector, else one for each lane
    seeded_by_reset: bool  # each ``reset`` begins again from its seeds; false: seeds belong to its constructor

    def reset(self) -> Array:
        """Begin an episode in every lane, and return the observations [b, ...]."""
        ...

    def step(self, actions_b: Array) -> LaneSteps:
        """Step all lanes. ``actions_b``: within the bounds of the space. Arrays are valid until the next step."""
        ...

    def render(self) -> Array:
        """Return a picture of lane 0, uint8 [height, width, 3]. Raises ConfigurationError where it can't."""
        ...

    def close(self) -> None: ...


class EpisodeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that ended in a fragment."""

    lane: int  # of the block
    reward: float  # its return: the sum of its rewards
    steps: int
    success: bool | None = None  # None: the simulator doesn't report it


class TokenSteps(NamedTuple):
    """The tokens of a block's decisions, step by step and lane by lane: k decisions, n tokens, r of responses."""

    grammar: str  # of each response
    ids_n: NDArray[np.int32]  # of each decision its prompt, then its response
    prompts_k: NDArray[np.int64]  # tokens of the prompts
    responses_k: NDArray[np.int64]  # ... and of the responses
    logprobs_r: NDArray[np.float32]  # of response tokens, over what their grammar allows, by the pass that sampled them


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """T steps of the B lanes of a block, by one version of the policy: the sample of embodied runs.

    Identity: (block, number). Invariant: every block makes its fragments in the order of their numbers, from 0."""

    block: int
    number: int  # of the block's fragments
    version: int  # of the policy that acted
    observations_tb: Array  # [t, b, ...] as the simulator gave them
    actions_tb: Array  # [t, b, dimensions] float32, before they are clipped to the bounds; [t, b] int64 if discrete
    logprobs_tb: NDArray[np.float32]  # of these actions, nats, from the forward pass that chose them
    values_tb: NDArray[np.float32]  # of the observations, in units of (normalised) reward, from the same pass
    rewards_tb: NDArray[np.float64]  # as the simulator gave them; 0 where not counted
    terminated_tb: NDArray[np.bool_]
    truncated_tb: NDArray[np.bool_]
    counted_tb: NDArray[np.bool_]  # see `LaneSteps`
    last_observations_b: Array  # behind the last step
    final_at: NDArray[np.int64]  # [n, 2] step and lane of each truncation
    final_observations_n: Array  # [n, ...] there, the last observations of the cut episodes
    tokens: TokenSteps | None = None  # None: the policy has none
    episodes: tuple[EpisodeEnd, ...] = ()
    constructions: int = 0  # simulator objects of the block so far, those of its former lives included
    life: int = 0  # how often the block was built again after its worker died
    seconds: float = 0.0  # in which it was collected
    worker_bytes: int = 0  # resident memory of the process that collected it

    @property
    def transitions(self) -> int:
        """The steps that count."""
        return int(self.counted_tb.sum())


class PolicyWeights(NamedTuple):
    """A version of the policy: its parameters, and the statistics by which its observations are normalised."""

    version: int  # the learner's completed steps
    parameters_p: NDArray[np.float32]  # all of them, in the order of `ActorCritic.shapes`
    observation_mean: NDArray[np.float64]  # of their shape, () where they aren't normalised; 0 before the first step
    observation_deviation: NDArray[np.float64]  # likewise, and 1
    published: PublishedWeights | None = None  # a token policy's, in the place of all parameters
