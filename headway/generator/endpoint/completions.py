"""OpenAI's Completions API: raw prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.constraints import text_format
from headway.generator.endpoint.dialect import (
    AnswerWriter,
    Dialect,
    ParsedRequest,
    Piece,
    Scored,
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
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.tokens.output_parsing import OutputFormat, response_text
from headway.tokens.tool_grammar import Constraint

PLAIN = OutputFormat()
_DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens
_MOST_TOP = 20  # likeliest tokens in each one's place: vLLM's default limit


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
            "echo": fields.flag(),
            "suffix": fields.only("", why="this server only continues a prompt"),
            "logprobs": _logprobs(),
            "max_tokens": fields.integer(0, fields.MAX_TOKENS),
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
            max_tokens=_DEFAULT_TOKENS if values["max_tokens"] is None else max(1, values["max_tokens"]),
            stop=values["stop"],
            seed=values["seed"],
        )

    def read(self, body: Mapping[str, Any], setting: Setting) -> ParsedRequest:
        parsed = super().read(body, setting)
        echo, top, samples = bool(body.get("echo")), int(body.get("logprobs") or 0), body.get("max_tokens") != 0
        if not samples and not echo:
            raise RequestRefused("max_tokens = 0: valid: from 1 on, or echo = true", param="max_tokens")
        if not echo and not top:
            return parsed
        name = "echo" if echo else "logprobs"
        if not setting.scores:
            reason = "the prompt isn't scored; valid: false" if echo else "only the sampled token's is known; valid: 0"
            raise RequestRefused(f"{name} = {fields.formatted(body[name])}: {reason}", param=name)
        if parsed.stream:
            reason = f"valid: false with {name} = {fields.formatted(body[name])}, which follows the answer"
            raise RequestRefused(f"stream = True: {reason}", param="stream")
        request = dataclasses.replace(parsed.request, answers=samples)
        return dataclasses.replace(parsed, request=request, scored=Scored(echo, top))

    def constraint(self, values: Values) -> Constraint | None:
        text_schema = values["response_format"]
        return None if text_schema is None else Constraint(text=text_schema)

    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        choices = [_choice(number, turn, parsed) for number, turn in enumerate(answers(call))]
        return {**envelope("cmpl", "text_completion", parsed), "choices": choices, "usage": usage(call)}

    def scored_body(
        self, parsed: ParsedRequest, prompt_ids: TokenIds, call: RecordedCall | None, scores: Sequence[PromptLogprobs]
    ) -> dict[str, Any]:
        """Return the response body of a request with `Scored`; ``scores``: of each choice, prompt and answer. None:
        only the prompt was scored."""
        assert parsed.scored is not None
        tokenizer, prompt = parsed.setting.chat.tokenizer, parsed.request.prompt
        prompt_text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt_ids)
        echoed_text, first = (prompt_text, 0) if parsed.scored.echo else ("", len(prompt_ids))
        choices = list[dict[str, Any]]()
        for number, logprobs in enumerate(scores):
            turn = None if call is None else answers(call)[number]
            ids = prompt_ids if turn is None else TokenIds.joined((prompt_ids, turn.answer.ids))
            choices.append(
                {
                    "index": number,
                    "text": echoed_text + ("" if turn is None else completion_text(turn, parsed.setting)),
                    "logprobs": parsed.setting.texts.scored(ids, logprobs, first) if parsed.logprobs else None,
                    "finish_reason": "length" if turn is None else turn.finish_reason,
                }
            )
        counts = {"prompt_tokens": len(prompt_ids), "completion_tokens": 0, "total_tokens": len(prompt_ids)}
        token_counts = counts if call is None else usage(call)
        return {**envelope("cmpl", "text_completion", parsed), "choices": choices, "usage": token_counts}


def _logprobs() -> Field:
    """The field of the count of likeliest tokens that are returned in each one's place; false: no log-probabilities."""
    count = fields.integer(0, _MOST_TOP)

    def checked(name: str, value: Any) -> int | bool:
        return False if value is False else count.read(name, value)

    return Field(checked, {"anyOf": [count.schema, {"const": False}]})


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
