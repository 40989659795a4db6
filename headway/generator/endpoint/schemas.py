"""JSON schemas of structured parts of requests and answers: messages, tools, choices, errors."""

from __future__ import annotations

from typing import Any

Part = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Part) -> Part:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _complete(**properties: Part) -> Part:
    return _object(tuple(properties), **properties)


def _list(items: Part, least: int = 0) -> Part:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


_TEXT: Part = {"type": "string"}
_COUNT: Part = {"type": "integer", "minimum": 0}
_ANY_OBJECT: Part = {"type": "object"}

MESSAGES = _list(_object(("role",), role=_TEXT), 1)
_STRICT: Part = {"type": ["boolean", "null"]}
_FUNCTION = _object(("name",), name=_TEXT, parameters={"type": ["object", "null"]}, strict=_STRICT)
TOOLS = _list(_object(("type", "function"), type={"const": "function"}, function=_FUNCTION))
RESPONSE_TOOLS = _list(_object(("type",), type=_TEXT, **_FUNCTION["properties"]))
ANTHROPIC_TOOLS = _list(_object(("name", "input_schema"), name=_TEXT, input_schema=_ANY_OBJECT, strict=_STRICT))
INPUT: Part = {"anyOf": [_TEXT, _list(_ANY_OBJECT, 1)]}
_IDS = _list(_COUNT, 1)
PROMPT: Part = {
    "anyOf": [_TEXT, _IDS, {**_list({"anyOf": [_TEXT, _IDS]}, 1), "maxItems": 1}],
}

# Fields of whole answers, all of them present.
_OPENAI_USAGE = _complete(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_TOKENS = _complete(input_tokens=_COUNT, output_tokens=_COUNT)
CHOICES: dict[str, Part] = {
    "id": _TEXT,
    "created": {"type": "integer"},
    "model": _TEXT,
    "choices": _list(_object(("index", "finish_reason"), index=_COUNT, finish_reason=_TEXT), 1),
    "usage": _OPENAI_USAGE,
}
OUTPUT: dict[str, Part] = {
    "id": _TEXT,
    "object": {"const": "response"},
    "model": _TEXT,
    "status": {"enum": ["completed", "incomplete"]},
    "output": _list(_object(("type",), type=_TEXT)),
    "usage": _TOKENS,
}
MESSAGE: dict[str, Part] = {
    "id": _TEXT,
    "type": {"const": "message"},
    "role": {"const": "assistant"},
    "model": _TEXT,
    "content": _list(_object(("type",), type=_TEXT)),
    "stop_reason": _TEXT,
    "usage": _TOKENS,
}
OPENAI_ERROR = _complete(error=_object(("message", "type", "param", "code"), message=_TEXT, type=_TEXT))
ANTHROPIC_ERROR = _complete(type={"const": "error"}, error=_complete(type=_TEXT, message=_TEXT), request_id=_TEXT)
