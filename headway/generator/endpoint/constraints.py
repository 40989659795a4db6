"""Fields of requests that constrain answers: formats of text, choices of tools, strict tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headway.generator.endpoint.fields import Field, formatted, refused
from headway.records.conversations import RequestRefused
from headway.tokens.tool_grammar import CallableTool, Constraint, RequestedSchema

_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPED = {"type": "object", "required": ["type"]}
_MODES = ("none", "auto", "required")
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """The tools that an answer may call, or must."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None  # of the only tools that may be called; None: all may
    single: bool = False  # one call at most


def text_format(*kinds: str) -> Field:
    """Make the field of a text format of one of ``kinds``, by default those of OpenAI's APIs: "text", "json_object" and
    "json_schema". Its value is a RequestedSchema, None for plain text. The chat API nests a schema in ``json_schema``,
    the others have it beside the type."""
    kinds = kinds or ("text", "json_object", "json_schema")

    def checked(name: str, value: Any) -> RequestedSchema | None:
        format_type = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(format_type, str) or format_type not in kinds:
            valid_formats = " and ".join(repr({"type": format_type}) for format_type in kinds)
            raise RequestRefused(f"{name} = {formatted(value)}: valid: {valid_formats}", param=name)
        if format_type == "text":
            return None
        path, format_fields = _inner(name, value, format_type)
        schema = format_fields.get("schema")
        if schema is None and format_type == "json_object":
            schema = _OBJECT
        if not isinstance(schema, Mapping):
            raise refused(f"{path}.schema", schema, "a JSON schema, an object")
        return RequestedSchema(param=f"{path}.schema" if schema is not _OBJECT else name, schema=schema)

    field_schema = {**_TYPED, "properties": {"type": {"enum": list(kinds)}}}
    return Field(checked, field_schema)


def tool_choice() -> Field:
    """Make the field ``tool_choice`` of OpenAI's APIs; its value is a ToolChoice. The chat API nests a name in
    ``function`` and a set of tools in ``allowed_tools``, the Responses API has them beside the type."""

    def checked(name: str, value: Any) -> ToolChoice:
        if isinstance(value, str) and value in _MODES:
            return ToolChoice(mode=value)
        choice_type = value.get("type") if isinstance(value, Mapping) else None
        if choice_type not in ("function", "custom", "allowed_tools"):
            valid_text = "'none', 'auto', 'required', and objects of the types 'function', 'custom' and 'allowed_tools'"
            raise RequestRefused(f"{name} = {formatted(value)}: valid: {valid_text}", param=name)
        path, choice_fields = _inner(name, value, choice_type)
        if choice_type != "allowed_tools":
            return ToolChoice(mode="required", names=(_name(path, choice_fields),), single=True)
        mode, tools = choice_fields.get("mode"), choice_fields.get("tools")
        if mode not in ("auto", "required"):
            raise refused(f"{path}.mode", mode, "'auto' or 'required'")
        if not isinstance(tools, list) or not tools:
            raise refused(f"{path}.tools", tools, "a list of one or more tools")
        named_tools = [_inner(f"{path}.tools[{tool_index}]", tool, "function") for tool_index, tool in enumerate(tools)]
        return ToolChoice(mode=mode, names=tuple(_name(*tool) for tool in named_tools))

    object_schema = {**_TYPED, "properties": {"type": {"enum": ["function", "custom", "allowed_tools"]}}}
    return Field(checked, {"anyOf": [{"enum": list(_MODES)}, object_schema]}, default=ToolChoice())


def anthropic_tool_choice() -> Field:
    """Make the field ``tool_choice`` of Anthropic's API; its value is a ToolChoice."""
    mode_by_type: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}

    def checked(name: str, value: Any) -> ToolChoice:
        choice_type = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(choice_type, str) or choice_type not in mode_by_type:
            raise refused(name, value, "an object with a type: 'auto', 'any', 'tool' or 'none'")
        tool_names = (_name(name, value),) if choice_type == "tool" else None
        single = value.get("disable_parallel_tool_use") is True or choice_type == "tool"
        return ToolChoice(mode=mode_by_type[choice_type], names=tool_names, single=single)

    return Field(checked, {**_TYPED, "properties": {"type": {"enum": list(mode_by_type)}}}, default=ToolChoice())


def _inner(name: str, value: Any, kind: str) -> tuple[str, Mapping[str, Any]]:
    """Return (path, fields) of an object's content, which is in the field named by its type, or beside the type."""
    if not isinstance(value, Mapping):
        raise refused(name, value, "an object")
    nested_fields = value.get(kind)
    return (f"{name}.{kind}", nested_fields) if isinstance(nested_fields, Mapping) else (name, value)


def _name(path: str, value: Mapping[str, Any]) -> str:
    name = value.get("name")
    if not isinstance(name, str):
        raise refused(f"{path}.name", name, "the name of a tool")
    namespace = value.get("namespace")
    return f"{namespace}.{name}" if namespace else name


PlacedTool = tuple[str, Mapping[str, Any], str]  # its path in the request, the function, the path of its schema


def placed_tools(tools: Any, key: str) -> list[PlacedTool]:
    """Return the functions of a request's tools, with paths; each has a name, as `CallRequest` has checked.
    ``key``: the field of a function's schema."""
    placed_functions = (_inner(f"tools[{tool_index}]", tool, "function") for tool_index, tool in enumerate(tools or ()))
    return [(path, function, f"{path}.{key}") for path, function in placed_functions]


def constraint(
    choice: ToolChoice,
    tools: Sequence[PlacedTool],
    text: RequestedSchema | None,
    *,
    key: str = "parameters",
    parallel: bool = True,
) -> Constraint | None:
    """Return the constraint that a request puts on its answer, or None. ``key``: the field of a tool's schema;
    ``parallel``: an answer may have several calls. Raises RequestRefused for an unknown tool or an invalid schema."""
    tool_names = [function["name"] for _, function, _ in tools]
    unknown_names = [name for name in choice.names or () if name not in tool_names]
    if unknown_names or (choice.mode == "required" and not tools):
        problem = formatted(unknown_names[0]) if unknown_names else "a tool is to be called"
        listed_names = ", ".join(map(repr, tool_names)) or "none"
        raise RequestRefused(f"tool_choice: {problem}, and the names of tools are: {listed_names}", param="tool_choice")
    callable_tools: list[CallableTool] = []
    demanding_param = "tool_choice" if choice.mode == "required" or choice.names is not None else ""
    is_optional = text is None and not demanding_param
    for path, function, param in tools:
        strict, schema = function.get("strict"), function.get(key)
        if strict is not None and not isinstance(strict, bool):
            raise refused(f"{path}.strict", strict, "true or false")
        if not isinstance(schema, Mapping | None):
            raise refused(param, schema, "a JSON schema, an object")
        if choice.mode != "none" and (choice.names is None or function["name"] in choice.names):
            arguments_schema = RequestedSchema(param=param, schema={**_OBJECT, **(schema or {})}, strict=bool(strict))
            callable_tools.append(CallableTool(name=function["name"], arguments=arguments_schema))
            demanding_param = demanding_param or (param.replace(f".{key}", ".strict") if strict else "")
    if text is None and not demanding_param:
        return None
    return Constraint(
        text=text if choice.mode != "required" else None,
        tools=tuple(callable_tools),
        forced=choice.mode == "required",
        single=choice.single or not parallel,
        calls_param=demanding_param,
        optional=is_optional,
    )
