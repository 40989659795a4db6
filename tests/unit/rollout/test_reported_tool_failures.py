"""Whose doing it is when a tool fails: the policy is told, a machine's failure is nobody's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sqlite3
import ssl
import subprocess
import time
import urllib.error
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from environment_player import Player, call, played, rollout, service, spelled_call

from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.tools import ToolError

NAME = "test_reported_tool_failures"


class Own(Exception):
    """An exception of a tool's own."""


def opens(path: str) -> Callable[[], Any]:
    return lambda: Path(path).read_text(encoding="utf-8")


def raises(error: Callable[[], BaseException]) -> Callable[[], Any]:
    def fail() -> Any:
        raise error()

    return fail


def module(name: str) -> Any:
    return pytest.importorskip(name)


POLICYS: dict[str, Callable[[], Any]] = {
    "no such file": opens("/no/such/file"),
    "a folder": opens("/tmp"),
    "no folder on the way": opens("/etc/passwd/x"),
    "a long name": opens("/tmp/" + "x" * 5000),
    "no text": lambda: b"\xff\xfe".decode(),
    "a name with a null": lambda: open("a\0b"),  # noqa: SIM115
    "there already": lambda: os.mkdir("/tmp"),
    "not empty": raises(lambda: OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), "a")),
    "not permitted": raises(lambda: PermissionError(errno.EACCES, "Permission denied", "a")),
    "links in a circle": raises(lambda: OSError(errno.ELOOP, "Too many levels of symbolic links", "a")),
    "an argument": raises(lambda: OSError(errno.EINVAL, "Invalid argument")),
    "an error without a number": raises(lambda: OSError("no such device")),
    "no such process": raises(lambda: ProcessLookupError(errno.ESRCH, "No such process")),
    "a program that fails": raises(lambda: subprocess.CalledProcessError(1, ["false"])),
    "no such program": lambda: subprocess.run(["/no/such/program"], check=False),
    "a key": lambda: {}["x"],
    "a value": lambda: int("x"),
    "a type": lambda: len(3),  # type: ignore[arg-type]
    "an attribute": lambda: (3).x,  # type: ignore[attr-defined]
    "division": lambda: 1 // 0,
    "an assertion": raises(lambda: AssertionError("no")),
    "JSON": lambda: json.loads("{"),
    "SQL": lambda: sqlite3.connect(":memory:").execute("select x"),
    "one of its own": raises(lambda: Own("broken")),
    "without a text": raises(lambda: RuntimeError()),
    "the end of an iterator": lambda: next(iter(())),
    "a page that isn't there": raises(lambda: urllib.error.HTTPError("http://a", 404, "Not Found", Message(), None)),
    "httpx: a page that isn't there": lambda: (
        module("httpx").Response(404, request=module("httpx").Request("GET", "http://a")).raise_for_status()
    ),
    "requests: a page that isn't there": lambda: (_ for _ in ()).throw(module("requests").HTTPError("404")),
    "requests: no address": lambda: module("requests").get("no address"),
    "depth": lambda: json.loads("[" * 100_000),
}


def infrastructure() -> BaseException:
    from headway import api

    return api.InfrastructureError("the search service is down")  # type: ignore[attr-defined]


MACHINES: dict[str, Callable[[], Any]] = {
    "what says so": raises(infrastructure),
    "refused": raises(lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")),
    "reset": raises(lambda: ConnectionResetError(errno.ECONNRESET, "reset")),
    "a broken pipe": raises(lambda: BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "a name that isn't resolved": raises(lambda: socket.gaierror(socket.EAI_AGAIN, "Temporary failure")),
    "TLS": raises(lambda: ssl.SSLError("bad handshake")),
    "urllib": raises(lambda: urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))),
    "its client's time": raises(lambda: TimeoutError("timed out")),
    "input and output": raises(lambda: OSError(errno.EIO, "Input/output error")),
    "a full disk": raises(lambda: OSError(errno.ENOSPC, "No space left on device")),
    "files": raises(lambda: OSError(errno.EMFILE, "Too many open files")),
    "files of the machine": raises(lambda: OSError(errno.ENFILE, "Too many open files in system")),
    "memory": raises(lambda: OSError(errno.ENOMEM, "Cannot allocate memory")),
    "httpx: refused": raises(lambda: module("httpx").ConnectError("refused")),
    "httpx: reading": raises(lambda: module("httpx").ReadError("reset")),
    "httpx: its time": raises(lambda: module("httpx").ReadTimeout("timed out")),
    "httpx: the protocol": raises(lambda: module("httpx").RemoteProtocolError("disconnected")),
    "requests: refused": raises(lambda: module("requests").ConnectionError("refused")),
    "requests: its time": raises(lambda: module("requests").Timeout("timed out")),
    "aiohttp: refused": raises(lambda: module("aiohttp").ClientConnectionError("refused")),
    "aiohttp: disconnected": raises(lambda: module("aiohttp").ServerDisconnectedError()),
}
ODD: dict[str, Any] = {
    "a name": "caf\udce9.txt",
    "names": ["a", "\udcff"],
    "in an object": {"name": "\udce9", "size": 3},
    "as a key": {"\udce9": 1},
    "a high one": "a\ud800b",
    "deeper": [{"a": ["\udcff\udcfe"]}],
    "one of an error": ToolError("no such file: \udce9"),
    "of an exception": FileNotFoundError(errno.ENOENT, "No such file", "\udce9"),
}


class Tools(Environment):
    """Tools that fail as a test says."""

    def tools(self) -> Any:
        return (self.fails, self.slowly, self.hangs, self.adds, self.odd, self.later)

    def fails(self, kind: str) -> Any:
        """Fail."""
        return {**POLICYS, **MACHINES}[kind]()

    async def later(self, kind: str) -> Any:
        """Fail later."""
        await asyncio.sleep(0)
        return {**POLICYS, **MACHINES}[kind]()

    def odd(self, kind: str) -> Any:
        """What no text can hold."""
        if isinstance(ODD[kind], Exception):
            raise ODD[kind]
        return ODD[kind]

    def slowly(self) -> str:
        """Take a while."""
        time.sleep(0.05)
        return "slow"

    def hangs(self, seconds: float) -> str:
        """Hang."""
        time.sleep(seconds)
        return "at last"

    def adds(self, a: int, b: int) -> int:
        """Add."""
        return a + b


def one(name: str, arguments: dict[str, Any], **settings: Any) -> tuple[str, Any]:
    """(what the model is told, the rollout's failure)."""

    async def main() -> tuple[str, Any]:
        episodes = service(name=f"{NAME}:Tools", **settings)
        player = Player(episodes)
        await player.begin()
        told = await player.answer(call(name, json.dumps(arguments)))
        await episodes.end(player.name)
        return told, player.last.failure

    return played(main)


def raised(fails: Callable[[], Any]) -> BaseException:
    try:
        fails()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("tool", ["fails", "later"])
@pytest.mark.parametrize("kind", POLICYS)
def test_what_the_policy_did_is_told_to_it(kind: str, tool: str) -> None:
    error = raised(POLICYS[kind])
    told, failure = one(tool, {"kind": kind})
    assert failure is None
    assert told.startswith("error: "), told
    if not isinstance(error, StopIteration):  # which no awaited call can raise
        assert told.startswith(f"error: {type(error).__name__}"), told
        assert not str(error) or str(error)[:20] in told


@pytest.mark.parametrize("tool", ["fails", "later"])
@pytest.mark.parametrize("kind", MACHINES)
def test_a_machines_failure_is_nobodys(kind: str, tool: str) -> None:
    if kind.partition(":")[0] in ("httpx", "requests", "aiohttp"):
        module(kind.partition(":")[0])
    told, failure = one(tool, {"kind": kind})
    assert told == ""
    assert (failure.boundary, failure.infrastructure) == ("environment", True), failure


class Hooks(Environment):
    """One whose own code fails as a task says."""

    async def reply(self, episode: Episode, answer: Answer) -> Any:
        return {**POLICYS, **MACHINES}[answer.text]()


@pytest.mark.parametrize(
    ("kind", "infrastructure"),
    [
        ("no such file", False),
        ("a folder", False),
        ("not permitted", False),
        ("an error without a number", False),
        ("a value", False),
        ("refused", True),
        ("a full disk", True),
        ("its client's time", True),
        ("what says so", True),
        ("httpx: refused", True),
    ],
)
def test_environments_of_ones_own_follow_the_same_rule(kind: str, infrastructure: bool) -> None:
    async def main() -> Any:
        player = Player(service(name=f"{NAME}:Hooks"))
        await player.begin()
        await player.answer(kind)
        return player.last.failure

    failure = played(main)
    assert failure is not None
    assert failure.infrastructure == infrastructure, failure


@pytest.mark.parametrize("kind", ODD)
def test_results_that_no_text_can_hold_are_told_with_a_replacement(kind: str) -> None:
    told, failure = one("odd", {"kind": kind})
    assert failure is None
    assert "\ufffd" in told or ("error" in kind or "exception" in kind)
    told.encode()


@pytest.mark.parametrize("kind", ["a name", "names", "as a key", "of an exception"])
def test_a_rollout_goes_on_after_such_a_result(kind: str) -> None:
    def says(prompt: str) -> str:
        return "done" if "tool_response" in prompt else spelled_call("odd", json.dumps({"kind": kind}))

    made = played(lambda: rollout(service(name=f"{NAME}:Tools"), says))
    assert made.failure is None, made.failure
    assert made.turns == 2


@pytest.mark.parametrize("stuck", [3, 10, 40])
def test_tools_that_hang_starve_no_others(stuck: int) -> None:
    async def main() -> tuple[list[str], list[Any], list[str]]:
        episodes = service(name=f"{NAME}:Tools", timeout_s=1.0)
        players = [Player(episodes, name=f"7-{number}") for number in range(stuck + 3)]
        for player in players:
            await player.begin()
        hanging = [player.answer(call("hangs", '{"seconds": 4}')) for player in players[:stuck]]
        told = await asyncio.gather(*hanging)
        others = [await player.answer(call("adds", '{"a": 1, "b": 2}')) for player in players[stuck:]]
        return told, [player.last.failure for player in players], others

    told, failures, others = played(main)
    assert others == ["3"] * 3
    assert failures == [None] * (stuck + 3)
    assert all(one.startswith("error: ") and "1 s" in one for one in told), told


def test_others_are_answered_while_tools_hang() -> None:
    async def main() -> tuple[str, float]:
        episodes = service(name=f"{NAME}:Tools", timeout_s=3.0)
        players = [Player(episodes, name=f"7-{number}") for number in range(13)]
        for player in players:
            await player.begin()
        hanging = [asyncio.create_task(player.answer(call("hangs", '{"seconds": 4}'))) for player in players[:12]]
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        told = await players[12].answer(call("slowly", "{}"))
        took_s = time.monotonic() - began_s
        await asyncio.gather(*hanging)
        return told, took_s

    told, took_s = played(main)
    assert told == "slow"
    assert took_s < 2


def test_a_tool_that_is_slow_within_its_time_is_waited_for() -> None:
    assert one("hangs", {"seconds": 0.3}, timeout_s=5.0) == ("at last", None)
