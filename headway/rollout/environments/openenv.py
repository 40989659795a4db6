"""Environments of OpenEnv: a server plays, each rollout has a session of its own over a WebSocket.

The protocol is spoken with the package websockets alone: openenv-core is what servers are made of, and asks for more
than a client needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from headway.records.errors import ConfigurationError, InfrastructureError
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.environments.actions import Reading, find_action
from headway.rollout.environments.gym import seed_of
from headway.rollout.environments.openenv_server import LocalServer, fetched, free_port
from headway.rollout.parameters import require_choice
from headway.rollout.tools import Tool, ToolError, read_object
from headway.runtime.imports import import_extra

KEY = "environment.parameters"
COLUMN = "openenv"  # of a row, and so in a task's metadata: the arguments of reset
_MESSAGE_BYTES = 32 << 20
_OURS = ("metadata", "reward", "done")  # of an observation: not what is seen
_REFUSED = "VALIDATION_ERROR"  # of an action that isn't one
_ENVIRONMENTS = "EXECUTION_ERROR"  # its own code failed


class SessionLost(InfrastructureError):
    """Raised where the server is gone, full, or can't begin."""


class OpenEnv(Environment):
    """A server's environment: every answer is an action, and the rewards of its steps are those of the turns.

    A task's ``{"openenv": {...}}`` are arguments of reset; a seed is there always, the same for all rollouts of a task.
    """

    def __init__(
        self,
        address: str = "",
        command: Sequence[str] = (),
        reads: Reading = "whole",
        field: str = "",
        action: Mapping[str, Any] | None = None,
        shows: str = "",
        reset: Mapping[str, Any] | None = None,
        system: str = "",
        solved_at: float = 1.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        """``address``: of a server that runs, http://HOST:PORT; or ``command`` starts one here, {port} is filled in.
        ``reads``: where in an answer the action is; "tool": a call of ``act`` with the action's fields. ``field``: the
        action's field that gets it; "": the only one it needs. ``action``: other fields. ``shows``: the observation's
        field that is told; "": all of it. ``reset``: arguments of every reset. ``solved_at``: rewards together from
        which the task counts as solved."""
        self._client = import_extra("websockets.asyncio.client", "openenv", "environment.name = 'openenv'")
        self._package = import_extra("websockets.exceptions", "openenv", "environment.name = 'openenv'")
        require_choice(f"{KEY}.reads", reads, Reading)
        if bool(address) == bool(command):
            raise ConfigurationError(f"{KEY}: either address = 'http://...' or command = ['program', ...] is needed")
        self.system = system
        self._server = LocalServer(command, free_port(), start_timeout_s) if command else None
        self._address = self._server.address if self._server else address.rstrip("/")
        self._reads: Reading = reads
        self._fixed, self._reset, self._shown = dict(action or {}), dict(reset or {}), shows
        self._solved_at = solved_at
        self._sessions: dict[str, Any] = {}
        self._restarting = asyncio.Lock()
        try:
            if self._server is not None:
                self._server.start()
            schema = fetched(f"{self._address}/schema", start_timeout_s)["action"]
        except (InfrastructureError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{KEY}: the server at {self._address}: {type(error).__name__}: {error}") from None
        self._schema = {key: one for key, one in schema.get("properties", {}).items() if key != "metadata"}
        self._needed = [key for key in schema.get("required", ()) if key not in self._fixed]
        self._field = field or (self._needed[0] if len(self._needed) == 1 else "")
        if reads != "tool" and self._field not in self._schema:
            has = ", ".join(self._schema) or "none"
            raise ConfigurationError(f"{KEY}.field = {field!r}: which of the action's fields gets the answer: {has}")

    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        if self._reads != "tool":
            return ()
        fields = {key: one for key, one in self._schema.items() if key not in self._fixed}
        parameters = {"type": "object", "properties": fields, "required": self._needed}
        return (Tool.described("act", "Take an action.", parameters, self._act, fatal=True),)

    async def begin(self, episode: Episode) -> None:
        episode.hold("its session with an OpenEnv server")
        episode.state.update(rewards=[], rewarded=False, stepped=False)
        own = episode.task.metadata.get(COLUMN) or {}
        self._sessions[episode.name] = await self._connected()
        data = await self._asked(episode, "reset", {"seed": seed_of(episode.task), **self._reset, **own})
        await super().begin(episode)
        episode.say(self._seen(data))
        if data.get("done"):
            episode.end("done")

    async def reply(self, episode: Episode, answer: Answer) -> None:
        episode.state["rewards"].append(0.0)
        if await self.call_tools(episode, answer):
            return
        try:
            told = await self._stepped(episode, {self._field: self._written(answer.text)})
        except ToolError as error:
            told = f"error: {error}"
        if not episode.over:
            episode.say(told)

    async def score(self, episode: Episode) -> Any:
        if not episode.state["stepped"]:
            return {"reward": 0.0, "solved": False, "actions": "none"}
        if not episode.state["rewarded"]:
            return None
        state = await self._asked(episode, "state")
        rewards = episode.state["rewards"]
        solved = sum(rewards) >= self._solved_at
        return {"turn_rewards": rewards, "reward": sum(rewards), "solved": solved, "state": state}

    async def close(self, episode: Episode) -> None:
        session = self._sessions.pop(episode.name, None)
        if session is not None:
            await session.close()

    async def stop(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    async def _act(self, written: str, episode: Episode) -> str:
        """The tool."""
        if episode.over:
            return "it is over"
        return await self._stepped(episode, read_object(written))

    async def _stepped(self, episode: Episode, action: Mapping[str, Any]) -> str:
        data = await self._asked(episode, "step", {**action, **self._fixed})
        episode.state["stepped"] = True
        reward = data.get("reward")
        if reward is not None:
            episode.reward(float(reward))
            episode.state["rewards"][-1] += float(reward)
            episode.state["rewarded"] = True
        if data.get("done"):
            episode.end("done")
        return self._seen(data)

    def _written(self, text: str) -> Any:
        """The action in an answer, in the type of its field. Raises ToolError where there is none."""
        if self._reads == "tool":
            raise ToolError("call the tool act")
        written = find_action(text, self._reads)
        if written is None:
            raise ToolError("there is no action in this answer")
        kind = self._schema[self._field].get("type")
        if kind in (None, "string"):
            return written
        try:
            return json.loads(written)
        except (ValueError, RecursionError):
            raise ToolError(f"{self._field} must be a JSON {kind}") from None

    def _seen(self, data: Mapping[str, Any]) -> str:
        observation = {key: one for key, one in (data.get("observation") or {}).items() if key not in _OURS}
        if self._shown:
            if self._shown not in observation:
                raise ValueError(f"the observation has no {self._shown!r}: {', '.join(observation)}")
            observation = {self._shown: observation[self._shown]}
        only = next(iter(observation.values())) if len(observation) == 1 else observation
        return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)

    async def _asked(self, episode: Episode, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """An answer's data. Raises ToolError for an action that isn't one, SessionLost, RuntimeError for a failure of
        the environment's own."""
        session = self._sessions[episode.name]
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            await session.send(json.dumps(message))
            answer = json.loads(await session.recv())
        except (self._package.ConnectionClosed, ValueError) as error:
            raise SessionLost(f"the OpenEnv server: {type(error).__name__}: {error}") from None
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return found
        code, what = found.get("code", ""), str(found.get("message", ""))[:300]
        if code == _REFUSED and kind == "step":
            raise ToolError(what or "that is no action")
        if code in (_ENVIRONMENTS, _REFUSED):
            raise RuntimeError(f"the OpenEnv server: {what} ({code})")
        raise SessionLost(f"the OpenEnv server: {what} ({code})")

    async def _connected(self) -> Any:
        """A new session; a server of this environment that has died is restarted. Raises OSError, SessionLost."""
        try:
            return await self._connect()
        except (OSError, InfrastructureError):
            if self._server is None:
                raise
        async with self._restarting:
            try:
                return await self._connect()
            except (OSError, InfrastructureError):
                await asyncio.to_thread(self._server.start)
        return await self._connect()

    async def _connect(self) -> Any:
        parts = urlsplit(self._address)
        url = f"{'wss' if parts.scheme in ('https', 'wss') else 'ws'}://{parts.netloc}{parts.path}/ws"
        local: dict[str, Any] = {"proxy": None} if parts.hostname in ("127.0.0.1", "localhost", "::1") else {}
        try:
            # environment.timeout_s is what it has for an answer: no pings beside it
            return await self._client.connect(url, max_size=_MESSAGE_BYTES, ping_interval=None, **local)
        except self._package.WebSocketException as error:
            raise SessionLost(f"the OpenEnv server at {self._address}: {type(error).__name__}: {error}") from None
