"""The endpoint's HTTP: methods, hosts, encodings, keys, and connections beyond the files that a process may open."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from endpoint_server import BODY, CALL, TOOLS, Served, served
from tiny_run import HERE

from headway.generator.endpoint.api_keys import ApiKeys
from headway.runtime.addresses import is_loopback_host, read_keys


def play(test: Callable[[Served], Awaitable[Any]], says: str = "hello", **keys: Any) -> Any:
    async def main() -> Any:
        async with served(says, **keys) as server:
            return await test(server)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/openapi.json",
        "/v1/models",
        "/v1/models/headway",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/rollouts/7-0/reward",
    ],
)
def test_head_of_any_route_is_answered_without_a_body(path: str) -> None:
    async def test(server: Served) -> None:
        status, _, body = await server.raw(path, None, method="HEAD")
        assert (status, body) == (200, b"")
        status, _, body = await server.raw(f"{path}/none", None, method="HEAD")
        assert (status, body) == (404, b"") or path.startswith("/v1/models")

    play(test)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.7", "[fe80::1]:80"]
)
def test_other_hosts_names_are_refused_on_loopback(host: str) -> None:
    async def test(server: Served) -> None:
        status, _, body = await server.post("/v1/chat/completions", BODY, headers={"host": host})
        assert status == 421
        assert host in body["error"]["message"]
        assert not server.engine.asked

    play(test)


def test_own_hosts_names_are_served() -> None:
    hosts = (
        "localhost",
        "localhost:8000",
        "LOCALHOST",
        "127.0.0.1",
        "127.8.8.8:1",
        "[::1]:8000",
        "a.localhost:3",
        "localhost.",
    )
    assert all(map(is_loopback_host, hosts))
    assert not any(map(is_loopback_host, ("", "local", "xlocalhost", "127.0.0.1@evil.example", "[::2]:80", "0.0.0.0")))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
def test_compressed_bodies_are_refused_by_name(coding: str) -> None:
    async def test(server: Served) -> None:
        data = gzip.compress(json.dumps(BODY).encode())
        status, _, body = await server.post("/v1/chat/completions", data, headers={"content-encoding": coding})
        assert status == 415
        assert coding in body["error"]["message"]
        status, _, _ = await server.post("/v1/chat/completions", BODY, headers={"content-encoding": "identity"})
        assert status == 200

    play(test)


@pytest.mark.parametrize("name", ["schlüssel-schlüssel", "ключ-ключ-ключ-ключ", "鍵" * 16])
def test_keys_beyond_ascii_are_compared_as_bytes(name: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf" + name.encode() + b"\n")
    keys = ApiKeys(read_keys(str(file), "--keys"))

    async def test(server: Served) -> None:
        server.sessions.session = lambda key, name="": keys.require(key) or server.session  # type: ignore[method-assign]
        assert (await server.post("/v1/chat/completions", BODY, key=name))[0] == 200
        assert (await server.post("/v1/chat/completions", BODY, key="x" + name))[0] == 401
        assert (await server.post("/v1/messages", {**BODY, "max_tokens": 3}, key="", headers={"x-api-key": name}))[
            0
        ] == 200

    play(test)


def nested(depth: int, name: str = "properties") -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", name: {"a": found}}
    return found


@pytest.mark.parametrize("depth", [150, 400, 450])
@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_deep_tools_are_refused(depth: int, route: str) -> None:
    function = {"name": "f", "parameters": nested(depth)}
    tools: Any = {
        "chat/completions": [{"type": "function", "function": function}],
        "responses": [{"type": "function", **function}],
        "messages": [{"name": "f", "input_schema": nested(depth)}],
    }

    async def test(server: Served) -> None:
        body = {"model": "headway", "messages": BODY["messages"], "input": "hi", "max_tokens": 4, "tools": tools[route]}
        status, _, answer = await server.post(f"/v1/{route}", body)
        assert status in ((200, 400) if depth < 400 else (400,))
        if status == 400:
            assert "nested" in answer["error"]["message"]
            assert "tools" in answer["error"]["message"]

    play(test, context_tokens=100_000)


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}])
@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_tools_without_parameters_take_none(parameters: Any, route: str) -> None:
    function = {"name": "now", "description": "d", **parameters}
    tool = {"type": "function", **function} if route == "responses" else {"type": "function", "function": function}

    async def test(server: Served) -> None:
        body = {"model": "headway", "messages": BODY["messages"], "input": "hi", "tools": [tool]}
        status, _, answer = await server.post(f"/v1/{route}", body)
        assert status == 200, answer
        prompt = server.engine.chat.tokenizer.decode(server.engine.asked[0].prompt_ids, keep_special=True)
        assert '"parameters": {"type": "object", "properties": {}}' in prompt

    play(test)


def test_call_ids_of_two_sessions_differ() -> None:
    async def test(server: Served) -> None:
        other = server.open("8-0")
        ids = [
            answer["choices"][0]["message"]["tool_calls"][0]["id"]
            for key in (server.session.key, other.key)
            for _, _, answer in [await server.post("/v1/chat/completions", {**BODY, "tools": TOOLS}, key=key)]
        ]
        assert len(set(ids)) == 2

    play(test, CALL)


_CROWD = """
import asyncio, resource, sys
sys.path[:0] = [{support!r}, {root!r}]
from endpoint_server import BODY, served
async def crowd():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    async with served(connections=4096) as server:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        script = (
            "import resource,socket,sys\\nresource.setrlimit(resource.RLIMIT_NOFILE,(999,999))\\n"
            "all=[socket.create_connection((%r,%s)) for _ in range(400)]\\n"
            "print('open',flush=True)\\nsys.stdin.read()" % (host, port)
        )
        idle = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=-1, stdout=-1)
        await idle.stdout.readline()
        for _ in range(5):
            async with asyncio.timeout(10):
                status, _, _ = await server.post("/v1/chat/completions", BODY)
            assert status == 200
        idle.stdin.close()
        await idle.wait()
asyncio.run(crowd())
"""


@pytest.mark.slow
def test_idle_connections_beyond_the_open_files_stop_no_answers() -> None:
    script = _CROWD.format(support=str(HERE), root=str(HERE.parents[1]))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, lines[:20]
    assert "4096 connections may be open" in lines[0]
    assert "200" in lines[0]
