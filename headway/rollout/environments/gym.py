"""Games with gymnasium's interface, played in text: observations become messages, and answers become actions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from headway.records.errors import ConfigurationError, InfrastructureError
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.environments.actions import Reading, actions_of, find_action
from headway.rollout.environments.simulator_pool import GameSimulator, SimulatorPool, close_game
from headway.rollout.parameters import require_choice
from headway.rollout.tools import Tool, ToolError, read_object
from headway.runtime.imports import import_extra, import_function

KEY = "environment.parameters.env"
COLUMN = "gym"  # of a row, and so in a task's metadata: {"seed", "arguments", "options"}
Shows = Literal["auto", "observation", "render", "both"]
Invalid = Literal["tell", "end"]

_MARKED = re.compile(r"\x1b\[[0-9;]*4[0-7][0-9;]*m(.*?)\x1b\[0m", re.DOTALL)  # text on a coloured background
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def tasks(
    count: int, first_seed: int = 0, prompt: str = "", arguments: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows for a task source (``source = "function"``): ``count`` games that differ in their seed. ``prompt``:
    text before the first observation; ``arguments``: of the game, added to those of ``environment.parameters``."""
    for seed in range(first_seed, first_seed + count):
        yield {"prompt": prompt or f"Game {seed}", COLUMN: {"seed": seed, "arguments": dict(arguments or {})}}


class ReplayMismatch(InfrastructureError):
    """Raised where a resumed game, replayed, has another state: the policy isn't to blame."""


class Gym(Environment):
    """Environment of a game with ``reset(seed=)`` and ``step(action)``: every answer is an action, and the rewards of
    the steps are those of the turns.

    A task's metadata may select the game by ``{"gym": {"seed": 7, "arguments": {...}, "options": {...}}}``. Without a
    seed, it is derived from the task, the same for every rollout of its group. Every game has a thread of its own. A
    game that has ended is reset for the next rollout with its arguments (`SimulatorPool`).
    """

    def __init__(
        self,
        env: str,
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        reads: Reading = "last_line",
        shows: str = "auto",
        system: str | None = None,
        invalid: Invalid = "tell",
        invalid_reward: float = 0.0,
        solved_at: float = 1.0,
        deterministic: bool = False,
    ) -> None:
        """``env``: gymnasium's id, or module:factory. ``arguments``: of either. ``actions``: names of a discrete
        space's actions, in its order. ``reads``: position of the action in an answer. ``shows``: form of the
        observations, or module:function(observation, info, env) -> text. ``system``: the first message; None:
        instructions how to act. ``invalid``: an answer without an action gets an error, or ends the game;
        ``invalid_reward``: of its turn. ``solved_at``: sum of rewards from which the task counts as solved.
        ``deterministic``: the same actions on the same seed lead to the same state, so that another process can resume
        a parked game by a replay."""
        require_choice("environment.parameters.reads", reads, Reading)
        require_choice("environment.parameters.invalid", invalid, Invalid)
        self._make = factory_of(env)
        self._pool = SimulatorPool(self._make)
        self._arguments = dict(arguments or {})
        self._reads: Reading = reads
        self._shows = formatter_of(shows)
        self._invalid, self._invalid_reward = invalid, invalid_reward
        self._solved_at = solved_at
        self._deterministic = deterministic
        self._games: dict[str, GameSimulator] = {}
        probe = self._make(**self._arguments)
        try:
            self._actions = actions_of(getattr(probe, "action_space", None), actions)
        finally:
            close_game(probe)
        self.system = self._actions.instructions(reads) if system is None else system

    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        if self._reads != "tool":
            return ()
        parameters_schema = {"type": "object", "properties": {"action": self._actions.schema}, "required": ["action"]}
        return (Tool.described("act", "Take an action.", parameters_schema, self._act, fatal=True),)

    async def begin(self, episode: Episode) -> None:
        episode.state.update(seed=seed_of(episode.task), actions=[], seen="", rewards=[])
        observation_text = await self._start(episode)
        episode.state["seen"] = _digest(observation_text)
        if not self._deterministic:
            episode.pin_to_process("its game")
        if self.system:
            episode.add_message(self.system, "system")
        for message in episode.task.messages:
            episode.add(message)
        prompt_alone = episode.task.prompt and not episode.task.messages
        episode.add_message(f"{episode.task.prompt}\n\n{observation_text}" if prompt_alone else observation_text)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        episode.state["rewards"].append(0.0)
        if await self.call_tools(episode, answer):
            return
        if self._reads == "tool":
            observation = self._reject(episode, "call the tool act")
        else:
            observation = await self._step(episode, find_action(answer.text, self._reads))
        if not episode.over:
            episode.add_message(observation)

    async def score(self, episode: Episode) -> Any:
        rewards = episode.state["rewards"]
        return {"turn_rewards": rewards, "reward": sum(rewards), "solved": sum(rewards) >= self._solved_at}

    async def resume(self, episode: Episode) -> None:
        observation_text = await self._start(episode)
        for action in episode.state["actions"]:
            observation_text, *_ = await self._play(episode, action)
        if _digest(observation_text) != episode.state["seen"]:
            raise ReplayMismatch("the game isn't deterministic: its actions, played again, lead elsewhere")

    async def close(self, episode: Episode) -> None:
        if (game := self._games.pop(episode.name, None)) is not None:
            self._pool.release(game)

    async def stop(self) -> None:
        await self._pool.stop()

    async def _act(self, written: str, episode: Episode) -> str:
        """Execute a call of the tool ``act``."""
        if episode.over:
            return "the game is over"
        try:
            action = read_object(written)["action"]
        except (ToolError, KeyError):
            return self._reject(episode, 'the arguments must be {"action": ...}')
        return await self._step(episode, action if isinstance(action, str) else json.dumps(action))

    async def _step(self, episode: Episode, written: str | None) -> str:
        """Play an action as the policy wrote it, and return the observation, or why the action is refused."""
        if written is None:
            return self._reject(episode, "there is no action in this answer")
        try:
            action = self._actions.read(written)
        except ValueError as error:
            return self._reject(episode, str(error))
        observation_text, reward, end_reason = await self._play(episode, action)
        _reward(episode, reward)
        episode.state["actions"].append(action)
        episode.state["seen"] = _digest(observation_text)
        if end_reason:
            episode.end(end_reason)
        return observation_text

    def _reject(self, episode: Episode, why: str) -> str:
        _reward(episode, self._invalid_reward)
        if self._invalid == "end":
            episode.end("invalid action")
        return f"error: {why}; {self._actions.instructions(self._reads)}"

    async def _start(self, episode: Episode) -> str:
        """Start the episode's game, and return the first observation as text."""
        task_settings = episode.task.metadata.get(COLUMN) or {}
        arguments = {**self._arguments, **(task_settings.get("arguments") or {})}
        options = {"options": task_settings["options"]} if task_settings.get("options") else {}

        def reset(env: Any) -> str:
            observation, info = env.reset(seed=episode.state["seed"], **options)
            return self._shows(observation, info, env)

        while True:
            game = self._games[episode.name] = self._pool.acquire(arguments)
            text = await self._pool.begin(game, reset)
            if text is not None:
                return text
            self._pool.release(game)

    async def _play(self, episode: Episode, action: Any) -> tuple[str, float, str]:
        """Take an action; returns the observation as text, the step's reward, and why the game is over, or ""."""
        game = self._games[episode.name]

        def step() -> tuple[str, float, str]:
            observation, reward, terminated, truncated, info = game.env.step(self._actions.to_native(action))
            end_reason = "terminated" if terminated else "truncated" if truncated else ""
            return self._shows(observation, info, game.env), float(reward), end_reason

        return await game.run(step)


def seed_of(task: Any) -> int:
    """Return a game's seed: the one in its task, else one that all rollouts of the task share."""
    seed = (task.metadata.get(COLUMN) or {}).get("seed")
    return int(hashlib.blake2b(task.task_id.encode(), digest_size=4).hexdigest(), 16) if seed is None else int(seed)


def factory_of(env: str) -> Callable[..., Any]:
    """Return the function that makes a game; ``env``: gymnasium's id, or module:factory. Raises ConfigurationError."""
    if ":" in env and not env.partition(":")[2].rpartition("-v")[2].isdecimal():  # module:Game-v0 is gymnasium's too
        return import_function(env, KEY, ())
    gymnasium = import_extra("gymnasium", "gym", f"{KEY} = {env!r}")

    def make(**arguments: Any) -> Any:
        try:
            return gymnasium.make(env, **arguments)
        except gymnasium.error.Error as error:
            raise ConfigurationError(f"{KEY} = {env!r}: {' '.join(str(error).split())}") from None

    return make


def formatter_of(shows: str) -> Callable[[Any, Any, Any], str]:
    """Return the function that makes a text of (observation, info, env). Raises ConfigurationError."""
    if ":" in shows:
        return import_function(shows, "environment.parameters.shows", get_args(Shows))
    if shows not in get_args(Shows):
        valid_text = f"{', '.join(get_args(Shows))} or module:function"
        raise ConfigurationError(f"environment.parameters.shows = {shows!r}: valid: {valid_text}")

    def show(observation: Any, info: Any, env: Any) -> str:
        rendered = shows != "observation" and _render_text(env)
        if shows == "auto":
            rendered = rendered if not isinstance(observation, str) else False
        if shows == "render" and not rendered:
            raise ValueError('the game draws no text: environment.parameters.arguments = { render_mode = "ansi" }')
        if shows in ("render", "auto") and rendered:
            return rendered
        text = observation if isinstance(observation, str) else json.dumps(observation, default=_plain)
        return f"{text}\n{rendered}" if rendered else text

    return show


def _render_text(env: Any) -> str | None:
    """Return the game's own rendering as text, or None where it has none."""
    if getattr(env, "render_mode", None) != "ansi":
        return None
    rendering = env.render()
    return uncoloured(rendering if isinstance(rendering, str) else rendering.getvalue())


def uncoloured(text: str) -> str:
    """Replace terminal colours: brackets around text with a coloured background; other colours are removed."""
    return _COLOUR.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")


def _reward(episode: Episode, value: float) -> None:
    episode.reward(value)
    episode.state["rewards"][-1] += value


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} isn't text: set environment.parameters.shows = module:function")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
