"""Workers on nodes: real agents, real processes, kills, cuts of the network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from node_processes import KEY, Events, joined_nodes, start_agent
from worker_processes import exists, run, spec, until

from headway.records.errors import RemoteError, WorkerDied
from headway.runtime.clock import RealClock
from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import ConnectionRefused, Hello, make_key
from headway.runtime.nodes.node import NodeLost
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.workers import LocalLauncher

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


def test_a_worker_on_a_node_serves_calls_events_and_arrays(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, events, _):
            worker = await nodes.start(spec(device="b/cpu:0", arguments={"greeting": "hello"}))
            seen = await worker.call("seen")
            assert (seen["greeting"], seen["device"]) == ("hello", "cpu:0")
            array = np.arange(3_000_000, dtype=np.float64)
            assert await worker.call("total", array) == float(array.sum())
            assert (await worker.call("make", 1_000_000)).nbytes == 1_000_000
            with pytest.raises(RemoteError, match="KeyError"):
                await worker.call("fail", "x")
            await worker.stop()
            assert worker.died.result().cause == "stopped"
            assert "cores" in events.of("node_joined")[0]

    run(main)


def test_a_killed_worker_on_a_node_is_an_event_with_its_last_output(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, _, _):
            worker = await nodes.start(spec(device="b/cpu:0"))
            call = asyncio.create_task(worker.call("hang", str(tmp_path / "in")))
            await until((tmp_path / "in").exists)
            os.kill(worker.pid, signal.SIGKILL)
            death = await worker.died
            assert death.cause.startswith("killed by SIGKILL (9)")
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await call

    run(main)


def test_a_killed_agent_takes_its_workers_with_it(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, events, agents):
            worker = await nodes.start(spec(device="b/cpu:0"))
            agents["b"].kill()
            death = await worker.died
            assert death.cause.startswith("node b ")
            assert death.found_by == "node"
            await until(lambda: not exists(worker.pid))
            assert events.of("node_lost")
            starting = asyncio.create_task(nodes.start(spec(device="b/cpu:0")))  # waits for its return
            again = start_agent(nodes.address, "b", log=tmp_path / "again.log")
            worker = await starting
            assert await worker.call("echo", 1) == 1
            agents["b"] = again

    run(main)


@pytest.mark.slow
def test_a_stopped_agent_is_lost_after_orphan_s_and_its_workers_end(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b", orphan_s=5.0) as (nodes, events, agents):
            worker = await nodes.start(spec(device="b/cpu:0"))
            agents["b"].send_signal(signal.SIGSTOP)
            death = await worker.died
            assert "no heartbeat" in death.cause
            await until(lambda: not exists(worker.pid))  # though its agent can't end it
            assert events.of("node_lost")
            agents["b"].kill()

    run(main)


def test_the_end_of_the_run_ends_agents_and_workers(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, _, agents):
            worker = await nodes.start(spec(device="b/cpu:0"))
        assert agents["b"].returncode == 0, (tmp_path / "b.log").read_text()
        await until(lambda: not exists(worker.pid))

    run(main)


@pytest.mark.parametrize(
    "first_bytes", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00", b"\xff\xff" + b"x" * 4096, b"\x05"]
)
def test_connection_that_is_no_handshake_is_refused(
    tmp_path: Path, first_bytes: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.runtime.nodes.listener.HANDSHAKE_S", 2.0)

    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, events, _):
            host, port = nodes.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(first_bytes)
            if not first_bytes:
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(15.0):
                    assert await reader.read() == b""
            writer.close()
            assert events.of("connection_refused")
            worker = await nodes.start(spec(device="b/cpu:0"))
            assert await worker.call("echo", 1) == 1

    run(main)


def test_a_wrong_key_is_found_by_both_sides(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, events, _):
            with pytest.raises(ConnectionRefused, match="another key"):
                await dial(nodes.address, make_key(), Hello(purpose="node", subject="x"), 10.0)
            await until(lambda: bool(events.of("connection_refused")))
            assert not nodes.joined

    run(main)


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        (Hello(purpose="node", subject="x", software={"python": "2.7"}), "python 2.7 where the orchestrator has"),
        (Hello(purpose="worker", subject="x"), "no worker with this token"),
        (Hello(purpose="node", subject="x", epoch=7), "epoch 7 has ended"),
        (Hello(purpose="node", subject="x", protocol=9), "protocol 9"),
    ],
)
def test_who_does_not_fit_is_told_why(tmp_path: Path, hello: Hello, refusal: str):
    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, _, _):
            with pytest.raises(ConnectionRefused, match=refusal):
                await dial(nodes.address, KEY, hello, 10.0)

    run(main)


def test_a_thousand_silent_connections_keep_nobody_out(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, events, _):
            host, port = nodes.address.split(":")
            silent = []
            for _ in range(1000):
                silent.append(socket.create_connection((host, int(port))))
                await asyncio.sleep(0)
            agent = start_agent(nodes.address, "b", log=tmp_path / "b.log")
            await nodes.wait_for("b", 30.0)
            for sock in silent:
                sock.close()
            assert 1 <= len(events.of("connection_refused")) <= 5
        agent.wait(10.0)

    run(main)


@pytest.mark.slow
def test_an_agent_that_is_kept_comes_back_even_while_the_others_are_let_go(tmp_path: Path):
    """A stopped agent holds up the end of the first; the other one knocks meanwhile, and joins the second."""

    async def main() -> None:
        clock, events = RealClock(), Events()

        def nodes_at(address: str) -> Nodes:
            return Nodes(address, KEY, 1, clock, LocalLauncher(clock), orphan_s=5.0, keep_agents=True, on_event=events)

        async with nodes_at("127.0.0.1:0") as first:
            address = first.address
            agents = [start_agent(address, name, log=tmp_path / f"{name}.log") for name in "bc"]
            await asyncio.gather(*(first.wait_for(name, 30.0) for name in "bc"))
            agents[1].send_signal(signal.SIGSTOP)
        assert any("the run is over" in cause for cause in events.of("connection_refused"))
        async with nodes_at(address) as second:
            await second.wait_for("b", 30.0)
        for agent in agents:
            agent.kill()
            agent.wait()

    run(main)


def test_a_missing_node_is_named(tmp_path: Path):
    async def main() -> None:
        clock, events = RealClock(), Events()
        async with Nodes("127.0.0.1:0", KEY, 1, clock, LocalLauncher(clock), on_event=events) as nodes:
            with pytest.raises(NodeLost, match="node b has not joined within"):
                await nodes.wait_for("b", 0.1)

    run(main)
