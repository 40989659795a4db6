"""What an API needs to be spoken: reading its requests, writing its answers, whole and as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.fields import Asked
from headway.generator.endpoint.logprobs import TokenTexts
from headway.generator.endpoint.refusals import Refused
from headway.generator.recording.answer_tree import Turn
from headway.generator.recording.recorder import Call
from headway.tokens.continuing import Chat


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What reading and writing depend on beside the request."""

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


class Writer(Protocol):
    """Writes one streamed answer. Every method gives the bytes of whole server-sent events."""

    ping: bytes  # says that the stream lives

    def begin(self) -> bytes: ...

    def more(self, piece: Piece) -> bytes: ...

    def end(self, piece: Piece, turn: Turn) -> bytes:
        """The last piece of a choice, and what is known only at the end."""
        ...

    def close(self) -> bytes: ...

    def failed(self, refused: Refused) -> bytes:
        """In place of all that is missing."""
        ...


class Dialect(Protocol):
    """One API."""

    def read(self, body: Mapping[str, Any], setting: Setting) -> Asked:
        """Raises RequestRefused naming the field that is wrong."""
        ...

    def whole(self, asked: Asked, call: Call, setting: Setting) -> dict[str, Any]:
        """The body of the answer to a call that was answered."""
        ...

    def writer(self, asked: Asked, call: Call, setting: Setting) -> Writer: ...

    @property
    def parsed(self) -> bool:
        """Whether its answers are messages; else they are plain text."""
        ...


def answers(call: Call) -> list[Turn]:
    """Those of a call that was answered, one for each choice."""
    return [turn for turn in call.turns if turn is not None]


def usage(call: Call) -> dict[str, int]:
    """Tokens of a call that was answered, in OpenAI's words."""
    prompt, completion = len(call.prompt_ids), sum(len(turn.answer.ids) for turn in answers(call))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event of JSON."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
