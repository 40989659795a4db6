"""Environments of rollouts with several turns. Write one by extending `Environment`.

The policy answers and the environment replies until it ends the rollout; then it scores the rollout. Environments
live in worker processes (rollout/hosting/service.py), one object for all rollouts of a worker; the state of a single
rollout is in its `Episode`. Environments see no tokens: these stay, token-exact, where they are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from headway.config.removed import renamed
from headway.records.environment import LEFT_OUT, NextTurn
from headway.records.rollout import ToolTimes
from headway.records.task import Task
from headway.rollout.episode_sandbox import EpisodeSandbox
from headway.rollout.external_models import ExternalModels
from headway.rollout.tools import Tool, ToolCalls, call_tool
from headway.runtime.hooks import finite_number, storable

_UNREAD = "<tool_call>"  # begins a call that stayed in the text because it isn't JSON


@dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call in an answer."""

    name: str
    arguments: str  # as the model wrote them
    call_id: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The policy's answer in one turn."""

    text: str  # without reasoning and calls
    message: dict[str, Any]  # as in OpenAI's chat API
    calls: tuple[Call, ...] = ()
    speaker: str = ""  # the role that gave it
    cut: bool = False  # truncated at a limit of tokens

    @classmethod
    def of(cls, message: Mapping[str, Any], speaker: str, cut: bool) -> Answer:
        calls = tuple(
            Call(name=call["function"]["name"], arguments=call["function"]["arguments"], call_id=call["id"])
            for call in message.get("tool_calls") or ()
        )
        return cls(text=message.get("content") or "", message=dict(message), calls=calls, speaker=speaker, cut=cut)


def _storable(value: Any) -> Any:
    """Return a JSON value with all texts made `storable`."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {_storable(key): _storable(nested) for key, nested in cast("dict[Any, Any]", value).items()}
    return [_storable(nested) for nested in cast("list[Any]", value)] if isinstance(value, list) else value


class Episode:
    """A rollout, as its environment sees it.

    ``state`` belongs to the environment and holds JSON types alone: it is saved while the rollout is parked, in this
    process or until the next one, and so are the sandbox's files. All other data of a rollout is lost then:
    `Environment.resume` rebuilds it, or `pin_to_process` declares that this is impossible.

    Example, in `Environment.reply`: ``episode.state["tries"] += 1``, ``episode.add_message("wrong, try again")``; or
    ``episode.reward(1.0)``, ``episode.end("solved")``.
    """

    def __init__(
        self, name: str, task: Task, sandbox: EpisodeSandbox, seed: int, max_turns: int, models: ExternalModels
    ) -> None:
        self.name = name  # of the rollout
        self.task = task
        self.sandbox = sandbox  # made when it is first used
        self.random = random.Random(seed)  # continues from its saved state when the rollout is resumed
        self.state: dict[str, Any] = {}
        self.messages: dict[str, list[dict[str, Any]]] = {}  # each speaker's conversation so far
        self.turns = 0  # answers so far
        self.turns_left = max_turns
        self.over = ""  # why there is no further turn
        self.pinned_by = ""  # the resource it needs that no other process has
        self._models = models
        self._pending: dict[str, list[dict[str, Any]]] = {}  # messages of each speaker, not yet in a request
        self._next = NextTurn(messages=())
        self._reward: float | None = None
        self._tool_times: list[ToolTimes] = []

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if sentence := renamed("Episode", name):
                raise TypeError(sentence)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(renamed("Episode", name) or f"an episode has no {name!r}", name=name, obj=self)

    @property
    def speaker(self) -> str:
        """The role in which the policy answers next."""
        return self._next.speaker

    def add_message(self, content: str, role: str = "user", *, to: str | None = None) -> None:
        """Add a message to the conversation of the next speaker, or of ``to``."""
        self.add({"role": role, "content": content}, to=to)

    def add(self, message: Mapping[str, Any], *, to: str | None = None) -> None:
        """Like `add_message`, with a message as in OpenAI's chat API."""
        self._pending.setdefault(self.speaker if to is None else to, []).append(_storable(dict(message)))

    def set_active_agent(
        self,
        speaker: str,
        *,
        learned: bool = True,
        tools: Sequence[Tool] | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        """Make the policy answer next as ``speaker``, in that role's own conversation. ``learned`` False: its tokens
        carry no loss. ``tools`` None: the environment's."""
        schemas = self._next.tools if tools is None else tuple(tool.schema for tool in tools)
        self._next = NextTurn(
            messages=(), speaker=speaker, learned=learned, tools=schemas, stop=tuple(stop), max_tokens=max_tokens
        )

    async def ask(self, name: str, messages: Sequence[Mapping[str, Any]], **body: Any) -> str:
        """Return the answer of ``[environment.models.NAME]`` to messages as in OpenAI's chat API; ``body``: further
        keys of the request. Raises InfrastructureError where there is no answer."""
        return await self._models.ask(name, messages, **body)

    def reward(self, value: float) -> None:
        """Reward the last answered turn; several rewards add up. Before the first answer, reward the first turn. Once
        the rollout is scored (`Environment.close`), a reward has no effect."""
        if finite_number(value) is None:
            raise ValueError(f"reward({value!r}): a finite number is needed")
        self._reward = (self._reward or 0.0) + float(value)

    def end(self, why: str = "answered") -> None:
        """End the rollout: there is no further turn. The first reason stays."""
        self.over = self.over or why

    def pin_to_process(self, resource: str) -> None:
        """Declare that the rollout needs ``resource``, which lives in this process alone (a connection, say). Parked,
        the rollout can't resume in another process: it restarts there, as after an infrastructure failure."""
        self.pinned_by = self.pinned_by or resource

    def add_tool_result(self, call: Call, content: str, *, to: str | None = None) -> None:
        """Add the result of a tool call."""
        self.add({"role": "tool", "content": content, "tool_call_id": call.call_id, "name": call.name}, to=to)

    # --- for the service ----------------------------------------------------------------------------------------

    def receive(self, answer: Answer) -> None:
        """Record an answer of the policy and count its turn."""
        self.messages.setdefault(answer.speaker, []).append(answer.message)
        self.turns, self.turns_left = self.turns + 1, self.turns_left - 1

    def note_tool(self, times: ToolTimes) -> None:
        """Record a tool call's times for the record of rollouts."""
        self._tool_times.append(times)

    def take_tool_times(self) -> tuple[ToolTimes, ...]:
        """Return and clear the tool calls recorded since the last time."""
        times, self._tool_times = tuple(self._tool_times), []
        return times

    def take_next(self) -> NextTurn:
        """Return the next turn to sample, with all messages that its speaker hasn't seen yet."""
        messages = self._pending.pop(self.speaker, [])
        self.messages.setdefault(self.speaker, []).extend(messages)
        return msgspec.structs.replace(self._next, messages=tuple(messages))

    def take_reward(self) -> float | None:
        """Return and clear the last answered turn's reward; None before the first answer, for which it then waits."""
        if not self.turns:
            return None
        reward, self._reward = self._reward, None
        return reward

    def saved_state(self) -> dict[str, Any]:
        """Return the episode's state outside its conversations and its sandbox, for parking."""
        return {
            "own": self.state,
            "pending": self._pending,
            "turns": self.turns,
            "turns_left": self.turns_left,
            "random": self.random.getstate(),
            "held": self.pinned_by,
            "reward": self._reward,
        }

    def restore(
        self, saved: Mapping[str, Any], next_turn: NextTurn, messages: Mapping[str, Sequence[dict[str, Any]]]
    ) -> None:
        """Restore a parked episode. ``next_turn``: the turn it was parked in; its messages are among ``messages``."""
        self.state = dict(saved["own"])
        self.turns, self.turns_left = saved["turns"], saved["turns_left"]
        self._reward = saved.get("reward")  # states parked by older versions have none
        version, internal_state, gauss_next = saved["random"]
        self.random.setstate((version, tuple(internal_state), gauss_next))
        self.messages = {speaker: list(history) for speaker, history in messages.items()}
        self._pending = {speaker: list(history) for speaker, history in saved["pending"].items()}
        self._next = next_turn


class Environment:
    """Base class of environments; ``environment.name = "module:Class"`` selects one.

    The simplest environment is a list of tools: the policy calls them until it answers without a call, and
    ``[verifier]`` judges that answer. Override `reply` for anything else, and `score` where the environment knows the
    reward.

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

    One object serves all rollouts of a worker concurrently: the state of a single rollout belongs into
    ``episode.state``. Parameters of ``__init__`` come from ``environment.parameters``. A call that takes long without
    awaiting delays the other rollouts of its worker. The model gets a tool's exception as an error; any other exception
    fails the rollout at the boundary "environment". Infrastructure failures (`is_infrastructure`: a connection, a time
    limit, a sandbox) are retried and never become a reward.
    """

    system = ""  # the first message of the conversation
    uses_sandbox = False  # True: the run checks before it starts that sandboxes can be made
    models: Sequence[str] = ()  # names of the [environment.models.NAME] that it asks
    longest_s: Mapping[str, float] = {}  # longest time of a reply or a score, by the parameter that sets it
    repeatable = False  # the same commands leave the same files: a lost sandbox can be remade

    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """Return the tools that the policy may call; called once."""
        return ()

    async def begin(self, episode: Episode) -> None:
        """Add the messages before the first answer: by default ``system``, and the task."""
        if self.system:
            episode.add_message(self.system, "system")
        for message in episode.task.messages or ({"role": "user", "content": episode.task.prompt},):
            episode.add(message)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        """Add the messages before the next answer, or end the rollout. By default tool calls are executed in their
        order, and an answer without any is the last."""
        if not await self.call_tools(episode, answer):
            episode.end()

    async def score(self, episode: Episode) -> Any:
        """Return the rollout's score, in a form that a verifier may return (docs/inputs.md). With None, the default,
        the turns' rewards count if there are any, or else ``[verifier]`` judges the last answer."""
        return None

    async def park(self, episode: Episode) -> None:
        """Put into ``episode.state`` all that `resume` will need: the rollout is about to be parked."""

    async def resume(self, episode: Episode) -> None:
        """Rebuild a parked rollout's data in another process; ``episode.state`` and its files are restored before."""

    async def close(self, episode: Episode) -> None:
        """Release a finished or abandoned rollout's resources. Its sandbox ends after this."""

    async def stop(self) -> None:
        """Release the resources that all rollouts of the worker share: the worker ends."""

    async def call_tools(self, episode: Episode, answer: Answer) -> bool:
        """Execute the tool calls of an answer; returns False where it has none."""
        for call_index, call in enumerate(answer.calls):
            if call_index >= self.most_calls:  # running out of time by too many calls isn't the infrastructure's fault
                episode.add_tool_result(call, f"error: at most {self.most_calls} calls in one answer")
                continue
            ok, name, read_time = False, call.name if call.name in self.offered else "", asyncio.get_running_loop().time
            started_s = read_time()
            is_blocking = name and self.offered[name].blocks  # a blocking tool has a time limit of its own
            try:
                with episode.sandbox.suspend_limits() if is_blocking else contextlib.nullcontext():
                    result_text, ok = await call_tool(self.offered, call.name, call.arguments, episode, self.tool_calls)
            finally:
                episode.note_tool(ToolTimes(name=name, start_s=started_s, end_s=read_time(), error=not ok))
            episode.add_tool_result(call, self.shortened(result_text))
        if not answer.calls and self.offered and _UNREAD in answer.text and not answer.cut:
            episode.add_message('error: a call must be valid JSON: {"name": ..., "arguments": {...}}')
            return True
        return bool(answer.calls)

    # --- set by the service -------------------------------------------------------------------------------------

    offered: Mapping[str, Tool] = {}  # `tools`, by name
    tool_calls = ToolCalls()  # counts the calls
    most_calls = 16  # executed calls of one answer
    longest_result_characters = 8000  # of a tool
    reply_timeout_s = 300.0  # of a reply, or a score

    def shortened(self, text: str) -> str:
        """Return a tool's result cut to its limit: its beginning and its end."""
        limit = self.longest_result_characters
        if len(text) <= limit:
            return text
        head_count, tail_count = limit - limit // 3, limit // 3
        note = LEFT_OUT.format(count=len(text) - head_count - tail_count)
        return text[:head_count] + note + text[-tail_count:]
