"""The base of the HTTP services' ASGI applications: it counts responses, and turns every error into one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.errors import HttpError, http_error
from headway.generator.endpoint.exchange import STOPPING, ClientGone, HttpExchange, Message, Receive, Send
from headway.runtime.addresses import is_loopback, is_loopback_host

_log = logging.getLogger("headway.endpoint")
_DECODER = msgspec.json.Decoder()
ResponseCounts = Counter[tuple[str, int]]  # responses by route and status; 0: the client left before one was sent


class HttpApp(ABC):
    """Base of the ASGI applications: `answer` responds to an exchange or raises, and every error becomes a response."""

    def __init__(self, settings: EndpointConfig, *, proxied: bool = False) -> None:
        """``settings``: limits of size and time. ``proxied``: a proxy may pass requests on, under names of its own; all
        need keys then."""
        self._proxied = proxied
        self.settings = settings
        self.responses: ResponseCounts = Counter()
        self._numbers = itertools.count(1)

    @abstractmethod
    async def answer(self, exchange: HttpExchange) -> None:
        """Respond to a request."""

    @abstractmethod
    def route(self, path: str) -> str:
        """The label of a path among the counted responses, from a small fixed set."""

    def error_body(self, exchange: HttpExchange, error: HttpError) -> bytes:
        """The body of an error's response."""
        return error.openai()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send, self.settings, f"req_{next(self._numbers):012x}")
        try:
            self._require_host(exchange)
            await self.answer(exchange)
        except ClientGone:
            pass
        except HeadRequest:
            with contextlib.suppress(ClientGone):
                await exchange.reply(200, b"")
        except asyncio.CancelledError:
            await self._refuse(exchange, HttpError(503, STOPPING, code="server_stopping"))
            raise
        except Exception as error:  # the HTTP edge's one capture point: every error becomes a response
            await self._refuse(exchange, error)
        finally:
            self.responses[self.route(exchange.path), exchange.status] += 1
            exchange.close()

    def _require_host(self, exchange: HttpExchange) -> None:
        """Raise HttpError 421 if the Host header of a request to a loopback address names another host: a web page may
        have its own name resolve to 127.0.0.1 (DNS rebinding)."""
        host = exchange.header("host")
        if host and not self._proxied and is_loopback(self.settings.address) and not is_loopback_host(host):
            reason = f"the header Host is {host!r}: valid: localhost, 127.0.0.1 and [::1]: only this machine is served"
            raise HttpError(421, reason, code="misdirected_request")

    async def _refuse(self, exchange: HttpExchange, error: Exception) -> None:
        """Respond with an error, unless a response has begun."""
        reply_error = http_error(error)
        if reply_error.status == 500:
            _log.error("%s %s: %s", exchange.method, exchange.path, reply_error, exc_info=error)
        if exchange.streaming or exchange.answered:
            return  # the server closes the connection, so the client sees a truncated response
        with contextlib.suppress(ClientGone):
            await exchange.reply(reply_error.status, self.error_body(exchange, reply_error), reply_error.headers)


class HeadRequest(Exception):
    """A HEAD request for an existing route, which is answered with a status alone."""


def decoded(raw: bytes) -> Mapping[str, Any]:
    """Decode a request's body, a JSON object. Raises HttpError 400."""
    try:
        body: Any = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise HttpError(400, f"the request's body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the request's body must be a JSON object")
    return body


def require_method(exchange: HttpExchange, method: str) -> None:
    """Raise HttpError 405 for a request with another method, and HeadRequest for a HEAD."""
    if exchange.method == "HEAD":
        raise HeadRequest
    if exchange.method != method:
        headers = ((b"allow", method.encode()),)
        raise HttpError(
            405, f"{exchange.method} {exchange.path}: valid: {method}", code="method_not_allowed", headers=headers
        )


def unknown_url(exchange: HttpExchange) -> HttpError:
    """Make the error of a path without a route."""
    return HttpError(404, f"unknown request URL: {exchange.method} {exchange.path}", code="unknown_url")
