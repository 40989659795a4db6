"""Tools that a model may call: Python functions, described by their signatures, called with what the model wrote."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticInvalidForJsonSchema, ValidationError, create_model

from headway.records.errors import ConfigurationError

_GIVEN = "episode"  # a parameter of this name isn't the model's: it gets the rollout


class ToolError(Exception):
    """Raised by a tool: what the model is told instead of a result. The rollout goes on."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]  # as in OpenAI's chat API: {"type": "function", "function": {...}}
    call: Callable[[str, Any], Any]  # (arguments as the model wrote them, episode) -> awaitable of a result

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

        async def call(written: str, episode: Any) -> Any:
            given = _read(arguments, written)
            if takes_episode:
                given[_GIVEN] = episode
            if inspect.iscoroutinefunction(function):
                return await function(**given)
            return await asyncio.to_thread(function, **given)

        return cls.described(name, " ".join(description.split()), parameters, call)

    @classmethod
    def described(
        cls, name: str, description: str, parameters: dict[str, Any], call: Callable[[str, Any], Any]
    ) -> Tool:
        """A tool whose ``parameters`` are described by a JSON schema; ``call``: as of `Tool`."""
        function = {"name": name, "description": description, "parameters": parameters}
        return cls(name=name, schema={"type": "function", "function": function}, call=call)


def tools_by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name, described where they are functions. Raises ConfigurationError for two of one name."""
    found: dict[str, Tool] = {}
    for entry in tools:
        tool = entry if isinstance(entry, Tool) else Tool.of(entry)
        if tool.name in found:
            raise ConfigurationError(f"two tools are called {tool.name}: a model couldn't tell them apart")
        found[tool.name] = tool
    return found


async def call_tool(tools: Mapping[str, Tool], name: str, arguments: str, episode: Any) -> tuple[str, bool]:
    """(what the model is told, whether the call was one): an unknown name, arguments that don't fit and a `ToolError`
    are told as errors. Other exceptions of a tool pass."""
    tool = tools.get(name)
    if tool is None:
        return f"error: there is no tool {name!r}; valid: {', '.join(tools) or 'none'}", False
    try:
        return as_text(await tool.call(arguments, episode)), True
    except ToolError as error:
        return f"error: {error}", False


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
        return result.model_dump_json()
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
