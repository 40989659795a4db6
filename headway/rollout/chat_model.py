"""A client, with retries, of a language model behind any endpoint that speaks OpenAI's chat completions.

Each question is one request in the caller's thread. Redirects aren't followed, so that the key goes nowhere else.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from headway.records.errors import ConfigurationError, InfrastructureError
from headway.runtime.addresses import machine_certificates
from headway.runtime.hooks import storable
from headway.runtime.retries import backoff_s, socket_error_of

T = TypeVar("T")

LONGEST_WAIT_S = 10.0  # longest wait before a retry, even if the server asks for more
_LONGEST_QUOTE = 160  # characters of an answer in an error
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # HTTP: overloaded, or a moment too early


@dataclass
class RequestCosts:
    """Attempts and tokens that the requests for one answer have used so far."""

    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Retry(Exception):
    """Raised where another attempt may succeed; ``wait_s``: the delay that the server asked for."""

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


class ModelFailed(InfrastructureError):
    """Raised where no attempt gave a usable answer."""


class _Unrecoverable(Exception):
    """Raised where another attempt would fail in the same way."""


@dataclass(frozen=True, kw_only=True)
class ModelEndpoint:
    """An address of a server that runs a model, asked with retries.

    No connection, a reply cut off or no JSON, a timeout, an overloaded or broken server and an answer that its reader
    can't use are retried ``retries`` times, with waits that double from ``retry_s``. Half of each wait is random:
    clients that failed together don't return together.
    """

    url: str
    key: str = field(default="", repr=False)
    called: str = "the model"  # in errors
    timeout_s: float = 30.0  # of one request
    retries: int = 2
    retry_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.random

    @property
    def longest_s(self) -> float:
        """The longest time of a question: all requests time out, all waits have their maximum."""
        return (self.retries + 1) * self.timeout_s + self.retries * LONGEST_WAIT_S

    def call(self, body: Mapping[str, Any] | None, read: Callable[[object], T], spent: RequestCosts) -> T:
        """Post ``body`` (None: get) and return ``read`` of the answer, which may raise `Retry`. ``spent`` grows with
        each request. Raises ModelFailed."""
        reason = ""
        for attempt in range(self.retries + 1):
            try:
                spent.attempts += 1
                return read(self._request(body))
            except Retry as error:
                reason = str(error)
                if attempt < self.retries:
                    wait_s = backoff_s(attempt + 1, self.retry_s) * (0.5 + 0.5 * self.draw())
                    self.sleep(min(max(wait_s, error.wait_s), LONGEST_WAIT_S))
            except _Unrecoverable as error:
                reason = str(error)
                break
        raise ModelFailed(f"{reason}; requests to {self.called}: {spent.attempts}")

    def _request(self, body: Mapping[str, Any] | None) -> object:
        import httpx  # here: processes that ask no model don't wait for the import

        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            reply = httpx.request(
                "GET" if body is None else "POST",
                self.url,
                # httpx's own encoding refuses half surrogate pairs
                content=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=self.timeout_s,
                verify=machine_certificates(),
            )
        except (httpx.RequestError, httpx.InvalidURL) as error:  # no connection, a timeout, a reply cut off
            cause = socket_error_of(error)
            raise Retry(f"{self.called} at {self.url} can't be reached: {type(cause).__name__}: {cause}") from None
        if not reply.is_success:
            reason = f"{self.called} answered HTTP {reply.status_code}: {quoted(reply.text)}"
            if reply.status_code not in _RETRIED:
                raise _Unrecoverable(reason)
            try:
                wait_s = max(0.0, float(reply.headers.get("Retry-After", "0")))
            except ValueError:  # a date
                wait_s = 0.0
            raise Retry(reason, wait_s)
        try:
            return reply.json()
        except ValueError:
            raise Retry(f"{self.called}'s reply isn't JSON: {quoted(reply.text)}") from None


@dataclass(frozen=True, kw_only=True)
class ChatModel(ModelEndpoint):
    """A model behind a chat completions endpoint."""

    model: str
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further keys of the request

    def ask(
        self, messages: Sequence[Mapping[str, Any]], read: Callable[[str], T], spent: RequestCosts, **body: Any
    ) -> T:
        """Ask the model and return ``read`` of the answer's text; ``read`` may raise `Retry`. ``body``: further keys of
        the request. See `ModelEndpoint.call`."""
        request = {"model": self.model, "messages": list(messages), **self.body, **body}
        return self.call(request, lambda answer: read(self._text_of(answer, spent)), spent)

    def _text_of(self, answer: object, spent: RequestCosts) -> str:
        """Return the text of a chat completion and add its tokens to ``spent``, even without a text. Raises Retry."""
        fields = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
        usage = fields.get("usage")
        if isinstance(usage, dict):
            spent.prompt_tokens += _count(usage.get("prompt_tokens"))
            spent.completion_tokens += _count(usage.get("completion_tokens"))
        try:
            text = fields["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise Retry(f"{self.called}'s reply isn't a chat completion: {quoted(json.dumps(answer))}")
        return storable(text)


def completions_url(base: str) -> str:
    """Return the chat completions URL under an endpoint's base, say https://api.openai.com/v1."""
    return base.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def api_key(variable: str, key: str) -> str:
    """Return the API key in an environment variable; "" where none is named. Raises ConfigurationError, naming the
    configuration's ``key``, for a variable that isn't set."""
    secret = os.environ.get(variable, "") if variable else ""
    if variable and not secret:
        raise ConfigurationError(f"{key}: the environment has no {variable}")
    return secret


def quoted(text: str) -> str:
    """Return a short quotation of an answer, for an error message."""
    single_line = " ".join(text.split())
    return repr(single_line if len(single_line) <= _LONGEST_QUOTE else single_line[: _LONGEST_QUOTE - 3] + "...")


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
