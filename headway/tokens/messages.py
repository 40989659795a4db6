"""Normal form of a chat request's messages and tools, independent of the client, and equality of messages.

Clients send messages back in other forms than they got them: content as a text or as parts, ``null`` for none,
arguments of tool calls respaced, reasoning in a field or as a ``<think>`` block at the beginning of the content,
additional fields. The normal form holds the parts that a model reads and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar

from headway.records.conversations import RequestRefused

Series = TypeVar("Series", str, list[int])
Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; few chat templates know it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its field
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)
_HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call of the assistant."""

    name: str
    arguments: str  # as written: JSON, if the model kept to it
    call_id: str = ""  # id that the tool's answer refers to; we assign it in answers that we sample

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and arguments in canonical form; arguments that don't parse are kept as they are."""
        return self.name, canonical_json(self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A chat message in its normal form."""

    role: Role
    content: str = ""  # the text, without reasoning and calls
    reasoning: str = ""  # the assistant's reasoning, stripped
    calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # for a tool's answer: the id of its call; "": not given
    name: str = ""
    written: str = ""  # the text with the reasoning inside, for templates that read it there; "": as content

    @property
    def inline(self) -> str:
        return self.written or self.content


def normal_messages(raw: Any) -> tuple[Message, ...]:
    """Convert the messages of a request's body to normal form. Raises RequestRefused naming the invalid field: content
    that isn't text, an unknown role, a tool's answer to a missing call."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise _refusal("messages", ": a list of one or more messages is needed")
    messages = tuple(normal_message(raw_message, f"messages[{number}]") for number, raw_message in enumerate(raw))
    asked: set[str] = set()  # call ids of the assistant message whose answers are read
    for number, message in enumerate(messages):
        if message.role == "assistant":
            asked = {call.call_id for call in message.calls}
        elif message.role == "tool" and message.tool_call_id and message.tool_call_id not in asked and "" not in asked:
            reason = f"the assistant's message before it has {', '.join(map(repr, sorted(asked))) or 'no tool calls'}"
            raise _refusal(f"messages[{number}].tool_call_id", f" = {message.tool_call_id!r}: {reason}")
    return messages


def normal_message(raw: Any, field: str) -> Message:
    """Convert a single message to normal form; ``field`` names it in errors. Raises RequestRefused."""
    entry = _object(raw, field)
    raw_role = entry.get("role")
    role = _ROLES.get(raw_role) if isinstance(raw_role, str) else None
    if role is None:
        raise _refusal(f"{field}.role", f" = {raw_role!r}: valid: {', '.join(map(repr, _ROLES))}")
    content = _text(entry.get("content"), f"{field}.content")
    name = _optional_text(entry, "name", field)
    if role != "assistant":
        return Message(role=role, content=content, name=name, tool_call_id=_optional_text(entry, "tool_call_id", field))
    if entry.get("function_call") is not None:
        raise _refusal(f"{field}.function_call", ": write tool_calls instead")
    reasoning = _optional_text(entry, "reasoning_content", field) or _optional_text(entry, "reasoning", field)
    return assistant_message(content, reasoning, _calls(entry.get("tool_calls"), f"{field}.tool_calls"), name)


def assistant_message(
    content: str, reasoning: str = "", calls: tuple[ToolCall, ...] = (), name: str = "", written: str = ""
) -> Message:
    """Make a message of the assistant. Where ``reasoning`` is empty, it is taken from a ``<think>`` block that
    ``content`` begins with. ``written``: the text with the reasoning inside, where it is known."""
    reasoning = reasoning.strip()
    if not reasoning and (match := THOUGHT.fullmatch(content)) is not None:
        written = written or content
        reasoning, content = match[1].strip(), match[2]
    elif reasoning and not written:
        written = f"<think>\n{reasoning}\n</think>\n\n{content}"
    return Message(role="assistant", content=content, reasoning=reasoning, calls=calls, name=name, written=written)


def normal_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Convert the tools of a request's body for chat templates; None when there are none. Raises RequestRefused."""
    if not raw:
        return None
    tools: list[dict[str, Any]] = []
    for number, raw_tool in enumerate(_list(raw, "tools")):
        tool = dict(raw_tool) if isinstance(raw_tool, Mapping) else {}
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(name, str):
            reason = ": valid: an object with type = 'function' and a function that has a name"
            raise _refusal(f"tools[{number}]", reason)
        # OpenAI's API lets clients leave these out, and templates read them.
        if not function.get("parameters"):
            defaults = {
                "parameters": {"type": "object", "properties": {}},
                "description": function.get("description") or "",
            }
            tool["function"] = {**function, **defaults}
        tools.append(tool)
    return tools


def template_form(messages: Iterable[Message], *, reasoning_field: bool) -> list[dict[str, Any]]:
    """Convert messages for chat templates: arguments of calls become objects where they parse, and reasoning goes to
    its field (``reasoning_field``) or, where the template reads no such field, inside the content."""
    return [_template_message(message, reasoning_field) for message in messages]


def _template_message(message: Message, reasoning_field: bool) -> dict[str, Any]:
    adapted: dict[str, Any] = {"role": message.role, "content": message.content if reasoning_field else message.inline}
    if message.reasoning and reasoning_field:
        adapted["reasoning_content"] = message.reasoning
    if message.calls:
        adapted["tool_calls"] = [
            openai_tool_call(call.name, object_or_text(call.arguments), call.call_id) for call in message.calls
        ]
    optional_fields = {"tool_call_id": message.tool_call_id, "name": message.name}
    return adapted | {key: text for key, text in optional_fields.items() if text}


def openai_tool_call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Make a tool call in the form of OpenAI's chat API."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def common_prefix(first: Series, second: Series) -> Series:
    """Return the longest common prefix of two texts, or of two lists of tokens."""
    if first[: len(second)] == second:
        return second
    return first[: next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))]


def same_answer(first: Message, second: Message) -> bool:
    """Whether two messages of the assistant are equal in meaning; white space around texts and call ids are
    ignored."""
    return first.reasoning == second.reasoning and message_key(first) == message_key(second)


def message_key(message: Message) -> str:
    """Return a key that is equal for messages of equal meaning, whatever their reasoning."""
    content = message.content.strip() if message.role == "assistant" else message.content
    # with their lengths, so that no other pair of texts gives the same key
    key = f"{message.role} {len(message.name)} {len(content)} {message.name}{content}"
    return key + json.dumps([call.meaning for call in message.calls]) if message.calls else key


def history_keys(root: str, messages: Sequence[Message]) -> list[bytes]:
    """Return a key for each prefix of the conversation, the empty one first. Two keys are equal where all messages of
    the prefixes have equal `message_key` and ``root`` (tools, arguments of the template) is equal."""
    return list(accumulate(messages, next_key, initial=_digest(b"", root)))


def next_key(key: bytes, message: Message) -> bytes:
    """Return the key of the history with the key ``key``, continued with ``message``."""
    return _digest(key, message_key(message))


def canonical_json(text: str) -> str:
    """Return the canonical form of a JSON text: ``{}`` for an empty text, and a text that isn't JSON as it is."""
    if not text.strip():
        return "{}"
    try:
        return canonical_value(json.loads(text))
    except (ValueError, RecursionError):
        return text


def json_text(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write a value as JSON that UTF-8 can encode: half of a surrogate pair stays an escape, as it was written."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    return text if text.isascii() else _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def canonical_value(value: Any) -> str:
    """Return the canonical JSON text of a value, independent of the order of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _digest(previous_key: bytes, text: str) -> bytes:
    return hashlib.blake2b(previous_key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _text(value: Any, field: str) -> str:
    """Return a content's text; parts are joined by line breaks, as in vLLM."""
    if value is None or isinstance(value, str):
        return require_encodable(value or "", field)
    texts: list[str] = []
    for number, part in enumerate(_list(value, field, "a text or a list of parts")):
        text = part.get(_TEXT_PARTS.get(str(part.get("type")), "")) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            reason = ": valid: a part with type = 'text' and its text; requests are of text alone"
            raise _refusal(f"{field}[{number}]", reason)
        texts.append(text)
    return require_encodable("\n".join(texts), field)


def encodable(text: str) -> bool:
    """Whether UTF-8 can encode the text, which then holds no half of a surrogate pair."""
    return text.isascii() or _HALVES.search(text) is None


def require_encodable(text: str, field: str) -> str:
    """Return ``text`` as it is. Raises RequestRefused naming ``field`` where no tokenizer can encode it."""
    match = None if text.isascii() else _HALVES.search(text)
    if match is not None:
        raise _refusal(field, f": character {match.start()} is half of a surrogate pair, which no tokenizer can encode")
    return text


def _optional_text(entry: Mapping[str, Any], key: str, field: str) -> str:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return require_encodable(value or "", f"{field}.{key}")
    raise _refusal(f"{field}.{key}", f": a text is needed, not {_kind(value)}")


def _calls(raw: Any, field: str) -> tuple[ToolCall, ...]:
    if not raw:
        return ()
    return tuple(_call(entry, f"{field}[{number}]") for number, entry in enumerate(_list(raw, field)))


def _call(raw: Any, field: str) -> ToolCall:
    fields: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    function = _object(fields.get("function"), f"{field}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json_text(arguments)
    if not isinstance(name, str) or not isinstance(arguments, str | None):
        raise _refusal(f"{field}.function", ": its name is a text, and so are its arguments (JSON)")
    name = require_encodable(name, f"{field}.function.name")
    arguments = require_encodable(arguments or "", f"{field}.function.arguments")
    return ToolCall(name=name, arguments=arguments, call_id=_optional_text(fields, "id", field))


def object_or_text(arguments: str) -> Any:
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refusal(field, f": an object is needed, not {_kind(value)}")
    return value


def _list(value: Any, field: str, expected: str = "a list") -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _refusal(field, f": {expected} is needed, not {_kind(value)}")
    return value


def _refusal(field: str, problem: str) -> RequestRefused:
    return RequestRefused(field + problem, param=field)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
