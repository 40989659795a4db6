"""Environments of OpenEnv, which run in a server; each rollout has a session of its own over a WebSocket.

The protocol is implemented with the package websockets alone: openenv-core is for servers, and has more dependencies
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
from headway.rollout.environments.openenv_server import LocalServer, fetch_json, free_port
from headway.rollout.parameters import require_choice
from headway.rollout.tools import Tool, ToolError, read_object
from headway.runtime.imports import import_extra

KEY = "environment.parameters"
COLUMN = "openenv"  # of a row, and so in a task's metadata: the arguments of reset
_MESSAGE_BYTES = 32 << 20
_OURS = ("metadata", "reward", "done")  # fields of an observation that the policy doesn't see
_REFUSED = "VALIDATION_ERROR"  # code for an invalid action
_ENVIRONMENTS = "EXECUTION_ERROR"  # code for a failure in the environment's code


class SessionLost(InfrastructureError):
    """Raised where the server is gone or full, or can't start an episode."""


class OpenEnv(Environment):
    """Environment in a server: every answer is an action, and the rewards of its steps are those of the turns.

    A task's ``{"openenv": {...}}`` are arguments of reset; there is always a seed, the same for all rollouts of a task.
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
        """``address``: of a running server, http://HOST:PORT; or ``command`` starts one here, with {port} filled in.
        ``reads``: position of the action in an answer; "tool": a call of ``act`` with the action's fields. ``field``:
        the action's field that gets the answer; "": the only required one. ``action``: constant fields. ``shows``: the
        observation's field that the policy sees; "": all of it. ``reset``: arguments of every reset. ``solved_at``: sum
        of rewards from which the task counts as solved."""
        self._client = import_extra("websockets.asyncio.client", "openenv", "environment.name = 'openenv'")
        self._package = import_extra("websockets.exceptions", "openenv", "environment.name = 'openenv'")
        require_choice(f"{KEY}.reads", reads, Reading)
        if bool(address) == bool(command):
            raise ConfigurationError(f"{KEY}: either address = 'http://...' or command = ['program', ...] is needed")
        self.system = system
        self._server = LocalServer(command, free_port(), start_timeout_s) if command else None
        self._address = self._server.address if self._server else address.rstrip("/")
        self._reads: Reading = reads
        self._fixed, self._reset, self._observation_field = dict(action or {}), dict(reset or {}), shows
        self._solved_at = solved_at
        self._sessions: dict[str, Any] = {}
        self._restarting = asyncio.Lock()
        try:
            if self._server is not None:
                self._server.start()
            schema = fetch_json(f"{self._address}/schema", start_timeout_s)["action"]
        except (InfrastructureError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{KEY}: the server at {self._address}: {type(error).__name__}: {error}") from None
        self._schema = {key: spec for key, spec in schema.get("properties", {}).items() if key != "metadata"}
        self._needed = [key for key in schema.get("required", ()) if key not in self._fixed]
        self._field = field or (self._needed[0] if len(self._needed) == 1 else "")
        if reads != "tool" and self._field not in self._schema:
            valid = ", ".join(self._schema) or "none"
            raise ConfigurationError(f"{KEY}.field = {field!r}: which of the action's fields gets the answer: {valid}")

    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        if self._reads != "tool":
            return ()
        fields = {key: spec for key, spec in self._schema.items() if key not in self._fixed}
        parameters = {"type": "object", "properties": fields, "required": self._needed}
        return (Tool.described("act", "Take an action.", parameters, self._act, fatal=True),)

    async def begin(self, episode: Episode) -> None:
        episode.pin_to_process("its session with an OpenEnv server")
        episode.state.update(rewards=[], rewarded=False, stepped=False)
        task_arguments = episode.task.metadata.get(COLUMN) or {}
        self._sessions[episode.name] = await self._open_session()
        answer = await self._request(episode, "reset", {"seed": seed_of(episode.task), **self._reset, **task_arguments})
        await super().begin(episode)
        episode.add_message(self._observation_text(answer))
        if answer.get("done"):
            episode.end("done")

    async def reply(self, episode: Episode, answer: Answer) -> None:
        episode.state["rewards"].append(0.0)
        if await self.call_tools(episode, answer):
            return
        try:
            observation = await self._stepped(episode, {self._field: self._parse_action(answer.text)})
        except ToolError as error:
            observation = f"error: {error}"
        if not episode.over:
            episode.add_message(observation)

    async def score(self, episode: Episode) -> Any:
        if not episode.state["stepped"]:
            return {"reward": 0.0, "solved": False, "actions": "none"}
        if not episode.state["rewarded"]:
            return None
        state = await self._request(episode, "state")
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
        """Execute a call of the tool ``act``."""
        if episode.over:
            return "it is over"
        return await self._stepped(episode, read_object(written))

    async def _stepped(self, episode: Episode, action: Mapping[str, Any]) -> str:
        step_answer = await self._request(episode, "step", {**action, **self._fixed})
        episode.state["stepped"] = True
        reward = step_answer.get("reward")
        if reward is not None:
            episode.reward(float(reward))
            episode.state["rewards"][-1] += float(reward)
            episode.state["rewarded"] = True
        if step_answer.get("done"):
            episode.end("done")
        return self._observation_text(step_answer)

    def _parse_action(self, text: str) -> Any:
        """Return the action in an answer, in the type of its field. Raises ToolError where there is none."""
        if self._reads == "tool":
            raise ToolError("call the tool act")
        action_text = find_action(text, self._reads)
        if action_text is None:
            raise ToolError("there is no action in this answer")
        json_type = self._schema[self._field].get("type")
        if json_type in (None, "string"):
            return action_text
        try:
            return json.loads(action_text)
        except (ValueError, RecursionError):
            raise ToolError(f"{self._field} must be a JSON {json_type}") from None

    def _observation_text(self, data: Mapping[str, Any]) -> str:
        observation = {key: content for key, content in (data.get("observation") or {}).items() if key not in _OURS}
        if self._observation_field:
            if self._observation_field not in observation:
                raise ValueError(f"the observation has no {self._observation_field!r}: {', '.join(observation)}")
            observation = {self._observation_field: observation[self._observation_field]}
        displayed = next(iter(observation.values())) if len(observation) == 1 else observation
        return displayed if isinstance(displayed, str) else json.dumps(displayed, ensure_ascii=False)

    async def _request(self, episode: Episode, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and return its answer's data. Raises ToolError for an invalid action, SessionLost,
        RuntimeError for a failure in the environment's code."""
        session = self._sessions[episode.name]
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        try:
            await session.send(json.dumps(message))
            answer = json.loads(await session.recv())
        except (self._package.ConnectionClosed, ValueError) as error:
            raise SessionLost(f"the OpenEnv server: {type(error).__name__}: {error}") from None
        payload = answer.get("data") or {}
        if answer.get("type") != "error":
            return payload
        code, error_text = payload.get("code", ""), str(payload.get("message", ""))[:300]
        if code == _REFUSED and kind == "step":
            raise ToolError(error_text or "that is no action")
        if code in (_ENVIRONMENTS, _REFUSED):
            raise RuntimeError(f"the OpenEnv server: {error_text} ({code})")
        raise SessionLost(f"the OpenEnv server: {error_text} ({code})")

    async def _open_session(self) -> Any:
        """Open a session; a dead server that this environment started is restarted. Raises OSError, SessionLost."""
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
        address = urlsplit(self._address)
        url = f"{'wss' if address.scheme in ('https', 'wss') else 'ws'}://{address.netloc}{address.path}/ws"
        proxy_options: dict[str, Any] = {"proxy": None} if address.hostname in ("127.0.0.1", "localhost", "::1") else {}
        try:
            # environment.timeout_s limits an answer's time: no pings are needed
            return await self._client.connect(url, max_size=_MESSAGE_BYTES, ping_interval=None, **proxy_options)
        except self._package.WebSocketException as error:
            raise SessionLost(f"the OpenEnv server at {self._address}: {type(error).__name__}: {error}") from None
