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
        parts: list[bytes] = []
        if piece.reasoning:
            parts.append(self._into("reasoning"))
            parts.append(self._text("response.reasoning_text.delta", delta=piece.reasoning))
            self._texts["reasoning"] += piece.reasoning
        if piece.content:
            parts.append(self._into("message"))
            parts.append(self._text("response.output_text.delta", delta=piece.content, logprobs=[]))
            self._texts["message"] += piece.content
        return b"".join(parts)

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        parts = [self.more(piece), self._shut()]
        for item in _output(turn, self._parsed):
            if item["type"] not in ("function_call", "custom_tool_call"):
                continue
            item_ref = {"item_id": item["id"], "output_index": self._done}
            key, named = ("arguments", {"name": item["name"]}) if item["type"] == "function_call" else ("input", {})
            events = "response.function_call_arguments" if named else "response.custom_tool_call_input"
            added = {**item, key: "", **({"status": "in_progress"} if named else {})}
            parts.append(self._event("response.output_item.added", output_index=self._done, item=added))
            parts.append(self._event(f"{events}.delta", **item_ref, delta=item[key]))
            parts.append(self._event(f"{events}.done", **item_ref, **{key: item[key]}, **named))
            parts.append(self._event("response.output_item.done", output_index=self._done, item=item))
            self._done += 1
        return b"".join(parts)

    def close(self) -> bytes:
        response = _response(self._parsed, self._call)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: HttpError) -> bytes:
        response = _response(self._parsed)
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**response, "status": "failed", "error": failure})

    def _into(self, kind: str) -> bytes:
        """Open an item of this type, closing one of another type."""
        if self._open == kind:
            return b""
        shut, self._open = self._shut(), kind
        item = {**_item(kind, "", self._identity, "in_progress"), "content": []}
        added = self._event("response.output_item.added", output_index=self._done, item=item)
        if kind == "message":
            added += self._text("response.content_part.added", part=_part(kind, ""))
        return shut + added

    def _shut(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        text = self._texts[kind]
        if kind == "message":
            done = self._text("response.output_text.done", text=text, logprobs=[])
            done += self._text("response.content_part.done", part=_part(kind, text))
        else:
            done = self._text("response.reasoning_text.done", text=text)
        item = _item(kind, text, self._identity, "completed")
        done += self._event("response.output_item.done", output_index=self._done, item=item)
        self._done += 1
        return done

    @property
    def _identity(self) -> str:
        return f"{self._setting.answer_id}_{self._done}"

    def _text(self, kind: str, **data: Any) -> bytes:
        prefix = "rs" if "reasoning" in kind else "msg"
        return self._event(kind, item_id=f"{prefix}_{self._identity}", output_index=self._done, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


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
        tools, paths = ResponseTools(values["tools"]), dict[str, str]()
        chat_messages = _messages(values, tools, paths)
        with fields.client_names(paths):
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
    items: Any = [{"role": "user", "content": raw_input}] if isinstance(raw_input, str) else raw_input
    if not isinstance(items, list) or not items:
        raise RequestRefused("input: a text or a list of items is needed", param="input")
    answer: dict[str, Any] | None = None  # the assistant's message that the next items extend
    for number, item in enumerate(items):
        field = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise RequestRefused(f"{field}: an object is needed", param=field)
        kind = item.get("type", "message")
        begins = kind == "reasoning" or (kind == "message" and item.get("role") == "assistant")
        path = f"messages[{len(messages)}]"
        if kind in ("function_call_output", "custom_tool_call_output"):
            answer = None
            paths |= {path: field, f"{path}.content": f"{field}.output", f"{path}.tool_call_id": f"{field}.call_id"}
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and not begins:
            answer = None
            paths[path] = field
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif begins or kind in ("function_call", "custom_tool_call"):
            if answer is None or (begins and (answer["tool_calls"] or answer["content"])):
                answer = {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": []}
                messages.append(answer)
            _add(answer, kind, item, field, tools)
            path, calls = f"messages[{len(messages) - 1}]", len(answer["tool_calls"])
            paths |= {path: field, f"{path}.tool_calls[{calls - 1}].function": field} if calls else {path: field}
        else:
            valid = "message, function_call, custom_tool_call, the outputs of both, and reasoning"
            raise RequestRefused(f"{field}.type = {fields.formatted(kind)}: valid: {valid}", param=f"{field}.type")
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
    body, setting, output = parsed.body, parsed.setting, list[dict[str, Any]]()
    status: str = "in_progress"
    used: dict[str, Any] | None = None
    if call is not None:
        [turn] = answers(call)
        status = "incomplete" if turn.finish_reason == "length" else "completed"
        output, used = _output(turn, parsed), _usage(call)
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    blank = {"strict": None, "parameters": None, "description": None}
    tools = [{**(blank if tool.get("type") == "function" else {}), **tool} for tool in body.get("tools") or ()]
    return {
        "id": f"resp_{setting.answer_id}",
        "object": "response",
        "created_at": float(setting.created),
        "status": status,
        "error": None,
        "incomplete_details": cut,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools,
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "usage": used,
    }


def _output(turn: RecordedTurn, parsed: ParsedRequest) -> list[dict[str, Any]]:
    """Output items of an answer: reasoning, message, calls."""
    setting, tools = parsed.setting, ResponseTools(parsed.body.get("tools"))
    items = list[dict[str, Any]]()
    for kind, text in zip(("reasoning", "message"), answer_texts(turn, setting), strict=True):
        if text:
            items.append(_item(kind, text, f"{setting.answer_id}_{len(items)}", "completed"))
    for call in turn.message.calls:
        items.append(tools.item(call, f"{setting.answer_id}_{len(items)}"))
    return items


def _item(kind: str, text: str, identity: str, status: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": f"rs_{identity}", "type": kind, "summary": [], "content": [_part(kind, text)], "status": status}
    content = [_part(kind, text)]
    return {"id": f"msg_{identity}", "type": kind, "role": "assistant", "status": status, "content": content}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(call: RecordedCall) -> dict[str, Any]:
    tokens = usage(call)
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["total_tokens"],
    }
