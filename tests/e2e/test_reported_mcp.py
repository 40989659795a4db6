"""Servers of tools whose answers are odd: the model is told, and the connection stays for everybody's next call."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

import pytest
from environment_player import Player, call, played, service
from packages import needs
from test_environment_mcp import alive

from headway.records.errors import ConfigurationError

needs("mcp", "mcp isn't installed: pip install 'headway[mcp]'")
pytestmark = pytest.mark.real

SERVER = r"""
import json, os, subprocess, sys, time
pages = sys.argv[1]
def out(line): sys.stdout.write(line + "\n"); sys.stdout.flush()
def say(i, **said): out(json.dumps({"jsonrpc": "2.0", "id": i, **said}))
count = 0
for line in sys.stdin:
    told = json.loads(line)
    asked, i, method = told.get("params") or {}, told.get("id"), told["method"]
    if method == "initialize":
        say(i, result={"protocolVersion": asked["protocolVersion"], "capabilities": {"tools": {}},
                       "serverInfo": {"name": "odd", "version": "1"}})
    elif method == "tools/list":
        count += 1
        tool = {"name": "does" if count == 1 else f"does{count}", "inputSchema": {"type": "object"}}
        if pages == "one":
            say(i, result={"tools": [tool]})
        elif pages == "two":
            say(i, result={"tools": [tool]} | ({"nextCursor": "a"} if count == 1 else {}))
        elif pages == "the same":
            say(i, result={"tools": [tool], "nextCursor": "a"})
        elif pages == "another each time":
            say(i, result={"tools": [tool], "nextCursor": str(count)})
        elif pages == "empty":
            say(i, result={"tools": [], "nextCursor": str(count)})
        elif pages == "slow":
            time.sleep(0.3); say(i, result={"tools": [tool], "nextCursor": str(count)})
        elif pages == "long":
            say(i, result={"tools": [], "nextCursor": "c" * 1000 + str(count)})
    elif method == "tools/call":
        how = asked["arguments"]
        if "line" in how:
            out(how["line"].replace("@ID", json.dumps(i)).replace("@LONG", "x" * how.get("long", 0)))
        elif "child" in how:
            made = subprocess.Popen([sys.executable, "-c", how["child"]], stdout=subprocess.PIPE, text=True,
                                    start_new_session=how.get("session", False))
            say(i, result={"content": [{"type": "text", "text": made.stdout.readline().strip()}]})
        else:
            say(i, result={"content": [{"type": "text", "text": str(os.getpid())}]})
    elif i is not None:
        say(i, error={"code": -32601, "message": "no"})
"""


async def started(pages: str = "one", **settings: Any) -> Any:
    server = {"name": "odd", "command": [sys.executable, "-c", SERVER, pages], "timeout_s": 5, **settings}
    episodes = service(name="test_environment_mcp:Plain", mcp=[server])
    try:
        await episodes.start()
    except ConfigurationError:
        await episodes.shut_down()
        raise
    return episodes


@pytest.fixture(autouse=True)
def small_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._RESULT_BYTES", 100_000)


def asked(line: str, long: int = 0) -> tuple[str, Any, bool, float]:
    """(what the model is told, the rollout's failure, whether the same server answers the next call, seconds)."""

    async def main() -> tuple[str, Any, bool, float]:
        episodes = await started()
        player, other = Player(episodes), Player(episodes, name="7-1")
        await player.begin()
        await other.begin()
        try:
            pid = await other.answer(call("does", "{}"))
            began_s = time.monotonic()
            told = await player.answer(call("does", json.dumps({"line": line, "long": long})))
            took_s = time.monotonic() - began_s
            return told, player.last.failure, await other.answer(call("does", "{}")) == pid, took_s
        finally:
            await episodes.shut_down()

    return played(main)


TEXT = '"content":[{"type":"text","text":"@LONG"}]'
LONG = {
    "the result first": '{"result":{' + TEXT + '},"jsonrpc":"2.0","id":@ID}',
    "the id first": '{"id":@ID,"jsonrpc":"2.0","result":{' + TEXT + "}}",
    "the id last": '{"jsonrpc":"2.0","result":{' + TEXT + '},"id":@ID}',
    "the id behind the result": '{"result":{' + TEXT + '},"id":@ID,"jsonrpc":"2.0"}',
    "blanks": '{ "jsonrpc" : "2.0" , "id" : @ID , "result" : {' + TEXT + "}}",
    "blanks and the result first": '{ "result" : {' + TEXT + '} , "jsonrpc" : "2.0" , "id" : @ID }',
    "another id inside": '{"result":{"id":99,' + TEXT + ',"_meta":{"id":98}},"jsonrpc":"2.0","id":@ID}',
    "as ever": '{"jsonrpc":"2.0","id":@ID,"result":{' + TEXT + "}}",
}


@pytest.mark.parametrize("line", LONG.values(), ids=LONG)
def test_a_result_that_is_too_long_is_told_whatever_its_order(line: str) -> None:
    told, failure, same, _ = asked(line, 300_000)
    assert (failure, same) == (None, True)
    assert told.startswith("error: ")
    assert "too long" in told


@pytest.mark.parametrize("code", [-32000, -32001, -32099, -32603, -32002, 0, 7, 2147483648])
def test_an_error_is_told_whatever_its_code(code: int) -> None:
    line = f'{{"jsonrpc":"2.0","id":@ID,"error":{{"code":{code},"message":"division by zero"}}}}'
    told, failure, same, _ = asked(line)
    assert (failure, same) == (None, True)
    assert told.startswith("error: ")
    assert "division by zero" in told


RESULTS = {
    "an unknown content": '{"content":[{"type":"video","data":"aGk=","mimeType":"video/mp4"}]}',
    "an unknown content beside a text": '{"content":[{"type":"text","text":"hi"},{"type":"hologram"}]}',
    "a content without a type": '{"content":[{"text":"hi"}]}',
    "a content that is a text": '{"content":"hi"}',
    "a number": "3",
    "nothing": "null",
    "a list": '[{"type":"text","text":"hi"}]',
    "a text that is a number": '{"content":[{"type":"text","text":3}]}',
    "a picture that isn't base64": '{"content":[{"type":"image","data":7,"mimeType":"image/png"}]}',
    "an unknown part of it": '{"content":[{"type":"text","text":"hi"}],"future":{"a":1}}',
    "no number": '{"content":[{"type":"text","text":"hi"}],"structuredContent":{"x":NaN}}',
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_that_isnt_understood_is_told(result: str) -> None:
    told, failure, same, took_s = asked('{"jsonrpc":"2.0","id":@ID,"result":' + result + "}")
    assert (failure, same) == (None, True)
    assert told
    assert took_s < 3, "it isn't waited for"


SURROGATES = {
    "in a text": '{"content":[{"type":"text","text":"a\\ud800b"}]}',
    "a low one": '{"content":[{"type":"text","text":"a\\udfffb"}]}',
    "two high ones": '{"content":[{"type":"text","text":"a\\ud83d\\ud83db"}]}',
    "at the end": '{"content":[{"type":"text","text":"ab\\udbff"}]}',
    "in one of two": '{"content":[{"type":"text","text":"a"},{"type":"text","text":"\\ud800b"}]}',
}


@pytest.mark.parametrize("result", SURROGATES.values(), ids=SURROGATES)
def test_half_a_character_is_told_as_a_replacement(result: str) -> None:
    told, failure, same, took_s = asked('{"jsonrpc":"2.0","id":@ID,"result":' + result + "}")
    assert (failure, same) == (None, True)
    assert "\ufffd" in told
    assert "b" in told
    assert took_s < 3, "it isn't waited for"


def test_half_a_character_in_an_error_is_told() -> None:
    told, failure, same, took_s = asked('{"jsonrpc":"2.0","id":@ID,"error":{"code":7,"message":"a\\ud800b"}}')
    assert (failure, same, told.startswith("error: ")) == (None, True, True)
    assert took_s < 3


def test_a_whole_character_in_two_halves_is_one() -> None:
    told, _, same, _ = asked(
        '{"jsonrpc":"2.0","id":@ID,"result":{"content":[{"type":"text","text":"\\ud83d\\ude00 \\\\ud800"}]}}'
    )
    assert (told, same) == ("\U0001f600 \\ud800", True)


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["the same", "another each time", "empty", "slow", "long"])
def test_a_list_of_tools_without_an_end_is_refused(pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.hosting.mcp.servers._START_S", 2.0)

    async def main() -> None:
        async with asyncio.timeout(10):
            await started(pages)

    with pytest.raises(ConfigurationError, match="odd"):
        played(main)


def test_a_list_of_tools_in_two_pages_is_read() -> None:
    async def main() -> list[str]:
        episodes = await started("two")
        player = Player(episodes)
        await player.begin()
        await episodes.shut_down()
        assert player.last.asked is not None
        return [tool["function"]["name"] for tool in player.last.asked.tools]

    assert played(main) == ["does", "does2"]


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
FORKS = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        print(os.getpid(), flush=True)\n"
    "        time.sleep(60)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)
DEAF = f"from signal import *; signal(SIGTERM, SIG_IGN); signal(SIGHUP, SIG_IGN); {SLEEPS}"
GROUP = f"import os; os.setpgid(0, 0); {SLEEPS}"


@pytest.mark.parametrize(
    ("child", "session"),
    [(SLEEPS, False), (SLEEPS, True), (FORKS, False), (DEAF, True), (GROUP, False)],
    ids=["of its session", "of its own session", "a daemon", "one that ignores signals", "of its own group"],
)
def test_what_a_server_has_started_ends_with_it(child: str, session: bool) -> None:
    async def main() -> int:
        episodes = await started()
        player = Player(episodes)
        await player.begin()
        pid = int(await player.answer(call("does", json.dumps({"child": child, "session": session}))))
        assert alive(pid)
        await episodes.shut_down()
        return pid

    pid = played(main)
    for _ in range(40):
        if not alive(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"{pid} goes on")
