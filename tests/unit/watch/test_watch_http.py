"""The HTTP side of `headway watch`: routes, who is let in, answers shared by viewers, streams, the server's end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from synthetic_run import step_record, synthetic_lines, write_run

from headway.cli.main import main as headway
from headway.config.endpoint import EndpointConfig
from headway.records.errors import ConfigurationError
from headway.report.watch.watched_runs import WatchedRuns
from headway.runtime.clock import run_virtual
from headway.services.watch import stream
from headway.services.watch.app import PageSettings, WatchApp, watch
from headway.services.watch.stream import SharedAnswers, changes

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"
KEY = "a-key-of-enough-characters"
LIMIT_S = 30.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(RECORDED / "ended", tmp_path / "runs" / "ended")
    write_run(tmp_path / "runs" / "group" / "long", synthetic_lines(60))
    return tmp_path / "runs"


class Client:
    """An HTTP client of an application in this process, without a server."""

    def __init__(self, app: WatchApp, base_url: str, runner: asyncio.Runner) -> None:
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)
        self._runner = runner

    @property
    def cookies(self) -> httpx.Cookies:
        return self._client.cookies

    def request(self, method: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self._runner.run(self._client.request(method, path, headers=headers))

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, headers)


Connect = Callable[..., Client]


@pytest.fixture
def connect(runs: Path) -> Iterator[Connect]:
    watched, answers = WatchedRuns([runs], 2.5), SharedAnswers()

    def client(*keys: str, base_url: str = "http://127.0.0.1:8060") -> Client:
        return Client(WatchApp(watched, answers, asyncio.Event(), EndpointConfig(), keys), base_url, runner)

    with asyncio.Runner() as runner:
        yield client
    watched.close()
    answers.close()


@pytest.fixture
def client(connect: Connect) -> Client:
    return connect()


ROUTES = (
    *("runs", "now", "names", "series?names=reward/mean&axis=hours", "series?names=reward/mean&points=7", "events"),
    *("events?after=3", "logs", "config", "rollouts", "rollouts?solved=true&limit=3&text=1", "tasks?bins=4", "lanes"),
    *("lanes/window?from_s=1&to_s=2&tracks=0,1", "compare?axis=dollars&names=reward/mean", "same_task?task=1"),
)


@pytest.mark.parametrize("run", ["ended", "group/long"])
@pytest.mark.parametrize("route", ROUTES)
def test_routes_answer_in_json(client: Client, run: str, route: str) -> None:
    name = "runs" if route.startswith(("compare", "same_task")) else "run"
    answer = client.get(f"/api/{route}{'&' if '?' in route else '?'}{name}={run}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    found = json.loads(answer.text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert "error" not in found


REFUSED = {
    "now": (400, "run: Field required"),
    "now?run=nowhere": (404, "run = 'nowhere': no such run is watched; valid: ended, group/long"),
    "now?run=../runs/ended": (404, "no such run"),
    "stream?run=nowhere": (404, "no such run"),
    "series?run=ended&names=nonsense": (400, "names = 'nonsense': valid: control/"),
    "series?run=ended&axis=furlongs": (400, "axis = 'furlongs': valid: steps, samples, tokens, hours, dollars"),
    "series?run=ended&points=x": (400, "points: Input should be a valid integer"),
    "series?run=ended&points=1": (400, "points = 1: valid: 2 to 10000"),
    "log?run=ended&name=../config.json": (400, "name = '../config.json': valid: there are no logs"),
    "compare?runs=": (400, "runs = 0: valid: 1 to 16"),
    "compare?runs=ended,nowhere": (404, "no such run"),
    "rollout?run=ended&row=1000000": (400, "row = 1000000"),
    "rollout?run=ended&row=-1&limit=100000": (400, "limit = 100000: valid: 1 to 20000"),
    "rollouts?run=ended&order=random": (400, "order: Input should be 'newest'"),
    "tasks?run=ended&bins=0": (400, "bins = 0: valid: 1 to 500"),
    "lanes/window?run=ended&from_s=2&to_s=1": (400, "from_s"),
    "lanes/window?run=ended&from_s=1&to_s=2&tracks=x": (400, "tracks = 'x'"),
    "nothing": (404, "Not Found"),
}


@pytest.mark.parametrize("route", REFUSED)
def test_bad_requests_are_refused_in_words(client: Client, route: str) -> None:
    status, words = REFUSED[route]
    answer = client.get(f"/api/{route}")
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]


def test_a_defect_is_an_answer_too(client: Client, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedRuns, "listing", lambda self: 1 / 0)
    answer = client.get("/api/runs")
    assert (answer.status_code, answer.json()) == (500, {"error": "ZeroDivisionError: division by zero"})
    assert answer.headers["x-content-type-options"] == "nosniff"


# --- who is let in ---------------------------------------------------------------------------------------


def test_headers_of_every_answer(connect: Connect) -> None:
    for client, path, cached in (
        (connect(), "/", "no-cache"),
        (connect(), "/app.js", "no-cache"),
        (connect(), "/api/runs", "no-store"),
        (connect(), "/api/nothing", "no-store"),
        (connect(base_url="http://evil.example"), "/", "no-cache"),
        (connect(KEY), "/api/runs", "no-store"),
    ):
        headers = client.get(path).headers
        assert headers["cache-control"] == cached, path
        assert headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "access-control-allow-origin" not in headers


def test_only_reading_is_answered(client: Client) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = client.request(method, "/api/runs")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert client.request("HEAD", "/").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(host, 200) for host in ("127.0.0.1:8060", "localhost:1", "localhost", "127.0.0.1", "[::1]:8060", "[::1]")],
        *[
            (host, 421)
            for host in ("evil.example", "evil.example:8060", "127.0.0.1.evil.example", "192.168.0.1", "", ":")
        ],
    ],
)
def test_without_keys_the_host_must_be_this_machine(client: Client, host: str, status: int) -> None:
    assert client.get("/api/health", headers={"host": host}).status_code == status


def test_with_keys_each_request_needs_one(connect: Connect) -> None:
    client = connect("another-key-of-enough", KEY, base_url="http://trainer.example:8060")
    for path in ("/", "/app.js", "/api/runs", "/api/stream", "/api/health"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
    for wrong in (f"Bearer {KEY[:-1]}", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY} x"):
        assert client.get("/api/runs", headers={"authorization": wrong}).status_code == 401, wrong
    assert client.get("/api/runs", headers={"authorization": f"bearer {KEY}"}).status_code == 200


def test_a_key_in_the_address_becomes_a_cookie(connect: Connect) -> None:
    client = connect(KEY)
    answer = client.get(f"/?a=1&key={KEY}&b=%26")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?a=1&b=%26")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert KEY not in cookie
    assert client.get("/api/runs").status_code == 200
    assert client.get("/api/runs?key=wrong").status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
    other = connect(KEY)  # a server that was started anew doesn't know the cookie
    other.cookies.update(client.cookies)
    assert other.get("/api/runs").status_code == 401
    assert connect(KEY).get("/api/runs", headers={"cookie": cookie.replace("=", "=0", 1)}).status_code == 401
    for path in ("//evil.example/", "/%5Cevil.example", "//evil.example/%2e%2e"):
        place = connect(KEY).get(f"http://127.0.0.1:8060{path}?key={KEY}").headers["location"]
        assert place.startswith("/"), place
        assert not place.startswith(("//", "/\\")), place


def test_static_files_are_asked_for_again_only_when_they_changed(client: Client) -> None:
    first = client.get("/app.js")
    assert client.get("/app.js", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    for path in ("/../access.py", "/..%2f..%2faccess.py", "/views/../../access.py", "/%00", "/views/"):
        assert client.get(path).status_code in (400, 404), path


# --- shared answers and streams --------------------------------------------------------------------------


def test_what_twenty_ask_at_once_is_made_once() -> None:
    made, go = list[int](), threading.Event()

    def make() -> dict[str, int]:
        assert go.wait(LIMIT_S)
        made.append(1)
        return {"n": len(made)}

    async def ask() -> list[bytes]:
        answers = SharedAnswers()
        waiting = [asyncio.ensure_future(answers.get("key", make)) for _ in range(20)]
        await asyncio.sleep(0)
        waiting[3].cancel()  # a viewer who leaves takes nobody's answer away
        go.set()
        bodies = await asyncio.gather(*waiting, return_exceptions=True)
        bodies.append(await answers.get("key", make))  # fresh still
        bodies.append(await answers.get("other", make))
        answers.close()
        return bodies

    bodies = asyncio.run(ask())
    assert isinstance(bodies.pop(3), asyncio.CancelledError)
    assert bodies == [b'{"n":1}'] * 20 + [b'{"n":2}']


def test_a_stale_answer_is_made_again_when_its_files_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FRESH_S", -1.0)
    made, stamp = list[int](), ["a"]

    def make() -> int:
        made.append(1)
        return len(made)

    async def ask() -> list[bytes]:
        answers = SharedAnswers()
        bodies = [await answers.get("key", make, lambda: stamp[0]) for _ in range(3)]
        stamp[0] = "b"
        bodies.append(await answers.get("key", make, lambda: stamp[0]))
        bodies += [await answers.get("unstamped", make) for _ in range(2)]
        answers.close()
        return bodies

    assert asyncio.run(ask()) == [b"1", b"1", b"1", b"2", b"3", b"4"]


def test_an_error_reaches_all_who_asked_and_is_not_kept() -> None:
    tries = list[int]()

    def make() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ConfigurationError("not yet")
        return 7

    async def ask() -> list[Any]:
        answers = SharedAnswers()
        found = await asyncio.gather(*(answers.get("key", make) for _ in range(3)), return_exceptions=True)
        found.append(await answers.get("key", make))
        answers.close()
        return found

    *failed, body = asyncio.run(ask())
    assert [str(error) for error in failed] == ["not yet"] * 3
    assert body == b"7"


def test_kept_answers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_BYTES", 1000)

    async def ask() -> int:
        answers = SharedAnswers()
        for number in range(50):
            await answers.get(number, lambda: "x" * 98)
        answers.close()
        return len(answers._kept)

    assert asyncio.run(ask()) == 10


def test_streams_send_changes_and_else_a_heartbeat() -> None:
    async def listen() -> list[bytes]:
        stopped, bodies = asyncio.Event(), iter([b"1", b"1", b"2", *[b"2"] * 20, b"3"])

        async def get() -> bytes:
            body = next(bodies)
            if body == b"3":
                stopped.set()
            return body

        return [part async for part in changes("now", get, stopped)]

    sent = run_virtual(listen(), limit_s=60.0)
    assert sent == [
        b"event: now\ndata: 1\n\n",
        b"event: now\ndata: 2\n\n",
        b": nothing new\n\n",
        b"event: now\ndata: 3\n\n",
    ]


# --- the server ------------------------------------------------------------------------------------------


async def events_of(client: httpx.AsyncClient, address: str) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("GET", address) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_a_server_streams_a_run_and_ends_on_ctrl_c_with_viewers_connected(runs: Path) -> None:
    async def view() -> None:
        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(watch(PageSettings(roots=(str(runs),), port=0), ready.set_result))
        address = await ready
        async with httpx.AsyncClient(base_url=address, timeout=LIMIT_S) as client:
            now = events_of(client, "/api/stream?run=group/long")
            lists = events_of(client, "/api/stream")
            assert (await anext(now))["step"] == 60
            assert {run["id"] for run in (await anext(lists))["runs"]} == {"ended", "group/long"}
            with (runs / "group" / "long" / "ledger.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(step_record(60)) + b"\n")
            assert (await anext(now))["step"] == 61
            os.kill(os.getpid(), signal.SIGINT)
            assert [found async for found in now] == []
            await serving

    asyncio.run(asyncio.wait_for(view(), LIMIT_S))


def test_addresses_that_cannot_be_served_are_refused_in_words(runs: Path, tmp_path: Path) -> None:
    def refused(**settings: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            asyncio.run(watch(PageSettings(roots=(str(runs),), **settings), print))
        return str(error.value)

    assert "--host 0.0.0.0: other machines can reach it" in refused(host="0.0.0.0", port=0)
    assert "No such file" in refused(key_file=str(tmp_path / "keys"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Address already in use" in refused(port=taken.getsockname()[1])


def test_command_refuses_what_is_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert headway(["watch", str(tmp_path / "nowhere"), "--port", "0"]) == 2
    assert "no such folder" in capsys.readouterr().err
