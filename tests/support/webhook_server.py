"""A real HTTP server that alerts are posted to: it answers as told, slowly, or never."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """What it has received; ``answers`` are given in order, the last one for ever."""

    def __init__(self, answers: list[int], delay_s: float, location: str) -> None:
        self.answers, self.delay_s, self.location = answers, delay_s, location
        self.received: list[dict[str, Any]] = []
        self.port = 0
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/T0KEN-secret"


@contextmanager
def webhook(*answers: int, delay_s: float = 0.0, location: str = "") -> Iterator[Webhook]:
    state = Webhook(list(answers or (200,)), delay_s, location)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            state.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            state.ended.wait(state.delay_s)
            self.send_response(state.answers.pop(0) if len(state.answers) > 1 else state.answers[0])
            if state.location:
                self.send_header("Location", state.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        server.server_close()
