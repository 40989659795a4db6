"""Links between workers: real processes, big payloads, deaths and restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_peer import KEY, digest, tensors, workflow
from worker_processes import run

from headway.flow.paths import PeerSettings
from headway.flow.peer_state import MAX_UNRECEIVED
from headway.flow.peers import PeerNetwork
from headway.flow.segments import PayloadReleased, new_folder
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import ConnectionRefused, make_key

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

BIG = (1, 25 << 20)  # one tensor of 100 MB


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*")] if folder.exists() else []


def test_calls_go_both_ways_and_carry_remote_tracebacks():
    async def main() -> None:
        async with workflow("a", "b") as (network, workers, _):
            assert await network.call("a", "echo", {"x": [1, 2]}) == {"x": [1, 2]}
            assert await workers["a"].call("call_peer", "driver", "echo", 3) == 3
            assert await network.call("a", "relay", "b", 4) == 4
            assert await workers["b"].call("call_peer", "a", "relay", "b", 5) == 5
            big = tensors(0, *BIG)
            assert await network.call("a", "digest", big) == digest(big)
            assert digest(await network.call("a", "relay", "b", big)) == digest(big)
            with pytest.raises(RemoteError, match=r"b\.fail: KeyError: 'no such'") as caught:
                await network.call("b", "fail", "no such")
            assert "raise KeyError(text)" in caught.value.traceback
            with pytest.raises(RemoteError, match="no public method _hidden"):
                await network.call("b", "_hidden")
            with pytest.raises(ConfigurationError, match=r"call of b\.echo: arguments\[1\]\['callback'\] = <function"):
                await network.call("b", "echo", 1, {"x": 2, "callback": lambda: None})

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["shared memory", "link"])
def test_messages_of_many_tensors_arrive_equal_and_in_order(path: str):
    async def main() -> None:
        paths: list[Any] = []
        noted = {"on_path": lambda *pair: paths.append(pair), "host": "127.0.0.1"}
        elsewhere = {"machine": "another", "host": "127.0.0.1"} if path == "link" else {}
        async with workflow("a", driver=noted, host="127.0.0.1") as (network, workers, start):
            a, b = workers["a"], await start("b", **elsewhere)
            sent = [await a.call("make", name, 1, *shape) for name, shape in (("many", (1000, 26214)), ("big", BIG))]
            await a.call("keep", "small", {"x": torch.ones(3, dtype=torch.bfloat16)})
            sending = asyncio.gather(*(a.call("send", "b", name) for name in ("many", "small", "big", "many")))
            received = [await b.call("recv", "a") for _ in range(4)]
            await sending
            assert received == [sent[0], digest({"x": torch.ones(3, dtype=torch.bfloat16)}), sent[1], sent[0]]
            nested = {"a": [tensors(3, 2, 50_000), np.arange(50_000)], "b": (torch.ones(2, 3), None, "text")}
            for _ in range(3):
                assert digest(await network.call("b", "echo", nested)) == digest(nested)
            pairs = [("a", "b"), ("b", "driver"), ("driver", "b")]
            assert sorted(paths) == [(*pair, path) for pair in pairs]

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["link", "tls"])
def test_two_machines_use_the_link_with_the_runs_key(way: str):
    async def main() -> None:
        elsewhere = {"machine": "another", "host": "127.0.0.1"}
        common: dict[str, Any] = {"certificate": make_certificate()} if way == "tls" else {}
        paths: list[Any] = []
        driver = {"host": "127.0.0.1", "on_path": lambda *pair: paths.append(pair)}
        async with workflow("a", driver=driver, **common) as (network, _, start):
            b = await start("b", **elsewhere)
            assert await network.call("a", "echo", 1) == 1
            big = tensors(0, *BIG)
            assert digest(await network.call("b", "echo", big)) == digest(big)
            assert ("driver", "b", "link") in paths
            ref = await network.hold(big)
            assert await b.call("fetch", ref) == digest(big)
            settings: dict[str, Any] = {"folder": new_folder(), "machine": "third"}
            for wrong in ({"key": make_key(), "epoch": 1}, {"key": KEY, "epoch": 2}):
                intruder = PeerNetwork("intruder", PeerSettings(**(settings | wrong)), driver=network.address)
                with pytest.raises(ConnectionRefused):
                    await intruder.start()
            assert not left_in(settings["folder"])

    run(main)


def test_a_killed_peer_fails_what_waits_for_it_and_its_successor_is_reconnected():
    async def main() -> None:
        async with workflow("a", "b") as (network, workers, start):
            a, b = workers["a"], workers["b"]
            await a.call("keep", "x", torch.arange(100_000))
            await a.call("send", "b", "x")
            assert await b.call("recv", "a") == digest(torch.arange(100_000))
            calls = [
                asyncio.ensure_future(call)
                for call in (network.call("b", "hang"), a.call("call_peer", "b", "hang"), a.call("recv", "b"))
            ]
            await asyncio.sleep(0.3)
            os.kill(b.pid, signal.SIGKILL)
            async with asyncio.timeout(2):
                ends = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(ends[0], WorkerDied)
            assert all(isinstance(end, RemoteError) and "worker b died" in str(end) for end in ends[1:])
            await b.died
            with pytest.raises(RemoteError, match="worker b died"):
                await a.call("recv", "b")
            with pytest.raises(WorkerDied, match="worker b died: lost its connection"):
                await network.recv("b")
            sending = asyncio.ensure_future(a.call("send", "b", "x"))  # waits for the successor
            b = await start("b")
            assert await b.call("recv", "a") == digest(torch.arange(100_000))
            await sending
            receiving = asyncio.ensure_future(a.call("recv", "b"))
            await b.call("keep", "y", [1, 2])
            await b.call("send", "a", "y")
            assert await receiving == digest([1, 2])
            assert await network.call("a", "relay", "b", 7) == 7
        with pytest.raises(WorkerDied, match="closed its connections"):
            await network.call("a", "echo", 1)

    run(main)


def test_a_sender_waits_while_its_messages_are_not_received():
    async def main() -> None:
        async with workflow("b") as (network, workers, _):
            for number in range(MAX_UNRECEIVED):
                await network.send("b", number)
            waiting = asyncio.ensure_future(network.send("b", MAX_UNRECEIVED))
            await network.send("b", "of another tag", "other")
            assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
            assert await workers["b"].call("recv", "driver") == digest(0)
            async with asyncio.timeout(5):
                await waiting
            for number in range(1, MAX_UNRECEIVED + 1):
                assert await workers["b"].call("recv", "driver") == digest(number)

    run(main)


def test_a_full_shared_memory_is_reported_once_and_the_link_is_taken(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        paths: list[Any] = []
        folder = new_folder()
        noted = {"on_path": lambda *pair: paths.append(pair)}
        async with workflow("b", folder=folder, driver=noted) as (network, workers, _):
            message = np.arange(1 << 20)
            assert await network.call("b", "digest", message) == digest(message)
            with monkeypatch.context() as patched:
                patched.setattr("headway.flow.segments.os.posix_fallocate", full)
                large, expected = np.arange(1 << 22), digest(np.arange(1 << 22))
                assert await network.call("b", "digest", large) == expected
                ref = await network.hold(large)
                large[:] = 0  # may be changed afterwards
                assert await workers["b"].call("fetch", ref) == digest(await network.fetch(ref)) == expected
            assert [path for *pair, path in paths if pair == ["driver", "b"]] == ["shared memory", "link"]
            assert len([name for name in left_in(folder) if name.endswith(".segment")]) == 1

    run(main)


def test_payloads_outlast_their_owner_until_it_is_forgotten_and_nothing_is_left():
    async def main() -> None:
        folder = new_folder()
        async with workflow("a", "b", folder=folder) as (network, workers, _):
            a, b = workers["a"], workers["b"]
            await a.call("make", "x", 5, 10, 100_000)
            ref, other = [await a.call("hold", "x") for _ in range(2)]
            assert await b.call("fetch", ref) == await b.call("fetch", ref) == digest(tensors(5, 10, 100_000))
            mine = await network.fetch(other)
            mine["t0"][:] = 0  # this process's own: the next reader has what was sent
            await a.call("release", other)
            third = await a.call("hold", "x")  # not where somebody still reads
            assert digest({**mine, "t0": tensors(5, 10, 100_000)["t0"]}) == digest(tensors(5, 10, 100_000))
            assert await b.call("fetch", third) == digest(tensors(5, 10, 100_000))
            assert await a.call("segments") == 3
            del mine
            await a.call("hold", "x")
            assert await a.call("segments") == 3  # the released one is used again
            with pytest.raises(PayloadReleased):
                await network.fetch(other)
            os.kill(a.pid, signal.SIGKILL)
            await a.died
            assert digest(await network.fetch(ref)) == digest(tensors(5, 10, 100_000))
            assert left_in(folder).count(f"{ref.incarnation}-{ref.id}.segment")
            network.release(ref)
            await asyncio.sleep(0.1)
            assert f"{ref.incarnation}-{ref.id}.segment" not in left_in(folder)
            with pytest.raises(PayloadReleased):
                await network.fetch(ref)
        assert not folder.exists()
        killed = new_folder()
        async with workflow("c", folder=killed, driver={"folder": new_folder()}) as (_, workers, _start):
            os.kill(workers["c"].pid, signal.SIGKILL)
            await workers["c"].died
            assert left_in(killed)
            async with workflow():  # the next one that starts here cleans up
                assert not left_in(killed)

    run(main)
