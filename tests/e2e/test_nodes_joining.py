"""Nodes that stop in the middle of joining, and two that join under one name."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from node_processes import KEY, joined_nodes
from worker_processes import run, spec, until

from headway.runtime.clock import RealClock
from headway.runtime.framing import HEADER, Kind
from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import Hello, NotAdmitted, software
from headway.runtime.nodes.node import Node

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

HELLO = Hello(purpose="node", subject="b", software=software())


def test_a_node_that_is_silent_after_its_welcome_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.runtime.nodes.listener.HANDSHAKE_S", 1.0)

    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, events, _):
            before = asyncio.all_tasks()
            sock, _ = await dial(nodes.address, KEY, HELLO, 10.0)  # describes itself to nobody
            await until(lambda: bool(events.of("connection_refused")))
            sock.close()
            assert not nodes.joined
            async with asyncio.timeout(20.0):  # its connection gets the closed one's number, and must be read
                worker = await nodes.start(spec())
                assert await worker.call("echo", 1) == 1
                await worker.stop()
            await until(lambda: asyncio.all_tasks() <= before)

    run(main)


def test_of_two_nodes_of_one_name_that_join_at_once_one_is_put_off(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, _, _):
            first, _ = await dial(nodes.address, KEY, HELLO, 10.0)
            with pytest.raises(NotAdmitted, match="node b") as refusal:
                await dial(nodes.address, KEY, HELLO, 10.0)
            assert refusal.value.later
            first.close()

    run(main)


def test_a_node_that_sends_what_can_not_be_read_is_lost_without_another_error():
    async def main() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        here, there = socket.socketpair()
        node = Node(here, "b", "127.0.0.1", RealClock(), lambda node, reason: None)
        there.send(HEADER.pack(Kind.EVENT, 0, 0, 3) + b"abc")
        await until(lambda: bool(node.lost))
        await asyncio.sleep(0)
        there.close()
        assert "cannot be read" in node.lost
        assert not errors

    run(main)
