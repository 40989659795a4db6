"""Base classes of the endpoint's APIs: parsing requests, writing whole answers and streams."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.fields import Field, Schema, Values
from headway.generator.endpoint.foreign_fields import foreign_fields, foreign_sampling, require_no_foreign
from headway.generator.endpoint.logprobs import TokenTexts
from headway.generator.recording.answer_tree import CallRequest, RecordedCall, RecordedTurn
from headway.records.conversations import ClientSampling, RequestRefused
from headway.tokens.continuation import Chat
from headway.tokens.tool_grammar import Constraint

_UNTRAINED = "a constrained answer is trained on only with algorithm.allow_truncated_sampling = true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Context for parsing a request and writing its answer: settings, tokenizer, time and id of the answer."""

    settings: EndpointConfig
    chat: Chat
    texts: TokenTexts
    fixed_sampling: bool  # the experiment's sampling parameters hold, not the client's
    constraints: bool  # answers may be constrained
    created: int  # seconds since the epoch
    answer_id: str  # without the API's prefix
    scores: bool = False  # log-probabilities of given tokens can be computed
    adapter: str = ""  # the adapter that the request names


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A parsed request, in one form for all APIs."""

    setting: Setting
    request: CallRequest
    client: ClientSampling
    constraint: Constraint | None = None  # on the answer; None: nothing
    left_out: Sequence[str] = ()  # kinds of hosted tools that the model isn't offered
    stream: bool
    include_usage: bool = False  # OpenAI's streams end with the token counts
    logprobs: bool = False
    scored: Scored | None = None  # log-probabilities of given tokens that are returned as well
    body: Mapping[str, Any]  # the request's JSON, unparsed


@dataclass(frozen=True)
class Scored:
    """The log-probabilities of given tokens that a request asks for, by one pass over prompt and answer."""

    echo: bool  # of the prompt's tokens too, whose text begins the answer's
    top: int  # likeliest tokens in each one's place


@dataclass(frozen=True)
class Piece:
    """An increment of one choice of a streamed answer."""

    choice: int
    reasoning: str = ""
    content: str = ""
    ids: Sequence[int] = ()  # tokens since the last piece
    logprobs: Sequence[float] = ()


class AnswerWriter(ABC):
    """Writes one streamed answer. The defaults are those of OpenAI's completion APIs. Every method returns the bytes
    of whole server-sent events."""

    ping = b": keepalive\n"  # without a blank line, which some clients take for an event
    prefix = ""  # of the answer's id
    kind = ""  # the "object" of every chunk

    def __init__(self, parsed: ParsedRequest, call: RecordedCall) -> None:
        self._parsed = parsed
        self._call = call
        self._setting = parsed.setting
        self._common_fields = envelope(self.prefix, self.kind, parsed)

    def begin(self) -> bytes:
        """Events before the first piece."""
        return b""

    @abstractmethod
    def more(self, piece: Piece) -> bytes:
        """Events of an increment of one choice."""

    @abstractmethod
    def end(self, piece: Piece, turn: RecordedTurn) -> bytes:
        """Events of a choice's last piece, with its tool calls and finish reason."""

    def close(self) -> bytes:
        """Events after the last choice: usage if asked for, and the end mark."""
        end_events = b"data: [DONE]\n\n"
        if self._parsed.include_usage:
            end_events = event({**self._common_fields, "choices": [], "usage": usage(self._call)}) + end_events
        return end_events

    def failed(self, error: HttpError) -> bytes:
        """An error event that ends the stream early."""
        return b"data: " + error.openai() + b"\n\n"


class Dialect(ABC):
    """A model API: the fields of its requests, and how its answers are written."""

    parsed: ClassVar[bool] = True  # answers are parsed into messages; False: plain text
    names: ClassVar[Mapping[str, str]] = {}  # its names of fields that OpenAI's chat API calls otherwise
    answer: ClassVar[Mapping[str, Schema]] = {}  # schemas of a whole answer's fields
    writer: ClassVar[type[AnswerWriter]]  # writes streamed answers

    @abstractmethod
    def fields(self, settings: EndpointConfig) -> dict[str, Field]:
        """Fields of this API's requests, beside those of all APIs (``model``, ``stream``, sampling)."""

    @abstractmethod
    def request(self, values: Values) -> CallRequest:
        """Convert parsed field values to a CallRequest. Raises RequestRefused naming the field."""

    @abstractmethod
    def constraint(self, values: Values) -> Constraint | None:
        """Return the constraint on the answer, or None, from field values that `request` accepted. Raises
        RequestRefused naming the field."""

    def left_out(self, values: Values) -> Sequence[str]:
        """Return the kinds of hosted tools in a request, which this server lacks and the model isn't offered."""
        return ()

    def all_fields(self, settings: EndpointConfig) -> dict[str, Field]:
        """All fields of this API's requests that have an effect or are refused."""
        model_field = fields.raw({"type": "string"}, required=True)
        return {
            "model": model_field,
            "stream": fields.flag(),
            **foreign_fields(),
            **fields.sampling(),
            **self.fields(settings),
        }

    def read(self, body: Mapping[str, Any], setting: Setting) -> ParsedRequest:
        """Parse a request's body. Raises RequestRefused naming the field."""
        known_fields = self.all_fields(setting.settings)
        require_no_foreign(body, known_fields)
        values = fields.read(body, known_fields)
        logprobs = values.get("logprobs")
        client_sampling = _client_sampling(values, fixed=setting.fixed_sampling)
        request, constraint = self.request(values), self.constraint(values)
        _require_answerable(request, constraint, len(body.get(self.names.get("messages", "messages")) or ()))
        if request.tools and request.calls and setting.chat.written.unknown:
            reason = f"{setting.chat.written.unknown}; valid: none, or tool_choice = 'none'"
            raise RequestRefused(f"tools: {reason}", param="tools")
        if constraint is not None and not setting.constraints:
            if not constraint.optional:
                raise RequestRefused(f"{constraint.param}: {_UNTRAINED}", param=constraint.param)
            client_sampling, constraint = msgspec.structs.replace(client_sampling, strict_tools=True), None
        return ParsedRequest(
            setting=setting,
            request=dataclasses.replace(request, adapter=setting.adapter),
            client=client_sampling,
            constraint=constraint,
            left_out=self.left_out(values),
            stream=values["stream"],
            include_usage=values.get("stream_options", {}).get("include_usage", False),
            logprobs=logprobs is not None and logprobs is not False,
            body=body,
        )

    @abstractmethod
    def response_body(self, parsed: ParsedRequest, call: RecordedCall) -> dict[str, Any]:
        """The response body of an answered call, as a mapping."""


def _require_answerable(request: CallRequest, constraint: Constraint | None, message_count: int) -> None:
    """Raise RequestRefused for a conversation that ends with the assistant, unless its last message is to be continued
    and can be. ``message_count``: messages as the client counts them."""
    message_path = f"messages[{message_count - 1}]"
    if not request.messages or request.messages[-1].role != "assistant":
        if request.continues:
            reason = f"{message_path}: there is no message to continue; valid: the assistant's"
            raise RequestRefused(reason, param=message_path)
        return
    last_message = request.messages[-1]
    if not request.continues:
        reason = (
            "a final message of the assistant is continued with continue_final_message = true, or prefix = true in it"
        )
        raise RequestRefused(f"{message_path}: {reason}; or add another message after it", param=message_path)
    _, think_tag, thinking_text = last_message.inline.rpartition("<think>")
    if last_message.calls or not last_message.content.strip() or (think_tag and "</think>" not in thinking_text):
        reason = "a text to be continued is needed, without calls or reasoning that is still open"
        raise RequestRefused(f"{message_path}: {reason}", param=message_path)
    if constraint is not None and not constraint.optional:
        reason = f"{constraint.param}: formats and tool choices don't apply to the continuation of a final message"
        raise RequestRefused(reason, param=constraint.param)


def _client_sampling(values: Values, *, fixed: bool) -> ClientSampling:
    """Convert the sampling fields. Raises RequestRefused: a bias of tokens, and other ways of sampling unless the
    experiment's parameters hold anyway (``fixed``)."""
    if values["logit_bias"]:
        raise RequestRefused("logit_bias: it isn't supported; valid: an empty object", param="logit_bias")
    parameter_names = ("temperature", "top_p", "top_k", "seed")
    foreign_values = foreign_sampling(values, fixed=fixed)
    return ClientSampling(**{name: values[name] for name in parameter_names}, further=foreign_values or None)


def envelope(prefix: str, kind: str, parsed: ParsedRequest) -> dict[str, Any]:
    """Return the fields of OpenAI's answers and chunks beside ``choices``: id, object, created, model."""
    answer_id = f"{prefix}-{parsed.setting.answer_id}"
    return {"id": answer_id, "object": kind, "created": parsed.setting.created, "model": parsed.body["model"]}


def answers(call: RecordedCall) -> list[RecordedTurn]:
    """Return the answers of an answered call, one for each choice."""
    return [turn for turn in call.turns if turn is not None]


def answer_texts(turn: RecordedTurn, setting: Setting) -> tuple[str, str]:
    """Return reasoning and text of an answer; the text has both if the chat template doesn't mark reasoning."""
    message = turn.message
    return (message.reasoning, message.content) if setting.chat.written.reasoning else ("", message.inline)


def usage(call: RecordedCall) -> dict[str, int]:
    """Return the token counts of an answered call, under OpenAI's names."""
    n_prompt, n_completion = len(call.prompt_ids), sum(len(turn.answer.ids) for turn in answers(call))
    return {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}


def event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event with JSON data."""
    name_line = b"event: " + name.encode() + b"\n" if name else b""
    return name_line + b"data: " + msgspec.json.encode(data) + b"\n\n"
