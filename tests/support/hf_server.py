"""A server with the part of the Hugging Face hub's protocol that huggingface_hub downloads models by."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Repositories = dict[str, dict[str, Path]]  # name -> commit -> folder of its files; the last is main


class Hub:
    """Repositories, those that are gated, and the requests that came."""

    def __init__(self, repositories: Repositories, gated: tuple[str, ...] = ()) -> None:
        self.repositories, self.gated = repositories, gated
        self.requests: list[str] = []
        self.address = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.requests.append(path)
            if path.startswith("api/models/"):
                owner, name, *rest = path.removeprefix("api/models/").split("/")
                return self._api(f"{owner}/{name}", rest)
            owner, name, _, revision, *file = path.split("/")
            commits = hub.repositories.get(f"{owner}/{name}", {})
            content = commits[revision].joinpath(*file) if revision in commits else None
            if content is None or not content.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            data = content.read_bytes()
            etag = hashlib.sha1(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": revision})

        def _api(self, name: str, rest: list[str]) -> None:
            if name in hub.gated:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            commits = hub.repositories.get(name)
            if commits is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            revision = rest[1] if len(rest) > 1 else "main"
            commit = [*commits][-1] if revision == "main" else revision
            if commit not in commits:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = sorted(
                str(file.relative_to(commits[commit])) for file in commits[commit].rglob("*") if file.is_file()
            )
            if rest[:1] == ["tree"]:
                listed = [{"type": "file", "path": file, "oid": "0" * 40, "size": 1} for file in files]
                return self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
            body = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files], "private": False}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
