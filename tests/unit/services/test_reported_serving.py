"""Names of sessions and keys as clients of `headway serve` send them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from endpoint_server import BODY, chat, request
from test_serving import sessions

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.app import App
from headway.generator.endpoint.server import serving
from headway.runtime.addresses import read_keys
from headway.runtime.clock import RealClock

KEY = "k" * 20


def status_of(headers: dict[str, bytes], keys: tuple[str, ...] = (), path: str = "/v1/models") -> int:
    async def main() -> int:
        access, _ = sessions(RealClock(), keys)
        settings = EndpointConfig()
        async with serving(App(access, chat(), settings, "models/tiny", 1000), settings) as address:
            host, _, port = address.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            given = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers.items())
            head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n".encode()
            writer.write(head + given + b"\r\n")
            answer = await reader.read()
            writer.close()
            return int(answer.split()[1])

    return asyncio.run(main())


@pytest.mark.parametrize("length", [257, 300, 1000, 5000])
@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["open", "with keys"])
def test_the_name_of_a_session_that_is_too_long_is_a_mistake_of_the_request(length: int, keys: tuple[str, ...]) -> None:
    async def main() -> int:
        access, _ = sessions(RealClock(), keys)
        settings = EndpointConfig()
        async with serving(App(access, chat(), settings, "models/tiny", 1000), settings) as address:
            headers = {"authorization": f"Bearer {KEY}", "x-session-id": "s" * length}
            status, _, _ = await request(address, "POST", "/v1/chat/completions", json.dumps(BODY).encode(), headers)
            return status

    assert asyncio.run(main()) == 400


@pytest.mark.parametrize(
    "key",
    ["schlüssel-schlüssel-schlüssel", "鍵" * 20, "naïve" * 6, "🔑" * 16],
    ids=["German", "Chinese", "French", "pictures"],
)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_keys_of_other_letters_match(key: str, header: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(key + "\n", encoding="utf-8")
    keys = read_keys(str(file), "--keys")
    value = key.encode() if header == "x-api-key" else b"Bearer " + key.encode()
    assert status_of({header: value}, keys) == 200
    assert status_of({header: value + b"x"}, keys) == 401


def test_plain_keys_match_as_ever() -> None:
    assert status_of({"authorization": f"Bearer {KEY}".encode()}, (KEY,)) == 200
    assert status_of({"authorization": b"Bearer wrong"}, (KEY,)) == 401
    assert status_of({}, (KEY,)) == 401
