"""OpenAI's Chat Completions API."""

from __future__ import annotations

from typing import Any, ClassVar

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.constraints import constraint, placed_tools, text_format, tool_choice
from headway.generator.endpoint.dialect import (
    AnswerWriter,
    Dialect,
    ParsedRequest,
    Piece,
    answers,
    envelope,
    event,
    usage,
)
from headway.generator.endpoint.fields import Field, Values
from headway.generator.endpoint.schemas import CHOICES, MESSAGES, TOOLS
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.records.conversations import RequestRefused
from headway.tokens.messages import normal_messages, normal_tools
from headway.tokens.output_parsing import openai_message
from headway.tokens.tool_grammar import Constraint

_TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # no client may set these


class ChatStream(AnswerWriter):
    """Writes ``chat.completion.chunk`` events; a choice's tool calls come whole, at its end."""

    prefix = "chatcmpl"
    kind = "chat.completion.chunk"

    def begin(self) -> bytes:
        first_delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, first_delta) for choice in range(self._call.request.choices))

    def more(self, piece: Piece) -> bytes:
        delta = {
            key: text for key, text in (("reasoning_content", piece.reasoning), ("content", piece.content)) if text
        }
        if not delta and not (self._parsed.logprobs and piece.ids):
            return b""
        return self._chunk(piece.choice, delta, piece=piece)

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        output_format = self._setting.chat.written
        tool_calls: list[dict[str, Any]] = openai_message(turn.message, output_format).get("tool_calls", [])
        encoded_events = [self.more(piece)]
        if tool_calls:
            numbered_calls = [{"index": call_index, **call} for call_index, call in enumerate(tool_calls)]
            encoded_events.append(self._chunk(piece.choice, {"tool_calls": numbered_calls}))
        encoded_events.append(self._chunk(piece.choice, {}, finish_reason=_finish_reason(turn)))
        return b"".join(encoded_events)

    def _chunk(
        self, choice: int, delta: dict[str, Any], *, finish_reason: str | None = None, piece: Piece | None = None
    ) -> bytes:
        choice_map: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if self._parsed.logprobs and piece is not None:
            token_logprobs = self._setting.texts.chat(piece.ids, piece.logprobs)
            choice_map["logprobs"] = {"content": token_logprobs, "refusal": None}
        usage_field = {"usage": None} if self._parsed.include_usage else {}
        return event({**self._common_fields, "choices": [choice_map], **usage_field})


class ChatCompletions(Dialect):
    """``POST /v1/chat/completions``."""

    answer: ClassVar = {**CHOICES, "object": {"const": "chat.completion"}}
    writer = ChatStream

    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        return {
            "messages": fields.raw(MESSAGES, settings.max_messages, required=True),
            "tools": fields.raw(TOOLS, settings.max_tools),
            "tool_choice": tool_choice(),
            "parallel_tool_calls": fields.flag(default=True),
            "response_format": text_format(),
            "functions": fields.only([], why="write tools instead"),
            "function_call": fields.only(why="write tool_choice instead"),
            "modalities": fields.only(["text"], why="this model writes text only"),
            "logprobs": fields.flag(),
            "top_logprobs": fields.only(0, why="only the sampled token's is known; valid: 0"),
            "max_completion_tokens": fields.integer(1, fields.MAX_TOKENS),
            "max_tokens": fields.integer(1, fields.MAX_TOKENS),
            "n": fields.integer(1, settings.choices),
            "stop": fields.stop(),
            "stream_options": fields.structure(include_usage=fields.flag()),
            "chat_template_kwargs": fields.structure(),
            "continue_final_message": fields.flag(),
            "add_generation_prompt": fields.flag(default=None),
            "add_special_tokens": fields.only(False, why="the chat template writes them; valid: false"),
        }

    def request(self, values: Values) -> CallRequest:
        messages = normal_messages(values["messages"])
        return CallRequest(
            tools=normal_tools(values["tools"]),
            messages=messages,
            continues=_continues(values),
            variables=_variables(values["chat_template_kwargs"]),
            calls=values["tool_choice"].mode != "none",
            choices=values["n"] or 1,
            max_tokens=values["max_completion_tokens"] or values["max_tokens"],
            stop=values["stop"],
            seed=values["seed"],
        )

    def constraint(self, values: Values) -> Constraint | None:
        tools, parallel = placed_tools(values["tools"], "parameters"), values["parallel_tool_calls"]
        return constraint(values["tool_choice"], tools, values["response_format"], parallel=parallel)

    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        choices = [_choice(number, turn, parsed) for number, turn in enumerate(answers(call))]
        return {**envelope("chatcmpl", "chat.completion", parsed), "choices": choices, "usage": usage(call)}


def _continues(values: Values) -> bool:
    """Whether the last message is the beginning of the answer. Raises RequestRefused for demands that contradict each
    other."""
    asks_continuation, adds_prompt = values["continue_final_message"], values["add_generation_prompt"]
    messages = values["messages"]
    marked = [n for n, message in enumerate(messages) if any(message.get(key) is True for key in ("prefix", "partial"))]
    if marked and marked != [len(messages) - 1]:
        reason = f"messages[{marked[0]}]: only the last message can be a prefix of the answer"
        raise RequestRefused(reason, param=f"messages[{marked[0]}]")
    if adds_prompt is asks_continuation is True:
        reason = "add_generation_prompt = true with continue_final_message = true; valid: false"
        raise RequestRefused(reason, param="add_generation_prompt")
    if adds_prompt is False and not asks_continuation and not marked:
        reason = "add_generation_prompt = false; valid: true, or false with continue_final_message = true"
        raise RequestRefused(reason, param="add_generation_prompt")
    return asks_continuation or bool(marked)


def _choice(number: int, turn: RecordedTurn, parsed: ParsedRequest) -> dict[str, Any]:
    logprobs, setting = None, parsed.setting
    if parsed.logprobs:
        logprobs = {"content": setting.texts.chat(turn.answer.ids, turn.logprobs), "refusal": None}
    return {
        "index": number,
        "message": {**openai_message(turn.message, setting.chat.written), "refusal": None},
        "logprobs": logprobs,
        "finish_reason": _finish_reason(turn),
    }


def _finish_reason(turn: RecordedTurn) -> str:
    return "tool_calls" if turn.message.calls else turn.finish_reason


def _variables(variables: Values) -> Values:
    """Check ``chat_template_kwargs``: the client's own arguments of the chat template. Raises RequestRefused."""
    for name in variables:
        if name in _TEMPLATE_OWN or not name.isidentifier():
            reason = f"chat_template_kwargs.{name}: valid: names that only the template knows, say enable_thinking"
            raise RequestRefused(reason, param="chat_template_kwargs")
    return variables
