"""Garbage, cut and replayed handshakes, impossible frames: the ports for other machines take them all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from node_fuzz import EVIL, frame, unpickled
from node_fuzz_cases import attack_a_mirror, attack_the_orchestrator
from node_processes import KEY, joined_nodes
from worker_processes import run, until

from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import Hello, software

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

CASES = 200


def test_the_orchestrators_port_takes_whatever_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(lambda: attack_the_orchestrator(tmp_path, monkeypatch, CASES))


def test_a_mirrors_port_takes_whatever_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(lambda: attack_a_mirror(tmp_path, monkeypatch, CASES))


def test_the_count_of_unpickled_attacks_would_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What somebody with the key sends as a whole frame is unpickled: the key is all that protects."""

    async def main() -> None:
        async with joined_nodes(tmp_path) as (nodes, _, _):
            with unpickled(monkeypatch) as found:
                hello = Hello(purpose="node", subject="x", software=software())
                sock, _ = await dial(nodes.address, KEY, hello, 10.0)
                with sock:
                    await asyncio.get_running_loop().sock_sendall(sock, frame(0, len(EVIL)) + EVIL)
                    await until(lambda: bool(found))

    run(main)
