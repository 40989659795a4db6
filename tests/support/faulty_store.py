"""Stores of objects that fail: an HTTP server in this process, and moto's S3 server in one of its own."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpStore:
    """Serves PUT, HEAD, DELETE, and GET with ranges; ``fail_share`` of the answers are 503, some come late.
    ``redirects``: PUT is told to go elsewhere; ``has_lengths``: HEAD says how long an object is."""

    def __init__(self, fail_share: float = 0.0) -> None:
        self.objects: dict[str, bytes] = {}
        self.fail_share, self.requests = fail_share, 0
        self.redirects, self.has_lengths = False, True
        chances = random.Random(0)
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status: int, content: bytes = b"", length: int | None = None) -> None:
                self.send_response(status)
                if store.has_lengths or self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content) if length is None else length))
                self.end_headers()
                self.wfile.write(content)

            def handle_request(self) -> None:
                store.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if chances.random() < store.fail_share:
                    return self.answer(503)
                if chances.random() < store.fail_share:
                    time.sleep(0.02)
                if self.command == "PUT" and store.redirects:
                    return self.answer(307)
                if self.command == "PUT":
                    store.objects[self.path] = body
                    return self.answer(201)
                if (content := store.objects.get(self.path)) is None:
                    return self.answer(404)
                if self.command == "DELETE":
                    del store.objects[self.path]
                    return self.answer(204)
                if self.command == "HEAD":
                    return self.answer(200, length=len(content))
                bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                assert bounds is not None
                return self.answer(206, content[int(bounds[1]) : int(bounds[2]) + 1])

            do_GET = do_PUT = do_DELETE = do_HEAD = handle_request

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/run"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve_s3(port: int, fail_share: float) -> None:
    """Run moto's server; a share of the answers are 503, or come late."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application, chances = DomainDispatcherApplication(create_backend_app), random.Random(0)

    def faulty(environment: Any, start_response: Any) -> Any:
        if chances.random() < fail_share:
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        if chances.random() < fail_share:
            time.sleep(0.05)
        return application(environment, start_response)

    run_simple("127.0.0.1", port, faulty, threaded=True)


if __name__ == "__main__":
    serve_s3(int(sys.argv[1]), float(sys.argv[2]))
