"""Tools of servers that speak the Model Context Protocol: `environment.mcp`.

A server that dies is restarted; its open calls fail their rollouts as infrastructure. The model gets a server's answers
to calls, errors too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import ValidationError

from headway.config.tool_servers import ToolServerConfig
from headway.records.errors import ConfigurationError, InfrastructureError
from headway.rollout.environment import Episode
from headway.rollout.hosting.mcp.http import http_client
from headway.rollout.hosting.mcp.process import process_streams
from headway.rollout.tools import Tool, ToolError, read_object, tools_by_name
from headway.runtime.clock import Clock
from headway.runtime.imports import import_extra

KEY = "environment.mcp"
_START_S = 30.0  # until a server has listed its tools; a package manager may fetch it first
_STARTS_PER_MINUTE = 5  # of a worker's server that died or hung: one that dies at once mustn't take all its time
_RESULT_BYTES = 10_000_000  # of a message; a longer result becomes an error for the model
_ALIVE_S = 5.0  # time for a server to answer a health check after a slow call
_END_S = 6.0  # time for a server to end
_MOST_PAGES = 1000  # of a list of tools


class ServerFailed(InfrastructureError):
    """Raised for a server that died or can't be reached."""


class ToolServerConnection:
    """A connection to a server: *new* -> *up* -> *down*. A single task owns it; any task may call."""

    def __init__(self, settings: ToolServerConfig) -> None:
        self._settings = settings
        self._client: Any = None
        self._ended = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self.down = False

    async def start(self) -> None:
        """Connect to the server. Raises ServerFailed."""
        up_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._run(up_future), name=f"mcp-{self._settings.name}")
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(up_future)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise ServerFailed(f"{self._settings.name} did not start within {_START_S:g} s") from None
            raise

    async def stop(self) -> None:
        self.down = True
        self._ended.set()
        if self._owner is not None and not self._owner.done():
            await asyncio.wait((self._owner,), timeout=_END_S)
            self._owner.cancel()
            await asyncio.wait((self._owner,), timeout=1.0)

    async def tools(self) -> list[Any]:
        """Return all tools that the server lists. Raises ServerFailed, also for an endless list."""
        listed_tools: list[Any] = []
        cursor = None
        async with self._failing():
            try:
                async with asyncio.timeout(_START_S):
                    for _ in range(_MOST_PAGES):
                        page = await self._client.list_tools(cursor=cursor)
                        listed_tools += page.tools
                        cursor = page.next_cursor
                        if cursor is None:
                            return listed_tools
            except TimeoutError:
                raise ConnectionError(f"its list of tools takes longer than {_START_S:g} s") from None
            raise ConnectionError(f"its list of tools has no end: {_MOST_PAGES} pages, {len(listed_tools)} tools")

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return the tool's result as text. Raises ToolError for failures that the model sees, ServerFailed for
        others."""
        mcp = import_extra("mcp", "mcp", KEY)
        types = import_extra("mcp_types", "mcp", KEY)
        limit_s, loop = self._settings.timeout_s, asyncio.get_running_loop()
        began_s = loop.time()
        async with self._failing():
            try:
                call_result = await self._client.call_tool(tool, arguments, read_timeout_seconds=limit_s)
            except mcp.MCPError as error:
                is_request_error = error.code in (types.INVALID_PARAMS, types.METHOD_NOT_FOUND)
                # The client library uses the same codes for a closed connection.
                if not (is_request_error or await self._alive()):
                    raise
                text_by_code = {types.PARSE_ERROR: "its result can't be read, or is too long: ask for less"}
                if loop.time() - began_s >= limit_s:
                    text_by_code[types.REQUEST_TIMEOUT] = f"{tool} did not answer within {limit_s:g} s"
                raise ToolError(text_by_code.get(error.code, error.message)) from None
            except (ValueError, RuntimeError) as error:  # its answer is no tool result
                if not (isinstance(error, ValidationError) or await self._alive()):
                    raise
                raise ToolError(f"its result can't be read: {_wrong(error)}") from None
        text = result_text(call_result)
        if call_result.is_error:
            raise ToolError(text or "it failed")
        return text

    async def _alive(self) -> bool:
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self._client.list_tools()
        except Exception:  # any error: the server doesn't answer
            return False
        return True

    @contextlib.asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        """End the connection on any exception of the block but ToolError, and raise it as ServerFailed."""
        try:
            yield
        except ToolError:
            raise
        except Exception as error:
            self.down = True
            self._ended.set()
            raise ServerFailed(f"the server {self._settings.name} failed: {_cause(error)}") from error

    async def _run(self, up: asyncio.Future[None]) -> None:
        mcp = import_extra("mcp", "mcp", KEY)
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await self._transport(stack)
                self._client = await stack.enter_async_context(mcp.Client(transport, cache=None))
                up.set_result(None)
                await self._ended.wait()
        except (Exception, asyncio.CancelledError) as error:
            if not up.done():
                up.set_exception(ServerFailed(f"the server {self._settings.name} can't be had: {_cause(error)}"))
                up.exception()  # retrieved here: the waiter may have been cancelled
        finally:
            self.down = True

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        settings = self._settings
        if settings.command:
            return process_streams(settings.command, environment_of(settings), _RESULT_BYTES)
        http_module = import_extra("mcp.client.streamable_http", "mcp", KEY)
        client = await stack.enter_async_context(
            http_client(
                {"Authorization": f"Bearer {key_of(settings)}"} if settings.api_key_env else {},
                connect_s=_START_S,
                read_s=settings.timeout_s + _ALIVE_S,
                result_bytes=_RESULT_BYTES,
            )
        )
        return http_module.streamable_http_client(settings.url, http_client=client)


class SharedConnection:
    """A worker's connection to a server, shared by its rollouts: opened on demand, and reopened when it is down. A
    cancelled caller doesn't cancel a start."""

    def __init__(self, settings: ToolServerConfig, clock: Clock) -> None:
        self.settings = settings
        self._clock = clock
        self._connection: ToolServerConnection | None = None
        self._starting: asyncio.Task[ToolServerConnection] | None = None
        self._starts_s: deque[float] = deque(maxlen=_STARTS_PER_MINUTE)

    async def connection(self) -> ToolServerConnection:
        """Return a connection that is up; open one where there is none. Raises ServerFailed."""
        if self._connection is not None and not self._connection.down:
            return self._connection
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name=f"starting {self.settings.name}")
            # Its error is retrieved here: asyncio would log that of a start without a waiter.
            self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())
        return await asyncio.shield(self._starting)

    async def _start(self) -> ToolServerConnection:
        await self._end()
        settings, starts = self.settings, self._starts_s
        wait_s = starts[0] + 60 - self._clock.now() if len(starts) == starts.maxlen else 0.0
        if wait_s > settings.timeout_s:
            raise ServerFailed(f"the server {settings.name} was started {len(starts)} times within a minute")
        await self._clock.sleep(max(0.0, wait_s))
        starts.append(self._clock.now())
        connection = ToolServerConnection(settings)
        await connection.start()
        self._connection = connection
        return connection

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._end()

    async def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.stop()


class ToolServers:
    """The tool servers of an environment in one worker."""

    def __init__(self, settings: Sequence[ToolServerConfig], clock: Clock) -> None:
        self._shared = {server_settings.name: SharedConnection(server_settings, clock) for server_settings in settings}
        self._by_rollout: dict[tuple[str, str], ToolServerConnection] = {}  # (rollout, server)
        self._making: dict[tuple[str, str], asyncio.Lock] = {}

    async def tools(self) -> list[Tool]:
        """Return the tools that may be called. Raises ConfigurationError for a server that can't be reached, or lacks a
        configured tool."""
        tools: list[Tool] = []
        for name, shared in self._shared.items():
            try:
                tool_by_name = {tool.name: tool for tool in await (await shared.connection()).tools()}
            except ServerFailed as error:
                raise ConfigurationError(f"{KEY}: {error}") from error
            if shared.settings.per == "episode":
                await shared.stop()
            missing_names = [tool_name for tool_name in shared.settings.tools if tool_name not in tool_by_name]
            if missing_names:
                valid = ", ".join(tool_by_name) or "none"
                raise ConfigurationError(f"{KEY}: the server {name} has no tool {missing_names[0]!r}; valid: {valid}")
            tools += [self._tool(name, tool_by_name[tool_name]) for tool_name in shared.settings.tools or tool_by_name]
        return tools

    async def merge_tools(self, base: Sequence[Tool]) -> dict[str, Tool]:
        """Return the environment's tools ``base`` and these, by name. Raises ConfigurationError as `tools`, and for
        equal names."""
        return tools_by_name([*base, *await self.tools()]) if self._shared else {tool.name: tool for tool in base}

    async def end(self, rollout: str) -> None:
        """End the servers that belong to one rollout."""
        for key in [key for key in self._by_rollout if key[0] == rollout]:
            self._making.pop(key, None)
            await self._by_rollout.pop(key).stop()

    async def stop(self) -> None:
        connections = [*self._shared.values(), *self._by_rollout.values()]
        await asyncio.gather(*(connection.stop() for connection in connections), return_exceptions=True)

    def _tool(self, server: str, listed: Any) -> Tool:
        async def call(written: str, episode: Episode) -> str:
            arguments = read_object(written)
            connection = await self._connection(server, episode)
            return await connection.call(listed.name, arguments)

        return Tool.described(listed.name, listed.description or "", listed.input_schema, call)

    async def _connection(self, server: str, episode: Episode) -> ToolServerConnection:
        shared = self._shared[server]
        if shared.settings.per == "worker":
            return await shared.connection()
        key = (episode.name, server)
        async with self._making.setdefault(key, asyncio.Lock()):
            connection = self._by_rollout.get(key)
            if connection is None:
                episode.pin_to_process(f"its server {server}")
                connection = self._by_rollout[key] = ToolServerConnection(shared.settings)
                await connection.start()
            if connection.down:
                raise ServerFailed(f"the server {server} of this rollout has ended, and its state is lost")
            return connection


def require_tools(settings: Sequence[ToolServerConfig], base: Sequence[Tool], clock: Clock) -> None:
    """Start all servers, list their tools, and stop them. Raises ConfigurationError as `ToolServers.merge_tools`."""

    async def ask() -> None:
        servers = ToolServers(settings, clock)
        try:
            await servers.merge_tools(base)
        finally:
            await servers.stop()

    with ThreadPoolExecutor(1, "mcp") as executor:  # an event loop may be running here
        executor.submit(lambda: asyncio.run(ask())).result()


def environment_of(settings: ToolServerConfig) -> dict[str, str]:
    """Return the environment variables of a server's process. Raises ServerFailed for one that isn't set here."""
    unset_names = [name for name in settings.passes if name not in os.environ]
    if unset_names:
        raise ServerFailed(f"{KEY}: passes: the environment has no {unset_names[0]}")
    passed_variables = {name: os.environ[name] for name in settings.passes}
    return {"PATH": os.environ.get("PATH", os.defpath), **passed_variables, **settings.variables}


def key_of(settings: ToolServerConfig) -> str:
    """Return a server's bearer token. Raises ServerFailed where it isn't set."""
    if key := os.environ.get(settings.api_key_env, ""):
        return key
    raise ServerFailed(f"{KEY}: api_key_env: the environment has no {settings.api_key_env}")


def result_text(result: Any) -> str:
    """Return a call's result as text for the model."""
    block_texts = [_part(block) for block in result.content]
    if not block_texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block_texts)


def _part(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        return getattr(block.resource, "text", None) or f"[{block.resource.uri}]"
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return f"[{block.type}: {block.mime_type}]"


def _wrong(error: Exception) -> str:
    """Return pydantic's errors for the fields of an invalid result, or the exception's text."""
    problems = error.errors(include_url=False) if isinstance(error, ValidationError) else ()
    problem_text = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems[:3])
    return problem_text or f"{type(error).__name__}: {error}"


def _cause(error: BaseException) -> str:
    """Return the first error of an exception group as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:200]
