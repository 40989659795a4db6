"""An HTTP server on this machine that speaks OpenAI's chat completions, as a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], Any]  # status, headers, body


class Endpoint(ThreadingHTTPServer):
    """Chat completions as ``answer`` gives them; remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.answer: Callable[[dict[str, Any]], Reply | str | None] = lambda body: "Score: 5"
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.open = self.most_open = 0


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        endpoint = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with endpoint.lock:
            endpoint.asked.append((self.path, dict(self.headers), body))
            endpoint.open += 1
            endpoint.most_open = max(endpoint.most_open, endpoint.open)
        try:
            found = endpoint.answer(body)
        finally:
            with endpoint.lock:
                endpoint.open -= 1
        if found is None:
            self.connection.close()  # in the middle of it
            return
        status, headers, content = (200, {}, completion(found)) if isinstance(found, str) else found
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing on the test's output."""


def completion(text: str, prompt_tokens: int = 100, completion_tokens: int = 10) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def serving() -> Iterator[Endpoint]:
    """For a fixture."""
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
