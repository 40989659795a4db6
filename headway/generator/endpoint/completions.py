"""OpenAI's completions of raw prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.generator.endpoint.dialect import Piece, Setting, answers, event, usage
from headway.generator.endpoint.fields import Asked, Fields, client_sampling
from headway.generator.endpoint.refusals import Refused
from headway.generator.recording.answer_tree import Turn
from headway.generator.recording.recorder import Call, Request
from headway.records.conversations import RequestRefused
from headway.tokens.output_parsing import OutputFormat, response_text

PLAIN = OutputFormat()
_MOST_TOKENS = 1 << 31
_DEFAULT_TOKENS = 16  # that OpenAI's API gives a completion whose length isn't said


class Completions:
    """``POST /v1/completions``. A prompt is a text or token ids; several in one request are refused."""

    parsed = False

    def read(self, body: Mapping[str, Any], setting: Setting) -> Asked:
        fields = Fields(body)
        choices = fields.integer("n", 1, setting.settings.choices) or 1
        fields.only("best_of", choices, why="this server samples just the n that are asked for")
        fields.only("echo", False, why="the prompt isn't scored; valid is false")
        fields.only("suffix", "", why="this server only continues")
        logprobs = fields.get("logprobs")
        fields.only("logprobs", 0, False, why="the sampled token's alone is known; valid is 0")
        request = Request(
            prompt=_prompt(fields.get("prompt")),
            choices=choices,
            max_tokens=fields.integer("max_tokens", 1, _MOST_TOKENS) or _DEFAULT_TOKENS,
            stop=fields.stop(),
            seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        )
        return Asked(
            request=request,
            client=client_sampling(fields, fixed=setting.fixed_sampling),
            stream=fields.flag("stream"),
            include_usage=Fields(fields.mapping("stream_options")).flag("include_usage"),
            logprobs=logprobs == 0 and logprobs is not False and logprobs is not None,
            body=body,
        )

    def whole(self, asked: Asked, call: Call, setting: Setting) -> dict[str, Any]:
        return {
            "id": f"cmpl-{setting.answer_id}",
            "object": "text_completion",
            "created": setting.created,
            "model": asked.body["model"],
            "choices": [_choice(number, turn, asked, setting) for number, turn in enumerate(answers(call))],
            "usage": usage(call),
        }

    def writer(self, asked: Asked, call: Call, setting: Setting) -> CompletionStream:
        return CompletionStream(asked, call, setting)


class CompletionStream:
    """Events of the same shape as the whole."""

    ping = b": keepalive\n"

    def __init__(self, asked: Asked, call: Call, setting: Setting) -> None:
        self._asked = asked
        self._call = call
        self._setting = setting
        self._same = {
            "id": f"cmpl-{setting.answer_id}",
            "object": "text_completion",
            "created": setting.created,
            "model": asked.body["model"],
        }
        self._offsets = [0] * call.request.choices

    def begin(self) -> bytes:
        return b""

    def more(self, piece: Piece) -> bytes:
        if not piece.content and not (self._asked.logprobs and piece.ids):
            return b""
        return self._chunk(piece)

    def end(self, piece: Piece, turn: Turn) -> bytes:
        return self._chunk(piece, turn.finish_reason)

    def close(self) -> bytes:
        last = b"data: [DONE]\n\n"
        if self._asked.include_usage:
            last = event({**self._same, "choices": [], "usage": usage(self._call)}) + last
        return last

    def failed(self, refused: Refused) -> bytes:
        return b"data: " + refused.openai() + b"\n\n"

    def _chunk(self, piece: Piece, finish_reason: str | None = None) -> bytes:
        logprobs = None
        if self._asked.logprobs:
            logprobs = self._setting.texts.completions(piece.ids, piece.logprobs, self._offsets[piece.choice])
            self._offsets[piece.choice] += sum(map(len, logprobs["tokens"]))
        entry = {
            "index": piece.choice,
            "text": piece.content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._same, "choices": [entry]})


def completion_text(turn: Turn, setting: Setting) -> str:
    """What was sampled, to the letter, up to the first stop string."""
    return response_text(setting.chat.tokenizer, turn.answer.ids, PLAIN, turn.answer.stop)


def _choice(number: int, turn: Turn, asked: Asked, setting: Setting) -> dict[str, Any]:
    logprobs = setting.texts.completions(turn.answer.ids, turn.logprobs, 0) if asked.logprobs else None
    text = completion_text(turn, setting)
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": turn.finish_reason}


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise RequestRefused("prompt: one text, or one list of token ids, is needed", param="prompt")
