"""Environments: what a rollout of several turns is played in. Write one by extending `Environment`.

The policy answers, the environment replies, until it says that the rollout is over; then it scores it. Environments
live in worker processes (rollout/hosting/service.py), one object for all rollouts of a worker; what is a rollout's
own is in its `Episode`. Tokens never come here: what was sampled stays token-exact where it is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from headway.records.environment import NextTurn
from headway.records.rollout import ToolTimes
from headway.records.task import Task
from headway.rollout.episode_sandbox import EpisodeSandbox
from headway.rollout.fixed_models import FixedModels
from headway.rollout.tools import Tool, ToolCalls, call_tool
from headway.runtime.hooks import finite_number, storable

_UNREAD = "<tool_call>"  # begins a call that stayed in the text because it isn't JSON


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a tool that an answer holds."""

    name: str
    arguments: str  # as the model wrote them
    call_id: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The policy's answer in one turn."""

    text: str  # without reasoning and calls
    message: dict[str, Any]  # as in OpenAI's chat API
    calls: tuple[Call, ...] = ()
    speaker: str = ""  # who said it
    cut: bool = False  # at a limit of tokens

    @classmethod
    def of(cls, message: Mapping[str, Any], speaker: str, cut: bool) -> Answer:
        calls = tuple(
            Call(name=call["function"]["name"], arguments=call["function"]["arguments"], call_id=call["id"])
            for call in message.get("tool_calls") or ()
        )
        return cls(text=message.get("content") or "", message=dict(message), calls=calls, speaker=speaker, cut=cut)


def _storable(value: Any) -> Any:
    """JSON types with `storable` texts."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {_storable(key): _storable(one) for key, one in cast("dict[Any, Any]", value).items()}
    return [_storable(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


class Episode:
    """A rollout, as its environment sees it.

    ``state`` is the environment's own: JSON types alone, for it is kept while the rollout is parked, in this process or
    until the next one; so are the sandbox's files. Whatever else an environment has of a rollout is lost then:
    `Environment.resume` makes it anew, or `hold` says that it can't be.

    Example, in `Environment.reply`: ``episode.state["tries"] += 1``, ``episode.say("wrong, try again")``; or
    ``episode.reward(1.0)``, ``episode.end("solved")``.
    """

    def __init__(
        self, name: str, task: Task, sandbox: EpisodeSandbox, seed: int, max_turns: int, models: FixedModels
    ) -> None:
        self.name = name  # of the rollout
        self.task = task
        self.sandbox = sandbox  # made when it is first used
        self.random = random.Random(seed)  # goes on where it was when the rollout is resumed
        self.state: dict[str, Any] = {}
        self.messages: dict[str, list[dict[str, Any]]] = {}  # each speaker's conversation so far
        self.turns = 0  # answers so far
        self.turns_left = max_turns
        self.over = ""  # why there is no further turn
        self.held = ""  # what it needs that no other process has
        self._models = models
        self._pending: dict[str, list[dict[str, Any]]] = {}  # said, but not asked with yet
        self._next = NextTurn(said=())
        self._reward: float | None = None
        self._tool_times: list[ToolTimes] = []

    @property
    def speaker(self) -> str:
        """The role in which the policy answers next."""
        return self._next.speaker

    def say(self, content: str, role: str = "user", *, to: str | None = None) -> None:
        """Add a message to the conversation of the next speaker, or of ``to``."""
        self.add({"role": role, "content": content}, to=to)

    def add(self, message: Mapping[str, Any], *, to: str | None = None) -> None:
        """`say`, with a message as in OpenAI's chat API."""
        self._pending.setdefault(self.speaker if to is None else to, []).append(_storable(dict(message)))

    def turn_to(
        self,
        speaker: str,
        *,
        learned: bool = True,
        tools: Sequence[Tool] | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        """The policy answers next as ``speaker``, in that role's own conversation. ``learned`` False: without loss.
        ``tools`` None: the environment's."""
        schemas = self._next.tools if tools is None else tuple(tool.schema for tool in tools)
        self._next = NextTurn(
            said=(), speaker=speaker, learned=learned, tools=schemas, stop=tuple(stop), max_tokens=max_tokens
        )

    async def ask(self, name: str, messages: Sequence[Mapping[str, Any]], **body: Any) -> str:
        """The answer of ``[environment.models.NAME]`` to messages as in OpenAI's chat API; ``body``: further keys of
        the request. Raises InfrastructureError where there is no answer."""
        return await self._models.ask(name, messages, **body)

    def reward(self, value: float) -> None:
        """Reward the turn that was just answered; several rewards add up. Before the first answer: the first turn. Once
        the rollout was scored (`Environment.close`) a reward has no effect."""
        if finite_number(value) is None:
            raise ValueError(f"reward({value!r}): a finite number is needed")
        self._reward = (self._reward or 0.0) + float(value)

    def end(self, why: str = "answered") -> None:
        """End the rollout: there is no further turn. The first reason stays."""
        self.over = self.over or why

    def hold(self, what: str) -> None:
        """Declare that the rollout needs ``what``, which lives in this process alone, a connection, say. Parked, it
        can't resume in another process: it starts anew there, as after an infrastructure failure."""
        self.held = self.held or what

    def tell(self, call: Call, content: str, *, to: str | None = None) -> None:
        """Answer a call of a tool."""
        self.add({"role": "tool", "content": content, "tool_call_id": call.call_id, "name": call.name}, to=to)

    # --- for the service ----------------------------------------------------------------------------------------

    def hear(self, answer: Answer) -> None:
        self.messages.setdefault(answer.speaker, []).append(answer.message)
        self.turns, self.turns_left = self.turns + 1, self.turns_left - 1

    def note_tool(self, times: ToolTimes) -> None:
        """Note a call of a tool for the record of rollouts."""
        self._tool_times.append(times)

    def take_tool_times(self) -> tuple[ToolTimes, ...]:
        """Take the calls that were noted since the last time."""
        times, self._tool_times = tuple(self._tool_times), []
        return times

    def take_next(self) -> NextTurn:
        """The next turn to sample, with all messages that its speaker hasn't seen yet."""
        said = self._pending.pop(self.speaker, [])
        self.messages.setdefault(self.speaker, []).extend(said)
        return msgspec.structs.replace(self._next, said=tuple(said))

    def take_reward(self) -> float | None:
        """Take the last answered turn's reward. None before the first answer: a reward given by then waits for it."""
        if not self.turns:
            return None
        reward, self._reward = self._reward, None
        return reward

    def kept(self) -> dict[str, Any]:
        """The episode's state outside its conversations and its sandbox, to be parked."""
        return {
            "own": self.state,
            "pending": self._pending,
            "turns": self.turns,
            "turns_left": self.turns_left,
            "random": self.random.getstate(),
            "held": self.held,
            "reward": self._reward,
        }

    def restore(
        self, kept: Mapping[str, Any], asked: NextTurn, messages: Mapping[str, Sequence[dict[str, Any]]]
    ) -> None:
        """Restore a parked episode. ``asked``: the turn it was parked in, already among ``messages``."""
        self.state = dict(kept["own"])
        self.turns, self.turns_left = kept["turns"], kept["turns_left"]
        self._reward = kept.get("reward")  # what was parked before there was one goes on too
        version, numbers, spare = kept["random"]
        self.random.setstate((version, tuple(numbers), spare))
        self.messages = {speaker: list(said) for speaker, said in messages.items()}
        self._pending = {speaker: list(said) for speaker, said in kept["pending"].items()}
        self._next = asked


class Environment:
    """Base class of the environments that rollouts are played in: ``environment.name = "module:Class"`` names one.

    The simplest is a list of tools: the policy calls them until it answers without a call, and ``[verifier]`` judges
    that answer. Override `reply` for anything else, and `score` where the environment knows the reward.

    Example:

        class Shop(Environment):
            system = "You answer questions about prices. Look them up."

            def tools(self):
                return (self.price,)

            async def price(self, item: str, episode: Episode) -> str:
                \"\"\"The price of an item, in euros.\"\"\"
                if item not in episode.task.metadata["prices"]:
                    raise ToolError(f"there is no {item}")
                return str(episode.task.metadata["prices"][item])

    One object serves all rollouts of a worker at once: whatever is a rollout's own belongs into ``episode.state``.
    Parameters of its ``__init__`` come from ``environment.parameters``. Everything may be async; a call that takes long
    without awaiting holds up the rollouts beside it. An exception of a tool is told to the model; any other fails the
    rollout at the boundary "environment". Infrastructure's (`is_infrastructure`: a connection, a time limit, a sandbox)
    are tried anew, never a reward.
    """

    system = ""  # what the conversation begins with
    uses_sandbox = False  # the run makes sure that there can be some before it starts
    models: Sequence[str] = ()  # of [environment.models.NAME], that it asks
    longest_s: Mapping[str, float] = {}  # what a reply or a score may take by each of its parameters
    repeatable = False  # the same commands leave the same files: a lost sandbox can be made again

    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """The tools that the policy may call; requested once."""
        return ()

    async def begin(self, episode: Episode) -> None:
        """Say what comes before the first answer: by default ``system``, and the task."""
        if self.system:
            episode.say(self.system, "system")
        for message in episode.task.messages or ({"role": "user", "content": episode.task.prompt},):
            episode.add(message)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        """Say what comes before the next answer, or end: by default calls are carried out, in their order, and an
        answer without any is the last."""
        if not await self.call_tools(episode, answer):
            episode.end()

    async def score(self, episode: Episode) -> Any:
        """The rollout's score, as a verifier may return it (docs/inputs.md). None, the default: the rewards of the
        turns if there are any, or else ``[verifier]`` judges the last answer."""
        return None

    async def park(self, episode: Episode) -> None:
        """The rollout is about to be parked: put into ``episode.state`` what `resume` will need."""

    async def resume(self, episode: Episode) -> None:
        """The rollout goes on, in another process than it was parked in. ``episode.state`` and its files are back."""

    async def close(self, episode: Episode) -> None:
        """The rollout is over, or given up. Its sandbox ends behind this."""

    async def stop(self) -> None:
        """The worker ends; what all its rollouts shared may go."""

    async def call_tools(self, episode: Episode, answer: Answer) -> bool:
        """Carry out the calls of an answer. False: it has none."""
        for number, call in enumerate(answer.calls):
            if number >= self.most_calls:  # what takes long isn't the infrastructure's fault
                episode.tell(call, f"error: at most {self.most_calls} calls in one answer")
                continue
            well, name, now = False, call.name if call.name in self.offered else "", asyncio.get_running_loop().time
            started_s = now()
            blocks = name and self.offered[name].blocks  # then it has a limit of its own
            try:
                with episode.sandbox.in_line() if blocks else contextlib.nullcontext():
                    text, well = await call_tool(self.offered, call.name, call.arguments, episode, self.tool_calls)
            finally:
                episode.note_tool(ToolTimes(name=name, start_s=started_s, end_s=now(), error=not well))
            episode.tell(call, self.shortened(text))
        if not answer.calls and self.offered and _UNREAD in answer.text and not answer.cut:
            episode.say('error: a call must be valid JSON: {"name": ..., "arguments": {...}}')
            return True
        return bool(answer.calls)

    # --- set by the service -------------------------------------------------------------------------------------

    offered: Mapping[str, Tool] = {}  # `tools`, by name
    tool_calls = ToolCalls()  # counts them
    most_calls = 16  # of an answer, that are carried out
    longest_result_characters = 8000  # of a tool
    reply_timeout_s = 300.0  # of a reply, or a score

    def shortened(self, text: str) -> str:
        """A tool's result within its limit: its beginning and its end."""
        most = self.longest_result_characters
        if len(text) <= most:
            return text
        head, tail = most - most // 3, most // 3
        return f"{text[:head]}\n[{len(text) - head - tail} characters left out]\n{text[-tail:]}"
