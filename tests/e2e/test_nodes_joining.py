"""Nodes that stop in the middle of joining, and two that join under one name."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from node_processes import KEY, joined_nodes
from worker_processes import run, spec, until

from headway.records.node import NodeFacts, ProcessEnded, ProcessOrder
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import RealClock
from headway.runtime.framing import HEADER, Kind, encode
from headway.runtime.link import Link
from headway.runtime.nodes.agent import Agent
from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import Hello, NotAdmitted, software
from headway.runtime.nodes.node import Node
from headway.runtime.worker_process import ProcessExit

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


class PatientAgent(Agent):
    """An agent that describes itself, and ends, when it may."""

    def __init__(self, name: str, folder: Path, *offers: str) -> None:
        super().__init__(name, "", KEY, 1, 10.0, folder, offers=offers)
        self.may_describe, self.may_end, self.told = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def facts(self) -> NodeFacts:
        await self.may_describe.wait()
        return await super().facts()

    async def end(self, over: bool = True) -> None:
        self.told.set()
        await self.may_end.wait()
        await super().end(over)


@pytest.mark.parametrize("joins", [True, False], ids=["joins meanwhile", "still joining"])
def test_a_node_that_joins_while_the_run_ends_is_told_so(tmp_path: Path, joins: bool):
    async def main() -> None:
        agents = [PatientAgent(name, tmp_path) for name in "bc"]
        first, late = agents
        first.may_describe.set()
        late.may_end.set()
        async with joined_nodes(tmp_path) as (nodes, _, _):
            serving: list[asyncio.Task[tuple[str, bool]]] = []
            for agent, name in zip(agents, "bc", strict=True):
                sock, _ = await dial(nodes.address, KEY, Hello(purpose="node", subject=name, software=software()), 10.0)
                serving.append(asyncio.create_task(agent.serve(sock, RealClock())))
            await nodes.wait_for("b", 10.0)
            meanwhile = asyncio.create_task(release(first, late, joins))
        await meanwhile
        async with asyncio.timeout(10.0):
            assert [await task for task in serving] == [("the run is over", True)] * 2

    async def release(first: PatientAgent, late: PatientAgent, joins: bool) -> None:
        await first.told.wait()
        if joins:
            late.may_describe.set()
            await late.told.wait()
        first.may_end.set()

    run(main)


def test_an_offer_that_can_not_be_taken_for_an_error_of_this_machine_is_reported(tmp_path: Path):
    async def take(device: str) -> None:
        raise OSError(5, f"Input/output error: {device}")

    async def main() -> None:
        agent = PatientAgent("b", tmp_path, "cpu:1")
        agent.may_describe.set()
        agent.may_end.set()
        async with joined_nodes(tmp_path) as (nodes, events, _):
            nodes.take_offers(take)
            sock, _ = await dial(nodes.address, KEY, HELLO, 10.0)
            serving = asyncio.create_task(agent.serve(sock, RealClock()))
            await until(lambda: events.of("offer_failed") == ["[Errno 5] Input/output error: b/cpu:1"])
        await serving

    run(main)


class GivenUp:
    """An agent whose next process gets the id of one whose start was given up."""

    async def start_process(self, order: ProcessOrder) -> int:
        return 7


def test_the_end_of_a_process_that_was_given_up_is_not_taken_for_a_later_ones():
    async def main() -> None:
        here, there = socket.socketpair()
        node = Node(here, "b", "127.0.0.1", RealClock(), lambda node, reason: None)
        agent = Link("orchestrator", there, BoundedQueue(1, "", RealClock()), lambda _: None, lambda _: None, GivenUp())
        agent.send(encode(Kind.EVENT, 0, ProcessEnded(pid=7, code=-9, output="the earlier one")))
        order = ProcessOrder(worker="w", token="t", device="cpu:0", environment={}, log="")
        await asyncio.sleep(0.1)
        process = await node.start_process(order)
        ends: list[ProcessExit] = []
        process.watch(ends.append)
        assert not ends
        agent.send(encode(Kind.EVENT, 0, ProcessEnded(pid=7, code=3, output="")))
        await until(lambda: [end.code for end in ends] == [3])
        node.give_up("")
        there.close()

    run(main)
