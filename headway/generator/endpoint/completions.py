"""OpenAI's Completions API: raw prompts."""

from __future__ import annotations

from typing import Any, ClassVar

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.constraints import text_format
from headway.generator.endpoint.dialect import (
    AnswerWriter,
    Dialect,
    ParsedRequest,
    Piece,
    Setting,
    answers,
    envelope,
    event,
    usage,
)
from headway.generator.endpoint.fields import Field, Values
from headway.generator.endpoint.schemas import CHOICES, PROMPT
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.records.conversations import RequestRefused
from headway.tokens.output_parsing import OutputFormat, response_text
from headway.tokens.tool_grammar import Constraint

PLAIN = OutputFormat()
_DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens


class CompletionStream(AnswerWriter):
    """Writes ``text_completion`` events, of the same shape as a whole answer."""

    prefix = "cmpl"
    kind = "text_completion"

    def __init__(self, parsed: ParsedRequest, call: RecordedCall) -> None:
        super().__init__(parsed, call)
        self._offsets = [0] * call.request.choices

    def more(self, piece: Piece) -> bytes:
        if not piece.content and not (self._parsed.logprobs and piece.ids):
            return b""
        return self._chunk(piece)

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        return self._chunk(piece, turn.finish_reason)

    def _chunk(self, piece: Piece, finish_reason: str | None = None) -> bytes:
        logprobs = None
        if self._parsed.logprobs:
            logprobs = self._setting.texts.completions(piece.ids, piece.logprobs, self._offsets[piece.choice])
            self._offsets[piece.choice] += sum(map(len, logprobs["tokens"]))
        chunk_choice = {
            "index": piece.choice,
            "text": piece.content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._common_fields, "choices": [chunk_choice]})


class Completions(Dialect):
    """``POST /v1/completions``. The prompt is a text or token ids; several prompts in one request are refused."""

    parsed = False
    answer: ClassVar = {**CHOICES, "object": {"const": "text_completion"}}
    writer = CompletionStream

    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        return {
            "prompt": fields.raw(PROMPT, required=True),
            "n": fields.integer(1, settings.choices),
            "best_of": fields.integer(1, settings.choices),
            "echo": fields.only(False, why="the prompt isn't scored; valid: false"),
            "suffix": fields.only("", why="this server only continues a prompt"),
            "logprobs": fields.only(0, False, why="only the sampled token's is known; valid: 0"),
            "max_tokens": fields.integer(1, fields.MAX_TOKENS),
            "stop": fields.stop(),
            "response_format": text_format(),
            "stream_options": fields.structure(include_usage=fields.flag()),
        }

    def request(self, values: Values) -> CallRequest:
        choice_count, best_of = values["n"] or 1, values["best_of"]
        if best_of not in (None, choice_count):
            reason = f"best_of = {fields.formatted(best_of)}: this server samples only the n that it returns"
            raise RequestRefused(reason, param="best_of")
        return CallRequest(
            prompt=_prompt(values["prompt"]),
            choices=choice_count,
            max_tokens=values["max_tokens"] or _DEFAULT_TOKENS,
            stop=values["stop"],
            seed=values["seed"],
        )

    def constraint(self, values: Values) -> Constraint | None:
        text_schema = values["response_format"]
        return None if text_schema is None else Constraint(text=text_schema)

    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        choices = [_choice(number, turn, parsed) for number, turn in enumerate(answers(call))]
        return {**envelope("cmpl", "text_completion", parsed), "choices": choices, "usage": usage(call)}


def completion_text(turn: RecordedTurn, setting: Setting) -> str:
    """Decode an answer's tokens literally, up to the first stop string."""
    return response_text(setting.chat.tokenizer, turn.answer.ids, PLAIN, turn.answer.stop)


def _choice(number: int, turn: RecordedTurn, parsed: ParsedRequest) -> dict[str, Any]:
    logprobs = parsed.setting.texts.completions(turn.answer.ids, turn.logprobs, 0) if parsed.logprobs else None
    text = completion_text(turn, parsed.setting)
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": turn.finish_reason}


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise RequestRefused("prompt: one text, or one list of token ids, is needed", param="prompt")
