"""OpenAI's Responses API, without server-side state: each request brings the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.constraints import constraint, text_format, tool_choice
from headway.generator.endpoint.dialect import (
    AnswerWriter,
    Dialect,
    ParsedRequest,
    Piece,
    answer_texts,
    answers,
    event,
    usage,
)
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.fields import Field, Values
from headway.generator.endpoint.response_tools import ResponseTools, custom_arguments
from headway.generator.endpoint.schemas import INPUT, OUTPUT, RESPONSE_TOOLS
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.records.conversations import RequestRefused
from headway.tokens.messages import normal_messages, normal_tools
from headway.tokens.tool_grammar import Constraint

_STATE = "this server keeps no responses: send the whole conversation as input"


class ResponseStream(AnswerWriter):
    """Events of a streamed response: each output item is added, filled and done."""

    def __init__(self, parsed: ParsedRequest, call: RecordedCall) -> None:
        super().__init__(parsed, call)
        self._sequence = 0
        self._done = 0  # items finished so far
        self._open = ""  # type of the open item
        self._texts = {"reasoning": "", "message": ""}

    def begin(self) -> bytes:
        response = _response(self._parsed)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def more(self, piece: Piece) -> bytes:
        encoded_events: list[bytes] = []
        if piece.reasoning:
            encoded_events.append(self._open_item("reasoning"))
            encoded_events.append(self._text("response.reasoning_text.delta", delta=piece.reasoning))
            self._texts["reasoning"] += piece.reasoning
        if piece.content:
            encoded_events.append(self._open_item("message"))
            encoded_events.append(self._text("response.output_text.delta", delta=piece.content, logprobs=[]))
            self._texts["message"] += piece.content
        return b"".join(encoded_events)

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        events = [self.more(piece), self._close_item()]
        for output in _output(turn, self._parsed):
            if output["type"] not in ("function_call", "custom_tool_call"):
                continue
            item_fields = {"item_id": output["id"], "output_index": self._done}
            key, named = ("arguments", {"name": output["name"]}) if output["type"] == "function_call" else ("input", {})
            event_prefix = "response.function_call_arguments" if named else "response.custom_tool_call_input"
            added_item = {**output, key: "", **({"status": "in_progress"} if named else {})}
            events.append(self._event("response.output_item.added", output_index=self._done, item=added_item))
            events.append(self._event(f"{event_prefix}.delta", **item_fields, delta=output[key]))
            events.append(self._event(f"{event_prefix}.done", **item_fields, **{key: output[key]}, **named))
            events.append(self._event("response.output_item.done", output_index=self._done, item=output))
            self._done += 1
        return b"".join(events)

    def close(self) -> bytes:
        response = _response(self._parsed, self._call)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: HttpError) -> bytes:
        response = _response(self._parsed)
        error_fields = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**response, "status": "failed", "error": error_fields})

    def _open_item(self, kind: str) -> bytes:
        """Open an item of this type, closing one of another type."""
        if self._open == kind:
            return b""
        closing_events, self._open = self._close_item(), kind
        opened_item = {**_item(kind, "", self._identity, "in_progress"), "content": []}
        opening_events = self._event("response.output_item.added", output_index=self._done, item=opened_item)
        if kind == "message":
            opening_events += self._text("response.content_part.added", part=_part(kind, ""))
        return closing_events + opening_events

    def _close_item(self) -> bytes:
        item_type, self._open = self._open, ""
        if not item_type:
            return b""
        text = self._texts[item_type]
        if item_type == "message":
            closing_events = self._text("response.output_text.done", text=text, logprobs=[])
            closing_events += self._text("response.content_part.done", part=_part(item_type, text))
        else:
            closing_events = self._text("response.reasoning_text.done", text=text)
        finished_item = _item(item_type, text, self._identity, "completed")
        closing_events += self._event("response.output_item.done", output_index=self._done, item=finished_item)
        self._done += 1
        return closing_events

    @property
    def _identity(self) -> str:
        return f"{self._setting.answer_id}_{self._done}"

    def _text(self, kind: str, **data: Any) -> bytes:
        prefix = "rs" if "reasoning" in kind else "msg"
        return self._event(kind, item_id=f"{prefix}_{self._identity}", output_index=self._done, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        sequence_number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": sequence_number, **data}, kind)


class Responses(Dialect):
    """``POST /v1/responses``."""

    names: ClassVar = {"messages": "input"}
    answer: ClassVar = OUTPUT
    writer = ResponseStream

    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        return {
            "input": fields.raw(INPUT, settings.max_messages, required=True),
            "instructions": fields.raw({}),
            "tools": fields.raw(RESPONSE_TOOLS, settings.max_tools),
            "previous_response_id": fields.only(why=_STATE),
            "conversation": fields.only(why=_STATE),
            "background": fields.only(False, why="this server answers while the client waits"),
            "tool_choice": tool_choice(),
            "parallel_tool_calls": fields.flag(default=True),
            "text": fields.structure(format=text_format()),
            "max_output_tokens": fields.integer(1, fields.MAX_TOKENS),
        }

    def request(self, values: Values) -> CallRequest:
        tools, client_paths = ResponseTools(values["tools"]), dict[str, str]()
        chat_messages = _messages(values, tools, client_paths)
        with fields.client_names(client_paths):
            messages = normal_messages(chat_messages)
        return CallRequest(
            messages=messages,
            tools=normal_tools(tools.functions),
            calls=values["tool_choice"].mode != "none",
            max_tokens=values["max_output_tokens"],
        )

    def constraint(self, values: Values) -> Constraint | None:
        tools, choice = ResponseTools(values["tools"]), values["tool_choice"]
        if choice.names is not None:
            choice = replace(choice, names=tuple(tools.names.get(name, name) for name in choice.names))
        parallel = values["parallel_tool_calls"]
        return constraint(choice, list(tools.constrainable), values["text"].get("format"), parallel=parallel)

    def left_out(self, values: Values) -> list[str]:
        return ResponseTools(values["tools"]).left_out

    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        return _response(parsed, call)


def _messages(values: Values, tools: ResponseTools, paths: dict[str, str]) -> list[dict[str, Any]]:
    """Convert a request's conversation to chat messages. ``paths`` is filled: path of a converted field -> path of
    the request's field. Raises RequestRefused naming the field."""
    messages: list[dict[str, Any]] = []
    instructions = values["instructions"]
    if instructions:
        paths["messages[0].content"] = "instructions"
        messages.append({"role": "system", "content": instructions})
    raw_input = values["input"]
    input_items: Any = [{"role": "user", "content": raw_input}] if isinstance(raw_input, str) else raw_input
    if not isinstance(input_items, list) or not input_items:
        raise RequestRefused("input: a text or a list of items is needed", param="input")
    assistant: dict[str, Any] | None = None  # the assistant's message that the next items extend
    for item_index, element in enumerate(input_items):
        source = f"input[{item_index}]"
        if not isinstance(element, Mapping):
            raise RequestRefused(f"{source}: an object is needed", param=source)
        kind = element.get("type", "message")
        begins_answer = kind == "reasoning" or (kind == "message" and element.get("role") == "assistant")
        path = f"messages[{len(messages)}]"
        if kind in ("function_call_output", "custom_tool_call_output"):
            assistant = None
            paths |= {path: source, f"{path}.content": f"{source}.output", f"{path}.tool_call_id": f"{source}.call_id"}
            messages.append({"role": "tool", "tool_call_id": element.get("call_id"), "content": element.get("output")})
        elif kind == "message" and not begins_answer:
            assistant = None
            paths[path] = source
            messages.append({"role": element.get("role"), "content": element.get("content")})
        elif begins_answer or kind in ("function_call", "custom_tool_call"):
            if assistant is None or (begins_answer and (assistant["tool_calls"] or assistant["content"])):
                assistant = {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": []}
                messages.append(assistant)
            _add(assistant, kind, element, source, tools)
            path, n_calls = f"messages[{len(messages) - 1}]", len(assistant["tool_calls"])
            paths |= {path: source, f"{path}.tool_calls[{n_calls - 1}].function": source} if n_calls else {path: source}
        else:
            valid = "message, function_call, custom_tool_call, the outputs of both, and reasoning"
            raise RequestRefused(f"{source}.type = {fields.formatted(kind)}: valid: {valid}", param=f"{source}.type")
    return messages


def _add(answer: dict[str, Any], kind: str, item: Mapping[str, Any], field: str, tools: ResponseTools) -> None:
    if kind == "message":
        answer["content"] = item.get("content")
    elif kind != "reasoning":
        arguments = item.get("arguments") if kind == "function_call" else custom_arguments(item.get("input"))
        function = {"name": tools.named(item), "arguments": arguments}
        answer["tool_calls"].append({"id": item.get("call_id"), "function": function})
    else:
        parts: Any = item.get("content") or []
        texts: list[Any]
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise RequestRefused(f"{field}.content: parts with texts are needed", param=f"{field}.content")
        answer["reasoning_content"] = "\n".join(texts)


def _response(parsed: ParsedRequest, call: RecordedCall | None = None) -> dict[str, Any]:
    """The response object; ``call``: the answered call, None while in progress."""
    body, setting, output_items = parsed.body, parsed.setting, list[dict[str, Any]]()
    status: str = "in_progress"
    usage_fields: dict[str, Any] | None = None
    if call is not None:
        [turn] = answers(call)
        status = "incomplete" if turn.finish_reason == "length" else "completed"
        output_items, usage_fields = _output(turn, parsed), _usage(call)
    incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    blank_fields = {"strict": None, "parameters": None, "description": None}
    tools = [{**(blank_fields if tool.get("type") == "function" else {}), **tool} for tool in body.get("tools") or ()]
    return {
        "id": f"resp_{setting.answer_id}",
        "object": "response",
        "created_at": float(setting.created),
        "status": status,
        "error": None,
        "incomplete_details": incomplete_details,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body["model"],
        "output": output_items,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools,
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "usage": usage_fields,
    }


def _output(turn: RecordedTurn, parsed: ParsedRequest) -> list[dict[str, Any]]:
    """Output items of an answer: reasoning, message, calls."""
    setting, tools = parsed.setting, ResponseTools(parsed.body.get("tools"))
    output_items = list[dict[str, Any]]()
    for item_type, text in zip(("reasoning", "message"), answer_texts(turn, setting), strict=True):
        if text:
            output_items.append(_item(item_type, text, f"{setting.answer_id}_{len(output_items)}", "completed"))
    for call in turn.message.calls:
        output_items.append(tools.item(call, f"{setting.answer_id}_{len(output_items)}"))
    return output_items


def _item(kind: str, text: str, identity: str, status: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": f"rs_{identity}", "type": kind, "summary": [], "content": [_part(kind, text)], "status": status}
    content_parts = [_part(kind, text)]
    return {"id": f"msg_{identity}", "type": kind, "role": "assistant", "status": status, "content": content_parts}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(call: RecordedCall) -> dict[str, Any]:
    token_counts = usage(call)
    return {
        "input_tokens": token_counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": token_counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": token_counts["total_tokens"],
    }
