"""Tools of the Responses API: functions, those of namespaces, custom ones, and hosted ones, which are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.generator.endpoint.fields import formatted, refused
from headway.records.conversations import RequestRefused
from headway.tokens.grammar import LARK
from headway.tokens.messages import ToolCall, json_text

_INPUT = "input"  # the one parameter of a custom tool, as the model sees it
_KINDS = ("function", "custom", "namespace")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseTool:
    """A tool as the model sees it (a function with a unique name), and as its client calls it."""

    path: str  # in the request
    name: str  # the model's
    own_name: str
    namespace: str = ""
    custom: bool = False  # takes a text, and no arguments
    function: Mapping[str, Any]  # as chat templates take it
    schema: Mapping[str, Any] | None = None  # of arguments, where calls are constrained further than the function says

    @property
    def called(self) -> dict[str, str]:
        """Fields that name it in the client's calls."""
        return {"name": self.own_name} | ({"namespace": self.namespace} if self.namespace else {})


class ResponseTools:
    """The tools of one request."""

    def __init__(self, raw: Any) -> None:
        """``raw``: the value of the field ``tools``. Raises RequestRefused naming the invalid part."""
        if not isinstance(raw, list | None):
            raise refused("tools", raw, "a list")
        self.left_out: list[str] = []
        self.tools: list[ResponseTool] = []
        plain_tools = (tool for tool in raw or () if isinstance(tool, Mapping) and tool.get("type") != "namespace")
        self._taken = {name for tool in plain_tools if isinstance(name := tool.get("name"), str)}
        self._add(raw or [], "tools", "", "")

    def _add(self, raw: Sequence[Any], field: str, namespace: str, about: str) -> None:
        for tool_index, tool in enumerate(raw):
            tool_path = f"{field}[{tool_index}]"
            kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, Mapping) else (None, None)
            if kind not in _KINDS and isinstance(kind, str) and kind.isidentifier() and not namespace and name is None:
                self.left_out.append(kind)
            elif kind not in _KINDS or not isinstance(name, str) or (namespace and kind == "namespace"):
                valid = "an object with a name and type = 'function', 'custom' or, outside of one, 'namespace'"
                raise refused(tool_path, tool, f"{valid}, or a hosted tool, which has no name")
            elif kind == "namespace":
                if not isinstance(inner_tools := tool.get("tools"), list):
                    raise refused(f"{tool_path}.tools", inner_tools, "a list of functions")
                self._add(inner_tools, f"{tool_path}.tools", name, tool.get("description") or "")
            else:
                self.tools.append(self._tool(tool, tool_path, namespace, about))

    def _tool(self, tool: Mapping[str, Any], path: str, namespace: str, about: str) -> ResponseTool:
        own_name, is_custom = tool["name"], tool["type"] == "custom"
        unique_name = _joined(namespace, own_name)
        while namespace and unique_name in self._taken:
            unique_name += "_"
        self._taken.add(unique_name)
        function = {
            key: value for key, value in tool.items() if key not in ("type", "strict", "format", "defer_loading")
        }
        schema, format_description = None, ""
        if is_custom:
            text_schema: dict[str, Any] = {"type": "string"}
            function["parameters"] = {"type": "object", "properties": {_INPUT: text_schema}, "required": [_INPUT]}
            schema, format_description = _constrained(tool.get("format") or {"type": "text"}, f"{path}.format")
        description_parts = [text for text in (about, tool.get("description"), format_description) if text]
        description_field = {"description": "\n".join(map(str, description_parts))} if description_parts else {}
        return ResponseTool(
            path=path, name=unique_name, own_name=own_name, namespace=namespace, custom=is_custom, schema=schema,
            function={**function, **description_field, "name": unique_name}
            | ({"strict": tool["strict"]} if "strict" in tool else {}),
        )  # fmt: skip

    @property
    def names(self) -> dict[str, str]:
        """The model's names of the tools, by the names that a request's ``tool_choice`` gives."""
        return {".".join(filter(None, (tool.namespace, tool.own_name))): tool.name for tool in self.tools}

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions in the form that chat templates take."""
        stripped = ({key: value for key, value in tool.function.items() if key != "strict"} for tool in self.tools)
        return [{"type": "function", "function": function} for function in stripped]

    @property
    def constrainable(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Yield (path, function with its schema, the schema's path) of each tool."""
        for tool in self.tools:
            if tool.schema is None:
                yield tool.path, tool.function, f"{tool.path}.parameters"
            else:
                constraint_fields = {"parameters": tool.schema, "strict": True}
                yield tool.path, {**tool.function, **constraint_fields}, f"{tool.path}.format.definition"

    def named(self, item: Mapping[str, Any]) -> Any:
        """Return the model's name of the tool that a call in the client's conversation names."""
        name, namespace = item.get("name"), item.get("namespace") or ""
        if not (isinstance(name, str) and isinstance(namespace, str)):
            return None  # no valid name of a call
        matching_names = [tool.name for tool in self.tools if (tool.own_name, tool.namespace) == (name, namespace)]
        return matching_names[0] if matching_names else _joined(namespace, name)

    def item(self, call: ToolCall, identity: str) -> dict[str, Any]:
        """Make the output item of a call by the model."""
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        call_fields = {"call_id": call.call_id, **({"name": call.name} if tool is None else tool.called)}
        if tool is not None and tool.custom:
            return {"id": f"ctc_{identity}", "type": "custom_tool_call", **call_fields, "input": _text(call.arguments)}
        function_fields = {**call_fields, "arguments": call.arguments, "status": "completed"}
        return {"id": f"fc_{identity}", "type": "function_call", **function_fields}


def custom_arguments(text: Any) -> str:
    """Encode the arguments of a custom tool's call with this input."""
    return json_text({_INPUT: text})


def _joined(namespace: str, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _text(arguments: str) -> str:
    """Return the input of a custom tool's call; arguments of another form are returned unchanged."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    input_text = decoded.get(_INPUT) if isinstance(decoded, dict) else None
    return input_text if isinstance(input_text, str) else arguments


def _constrained(spec: Any, path: str) -> tuple[Mapping[str, Any] | None, str]:
    """Return (schema of the arguments, None if any text is valid; its description for the model) of a format."""
    format_type, syntax = (spec.get("type"), spec.get("syntax")) if isinstance(spec, Mapping) else (None, None)
    definition = spec.get("definition") if isinstance(spec, Mapping) else None
    if format_type == "text":
        return None, ""
    if format_type != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        valid = "{'type': 'text'} and {'type': 'grammar', 'syntax': 'lark' or 'regex', 'definition': a text}"
        raise RequestRefused(f"{path} = {formatted(spec)}: valid: {valid}", param=path)
    text_type = {"type": "string", **({"pattern": f"^(?:{definition})$"} if syntax == "regex" else {LARK: definition})}
    schema = {"type": "object", "properties": {_INPUT: text_type}, "required": [_INPUT], "additionalProperties": False}
    return schema, f"Its {_INPUT} matches this {syntax} grammar:\n{definition}"
