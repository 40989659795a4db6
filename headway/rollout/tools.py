"""Tools that a model may call: Python functions, described by their signatures, called with what the model wrote."""

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
from headway.rollout.lane import Lane
from headway.runtime.hooks import error_text, is_infrastructure, place_of, storable

_FEWEST_CALLS = 4  # of a tool, before it is said that half of them raise
_GIVEN = "episode"  # a parameter of this name isn't the model's: it gets the rollout


class ToolError(Exception):
    """Raised by a tool: what the model is told instead of a result. The rollout goes on."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]  # as in OpenAI's chat API: {"type": "function", "function": {...}}
    call: Callable[[str, Any], Any]  # (arguments as the model wrote them, episode) -> awaitable of a result
    blocks: bool = False  # `call` gives the result itself, in a thread of its own
    fatal: bool = False  # what it raises fails the rollout, for nobody knows where its game is then

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """A tool out of a typed function, async or not. Its name is the function's, its description the docstring's
        first paragraph; a line ``name: text`` in the docstring describes that parameter. A parameter ``episode`` is the
        rollout's and no part of the schema; one with a default may be left out. Raises ConfigurationError for one that
        can't be described."""
        name = function.__name__
        takes_episode, arguments = _arguments_of(function)
        description, _, details = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        if not description:
            raise ConfigurationError(f"tool {name}: without a docstring no model knows what it is for")
        try:
            parameters = arguments.model_json_schema()
        except PydanticInvalidForJsonSchema as error:
            raise ConfigurationError(f"tool {name}: its parameters have no JSON form: {error}") from None
        _describe(parameters, details)

        def blocking(written: str, episode: Any) -> Any:
            given = _read(arguments, written)
            return function(**given, **({_GIVEN: episode} if takes_episode else {}))

        async def awaited(written: str, episode: Any) -> Any:
            return await blocking(written, episode)

        blocks = not inspect.iscoroutinefunction(function)
        call = blocking if blocks else awaited
        return cls.described(name, " ".join(description.split()), parameters, call, blocks=blocks)

    @classmethod
    def described(
        cls, name: str, description: str, parameters: dict[str, Any], call: Callable[[str, Any], Any], **fields: bool
    ) -> Tool:
        """A tool whose ``parameters`` are described by a JSON schema; ``call``, ``fields``: as of `Tool`."""
        function = {"name": name, "description": description, "parameters": parameters}
        return cls(name=name, schema={"type": "function", "function": function}, call=call, **fields)


class ToolCalls:
    """The calls of a worker's tools: counted; those of plain functions given up after ``limit_s``.

    Each of these has a thread, which can't be ended. A call that runs on after its limit, given up or abandoned with
    its rollout, is *stuck*: it is reported by its tool's name, and delays no other. So is a tool of which half of the
    calls raise, once."""

    def __init__(self, limit_s: float = 300.0) -> None:
        self.report: Callable[..., object] = lambda event, what, data: None  # of events: name, text, further fields
        self.stuck = 0  # so far
        self._limit_s = limit_s
        self._called, self._raised = Counter[str](), Counter[str]()
        self._seen: set[Any] = set()  # tools and places that were reported

    async def result(self, tool: Tool, arguments: str, episode: Any) -> Any:
        """The result of a call. Raises what it raises, and ToolError where it has none within the limit."""
        self._called[tool.name] += 1
        if not tool.blocks:
            return await tool.call(arguments, episode)
        try:
            lane = Lane(f"tool-{tool.name}")
        except RuntimeError as error:
            raise InfrastructureError(f"no thread for the tool {tool.name}: {error}") from error
        running = asyncio.ensure_future(lane.run(copy_context().run, tool.call, arguments, episode))
        late = asyncio.get_running_loop().call_later(self._limit_s, self._stick, tool.name)

        def ended(done: asyncio.Future[Any]) -> None:
            late.cancel()
            lane.end()
            if not done.cancelled():
                done.exception()  # its caller may have gone

        running.add_done_callback(ended)
        await asyncio.wait((running,), timeout=self._limit_s)
        if not running.done():
            raise ToolError(f"{tool.name} gave no answer in {self._limit_s:g} s")
        return running.result()

    def note_raised(self, name: str, error: BaseException) -> None:
        """Count a call whose exception the model is told; the first of its kind is printed to the worker's log."""
        self._raised[name] += 1
        place, called, raised = place_of(error), self._called[name], self._raised[name]
        if (kind := (name, type(error), place)) not in self._seen:
            self._seen.add(kind)
            traced = storable("".join(traceback.format_exception(error)))
            print(f"the tool {name} raises, and the model is told:\n{traced}", file=sys.stderr, flush=True)
        if called >= _FEWEST_CALLS and 2 * raised >= called and name not in self._seen:
            self._seen.add(name)
            what = f"{raised} of {called} calls of the tool {name} raised, the last {error_text(error)}"
            what = storable(what)[:300] + (f" ({place})" if place else "")
            self.report("tool_raises", what, {"tool": name, "calls": called, "raised": raised})

    def _stick(self, name: str) -> None:
        self.stuck += 1
        what = f"a call of the tool {name} goes on after {self._limit_s:g} s (environment.timeout_s)"
        self.report("tool_stuck", what, {"tool": name, "stuck": self.stuck})


def tools_by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name, described where they are functions. Raises ConfigurationError for two of one name."""
    found: dict[str, Tool] = {}
    for entry in tools:
        tool = entry if isinstance(entry, Tool) else Tool.of(entry)
        if tool.name in found:
            raise ConfigurationError(f"two tools are called {tool.name}: a model couldn't tell them apart")
        found[tool.name] = tool
    return found


async def call_tool(
    tools: Mapping[str, Tool], name: str, arguments: str, episode: Any, calls: ToolCalls | None = None
) -> tuple[str, bool]:
    """(what the model is told, whether the call was one): an unknown name, arguments that don't fit and what a tool
    raises are told as errors. Only infrastructure's failures pass, those of sandboxes and of tools that are fatal."""
    tool, calls = tools.get(name), calls or ToolCalls()
    if tool is None:
        return f"error: there is no tool {name!r}; valid: {', '.join(tools) or 'none'}", False
    try:
        return as_text(await calls.result(tool, arguments, episode)), True
    except ToolError as error:
        return f"error: {error}", False
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the boundary to a tool's code
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
        if cancelled or tool.fatal or isinstance(error, SandboxError) or is_infrastructure(error):
            raise
        calls.note_raised(name, error)
        return f"error: {error_text(error)}", False


def read_object(written: str) -> dict[str, Any]:
    """The arguments of a call. Raises ToolError that says what is wrong with them."""
    try:
        value: Any = json.loads(written) if written.strip() else {}
        json.dumps(value, ensure_ascii=False).encode()  # "\\ud800" is JSON, and no text: it can't be sent anywhere
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ToolError("the arguments must be a JSON object")
    return value


def as_text(result: Any) -> str:
    """A tool's result as a model reads it: a text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    if isinstance(result, BaseModel):
        try:
            return result.model_dump_json()
        except PydanticSerializationError:  # of a text that has no UTF-8 form
            return as_text(result.model_dump())
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


def _arguments_of(function: Callable[..., Any]) -> tuple[bool, type[BaseModel]]:
    """Whether it takes the episode, and its other parameters as a model."""
    name = function.__name__
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigurationError(f"tool {name}: its annotations can't be read: {error}") from None
    fields: dict[str, Any] = {}
    takes_episode = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == _GIVEN:
            takes_episode = True
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigurationError(f"tool {name}: {parameter}: parameters need names")
        if parameter.name not in hints:
            raise ConfigurationError(f"tool {name}: the parameter {parameter.name} has no type")
        required = parameter.default is inspect.Parameter.empty
        fields[parameter.name] = (hints[parameter.name], ... if required else Field(default=parameter.default))
    return takes_episode, create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _describe(parameters: dict[str, Any], details: str) -> None:
    """Put the docstring's lines about parameters into their schema, and remove titles and the like from it."""
    properties: dict[str, dict[str, Any]] = parameters.get("properties", {})
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    for entry in properties.values():
        entry.pop("title", None)
    for line in details.splitlines():
        key, colon, text = line.strip().partition(":")
        if colon and key in properties and text.strip():
            properties[key].setdefault("description", text.strip())


def _read(arguments: type[BaseModel], written: str) -> dict[str, Any]:
    """A call's arguments, validated. Raises ToolError that tells the model what is wrong."""
    value = read_object(written)
    try:
        checked = arguments.model_validate(value)
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors())
        raise ToolError("; ".join(wrong)) from None
    return {name: getattr(checked, name) for name in arguments.model_fields}
