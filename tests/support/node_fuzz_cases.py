"""Attacks on a whole orchestrator and a whole mirror, with a healthy peer that goes on meanwhile."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from node_fuzz import EVIL, REQUEST, Attack, frame, goes_on, resident_bytes, unpickled
from node_processes import KEY, joined_nodes
from worker_processes import spec, until

from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import Hello, software
from headway.runtime.nodes.nodes import Nodes
from headway.weights.mirror import MirrorService
from headway.weights.shared_memory import Publisher, Subscriber

FLAT_BYTES = 48 << 20


async def attack_the_orchestrator(folder: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    async with joined_nodes(folder, "b") as (nodes, events, _):
        worker = await nodes.start(spec(device="b/cpu:0"))

        async def work() -> None:
            assert await worker.call("echo", "still here") == "still here"

        with unpickled(monkeypatch) as found:
            async with goes_on(work):
                await Attack(nodes.address, KEY, "worker", 0).run(cases // 10)
                before = resident_bytes()
                await Attack(nodes.address, KEY, "worker", 1).run(cases)
                await attack_as_node(nodes, cases // 20)
                assert resident_bytes() - before < FLAT_BYTES
            assert not found
        assert set(nodes.joined) == {"b"}
        refusals = events.of("connection_refused")
        assert 3 < len(refusals) <= 40, refusals
        await worker.stop()


async def attack_as_node(nodes: Nodes, cases: int) -> None:
    """Frames of somebody who knows the key, and is let in as a node: too large, cut."""
    for number in range(cases):
        hello = Hello(purpose="node", subject=f"fuzz{number}", epoch=1, software=software())
        sock, _ = await dial(nodes.address, KEY, hello, 10.0)
        with sock:
            data = frame(0, 1 << 63) if number % 2 else frame(0, 4 << 20) + EVIL
            await asyncio.get_running_loop().sock_sendall(sock, data)
    await until(lambda: len(nodes.joined) == 1)


async def attack_a_mirror(folder: Path, monkeypatch: pytest.MonkeyPatch, cases: int) -> None:
    context = cast(Any, type("Context", (), {"log": logging.getLogger("mirror")}))
    settings: dict[str, Any] = {"host": "127.0.0.1", "ports": [0], "key": KEY, "epoch": 1, "orphan_s": 10.0}
    source, here = (MirrorService(context, run_id=folder.name, node=node, **settings) for node in "ab")
    with Publisher(folder.name, directory=folder) as publisher, unpickled(monkeypatch) as found:
        expected = torch.randn(1 << 20)
        published = publisher.publish(0, {"a": expected})
        source.serve_published(published)

        async def work() -> None:
            copy = await asyncio.to_thread(here.fetch, published, [(source.address(), ())])
            assert torch.equal(Subscriber().fetch(copy)["a"], expected)

        async with goes_on(work):
            await Attack(source.address(), KEY, "mirror", 0).run(cases // 10)
            before = resident_bytes()
            await Attack(source.address(), KEY, "mirror", 1).run(cases)
            for offset, count in ((0, (1 << 64) - 1), ((1 << 64) - 1, 1), (0, 1 << 63), (1 << 40, 0)):
                sock, _ = await dial(source.address(), KEY, Hello(purpose="mirror", subject="0", epoch=1), 10.0)
                with sock:
                    await asyncio.get_running_loop().sock_sendall(sock, REQUEST.pack(False, 0, offset, count))
                    answer = await asyncio.get_running_loop().sock_recv(sock, 100)
                    assert answer == bytes(9)  # not there
            assert resident_bytes() - before < FLAT_BYTES
        assert not found
    source.close()
    here.close()
