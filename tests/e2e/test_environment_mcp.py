"""Servers of tools over stdio and HTTP: what the model is told, what fails a rollout, what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from environment_player import Player, asked_tools, call, played, rollout, service, spelled_call, workers
from odd_tool_servers import STRICT, odd
from packages import needs

from headway.config.tool_servers import ToolServerConfig
from headway.records.errors import ConfigurationError
from headway.rollout.environment import Environment
from headway.rollout.hosting.agents.host import MARK
from headway.rollout.hosting.mcp.servers import SharedConnection
from headway.runtime.clock import RealClock

needs("mcp", "mcp isn't installed: pip install 'headway[mcp]'")
pytestmark = pytest.mark.real

SERVER = str(Path(__file__).parents[1] / "support" / "tools_server.py")
COMMAND = [sys.executable, SERVER]


class Plain(Environment):
    """No tools of its own."""


class Adder(Environment):
    def tools(self) -> Any:
        return (self.add,)

    def add(self, a: int) -> int:
        """Add one."""
        return a + 1


@pytest.fixture(autouse=True)
def small_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._RESULT_BYTES", 200_000)


def server(**settings: Any) -> dict[str, Any]:
    return {"name": "here", "command": COMMAND, **settings}


async def started(*servers: dict[str, Any], name: str = "test_environment_mcp:Plain", **settings: Any) -> Any:
    episodes = service(name=name, mcp=servers or (server(),), **settings)
    try:
        await episodes.start()
    except ConfigurationError:
        await episodes.shut_down()
        raise
    return episodes


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """It has been killed, and so ends."""
    for _ in range(20):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def address() -> Iterator[tuple[str, Any]]:
    """One over HTTP, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def asks(episodes_of: Any, *calls: tuple[str, str]) -> list[str]:
    """What the model is told of each call."""

    async def main() -> list[str]:
        episodes = await episodes_of()
        player = Player(episodes)
        await player.begin()
        try:
            return [await player.answer(call(*one)) for one in calls]
        finally:
            await episodes.end(player.name)
            await episodes.shut_down()

    return played(main)


CALLS = (("add", '{"a": 2, "b": 3}'), ("add", '{"a": "two"}'), ("broken", "{}"), ("add", "[1]"), ("no", "{}"))


def check_told(said: list[str]) -> None:
    assert said[0] == "5"
    assert said[1].startswith("error: ")
    assert "out of order" in said[2]
    assert said[3] == "error: the arguments must be a JSON object"
    assert "there is no tool 'no'; valid: add, note" in said[4]


def test_what_is_told_over_stdio() -> None:
    check_told(asks(started, *CALLS))


def test_what_is_told_over_http(address: tuple[str, Any]) -> None:
    check_told(asks(lambda: started({"name": "there", "url": address[0]}), *CALLS))


def test_a_rollout_in_a_worker_calls_them() -> None:
    def says(prompt: str) -> str:
        return "it is 5" if "tool_response" in prompt else spelled_call("add", '{"a": 2, "b": 3}')

    async def main() -> Any:
        async with workers(name="python_tool", mcp=[server(tools=["add"])]) as pool:
            return await rollout(pool, says)

    made = played(main)
    assert made.failure is None, made.failure
    assert made.turns == 2


def test_only_those_that_are_allowed() -> None:
    async def main() -> Any:
        episodes = await started(server(tools=["note", "add"]))
        player = Player(episodes)
        await player.begin()
        await episodes.shut_down()
        return asked_tools(player.last.asked)

    assert played(main) == ["note", "add"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "name", "what"),
    [
        ([server()], "Adder", "two tools are called add"),
        ([server(), server(name="other")], "Plain", "two tools are called add"),
        ([server(tools=["subtract"])], "Plain", "has no tool 'subtract'; valid: add"),
        ([server(command=["/no/such/program"])], "Plain", "here can't be had: FileNotFoundError"),
        ([server(command=["true"])], "Plain", "here can't be had"),
        ([server(variables={"LATE": "3"})], "Plain", "did not start within"),
        ([server(passes=["NO_SUCH_VARIABLE"])], "Plain", "no NO_SUCH_VARIABLE"),
        ([{"name": "there", "url": "http://127.0.0.1:9/mcp"}], "Plain", "there can't be had"),
    ],
)
def test_what_is_wrong_is_known_before_the_run(
    servers: list[dict[str, Any]], name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "did not start within":
        monkeypatch.setattr("headway.rollout.hosting.mcp.servers._START_S", 0.5)

    async def main() -> Any:
        await started(*servers, name=f"test_environment_mcp:{name}")

    with pytest.raises(ConfigurationError, match=what):
        played(main)


def test_a_worker_says_what_is_wrong() -> None:
    async def main() -> None:
        async with workers(name="python_tool", mcp=[server(tools=["subtract"])]):
            pass

    with pytest.raises(ConfigurationError, match="has no tool 'subtract'"):
        played(main)


def test_nothing_of_the_environment_reaches_it_unless_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    one = server(passes=["HF_TOKEN"], variables={"MODE": "fast"})
    [said] = asks(lambda: started(one), ("variables", "{}"))
    assert set(said.split()) - {"LC_CTYPE", MARK} == {"HF_TOKEN", "MODE", "PATH"}


def test_a_death_fails_its_rollout_as_infrastructure_and_the_next_has_another_server(monkeypatch: Any) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._STARTS_PER_MINUTE", 2)

    async def main() -> None:
        episodes = await started(server(timeout_s=5))
        failures = []
        for number in range(3):
            player = Player(episodes, name=f"7-{number}")
            await player.begin()
            await player.answer(call("dies", "{}"))
            failures.append(player.last.failure)
            await episodes.end(player.name)
        assert all(one is not None and one.infrastructure and one.boundary == "environment" for one in failures)
        assert "here failed" in failures[0].cause
        assert "started 2 times within a minute" in failures[2].cause
        await episodes.shut_down()

    played(main)


def test_an_error_that_a_server_answers_with_is_told_and_ends_nobody_elses_calls() -> None:
    one = {"name": "strict", "command": [sys.executable, "-c", STRICT], "timeout_s": 5}

    async def main() -> list[str]:
        episodes = await started(one)
        players = [Player(episodes, name=f"7-{number}") for number in range(2)]
        for player in players:
            await player.begin()
        waiting = asyncio.create_task(players[0].answer(call("divide", '{"by": 2}')))
        await asyncio.sleep(0.2)
        said = [await players[1].answer(call("divide", f'{{"by": 0, "code": {code}}}')) for code in (-32603, 7)]
        said += [await waiting, await players[1].answer(call("divide", '{"by": 2}'))]
        await episodes.shut_down()
        return said

    assert played(main) == ["error: division by zero", "error: division by zero", "done", "done"]


TOO_LONG, WELL = "error: its result is too long: ask for less", "well"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"how": "result first"}, TOO_LONG),
        ({"how": "id last"}, TOO_LONG),
        ({"how": "id first"}, TOO_LONG),
        ({"how": "version last"}, TOO_LONG),
        ({"how": "notification"}, "after it"),
        ({"how": "unknown type"}, "error: its result can't be read: content.0"),
        ({"how": "no content"}, "error: its result can't be read: content: "),
        ({"how": "null text"}, "error: its result can't be read: content.0"),
        ({"how": "no json"}, "error: its result can't be read"),
        ({"how": "code", "code": -32000}, "error: the shop is shut"),
        ({"how": "code", "code": -32001}, "error: the shop is shut"),
        ({"how": "code", "code": 404}, "error: the shop is shut"),
        ({"how": "half"}, "a\ufffdb \U0001f600"),
        ({"how": "escaped"}, "a\\ud800b"),
        ({"how": "bytes"}, "a\ufffdb"),
    ],
    ids=str,
)
def test_one_bad_result_takes_no_connection(how: dict[str, Any], told: str) -> None:
    started_s = time.monotonic()
    calls = (("do", json.dumps(how)), ("do", '{"how": "child"}'), ("do", '{"how": "well"}'))
    said = asks(lambda: started(odd()), *calls)
    assert said[0].startswith(told)
    assert said[1].isdecimal(), "the same server"
    assert said[2] == WELL
    assert time.monotonic() - started_s < 8, "nobody waited for a time limit"
    assert gone(int(said[1])), "what it has started in a session of its own ends with it"


def test_what_a_server_that_died_has_started_ends_too() -> None:
    async def main() -> int:
        episodes = await started(odd())
        player = Player(episodes)
        await player.begin()
        pid = int(await player.answer(call("do", '{"how": "child"}')))
        await player.answer(call("do", '{"how": "dies"}'))
        assert player.last.failure is not None
        assert player.last.failure.infrastructure
        await episodes.shut_down()
        return pid

    assert gone(played(main))


@pytest.mark.parametrize(
    ("seconds", "message"),
    [("1e-9", "its list of tools has no end: 1000 pages, 1000 tools"), ("0.1", r"takes longer than 0\.5 s")],
)
def test_a_list_of_tools_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, seconds: str, message: str) -> None:
    if seconds == "0.1":  # for each page
        monkeypatch.setattr("headway.rollout.hosting.mcp.servers._START_S", 0.5)

    async def main() -> None:
        await started(odd(variables={"ENDLESS": seconds}))

    with pytest.raises(ConfigurationError, match=message):
        played(main)


def test_whoever_gives_up_waiting_for_a_server_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._STARTS_PER_MINUTE", 1)
    shared = SharedConnection(ToolServerConfig.model_validate(server(variables={"LATE": "0.5"})), RealClock())

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await shared.connection()
        assert not (await shared.connection()).down
        await shared.stop()

    played(main)


def test_more_starts_than_a_minute_may_have_wait_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._STARTS_PER_MINUTE", 1)

    class Clock(RealClock):
        slept: ClassVar[list[float]] = []

        async def sleep(self, seconds: float) -> None:
            self.slept.append(seconds)

    shared = SharedConnection(ToolServerConfig.model_validate(server()), Clock())

    async def main() -> None:
        first = await shared.connection()
        await first.stop()
        assert not (await shared.connection()).down
        first_s, second_s = Clock.slept
        assert first_s < 1
        assert 30 < second_s <= 60  # a minute, less what the first took to start and stop
        await shared.stop()

    played(main)


@pytest.mark.slow
def test_a_slow_tool_is_told_and_a_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._ALIVE_S", 2.0)

    async def main() -> None:
        episodes = await started(server(timeout_s=0.5))
        player = Player(episodes)
        await player.begin()
        assert await player.answer(call("slow", "{}")) == "error: slow did not answer within 0.5 s"
        pid = int(await player.answer(call("pid", "{}")))
        await player.answer(call("hangs", "{}"))
        assert player.last.failure is not None
        assert player.last.failure.infrastructure
        other = Player(episodes, name="7-1")
        await other.begin()
        assert int(await other.answer(call("pid", "{}"))) != pid
        await episodes.shut_down()
        assert not alive(pid)

    played(main)


def test_huge_results_are_shortened_or_refused() -> None:
    one = server()
    calls = [("long", '{"characters": 50000}'), ("long", '{"characters": 5000000}'), ("add", '{"a": 1, "b": 1}')]
    said = asks(lambda: started(one, tool_result_characters=1000), *calls)
    assert 1000 < len(said[0]) < 1100
    assert "characters left out" in said[0]
    assert said[1] == "error: its result is too long: ask for less"
    assert said[2] == "2"


def test_huge_results_over_http_are_refused_too(address: tuple[str, Any]) -> None:
    one = {"name": "there", "url": address[0]}
    calls = [("long", '{"characters": 5000000}'), ("add", '{"a": 1, "b": 1}'), ("long", '{"characters": 5000}')]
    said = asks(lambda: started(one), *calls)
    assert said[0] == "error: its result can't be read, or is too long: ask for less"
    assert said[1] == "2"
    assert len(said[2]) == 5000


@pytest.mark.parametrize(("status", "told"), [(503, False), (500, True)])
def test_what_stands_before_a_server_and_says_there_is_none_isnt_told(
    address: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, status: int, told: bool
) -> None:
    httpx = pytest.importorskip("httpx2")
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def gateway(self: Any, request: Any) -> Any:
        if b'"tools/call"' in request.content:
            return httpx.Response(status, content=b"<html>no</html>", request=request)
        return await send(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", gateway)

    async def main() -> None:
        episodes = await started({"name": "there", "url": address[0]})
        player = Player(episodes)
        await player.begin()
        said = await player.answer(call("add", '{"a": 1, "b": 1}'))
        assert said.startswith("error: ") == told
        assert (player.last.failure is not None and player.last.failure.infrastructure) == (not told)
        await episodes.shut_down()

    played(main)


@pytest.mark.parametrize("events", [False, True])
def test_halves_of_surrogate_pairs_over_http(
    address: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, events: bool
) -> None:
    httpx = pytest.importorskip("httpx2")
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def odd_one(self: Any, request: Any) -> Any:
        if b'"tools/call"' not in request.content:
            return await send(self, request)
        text = {"type": "text", "text": "a\ud800b \U0001f600"}
        answer = {
            "jsonrpc": "2.0",
            "id": json.loads(request.content)["id"],
            "result": {"content": [text], "structuredContent": {"result": "a"}, "resultType": "complete"},
        }
        body = json.dumps(answer).encode()
        kind, body = ("text/event-stream", b"data: " + body + b"\n\n") if events else ("application/json", body)
        return httpx.Response(200, headers={"content-type": kind}, stream=httpx.ByteStream(body), request=request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", odd_one)
    said = asks(lambda: started({"name": "there", "url": address[0]}), ("broken", "{}"))
    assert said == ["a\ufffdb \U0001f600"]


@pytest.mark.slow
def test_a_server_of_its_own_for_each_rollout() -> None:
    async def main() -> None:
        episodes = await started(server(per="episode"))
        one, other = Player(episodes, name="7-0"), Player(episodes, name="7-1")
        for player in (one, other):
            await player.begin()
        assert await one.answer(call("note", '{"text": "a"}')) == "a"
        assert await other.answer(call("note", '{"text": "b"}')) == "b"
        assert await one.answer(call("note", '{"text": "c"}')) == "a c"
        pids = [int(await player.answer(call("pid", "{}"))) for player in (one, other)]
        elsewhere = await started(server(per="episode"))
        failure = await one.moved(elsewhere)
        assert failure.infrastructure
        assert "its server here was lost" in failure.cause
        await episodes.end("7-0")
        assert [alive(pid) for pid in pids] == [False, True]
        await other.answer(call("dies", "{}"))
        assert other.last.failure is not None
        await episodes.shut_down()
        await elsewhere.shut_down()
        assert not any(alive(pid) for pid in pids)

    played(main)


def test_a_shared_one_is_there_after_a_move() -> None:
    async def main() -> None:
        episodes, elsewhere = await started(), await started()
        player = Player(episodes)
        await player.begin()
        await player.answer(call("add", '{"a": 1, "b": 1}'))
        assert await player.moved(elsewhere) is None
        assert await player.answer(call("add", '{"a": 1, "b": 2}')) == "3"
        await asyncio.gather(episodes.shut_down(), elsewhere.shut_down())

    played(main)


def test_a_server_over_http_that_dies(address: tuple[str, Any]) -> None:
    url, process = address

    async def main() -> None:
        episodes = await started({"name": "there", "url": url})
        player = Player(episodes)
        await player.begin()
        process.kill()
        process.wait()
        await player.answer(call("add", '{"a": 1, "b": 1}'))
        assert player.last.failure is not None
        assert player.last.failure.infrastructure, player.last.failure
        await episodes.shut_down()

    played(main)


def test_the_key_of_one_over_http(monkeypatch: pytest.MonkeyPatch, address: tuple[str, Any]) -> None:
    there = {"name": "there", "url": address[0], "api_key_env": "TOOLS_KEY"}
    with pytest.raises(ConfigurationError, match="TOOLS_KEY"):
        played(lambda: started(there))
    monkeypatch.setenv("TOOLS_KEY", "open")
    assert asks(lambda: started(there), CALLS[0]) == ["5"]
    assert "TOOLS_KEY" in os.environ
