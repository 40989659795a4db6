"""The endpoint's HTTP server, in a shared event loop: uvicorn with httptools' parser."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.exchange import CONNECTION, Connection
from headway.runtime.addresses import BACKLOG, listening_socket

_HEAD_BYTES = 64 * 1024  # request line and headers
_GRACE_S = 2  # for responses under way at shutdown
_ACCEPTED = 8  # connections accepted at once: else the loop would accept all that wait before it closes one
_SPARED = 64  # descriptors reserved for everything but connections; at most a quarter of the limit
_log = logging.getLogger("headway.endpoint")


def _refusal(status: bytes, error: HttpError) -> bytes:
    """Encode a whole HTTP response to a request that the server refuses before the application."""
    body = error.openai()
    head_format = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head_format % (status, len(body)) + body


_TOO_LARGE = _refusal(b"431 Request Header Fields Too Large", HttpError(431, "the head is too large"))
_TOO_LATE = _refusal(b"408 Request Timeout", HttpError(408, "the request's head arrived too slowly", code="timeout"))


@asynccontextmanager
async def serving(app: Any, settings: EndpointConfig, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve ``app`` inside the block on ``listener`` (closed at the end), or on a new socket at ``settings.address``.
    Yields the server's address, http://HOST:PORT. Raises ConfigurationError as `listening_socket`."""
    open_limit, file_limit = min(settings.connections, _capacity()), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_limit < settings.connections:
        _log.warning(
            "%d connections may be open: this process may open %d files (ulimit -n), so %d stay open; those that "
            "were never used are closed for others", settings.connections, file_limit, open_limit,
        )  # fmt: skip
    connection_limits = {"max_connections": settings.connections, "capacity": open_limit}
    protocol_attributes = {**connection_limits, "timeout_s": settings.body_timeout_s, "idle": dict[_Protocol, None]()}
    with closing(listener or listening_socket(settings.address, "endpoint.address")) as listener:
        config = uvicorn.Config(
            app,
            http=type("Protocol", (_Protocol,), protocol_attributes),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # clients' bad requests aren't logged
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(settings.keep_alive_s),  # longer than clients' own 5 s: equal ones race
            timeout_graceful_shutdown=_GRACE_S,
            backlog=_ACCEPTED,
        )
        config.load()
        # The parts of Server.serve() without its handling of the process's signals.
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        listener.listen(BACKLOG)  # the kernel's queue, which startup has made as short as ``_ACCEPTED``
        try:
            host, port = listener.getsockname()[:2]
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            await asyncio.shield(server.shutdown(sockets=[listener]))


def _capacity() -> int:
    """Return how many connections this process can open beside its open files and those it may need."""
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, file_limit - len(os.listdir("/proc/self/fd")) - min(_SPARED, file_limit // 4))


class _Protocol(HttpToolsProtocol):
    """HTTP with limits that uvicorn lacks: concurrent connections, size of a request's head, time until a request
    is whole. The application itself waits for the body of a request that it answers."""

    max_connections: ClassVar[int]
    capacity: ClassVar[int]  # connections that this process has files for
    timeout_s: ClassVar[float]
    idle: ClassVar[dict[_Protocol, None]]  # those without a request in flight, longest idle first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.in_head = True
        self.idle[self] = None
        self.unfinished_bytes = 0  # of an incomplete head
        self.messages = 0  # complete requests so far
        self.unread: list[Connection] = []  # of exchanges whose responses may be unread
        self.deadline: asyncio.TimerHandle | None = self.loop.call_later(self.timeout_s, self.refuse_late)
        if len(self.connections) > self.max_connections:
            transport.abort()
        elif len(self.connections) > self.capacity:
            idle_peers = [peer for peer in self.idle if peer is not self and not peer.transport.get_write_buffer_size()]
            unused_peers = (peer for peer in reversed(idle_peers) if not peer.messages)
            closed_peer = next(unused_peers, idle_peers[0] if idle_peers else self)
            self.idle.pop(closed_peer)
            closed_peer.transport.abort()

    def data_received(self, data: bytes) -> None:
        earlier_messages = self.messages
        super().data_received(data)
        still_in_head = self.in_head and earlier_messages == self.messages
        self.unfinished_bytes = self.unfinished_bytes + len(data) if still_in_head else 0
        if self.unfinished_bytes > _HEAD_BYTES:
            self.refuse_head()
        is_complete = self.in_head and not self.unfinished_bytes
        if self.deadline is not None and (is_complete or earlier_messages != self.messages):
            self.deadline.cancel()
            self.deadline = None
        if self.deadline is None and not is_complete:
            self.deadline = self.loop.call_later(self.timeout_s, self.refuse_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        if self.deadline is not None:
            self.deadline.cancel()
        sock = self.transport.get_extra_info("socket")
        was_reset = exc is not None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        for connection in self.unread:
            connection.lost = True
            if was_reset and connection.on_reset is not None:
                connection.on_reset()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self.in_head = False
        self.idle.pop(self, None)
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _HEAD_BYTES:
            self.refuse_head()
            raise httptools.HttpParserError("the request's head is too large")  # ends the parsing
        if self.cycle is None or self.cycle.response_complete:
            self.unread.clear()  # a client that sends its next request has read the responses before
        self.unread.append(Connection())
        extensions: Any = {CONNECTION: self.unread[-1]}
        self.scope["extensions"] = extensions
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.idle[self] = None

    def on_message_complete(self) -> None:
        self.in_head = True
        self.messages += 1
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.transport.write(_refusal(b"400 Bad Request", HttpError(400, msg)))
        self.transport.close()

    def refuse_head(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def refuse_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.deadline = self.loop.call_later(self.timeout_s, self.refuse_late)
        elif not self.transport.is_closing():
            self.transport.write(_TOO_LATE if self.unfinished_bytes else b"")
            self.transport.close()
