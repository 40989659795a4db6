"""An HTTP relay that doubles some requests and loses some replies, as networks and impatient clients do."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@contextmanager
def lossy_relay(port: int, seed: int, doubled: float = 0.1, lost: float = 0.1) -> Iterator[str]:
    """Relay to a port of this machine; yields its address. ``doubled``, ``lost``: shares of requests."""
    chance, counting = random.Random(seed), threading.Lock()

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with counting:
                drawn = chance.random()
            try:
                answer = self.ask(body)
                if drawn < doubled:
                    answer = self.ask(body)
            except (OSError, http.client.HTTPException):
                answer = None
            if answer is None or doubled <= drawn < doubled + lost:
                self.close_connection = True  # without a word
                return
            status, headers, content = answer
            self.send_response(status)
            for name, text in headers:
                if name.lower() not in _HOP:
                    self.send_header(name, text)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            headers = {name: text for name, text in self.headers.items() if name.lower() not in _HOP}
            try:
                connection.request(self.command, self.path, body, headers)
                reply = connection.getresponse()
                return reply.status, reply.getheaders(), reply.read()
            finally:
                connection.close()

        do_GET = do_POST = do_PUT = do_DELETE = relay

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None: ...  # a client that was killed

    with Server(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
