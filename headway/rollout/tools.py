"""Tools that a model may call: Python functions, described by their signatures, called with the model's arguments."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticInvalidForJsonSchema, ValidationError, create_model
from pydantic_core import PydanticSerializationError

from headway.records.errors import ConfigurationError, InfrastructureError
from headway.records.sandbox import SandboxError
from headway.rollout.single_thread_executor import SingleThreadExecutor
from headway.runtime.hooks import error_text, is_infrastructure, source_location, storable

_FEWEST_CALLS = 4  # of a tool, before a report that half of them raise
_EPISODE_PARAMETER = "episode"  # the parameter of this name isn't in the schema: it gets the rollout


class ToolError(Exception):
    """Raised by a tool; the model gets its text instead of a result, and the rollout continues."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]  # as in OpenAI's chat API: {"type": "function", "function": {...}}
    call: Callable[[str, Any], Any]  # (arguments as the model wrote them, episode) -> awaitable of a result
    blocks: bool = False  # `call` returns the result itself and runs in a thread of its own
    fatal: bool = False  # its exceptions fail the rollout, for the state of the game is unknown then

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Make a tool of a typed function, async or not. Its name is the function's, its description the docstring's
        first paragraph; a line ``name: text`` in the docstring describes that parameter. A parameter ``episode``
        receives the rollout and isn't in the schema; a parameter with a default may be omitted. Raises
        ConfigurationError for a function that can't be described."""
        name = function.__name__
        takes_episode, arguments_model = _arguments_of(function)
        description, _, parameter_details = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        if not description:
            raise ConfigurationError(f"tool {name}: without a docstring no model knows what it is for")
        try:
            parameters = arguments_model.model_json_schema()
        except PydanticInvalidForJsonSchema as error:
            raise ConfigurationError(f"tool {name}: its parameters have no JSON form: {error}") from None
        _describe(parameters, parameter_details)

        def call_blocking(written: str, episode: Any) -> Any:
            parsed_arguments = _read(arguments_model, written)
            return function(**parsed_arguments, **({_EPISODE_PARAMETER: episode} if takes_episode else {}))

        async def call_awaited(written: str, episode: Any) -> Any:
            return await call_blocking(written, episode)

        is_blocking = not inspect.iscoroutinefunction(function)
        call = call_blocking if is_blocking else call_awaited
        return cls.described(name, " ".join(description.split()), parameters, call, blocks=is_blocking)

    @classmethod
    def described(
        cls, name: str, description: str, parameters: dict[str, Any], call: Callable[[str, Any], Any], **fields: bool
    ) -> Tool:
        """Make a tool whose ``parameters`` are described by a JSON schema; ``call``, ``fields``: as of `Tool`."""
        function_schema = {"name": name, "description": description, "parameters": parameters}
        return cls(name=name, schema={"type": "function", "function": function_schema}, call=call, **fields)


class ToolCalls:
    """Runs and counts the tool calls of a worker; calls of plain functions are abandoned after ``limit_s``.

    Each call of a plain function has a thread, which can't be ended. A call that runs on after its limit, abandoned
    alone or with its rollout, is *stuck*: it is reported by its tool's name, and delays no other. A tool of which half
    of the calls raise is reported once, too."""

    def __init__(self, limit_s: float = 300.0) -> None:
        self.report: Callable[..., object] = lambda event, message, data: None  # of events: name, text, further fields
        self.stuck = 0  # so far
        self._limit_s = limit_s
        self._called, self._raised = Counter[str](), Counter[str]()
        self._seen: set[Any] = set()  # tools and places that were reported

    async def result(self, tool: Tool, arguments: str, episode: Any) -> Any:
        """Return the result of a call. Raises the tool's exceptions, and ToolError where the limit is exceeded."""
        self._called[tool.name] += 1
        if not tool.blocks:
            return await tool.call(arguments, episode)
        try:
            executor = SingleThreadExecutor(f"tool-{tool.name}")
        except RuntimeError as error:
            raise InfrastructureError(f"no thread for the tool {tool.name}: {error}") from error
        call_future = asyncio.ensure_future(executor.run(copy_context().run, tool.call, arguments, episode))
        stuck_timer = asyncio.get_running_loop().call_later(self._limit_s, self._report_stuck, tool.name)

        def on_done(done: asyncio.Future[Any]) -> None:
            stuck_timer.cancel()
            executor.end()
            if not done.cancelled():
                done.exception()  # retrieved here: its caller may have been cancelled

        call_future.add_done_callback(on_done)
        await asyncio.wait((call_future,), timeout=self._limit_s)
        if not call_future.done():
            raise ToolError(f"{tool.name} gave no answer in {self._limit_s:g} s")
        return call_future.result()

    def note_raised(self, name: str, error: BaseException) -> None:
        """Count a call whose exception becomes an error message; the first of its kind goes to the worker's log."""
        self._raised[name] += 1
        location, call_count, raised_count = source_location(error), self._called[name], self._raised[name]
        if (error_key := (name, type(error), location)) not in self._seen:
            self._seen.add(error_key)
            traceback_text = storable("".join(traceback.format_exception(error)))
            print(f"the tool {name} raised; the model reads:\n{traceback_text}", file=sys.stderr, flush=True)
        if call_count >= _FEWEST_CALLS and 2 * raised_count >= call_count and name not in self._seen:
            self._seen.add(name)
            summary = f"{raised_count} of {call_count} calls of the tool {name} raised, the last {error_text(error)}"
            summary = storable(summary)[:300] + (f" ({location})" if location else "")
            self.report("tool_raises", summary, {"tool": name, "calls": call_count, "raised": raised_count})

    def _report_stuck(self, name: str) -> None:
        self.stuck += 1
        message = f"a call of the tool {name} still runs after {self._limit_s:g} s (environment.timeout_s)"
        self.report("tool_stuck", message, {"tool": name, "stuck": self.stuck})


def tools_by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name, described where they are functions. Raises ConfigurationError for equal names."""
    tool_by_name: dict[str, Tool] = {}
    for tool_or_function in tools:
        tool = tool_or_function if isinstance(tool_or_function, Tool) else Tool.of(tool_or_function)
        if tool.name in tool_by_name:
            raise ConfigurationError(f"two tools are called {tool.name}: a model couldn't distinguish them")
        tool_by_name[tool.name] = tool
    return tool_by_name


async def call_tool(
    tools: Mapping[str, Tool], name: str, arguments: str, episode: Any, calls: ToolCalls | None = None
) -> tuple[str, bool]:
    """Execute a call; returns (text for the model, whether the call succeeded). An unknown name, invalid arguments and
    a tool's exceptions become error texts. Failures of infrastructure, of sandboxes and of fatal tools are raised."""
    tool, calls = tools.get(name), calls or ToolCalls()
    if tool is None:
        return f"error: there is no tool {name!r}; valid: {', '.join(tools) or 'none'}", False
    try:
        return as_text(await calls.result(tool, arguments, episode)), True
    except ToolError as error:
        return f"error: {error}", False
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the boundary to a tool's code
        task = asyncio.current_task()
        is_cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
        if is_cancelled or tool.fatal or isinstance(error, SandboxError) or is_infrastructure(error):
            raise
        calls.note_raised(name, error)
        return f"error: {error_text(error)}", False


def read_object(written: str) -> dict[str, Any]:
    """Parse the arguments of a call, a JSON object. Raises ToolError that says what is wrong with them."""
    try:
        arguments: Any = json.loads(written) if written.strip() else {}
        json.dumps(arguments, ensure_ascii=False).encode()  # "\\ud800" is JSON, and no text: it can't be sent anywhere
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object")
    return arguments


def as_text(result: Any) -> str:
    """Return a tool's result as text for the model: a string unchanged, anything else as JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, BaseModel):
        try:
            return result.model_dump_json()
        except PydanticSerializationError:  # of a text that has no UTF-8 form
            return as_text(result.model_dump())
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


def _arguments_of(function: Callable[..., Any]) -> tuple[bool, type[BaseModel]]:
    """Return whether a function takes the episode, and its other parameters as a pydantic model."""
    name = function.__name__
    try:
        type_hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(f"tool {name}: its annotations can't be read: {error}") from None
    fields: dict[str, Any] = {}
    takes_episode = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == _EPISODE_PARAMETER:
            takes_episode = True
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigurationError(f"tool {name}: {parameter}: parameters need names")
        if parameter.name not in type_hints:
            raise ConfigurationError(f"tool {name}: the parameter {parameter.name} has no type")
        is_required = parameter.default is inspect.Parameter.empty
        fields[parameter.name] = (type_hints[parameter.name], ... if is_required else Field(default=parameter.default))
    return takes_episode, create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _describe(parameters: dict[str, Any], details: str) -> None:
    """Put the docstring's lines about parameters into their schema, and remove titles and the like from it."""
    properties: dict[str, dict[str, Any]] = parameters.get("properties", {})
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    for parameter_schema in properties.values():
        parameter_schema.pop("title", None)
    for line in details.splitlines():
        parameter_name, colon, description = line.strip().partition(":")
        if colon and parameter_name in properties and description.strip():
            properties[parameter_name].setdefault("description", description.strip())


def _read(arguments: type[BaseModel], written: str) -> dict[str, Any]:
    """Return a call's validated arguments. Raises ToolError that tells the model what is wrong."""
    raw_arguments = read_object(written)
    try:
        checked_arguments = arguments.model_validate(raw_arguments)
    except ValidationError as error:
        fault_texts = (f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}" for fault in error.errors())
        raise ToolError("; ".join(fault_texts)) from None
    return {name: getattr(checked_arguments, name) for name in arguments.model_fields}
