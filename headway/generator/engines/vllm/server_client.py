"""HTTP client for `vllm serve`: blocking calls, and streams of events read without blocking."""

from __future__ import annotations

import http.client
import os
import socket
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from headway.records.errors import HeadwayError

_CONNECT_S = 10.0
_CALL_S = 600.0  # a reload of large weights from a slow folder takes minutes
_READ_BYTES = 1 << 16
_END = b"[DONE]"
_DEAD = "EngineCore encountered an issue"  # in vLLM's every error once its engine is dead
KEY_VARIABLE = "VLLM_API_KEY"  # environment variable with the server's --api-key


class ServerError(HeadwayError):
    """An HTTP error response of the server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class VllmServer:
    """Client of one server. Calls raise ServerError for an HTTP error, OSError if the server or its engine is gone."""

    def __init__(self, address: str) -> None:
        """``address``: http://HOST:PORT."""
        url_parts = urlsplit(address)
        assert url_parts.hostname is not None  # runtime/devices.py has checked both
        assert url_parts.port is not None
        self.address = address
        self.host, self.port = url_parts.hostname, url_parts.port
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key := os.environ.get(KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {api_key}"

    def last_output(self) -> str:
        """Return the last lines of the server's output for an error's message; "" for one that runs elsewhere."""
        return ""

    def get(self, path: str, *, timeout_s: float | None = None) -> bytes:
        """GET; returns the body. ``timeout_s``: of connecting and of each read; None: enough for a load of weights."""
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any = None) -> Any:
        """POST ``body`` as JSON; returns the decoded response, None for one that isn't JSON."""
        response_body = self._call("POST", path, None if body is None else msgspec.json.encode(body))
        return msgspec.json.decode(response_body) if response_body[:1] in (b"{", b"[") else None

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float | None = None) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s or _CALL_S)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            response_body = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.address}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status >= 400:
            error_text = message_of(response_body)
            require_engine(error_text)
            raise ServerError(response.status, error_text)
        return response_body

    def stream(self, path: str, body: Any) -> EventStream:
        """POST ``body`` as JSON and return the response as a stream of events."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_CONNECT_S)
        connection.request("POST", path, msgspec.json.encode(body), self._headers)
        connection.sock.setblocking(False)
        return EventStream(connection.sock)


class EventStream:
    """A response of server-sent events, read without blocking: *open* -> ``over`` after the server's end mark."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._parser = httptools.HttpResponseParser(self)  # calls `on_headers_complete` and `on_body`
        self._status = 0
        self._body = bytearray()
        self.over = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; the server then aborts the request."""
        self._socket.close()

    def read(self) -> list[bytes]:
        """Return the data of the events received by now. Raises ServerError for an HTTP error, ConnectionError when the
        stream breaks off or the server's engine is dead."""
        is_closed = False
        try:
            while not is_closed:
                received_bytes = self._socket.recv(_READ_BYTES)
                self._parser.feed_data(received_bytes)
                is_closed = not received_bytes
        except BlockingIOError:
            pass
        except httptools.HttpParserError as error:
            raise ConnectionError(f"the server's answer is no HTTP: {error}") from error
        if self._status not in (0, 200):
            if not is_closed:
                return []
            error_text = message_of(bytes(self._body))
            require_engine(error_text)
            raise ServerError(self._status, error_text)
        events = self._events()
        if is_closed and not self.over:
            raise ConnectionError("the server closed a stream before its end")
        return events

    def _events(self) -> list[bytes]:
        *complete_events, incomplete_event = bytes(self._body).split(b"\n\n")
        self._body = bytearray(incomplete_event)
        event_payloads = [event.removeprefix(b"data: ") for event in complete_events if event.startswith(b"data: ")]
        if _END in event_payloads:
            self.over = True
            event_payloads.remove(_END)
        return event_payloads


def require_engine(message: str) -> None:
    """Raise ConnectionError if an error message means that the server's engine is dead."""
    if _DEAD in message:
        raise ConnectionError(f"its engine is dead: {message}")


def message_of(answer: bytes) -> str:
    """Extract the message from an error response's body."""
    try:
        body = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return answer[:300].decode(errors="replace").strip()
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        body = error.get("message", error) if isinstance(error, dict) else error
    return str(body)[:500]
