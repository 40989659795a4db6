"""Anthropic's Messages API. Shapes: platform.claude.com/docs/en/api/messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.constraints import anthropic_tool_choice, constraint, placed_tools, text_format
from headway.generator.endpoint.dialect import (
    AnswerWriter,
    Dialect,
    ParsedRequest,
    Piece,
    Setting,
    answer_texts,
    answers,
    event,
    usage,
)
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.fields import Field, Values
from headway.generator.endpoint.schemas import ANTHROPIC_TOOLS, MESSAGE, MESSAGES
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.records.conversations import RequestRefused
from headway.tokens.messages import json_text, normal_messages
from headway.tokens.tool_grammar import Constraint

_RAW = "raw_arguments"  # key that wraps a tool call's arguments when they aren't a JSON object


class MessageStream(AnswerWriter):
    """Events of a streamed message: content blocks one after the other, each opened, filled and closed."""

    ping = event({"type": "ping"}, "ping")

    def __init__(self, parsed: ParsedRequest, call: RecordedCall) -> None:
        super().__init__(parsed, call)
        self._blocks = 0
        self._open = ""  # type of the open block
        self._turn: RecordedTurn | None = None

    def begin(self) -> bytes:
        start_usage = {"input_tokens": len(self._call.prompt_ids), "output_tokens": 0}
        message = {**_envelope(self._parsed), "content": [], "usage": start_usage}
        return _named({"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}})

    def more(self, piece: Piece) -> bytes:
        encoded_events: list[bytes] = []
        if piece.reasoning:
            encoded_events.append(self._open_block({"type": "thinking", "thinking": "", "signature": ""}))
            encoded_events.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.content:
            encoded_events.append(self._open_block({"type": "text", "text": ""}))
            encoded_events.append(self._delta({"type": "text_delta", "text": piece.content}))
        return b"".join(encoded_events)

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        self._turn = turn
        encoded_events = [self.more(piece)]
        for block in _blocks(turn, self._setting):
            if block["type"] == "tool_use":
                encoded_events += [self._close_block(), self._open_block({**block, "input": {}})]
                arguments_json = msgspec.json.encode(block["input"]).decode()
                encoded_events.append(self._delta({"type": "input_json_delta", "partial_json": arguments_json}))
        return b"".join([*encoded_events, self._close_block()])

    def close(self) -> bytes:
        assert self._turn is not None
        stop_fields = _stop(self._turn, self._setting)
        delta_event = _named({"type": "message_delta", "delta": stop_fields, "usage": _usage(self._call)})
        return delta_event + _named({"type": "message_stop"})

    def failed(self, error: HttpError) -> bytes:
        return b"event: error\ndata: " + error.anthropic(self._setting.answer_id) + b"\n\n"

    def _open_block(self, block: dict[str, Any]) -> bytes:
        """Open a block of this type, closing one of another type."""
        if self._open == block["type"]:
            return b""
        closing_event, self._open = self._close_block(), block["type"]
        return closing_event + _named({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _named({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        block_index, self._open = self._blocks, ""
        self._blocks += 1
        return _named({"type": "content_block_stop", "index": block_index})


class Messages(Dialect):
    """``POST /v1/messages``."""

    answer: ClassVar = MESSAGE
    writer = MessageStream

    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        return {
            "messages": fields.raw(MESSAGES, settings.max_messages, required=True),
            "system": fields.raw({}),
            "tools": fields.raw(ANTHROPIC_TOOLS, settings.max_tools),
            "tool_choice": anthropic_tool_choice(),
            "output_config": fields.structure(format=text_format("json_schema")),
            "max_tokens": fields.integer(1, fields.MAX_TOKENS, required=True),
            "stop_sequences": fields.stop(),
            "thinking": fields.raw({}),  # disabled is this API's default, which asks for nothing
            "thread": Field(_refuse_thread, {"type": "null"}),
        }

    def request(self, values: Values) -> CallRequest:
        client_paths: dict[str, str] = {}
        chat_messages = openai_messages(values, client_paths)
        with fields.client_names(client_paths):
            messages = normal_messages(chat_messages)
        return CallRequest(
            messages=messages,
            continues=messages[-1].role == "assistant",
            tools=openai_tools(values["tools"]),
            calls=values["tool_choice"].mode != "none",
            max_tokens=values["max_tokens"],
            stop=values["stop_sequences"],
        )

    def constraint(self, values: Values) -> Constraint | None:
        tools, text_schema = placed_tools(values["tools"], "input_schema"), values["output_config"].get("format")
        return constraint(values["tool_choice"], tools, text_schema, key="input_schema")

    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        [turn] = answers(call)
        blocks = _blocks(turn, parsed.setting)
        return {**_envelope(parsed), "content": blocks, **_stop(turn, parsed.setting), "usage": _usage(call)}


def _refuse_thread(name: str, value: Any) -> None:
    """Refuse a conversation that the server would have to store, so that the client sends all of it instead."""
    reason = f"{name}: this server keeps no conversations; leave it out and send all messages"
    raise RequestRefused(reason, param=name, code="thread_unsupported_request")


def openai_messages(values: Values, paths: dict[str, str]) -> list[dict[str, Any]]:
    """Convert a request's conversation to OpenAI's message format. ``paths`` is filled: path of a converted field
    -> path of the request's field. Raises RequestRefused naming the field."""
    chat_messages: list[dict[str, Any]] = []
    system = values["system"]
    if system:
        paths["messages[0].content"] = "system"
        chat_messages.append({"role": "system", "content": system})
    messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages: a list of one or more messages is needed", param="messages")
    for number, message in enumerate(messages):
        prefix = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        roles = ("user", "assistant", "system") if number else ("user", "assistant")  # else it is the field system
        if not isinstance(role, str) or role not in roles:
            raise RequestRefused(f"{prefix}.role: valid: {', '.join(map(repr, roles))}", param=f"{prefix}.role")
        content: Any = message.get("content")
        blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise RequestRefused(f"{prefix}.content: a text or a list of blocks is needed", param=f"{prefix}.content")
        block_paths = [f"{prefix}.content[{index}]" for index in range(len(blocks))] if blocks is content else [prefix]
        if role == "assistant":
            new_messages, paths_by_message = _assistant(blocks, block_paths)
        else:
            new_messages, paths_by_message = _user(blocks, block_paths, role)
        for index, paths_by_field in enumerate(paths_by_message):
            new_path = f"messages[{len(chat_messages) + index}]"
            paths |= {new_path: prefix} | {f"{new_path}.{subfield}": path for subfield, path in paths_by_field.items()}
        chat_messages += new_messages
    return chat_messages


Converted = tuple[list[dict[str, Any]], list[dict[str, str]]]  # messages; of each, the request's paths by its fields


def _assistant(blocks: Sequence[Mapping[str, Any]], block_paths: Sequence[str]) -> Converted:
    text_parts: list[Mapping[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    paths: dict[str, str] = {}
    for path, block in zip(block_paths, blocks, strict=True):
        block_type = block.get("type")
        if block_type == "tool_use":
            inputs: Any = block.get("input")
            encoded = inputs.get(_RAW) if isinstance(inputs, Mapping) and list(inputs) == [_RAW] else json_text(inputs)
            new_path = f"tool_calls[{len(calls)}]"
            paths |= {new_path: path, f"{new_path}.function": path, f"{new_path}.function.arguments": f"{path}.input"}
            calls.append({"id": block.get("id"), "function": {"name": block.get("name"), "arguments": encoded}})
        elif block_type == "thinking" and isinstance(block.get("thinking"), str):
            paths["reasoning_content"] = f"{path}.thinking"
            thoughts.append(block["thinking"])
        elif block_type == "text":
            paths[f"content[{len(text_parts)}]"] = path
            text_parts.append(block)
        else:
            reason = f"{path}.type = {fields.formatted(block_type)}: valid: text, thinking and tool_use"
            raise RequestRefused(reason, param=path)
    answer = {"role": "assistant", "content": text_parts, "tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
    return [answer], [paths]


def _user(blocks: Sequence[Mapping[str, Any]], block_paths: Sequence[str], role: str) -> Converted:
    """Convert a message of the user or the system: one tool message for each tool result, then one of its other
    blocks."""
    blocks_with_paths = list(zip(blocks, block_paths, strict=True))
    tool_results = [(block, path) for block, path in blocks_with_paths if block.get("type") == "tool_result"]
    other_blocks = [(block, path) for block, path in blocks_with_paths if block.get("type") != "tool_result"]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, path)}
        for block, path in tool_results
    ]
    paths = [{"content": f"{path}.content", "tool_call_id": f"{path}.tool_use_id"} for _, path in tool_results]
    if other_blocks or not messages:
        messages.append({"role": role, "content": [block for block, _ in other_blocks]})
        paths.append({f"content[{block_index}]": path for block_index, (_, path) in enumerate(other_blocks)})
    return messages, paths


def _result(block: Mapping[str, Any], path: str) -> Any:
    """Return a tool result's content. An error is marked in the text, because the model reads nothing else of it."""
    content, failed = block.get("content") or "", block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise fields.refused(f"{path}.is_error", failed, "true or false")
    if failed and isinstance(content, list):
        return [{"type": "text", "text": "error:"}, *content]
    unmarked = failed and isinstance(content, str) and not content.lower().startswith("error")
    return f"error: {content}" if unmarked else content


def openai_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Convert tools to the form chat templates take. Raises RequestRefused, e.g. for tools that Anthropic runs."""
    if not raw:
        return None
    if not isinstance(raw, list):
        raise RequestRefused("tools: a list is needed", param="tools")
    tools: list[dict[str, Any]] = []
    for tool_index, tool in enumerate(raw):
        schema = tool.get("input_schema") if isinstance(tool, Mapping) else None
        if not isinstance(schema, Mapping) or not isinstance(tool.get("name"), str):
            tool_path = f"tools[{tool_index}]"
            raise RequestRefused(f"{tool_path}: valid: a tool with a name and an input_schema", param=tool_path)
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": dict(schema)}
        tools.append({"type": "function", "function": function})
    return tools


def _envelope(parsed: ParsedRequest) -> dict[str, Any]:
    message_id = f"msg_{parsed.setting.answer_id}"
    return {"id": message_id, "type": "message", "role": "assistant", "model": parsed.body["model"]}


def _blocks(turn: RecordedTurn, setting: Setting) -> list[dict[str, Any]]:
    """Content blocks of an answer: thinking, text, tool calls."""
    blocks = list[dict[str, Any]]()
    reasoning, text = answer_texts(turn, setting)
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text:
        blocks.append({"type": "text", "text": text})
    for call in turn.message.calls:
        blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(arguments or "{}")  # strictly: no NaN, no half of a surrogate pair
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {_RAW: arguments}


def _stop(turn: RecordedTurn, setting: Setting) -> dict[str, str | None]:
    """Fields ``stop_reason`` and ``stop_sequence``: the stop string that ended the answer, if one did."""
    stop_reason, matches = "end_turn", list[tuple[int, str]]()
    if turn.message.calls:
        stop_reason = "tool_use"
    elif turn.finish_reason == "length":
        stop_reason = "max_tokens"
    elif turn.answer.ids[-1] not in setting.chat.tokenizer.stop_ids:
        answer_text = setting.chat.tokenizer.decode(turn.answer.ids)
        matches = [(offset, stop) for stop in turn.answer.stop if (offset := answer_text.find(stop)) >= 0]
    stop_string = min(matches)[1] if matches else None
    return {"stop_reason": "stop_sequence" if matches else stop_reason, "stop_sequence": stop_string}


def _usage(call: RecordedCall) -> dict[str, int]:
    token_counts = usage(call)
    return {"input_tokens": token_counts["prompt_tokens"], "output_tokens": token_counts["completion_tokens"]}


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])
