"""The APIs that the endpoint speaks: reading their requests, writing their answers, whole and as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.fields import Field, ParsedRequest, Schema, Values
from headway.generator.endpoint.logprobs import TokenTexts
from headway.generator.endpoint.refusals import HttpError
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.tokens.continuing import Chat

_CONSTRAINED = "this server doesn't constrain what is sampled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Settings that parsing requests and rendering answers need beside the request."""

    settings: EndpointConfig
    chat: Chat
    texts: TokenTexts
    fixed_sampling: bool  # the client's own parameters have no effect
    created: int  # seconds since the epoch
    answer_id: str  # of the answer, without the API's own prefix


@dataclass(frozen=True)
class Piece:
    """News of one choice of a streamed answer."""

    choice: int
    reasoning: str = ""
    content: str = ""
    ids: Sequence[int] = ()  # that came since the last piece
    logprobs: Sequence[float] = ()


class AnswerWriter:
    """Writes one streamed answer, as OpenAI's APIs do unless a dialect's own says otherwise. Every method gives the
    bytes of whole server-sent events."""

    ping = b": keepalive\n"  # says that the stream lives; without a blank line, which some clients take for an event
    prefix = ""  # of the answer's id
    kind = ""  # the "object" of every chunk

    def __init__(self, asked: ParsedRequest, call: RecordedCall, setting: Setting) -> None:
        self._asked = asked
        self._call = call
        self._setting = setting
        self._same = envelope(self.prefix, self.kind, asked, setting)

    def begin(self) -> bytes:
        """Return the bytes before the first piece."""
        return b""

    def more(self, piece: Piece) -> bytes:
        """News of a choice."""
        raise NotImplementedError

    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        """The last piece of a choice, and what is known only at the end."""
        raise NotImplementedError

    def close(self) -> bytes:
        """Return the bytes after the last choice."""
        last = b"data: [DONE]\n\n"
        if self._asked.include_usage:
            last = event({**self._same, "choices": [], "usage": usage(self._call)}) + last
        return last

    def failed(self, error: HttpError) -> bytes:
        """An error in place of all that is missing."""
        return b"data: " + error.openai() + b"\n\n"


class Dialect(ABC):
    """An API's dialect: how its requests are parsed and its answers rendered, whole and streamed."""

    parsed: ClassVar[bool] = True  # its answers are messages; else plain text
    answer: ClassVar[Mapping[str, Schema]] = {}  # fields of a whole answer, with their schemas
    writer: ClassVar[type[AnswerWriter]]  # of its streams

    @abstractmethod
    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        """The fields of its requests beside those of all APIs: ``model``, ``stream``, how to sample."""

    @abstractmethod
    def request(self, values: Values) -> CallRequest:
        """Convert the values of a request's fields into a call. Raises RequestRefused naming the wrong field."""

    def all_fields(self, settings: EndpointConfig) -> dict[str, Field]:
        """Every field of its requests that has an effect, or is refused."""
        model = fields.raw({"type": "string"}, required=True)
        return {"model": model, "stream": fields.flag(), **fields.sampling(), **self.fields(settings)}

    def read(self, body: Mapping[str, Any], setting: Setting) -> ParsedRequest:
        """Raises RequestRefused naming the field that is wrong."""
        values = fields.read(body, self.all_fields(setting.settings))
        logprobs = values.get("logprobs")
        return ParsedRequest(
            request=self.request(values),
            client=fields.client_sampling(values, fixed=setting.fixed_sampling),
            stream=values["stream"],
            include_usage=values.get("stream_options", {}).get("include_usage", False),
            logprobs=logprobs is not None and logprobs is not False,
            body=body,
        )

    @abstractmethod
    def whole(self, asked: ParsedRequest, call: RecordedCall, setting: Setting) -> dict[str, Any]:
        """The body of the answer to a call that was answered."""


def envelope(prefix: str, kind: str, asked: ParsedRequest, setting: Setting) -> dict[str, Any]:
    """Return the fields around the choices of OpenAI's answers and chunks: id, object, time, model."""
    identity = f"{prefix}-{setting.answer_id}"
    return {"id": identity, "object": kind, "created": setting.created, "model": asked.body["model"]}


def tool_choice() -> Field:
    """Whether tools that are given may be called."""
    return fields.only("auto", "none", why=f"{_CONSTRAINED}; valid are 'auto' and 'none'")


def text_format() -> Field:
    """Make the field that asks for a format of the answer's text; only plain text is valid."""
    return fields.only({"type": "text"}, why=f"{_CONSTRAINED}; valid is {{'type': 'text'}}")


def answers(call: RecordedCall) -> list[RecordedTurn]:
    """Return the recorded turns of an answered call, one for each choice."""
    return [turn for turn in call.turns if turn is not None]


def usage(call: RecordedCall) -> dict[str, int]:
    """Tokens of a call that was answered, in OpenAI's words."""
    prompt, completion = len(call.prompt_ids), sum(len(turn.answer.ids) for turn in answers(call))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event of JSON."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
