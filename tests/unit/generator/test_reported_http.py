"""HTTP as strangers speak it: HEAD, hosts, encodings, more connections than files."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from endpoint_server import Served, request
from test_reported_endpoint import BODIES, CHAT, MESSAGES, play


@pytest.mark.parametrize("path", ["/", "/health", "/openapi.json", "/v1/models", "/v1/models/headway"])
def test_head_is_get_without_a_body(path: str) -> None:
    async def test(server: Served) -> None:
        status, headers, body = await server.raw(path, None, method="HEAD")
        assert (status, body) == (200, b"")
        assert (await server.raw(path, None, method="GET"))[0] == 200
        assert "content-type" in headers

    play(test)


def test_head_of_no_route_is_not_found() -> None:
    async def test(server: Served) -> None:
        assert (await server.raw("/v1/nothing", None, method="HEAD"))[0] == 404

    play(test)


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("evil.example", False),
        ("evil.example:80", False),
        ("rebound.attacker.test:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost", True),
        ("localhost:1234", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
    ],
)
def test_hosts_of_others_are_refused_on_loopback(host: str, right: bool) -> None:
    async def test(server: Served) -> None:
        status, _, _ = await server.post(CHAT, BODIES[CHAT], headers={"host": host})
        assert (status == 200) if right else (status in (403, 421)), status

    play(test)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_encoded_bodies_are_refused_by_name(encoding: str, path: str) -> None:
    plain = json.dumps(BODIES[path]).encode()
    data = zlib.compress(plain) if encoding == "deflate" else gzip.compress(plain)

    async def test(server: Served) -> None:
        status, _, _ = await server.post(path, data, headers={"content-encoding": encoding})
        assert status == 415

    play(test)


def test_a_body_that_says_it_is_plain_is_read() -> None:
    async def test(server: Served) -> None:
        assert (await server.post(CHAT, BODIES[CHAT], headers={"content-encoding": "identity"}))[0] == 200

    play(test)


SERVING = """
import asyncio, resource, sys
sys.path[:0] = sys.argv[2:]
from endpoint_server import served
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
async def main():
    async with served() as server:
        print(server.address, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("files", [100, 200, 256, 300])
def test_more_idle_connections_than_files_are_closed_and_fill_no_log(files: int, tmp_path: Path) -> None:
    said, tests = tmp_path / "said", Path(__file__).parents[2]
    with said.open("wb") as log:
        argv = [sys.executable, "-c", SERVING, str(files), str(tests / "support"), str(tests.parent)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log)
    held = list[socket.socket]()
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        host, _, port = address.removeprefix("http://").rpartition(":")
        for _ in range(2 * files):
            held.append(socket.create_connection((host, int(port)), 5))
        late = socket.create_connection((host, int(port)), 5)
        held.append(late)
        late.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        try:
            answered = late.recv(100)  # b"": closed
        except ConnectionError:
            answered = b""
        assert answered == b"" or answered.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503"))
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert held[0].recv(100).startswith(b"HTTP/1.1 200")
        for one in held:
            one.close()
        status = asyncio.run(request(address, "GET", "/health", b"", {}))[0]
        assert status == 200
    finally:
        process.kill()
        process.communicate()
    lines = said.read_text().splitlines()
    assert (lines.count("Traceback (most recent call last):"), len(lines) <= 5) == (0, True), lines[:10]
