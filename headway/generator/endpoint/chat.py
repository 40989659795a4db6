"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.generator.endpoint.dialect import Piece, Setting, answers, event, usage
from headway.generator.endpoint.fields import Asked, Fields, client_sampling
from headway.generator.endpoint.refusals import Refused
from headway.generator.recording.answer_tree import Turn
from headway.generator.recording.recorder import Call, Request
from headway.records.conversations import RequestRefused
from headway.tokens.messages import normal_messages, normal_tools
from headway.tokens.output_parsing import client_form

_MOST_TOKENS = 1 << 31
_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # what a client's variables may not replace
_CONSTRAINED = "this server doesn't constrain what is sampled"


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    parsed = True

    def read(self, body: Mapping[str, Any], setting: Setting) -> Asked:
        fields = Fields(body)
        fields.listed("messages", setting.settings.max_messages)
        fields.listed("tools", setting.settings.max_tools)
        tools = normal_tools(fields.get("tools"))
        fields.only("tool_choice", "auto", "none", why=f"{_CONSTRAINED}; valid are 'auto' and 'none'")
        fields.only("response_format", {"type": "text"}, why=f"{_CONSTRAINED}; valid is {{'type': 'text'}}")
        fields.only("functions", [], why="write tools instead")
        fields.only("function_call", why="write tool_choice instead")
        fields.only("modalities", ["text"], why="this model writes text alone")
        fields.only("top_logprobs", 0, why="the sampled token's alone is known; valid is 0")
        most = fields.integer("max_completion_tokens", 1, _MOST_TOKENS) or fields.integer("max_tokens", 1, _MOST_TOKENS)
        choices = fields.integer("n", 1, setting.settings.choices)
        request = Request(
            messages=normal_messages(fields.get("messages")),
            tools=tools,
            variables=_variables(fields),
            calls=fields.get("tool_choice") != "none",
            choices=choices or 1,
            max_tokens=most,
            stop=fields.stop(),
            seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        )
        return Asked(
            request=request,
            client=client_sampling(fields, fixed=setting.fixed_sampling),
            stream=fields.flag("stream"),
            include_usage=Fields(fields.mapping("stream_options")).flag("include_usage"),
            logprobs=fields.flag("logprobs"),
            body=body,
        )

    def whole(self, asked: Asked, call: Call, setting: Setting) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{setting.answer_id}",
            "object": "chat.completion",
            "created": setting.created,
            "model": asked.body["model"],
            "choices": [_choice(number, turn, asked, setting) for number, turn in enumerate(answers(call))],
            "usage": usage(call),
        }

    def writer(self, asked: Asked, call: Call, setting: Setting) -> ChatStream:
        return ChatStream(asked, call, setting)


class ChatStream:
    """``chat.completion.chunk`` events; tool calls come whole, at the end."""

    ping = b": keepalive\n"  # without a blank line: some clients take that for an empty event

    def __init__(self, asked: Asked, call: Call, setting: Setting) -> None:
        self._asked = asked
        self._call = call
        self._setting = setting
        self._same = {
            "id": f"chatcmpl-{setting.answer_id}",
            "object": "chat.completion.chunk",
            "created": setting.created,
            "model": asked.body["model"],
        }
        self._usage = {"usage": None} if asked.include_usage else {}

    def begin(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, first) for choice in range(self._call.request.choices))

    def more(self, piece: Piece) -> bytes:
        delta = {
            key: text for key, text in (("reasoning_content", piece.reasoning), ("content", piece.content)) if text
        }
        if not delta and not (self._asked.logprobs and piece.ids):
            return b""
        return self._chunk(piece.choice, delta, piece=piece)

    def end(self, piece: Piece, turn: Turn) -> bytes:
        written = self._setting.chat.written
        calls: list[dict[str, Any]] = client_form(turn.message, written).get("tool_calls", [])
        parts = [self.more(piece)]
        if calls:
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            parts.append(self._chunk(piece.choice, {"tool_calls": numbered}))
        parts.append(self._chunk(piece.choice, {}, finish_reason=_finish_reason(turn)))
        return b"".join(parts)

    def close(self) -> bytes:
        last = b"data: [DONE]\n\n"
        if self._asked.include_usage:
            last = event({**self._same, "choices": [], "usage": usage(self._call)}) + last
        return last

    def failed(self, refused: Refused) -> bytes:
        return b"data: " + refused.openai() + b"\n\n"

    def _chunk(
        self, choice: int, delta: dict[str, Any], *, finish_reason: str | None = None, piece: Piece | None = None
    ) -> bytes:
        entry: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self._asked.logprobs and piece is not None:
            content = self._setting.texts.chat(piece.ids, piece.logprobs)
            entry["logprobs"] = {"content": content, "refusal": None}
        return event({**self._same, "choices": [entry], **self._usage})


def _choice(number: int, turn: Turn, asked: Asked, setting: Setting) -> dict[str, Any]:
    logprobs = None
    if asked.logprobs:
        logprobs = {"content": setting.texts.chat(turn.answer.ids, turn.logprobs), "refusal": None}
    return {
        "index": number,
        "message": {**client_form(turn.message, setting.chat.written), "refusal": None},
        "logprobs": logprobs,
        "finish_reason": _finish_reason(turn),
    }


def _finish_reason(turn: Turn) -> str:
    return "tool_calls" if turn.message.calls else turn.finish_reason


def _variables(fields: Fields) -> Mapping[str, Any]:
    """Arguments of the chat template that the client gives, as vLLM takes them."""
    variables = fields.mapping("chat_template_kwargs")
    for name in variables:
        if name in _TEMPLATE_OWN or not name.isidentifier():
            what = f"chat_template_kwargs.{name}: valid are names that only the template knows, say enable_thinking"
            raise RequestRefused(what, param="chat_template_kwargs")
    return variables
