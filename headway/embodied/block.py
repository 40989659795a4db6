"""A block: lanes that are stepped together, and the policy that acts in them. It makes fragments.

Shapes: t steps of a fragment, b lanes of the block, then the dimensions of one observation or action.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from headway.embodied.records import (
    Array,
    Box,
    EpisodeEnd,
    Fragment,
    LaneSimulator,
    Spaces,
    TokenSteps,
    mismatch,
    to_host,
)
from headway.records.errors import ConfigurationError, SimulatorFailed
from headway.runtime.devices import resident_bytes
from headway.runtime.hooks import error_text
from headway.runtime.stalls.watchdog import Watchdog


class ActingPolicy(Protocol):
    """Chooses the actions of all lanes by one forward pass."""

    def act(self, observations_b: Any, noise_b: Array) -> tuple[Any, Any, Any]:
        """Return actions_b before clipping, their log-probabilities_b, and values_b of the observations: NumPy's, or
        tensors where the observations are. ``noise_b``: standard normal [b, dimensions] for boxes, else uniform [b],
        float32."""
        ...

    def take_tokens(self) -> TokenSteps | None:
        """Return the tokens of the `act` calls since the last one; None for a policy without tokens."""
        ...


def seed_of(seed: int, block: int, life: int, lane: int, episode: int) -> int:
    """Return the 31-bit seed of a simulator's lane and episode. ``seed``: the run's; ``life``: how often the block was
    rebuilt; ``episode``: 0 where the seed belongs to the constructor.

    ``functools.partial(seed_of, seed, block, life)`` makes the `Seeds` of a block."""
    text = f"{seed}/{block}/{life}/{lane}/{episode}"
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


class _Rows:
    """The arrays of a fragment, filled step by step, by the names that they have there."""

    def __init__(self, steps: int, lanes: int, spaces: Spaces) -> None:
        observations, actions = spaces
        # Those behind the last step included.
        self.all_observations_tb = np.empty((steps + 1, lanes, *observations.shape), observations.low.dtype)
        is_box = isinstance(actions, Box)
        self.actions_tb = np.empty((steps, lanes, *(actions.shape if is_box else ())), np.float32 if is_box else int)
        self.logprobs_tb, self.values_tb = np.empty((2, steps, lanes), np.float32)
        self.rewards_tb = np.empty((steps, lanes))
        self.terminated_tb, self.truncated_tb, self.counted_tb = np.empty((3, steps, lanes), np.bool_)
        self.numbers = (self.rewards_tb, self.terminated_tb, self.truncated_tb, self.counted_tb)  # as in `LaneSteps`
        self.final_observations: dict[tuple[int, int], Array] = {}  # (step, lane) -> of the episode that ended there
        self.successes: dict[tuple[int, int], bool] = {}


class LaneBlock:
    """Lanes of a simulator and their episodes, which continue from one fragment to the next.

    Lifecycle: built, with a simulator that wasn't reset -> ``collect`` any number of times, the first of which resets
    the lanes. After an error it must be rebuilt: with ``life`` + 1, so that its lanes get other seeds, and the number
    of its next fragment as ``fragments``.

    Invariant: the noise of a fragment follows from (seed, number of the block, number of the fragment) alone, so that
    fragments don't depend on the worker that makes them."""

    def __init__(
        self,
        simulator: LaneSimulator,
        policy: ActingPolicy,
        spaces: Spaces,
        *,
        seed: int,
        number: int,
        steps: int,
        life: int = 0,
        watchdog: Watchdog,
        episodic: bool = False,
    ) -> None:
        """``spaces``: those that the policy is made for. ``steps``: of a fragment. ``life``: how often it was rebuilt.
        ``watchdog``: ends the process in a step that takes longer than it allows. ``episodic``: a fragment
        is an episode of every lane, which it begins by a reset. Raises ConfigurationError for a simulator of other
        spaces."""
        if simulator.spaces != spaces:
            raise ConfigurationError(f"block {number}: its simulator has {simulator.spaces}; valid: {spaces}")
        self.number, self.life = number, life
        self.fragments = 0  # number of the next one
        self._simulator, self._policy, self._spaces = simulator, policy, spaces
        self._seed, self._steps, self._watchdog = seed, steps, watchdog
        self._episodic, self._observations_b = episodic, cast("Any", None)
        self._rewards_b = np.zeros(simulator.lanes)  # of the episodes under way
        self._lengths_b = np.zeros(simulator.lanes, np.int64)
        actions = spaces.actions
        self._bounds: tuple[Any, Any] | None = (actions.low, actions.high) if isinstance(actions, Box) else None

    def collect(self, version: int) -> Fragment:
        """Make the next fragment by the policy, whose version is ``version``. Raises SimulatorFailed, with block, lane
        and step, where the simulator raises, returns arrays of other spaces, or numbers that aren't finite."""
        started_s = time.monotonic()
        rows = _Rows(self._steps, self._simulator.lanes, self._spaces)
        self._policy.take_tokens()  # of a fragment that failed
        with self._watchdog as watchdog:
            if self._observations_b is None or self._episodic:
                self._observations_b = self._call(0, None, self._simulator.reset)
            self._write(0, rows.all_observations_tb, self._observations_b, "observations_b")
            for t, noise_b in enumerate(self._noise()):
                watchdog.restart()
                self._step(t, rows, noise_b)
        fragment = self._fragment(version, rows, started_s)
        self.fragments += 1
        return fragment

    def close(self) -> None:
        """Close the simulator."""
        self._simulator.close()

    def _noise(self) -> Array:
        key = np.array([self._seed % 2**64, self.number], np.uint64)  # a list would become floats
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, self.fragments]))
        shape = (self._steps, self._simulator.lanes)
        if isinstance(self._spaces.actions, Box):
            return generator.standard_normal((*shape, *self._spaces.actions.shape), dtype=np.float32)
        return generator.random(shape, dtype=np.float32)

    def _step(self, t: int, rows: _Rows, noise_b: Array) -> None:
        """Act on the observations of row ``t``, step all lanes, and record what comes of it."""
        tensors_b = self._observations_b
        observations_b = rows.all_observations_tb[t] if isinstance(tensors_b, np.ndarray) else tensors_b
        actions_b, logprobs_b, values_b = self._policy.act(observations_b, noise_b)
        rows.actions_tb[t], rows.logprobs_tb[t], rows.values_tb[t] = map(to_host, (actions_b, logprobs_b, values_b))
        lane_steps = self._call(t, rows, self._simulator.step, self._clip(actions_b))
        if not hasattr(lane_steps, "final_observations"):
            self._fail(t, None, f"the simulator's step returned {type(lane_steps).__name__}; valid: LaneSteps")
        self._write(t + 1, rows.all_observations_tb, lane_steps.observations_b, "observations_b")
        for name, rows_tb, row in zip(lane_steps._fields[1:5], rows.numbers, lane_steps[1:5], strict=True):
            self._write(t, rows_tb, row, name)
        for lane, observation in lane_steps.final_observations.items():
            rows.final_observations[t, lane] = np.array(to_host(observation))
        rows.successes |= {(t, lane): success for lane, success in lane_steps.successes.items()}
        self._observations_b = lane_steps.observations_b

    def _call(self, t: int, rows: _Rows | None, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the simulator at step ``t``. ``rows``: those filled so far, if there are any."""
        try:
            return method(*arguments)
        except Exception as error:  # the boundary to a simulator's code
            if rows is not None:
                self._require_finite(rows, t)  # numbers that were wrong earlier explain it better
            lane = error.lane if isinstance(error, SimulatorFailed) else None
            problem = str(error) if isinstance(error, SimulatorFailed) else f"the simulator raised {error_text(error)}"
            self._fail(t, lane, problem, error)

    def _clip(self, actions_b: Any) -> Any:
        """Clip actions to the bounds of their space."""
        if self._bounds is None:
            return actions_b
        low, high = self._bounds
        if isinstance(actions_b, np.ndarray):
            return np.minimum(np.maximum(actions_b, low), high)
        if isinstance(low, np.ndarray) and hasattr(actions_b, "new_tensor"):
            self._bounds = low, high = actions_b.new_tensor(low), actions_b.new_tensor(high)
        return actions_b.clip(low, high)

    def _write(self, t: int, rows_tb: Array, row: Any, name: str) -> None:
        """Copy a simulator's array to row ``t``. ``name``: its field of `LaneSteps`. Raises SimulatorFailed for another
        shape, or numbers that the row can't hold."""
        array, row_b = to_host(row), rows_tb[t]
        if problem := mismatch(array, row_b):
            self._fail(t, None, f"{name.removesuffix('_b')} of {problem}")
        row_b[...] = array

    def _fragment(self, version: int, rows: _Rows, started_s: float) -> Fragment:
        """Check the rows, and make the fragment of them."""
        rows.rewards_tb[~rows.counted_tb] = 0.0
        rows.terminated_tb &= rows.counted_tb
        rows.truncated_tb &= rows.counted_tb & ~rows.terminated_tb
        self._require_finite(rows, self._steps)
        final_at = np.argwhere(rows.truncated_tb)
        finals_n = np.empty((len(final_at), *rows.all_observations_tb.shape[2:]), rows.all_observations_tb.dtype)
        for index, (t, lane) in enumerate(final_at.tolist()):
            final = rows.final_observations.get((t, lane))
            if final is None or final.shape != finals_n.shape[1:] or not np.isfinite(final).all():
                self._fail(t, lane, f"the last observation of the truncated episode is {final}")
            finals_n[index] = final
        episodes = self._episodes(rows)
        if self._episodic and (missing := {*range(self._simulator.lanes)} - {end.lane for end in episodes}):
            limit = f"simulator.steps_per_fragment = {self._steps}"
            self._fail(self._steps, min(missing), f"its episode hasn't ended; valid: at most {limit} decisions")
        return Fragment(
            block=self.number,
            number=self.fragments,
            version=version,
            observations_tb=rows.all_observations_tb[:-1],
            last_observations_b=rows.all_observations_tb[-1],
            final_at=final_at,
            final_observations_n=finals_n,
            tokens=self._policy.take_tokens(),
            episodes=episodes,
            constructions=(self.life + 1) * self._simulator.constructions,
            life=self.life,
            seconds=time.monotonic() - started_s,
            worker_bytes=resident_bytes(),
            **{name: rows_tb for name, rows_tb in vars(rows).items() if name in Fragment.__annotations__},
        )

    def _episodes(self, rows: _Rows) -> tuple[EpisodeEnd, ...]:
        """Return the episodes that ended, and keep the sums of those under way."""
        rewards_tb = self._rewards_b + np.cumsum(rows.rewards_tb, axis=0)
        lengths_tb = self._lengths_b + np.cumsum(rows.counted_tb, axis=0)
        ended_rewards_b, ended_lengths_b = np.zeros_like(self._rewards_b), np.zeros_like(self._lengths_b)
        episodes: list[EpisodeEnd] = []
        for t, lane in np.argwhere(rows.terminated_tb | rows.truncated_tb).tolist():
            reward, steps = rewards_tb[t, lane] - ended_rewards_b[lane], lengths_tb[t, lane] - ended_lengths_b[lane]
            success = rows.successes.get((t, lane))
            episodes.append(EpisodeEnd(lane=lane, reward=float(reward), steps=int(steps), success=success))
            ended_rewards_b[lane], ended_lengths_b[lane] = rewards_tb[t, lane], lengths_tb[t, lane]
        self._rewards_b, self._lengths_b = rewards_tb[-1] - ended_rewards_b, lengths_tb[-1] - ended_lengths_b
        return tuple(episodes)

    def _require_finite(self, rows: _Rows, steps: int) -> None:
        """Raise SimulatorFailed for the first number that isn't finite of ``steps`` steps and the observations behind
        them."""
        named_rows = {
            "observation": rows.all_observations_tb[: steps + 1],
            "action of the policy": rows.actions_tb[: steps + 1],
            "reward": rows.rewards_tb[:steps],
        }
        faults = []
        for name, rows_tb in named_rows.items():
            if rows_tb.dtype.kind == "f" and not (finite := np.isfinite(rows_tb)).all():
                position = tuple(np.argwhere(~finite)[0].tolist())
                faults.append((position, f"the {name}{list(position[2:]) or ''} is {rows_tb[position]}"))
        if faults:
            (t, lane, *_), problem = min(faults, key=lambda fault: fault[0][0])
            self._fail(t, lane, problem)

    def _fail(self, t: int, lane: int | None, problem: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the error of step ``t``."""
        step = f"block {self.number}, {'' if lane is None else f'lane {lane}, '}step {t} of fragment {self.fragments}"
        raise SimulatorFailed(f"{step}: {problem}", lane) from cause
