"""Encrypted connections: real agents, workers and mirrors over TLS, a listener and a man in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from node_processes import KEY, joined_nodes
from worker_processes import exists, run, spec, until

from headway.records.errors import ConfigurationError
from headway.runtime.clock import RealClock
from headway.runtime.nodes import encryption
from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import ConnectionRefused, EncryptionRequired, Hello
from headway.weights.mirrors import Mirrors
from headway.weights.shared_memory import Publisher, Subscriber

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def certificate() -> str:
    return make_certificate()


def test_a_worker_and_a_mirror_work_over_tls(tmp_path: Path, certificate: str):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b", "c", certificate=certificate) as (nodes, events, _):
            worker = await nodes.start(spec(device="b/cpu:0"))
            array = np.arange(3_000_000, dtype=np.float64)
            assert await worker.call("total", array) == float(array.sum())
            assert (await worker.call("make", 5_000_000)).nbytes == 5_000_000
            settings: dict[str, Any] = {"run_id": tmp_path.name, "key": KEY, "epoch": 1, "orphan_s": 10.0}
            settings |= {"certificate": certificate, "ports": list(range(29720, 29740))}
            mirrors = Mirrors(nodes, RealClock(), "", nodes.host_of, settings, events)
            with Publisher(tmp_path.name, directory=tmp_path) as publisher:
                weights = torch.randn(5 << 20)
                published = publisher.publish(0, {"a": weights})
                for copy in await asyncio.gather(*(mirrors.on_node(published, node) for node in "bc")):
                    assert torch.equal(Subscriber().fetch(copy)["a"], weights)
            await mirrors.stop()
            os.kill(worker.pid, signal.SIGKILL)
            assert (await worker.died).cause.startswith("killed by SIGKILL (9)")

    run(main)


def test_an_agent_over_tls_takes_its_workers_with_it(tmp_path: Path, certificate: str):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b", certificate=certificate) as (nodes, _, agents):
            worker = await nodes.start(spec(device="b/cpu:0"))
            agents["b"].kill()
            assert (await worker.died).cause.startswith("node b ")
            await until(lambda: not exists(worker.pid))

    run(main)


def test_nothing_of_a_call_can_be_read_on_the_way(tmp_path: Path, certificate: str):
    """The same tap sees the words of a run that isn't encrypted."""

    async def seen(certificate: str) -> bytes:
        carried = bytearray()
        async with (
            joined_nodes(tmp_path, certificate=certificate) as (nodes, _, _),
            await asyncio.start_server(tap_to(nodes.address, carried), "127.0.0.1", 0) as tap,
        ):
            address = f"127.0.0.1:{tap.sockets[0].getsockname()[1]}"
            hello = Hello(purpose="worker", subject="a word in the clear")
            with pytest.raises(ConnectionRefused, match="no worker with this token"):
                await dial(address, KEY, hello, 10.0, encrypted=bool(certificate))
        return bytes(carried)

    async def main() -> None:
        assert b"a word in the clear" in await seen("")
        assert b"a word in the clear" not in await seen(certificate)

    run(main)


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_found(tmp_path: Path, certificate: str):
    async def main() -> None:
        own = tmp_path / "own.pem"
        own.write_text(make_certificate())
        host_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        host_side.load_cert_chain(own)
        guest_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        guest_side.check_hostname, guest_side.verify_mode = False, ssl.CERT_NONE
        async with joined_nodes(tmp_path, certificate=certificate) as (nodes, _, _):
            middle = tap_to(nodes.address, bytearray(), ssl=guest_side)
            async with await asyncio.start_server(middle, "127.0.0.1", 0, ssl=host_side) as server:
                address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                with pytest.raises(ConnectionRefused, match="another key"):
                    await dial(address, KEY, Hello(purpose="node", subject="x"), 10.0, encrypted=True)
            async with await asyncio.start_server(middle, "127.0.0.1", 0) as server:  # who strips the encryption
                address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                with pytest.raises(ConnectionRefused, match="another key"):
                    await dial(address, KEY, Hello(purpose="node", subject="x"), 10.0)
            assert not nodes.joined

    run(main)


def test_who_speaks_in_the_clear_is_told_to_encrypt(tmp_path: Path, certificate: str):
    async def main() -> None:
        async with joined_nodes(tmp_path, certificate=certificate) as (nodes, _, _):
            with pytest.raises(EncryptionRequired):
                await dial(nodes.address, KEY, Hello(purpose="node", subject="x"), 10.0)

    run(main)


def test_a_machine_without_openssl_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigurationError, match="needs the openssl program"):
        make_certificate()


def tap_to(address: str, carried: bytearray, **how: Any) -> Any:
    """A server that carries bytes to ``address`` and back, and keeps them."""
    host, port = address.split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(host, int(port), **how)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(4096):
                carried.extend(data)
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, to), copy(there, writer), return_exceptions=True)

    return carry


def test_a_relay_sleeps_while_what_a_process_sent_last_can_not_leave():
    outer, network = socket.socketpair()
    inner, process = socket.socketpair()
    for end in (outer, inner, process):
        end.setblocking(False)
    relay = threading.Thread(target=encryption._relay, args=(outer, inner), daemon=True)  # pyright: ignore
    relay.start()
    sent = 0
    for _ in range(200):  # until nothing moves: the network is out
        with contextlib.suppress(BlockingIOError):
            sent += process.send(bytes(1 << 16))
        time.sleep(0.001)
    process.close()
    time.sleep(0.1)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.1
    arrived = 0
    while data := network.recv(1 << 20):
        arrived += len(data)
    assert arrived == sent
    network.close()
    relay.join(10.0)
    assert not relay.is_alive()


def test_what_a_process_sent_last_arrives_though_it_left_something_unread():
    outer, network = socket.socketpair()
    inner, process = socket.socketpair()
    network.send(b"a heartbeat")
    process.send(b"its traceback")
    process.close()
    for end in (outer, inner):
        end.setblocking(False)
    relay = threading.Thread(target=encryption._relay, args=(outer, inner), daemon=True)  # pyright: ignore
    relay.start()
    network.settimeout(10.0)
    assert network.recv(1 << 10) == b"its traceback"
    assert network.recv(1 << 10) == b""
    network.close()
    relay.join(10.0)
    assert not relay.is_alive()
