"""An HTTP request and its response over ASGI: limits of size and time, streams, clients that disconnect."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.errors import HttpError
from headway.runtime.supervision import run_to_completion

T = TypeVar("T")
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_DISCARDED = 4  # multiple of the limit that is read before a refusal: clients read no response while they send


STOPPING = "the server is stopping"
CONNECTION = "headway.connection"  # extension of the ASGI scope: a Connection


class Connection:
    """State of an exchange's connection that ASGI doesn't convey; the server sets it."""

    def __init__(self) -> None:
        self.lost = False  # closed; set before the application runs again
        self.on_reset: Callable[[], object] | None = None  # called on a close with the response unread


class ClientGone(Exception):
    """The client closed the connection, or stopped reading."""


class HttpExchange:
    """State of one exchange: *reading* -> *answered* (`reply`), or *streaming* (`begin_stream`,
    `write`) -> *answered* (`end_stream`)."""

    def __init__(self, scope: Message, receive: Receive, send: Send, settings: EndpointConfig, request_id: str) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = request_id
        self.status = 0  # of the response; 0: none has begun
        self.streaming = False
        self.answered = False
        self._query: bytes = scope.get("query_string", b"")
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._connection: Connection = scope.get("extensions", {}).get(CONNECTION) or Connection()
        self._receive = receive
        self._send = send
        self._settings = settings
        self._gone: asyncio.Task[None] | None = None

    def header(self, name: str) -> str:
        """A request header's value; "" if absent."""
        return self._headers.get(name.encode(), b"").decode("utf-8", "replace")

    @property
    def query(self) -> dict[str, str]:
        """The values of the request's query by name; the last one of a repeated name."""
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    @property
    def key(self) -> str:
        """The request's API key, from `authorization` or `x-api-key`, byte by byte; "" if absent."""
        auth_scheme, _, token = self._headers.get(b"authorization", b"").partition(b" ")
        key_bytes = (token.strip() if auth_scheme.lower() == b"bearer" else b"") or self._headers.get(b"x-api-key", b"")
        return key_bytes.decode("utf-8", "surrogateescape")

    async def body(self, most_bytes: int | None = None, codings: tuple[str, ...] = ()) -> bytes:
        """Read the request's body; ``most_bytes``: a limit below the server's; ``codings``: of compressed bodies that
        the caller decodes. Raises HttpError 413 (too large), 408
        (too slow) or 415 (compressed), and ClientGone."""
        limit_bytes = min(self._settings.max_body_bytes, most_bytes or sys.maxsize)
        pieces: list[bytes] = []
        size_bytes, has_more = 0, True
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while has_more and size_bytes <= limit_bytes * _DISCARDED:
                    asgi_message = await self._receive()
                    if asgi_message["type"] == "http.disconnect":
                        raise ClientGone
                    piece: bytes = asgi_message.get("body", b"")
                    size_bytes += len(piece)
                    if size_bytes <= limit_bytes:
                        pieces.append(piece)
                    else:
                        pieces.clear()
                    has_more = asgi_message.get("more_body", False)
        except TimeoutError:
            reason = f"the request is incomplete after {self._settings.body_timeout_s:g} s"
            raise HttpError(408, reason, code="timeout", headers=((b"connection", b"close"),)) from None
        if (coding := self.header("content-encoding").strip().lower()) not in ("", "identity", *codings):
            raise HttpError(415, f"content-encoding = {coding!r}: compression isn't supported; send it uncompressed")
        if size_bytes > limit_bytes:
            reason = f"the request's body is larger than {limit_bytes} bytes"
            raise HttpError(413, reason, code="request_too_large", headers=((b"connection", b"close"),))
        return b"".join(pieces)

    def gone(self) -> asyncio.Task[None]:
        """Task that is done when the client has disconnected. Call it only after the body was read."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._wait_gone(), name="client")
        return self._gone

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. If the client disconnects, cancels it and raises ClientGone. Call this only
        after the body was read."""
        work_task = asyncio.create_task(work, name="answer")
        try:
            await asyncio.wait({work_task, self.gone()}, return_when=asyncio.FIRST_COMPLETED)
            if not work_task.done():
                raise ClientGone
            return work_task.result()
        finally:
            work_task.cancel()  # if it isn't done
            await run_to_completion(asyncio.wait({work_task}))

    async def _wait_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), kind: bytes = b"application/json"
    ) -> None:
        """Send a whole response. Raises ClientGone."""
        length_headers = () if status == 304 else ((b"content-length", str(len(body)).encode()),)
        head_message = self._head(status, kind, [*length_headers, *headers])
        self.answered = True
        await self._deliver(head_message, {"type": "http.response.body", "body": body})

    async def reply_with(self, payload: Any) -> None:
        """Send ``payload`` as JSON, or bytes as metrics in Prometheus' text format. Raises ClientGone."""
        if isinstance(payload, bytes):
            await self.reply(200, payload, kind=b"text/plain; version=0.0.4; charset=utf-8")
        else:
            await self.reply(200, msgspec.json.encode(payload))

    async def begin_stream(self) -> None:
        """Send the head of a stream of server-sent events. Raises ClientGone."""
        self.streaming = True
        await self._deliver(self._head(200, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")]))

    async def write(self, data: bytes) -> None:
        """Send a piece of the stream, unless it is empty. Raises ClientGone."""
        if data:
            await self._deliver({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, last: bytes) -> None:
        """Send the stream's last piece and the response's end in one write. Raises ClientGone."""
        self.answered = True
        await self._deliver({"type": "http.response.body", "body": last})

    def note_received(self, note: Callable[[bool], object]) -> None:
        """Call ``note(True)`` now that the whole response was sent, and ``note(False)`` if the client closes the
        connection without reading all of it. A later request on the same connection proves that it was read."""
        note(True)
        self._connection.on_reset = lambda: note(False)

    def close(self) -> None:
        """Stop waiting for the client's disconnect; after a whole response the server ends that wait itself."""
        if self._gone is not None and not self.answered:
            self._gone.cancel()

    def _head(self, status: int, kind: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Message:
        self.status, request_id = status, self.request_id.encode()
        all_headers = [(b"content-type", kind), (b"x-request-id", request_id), (b"request-id", request_id), *headers]
        return {"type": "http.response.start", "status": status, "headers": all_headers}

    async def _deliver(self, *messages: Message) -> None:
        """Send ASGI messages. Raises ClientGone, also when the client reads nothing for ``body_timeout_s``."""
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                for message in messages:
                    await self._send(message)
        except OSError:  # also a TimeoutError
            raise ClientGone from None
        if self._connection.lost:
            raise ClientGone
