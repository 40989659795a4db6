"""A relay of TCP connections that passes every byte on as it came and keeps them, so that a test can read what a client
and a server said to each other, neither of which knows of it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httptools

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@dataclass
class Exchange:
    """A request and its response."""

    method: str = ""
    path: str = ""  # with the query
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    status: int = 0  # 0: no response came
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""


@dataclass
class _Connection:
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


class WireTap:
    """Relays connections to one server; see `tapped`."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._connections: list[_Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: str = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def exchanges(self) -> list[Exchange]:
        """All of them so far, in the order of their connections."""
        return [exchange for connection in list(self._connections) for exchange in _exchanges(connection)]

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                connection = _Connection()
                self._connections.append(connection)
                server = socket.create_connection(self._server)
                for source, sink, kept in (
                    (client, server, connection.asked),
                    (server, client, connection.answered),
                ):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=_relay, args=(source, sink, kept), daemon=True).start()


def _relay(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    """One way, until the source ends it, or either side breaks it: then the other side's is broken too."""
    try:
        while piece := source.recv(_PIECE_BYTES):
            kept += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()


class _Reader:
    """Callbacks of httptools' parsers, for requests and for responses."""

    def __init__(self) -> None:
        self.messages: list[_Reader.Parsed] = []

    @dataclass
    class Parsed:
        url: bytes = b""
        headers: dict[str, str] = field(default_factory=dict)
        body: bytes = b""
        whole: bool = False

    def on_message_begin(self) -> None:
        self.messages.append(self.Parsed())

    def on_url(self, url: bytes) -> None:
        self.messages[-1].url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.messages[-1].headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.messages[-1].body += body

    def on_message_complete(self) -> None:
        self.messages[-1].whole = True


class _Requests(_Reader):
    def __init__(self) -> None:
        super().__init__()
        self.parser = httptools.HttpRequestParser(self)
        self.methods: list[str] = []

    def on_headers_complete(self) -> None:
        self.methods.append(self.parser.get_method().decode())


class _Responses(_Reader):
    def __init__(self) -> None:
        super().__init__()
        self.parser = httptools.HttpResponseParser(self)
        self.statuses: list[int] = []

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())


def _exchanges(connection: _Connection) -> Iterator[Exchange]:
    asked, answered = _Requests(), _Responses()
    asked.parser.feed_data(bytes(connection.asked))
    answered.parser.feed_data(bytes(connection.answered))
    for number, request in enumerate(asked.messages):
        exchange = Exchange(asked.methods[number], request.url.decode(), request.headers, request.body)
        if number < len(answered.messages) and answered.messages[number].whole:
            response = answered.messages[number]
            exchange.status = answered.statuses[number]
            exchange.answer_headers, exchange.answer = response.headers, response.body
        yield exchange


@contextmanager
def tapped(server: tuple[str, int]) -> Iterator[WireTap]:
    """A relay to ``server`` (host and port) on a port of its own."""
    tap = WireTap(server)
    try:
        yield tap
    finally:
        tap.close()
