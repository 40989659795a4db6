"""Weights to other nodes: real agents, mirrors in processes of their own, kills in mid-transfer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from node_processes import KEY, joined_nodes
from worker_processes import run
from writer_threads import ThreadWriter, WriterThreads, rows_of

from headway.records.errors import WeightsCorrupt
from headway.records.generation import PublishedPart, PublishedWeights
from headway.runtime.clock import RealClock
from headway.runtime.nodes.handshake import make_key
from headway.runtime.workers import LocalLauncher, WorkerSpec
from headway.weights.mirror import MirrorService
from headway.weights.mirrors import Mirrors
from headway.weights.shared_memory import Publisher, Subscriber

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

SETTINGS: dict[str, Any] = {"key": KEY, "epoch": 1, "orphan_s": 10.0, "ports": [0], "host": "127.0.0.1"}


def tensors(version: int, megabytes: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(megabytes << 18, generator=generator), "b": torch.full((5, 3), float(version))}


def same(published: PublishedWeights, expected: dict[str, torch.Tensor]) -> bool:
    read = Subscriber().fetch(published)
    return all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def slots(folder: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"headway-{folder.name}-*"))


class Context:
    """What a mirror uses of a worker's context."""

    def __init__(self) -> None:
        self.log = logging.getLogger("mirror")


def mirror(folder: Path, node: str, **settings: Any) -> MirrorService:
    return MirrorService(cast(Any, Context()), run_id=folder.name, node=node, **(SETTINGS | settings))


class Throttle:
    """A relay before a mirror that stops carrying its bytes after so many, until it is opened."""

    def __init__(self, address: str, limit_bytes: int) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._left_bytes = limit_bytes
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._carry, "127.0.0.1", 0) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(self._host, self._port)

        async def ask() -> None:
            while data := await reader.read(1 << 16):
                to.write(data)
            to.close()

        asking = asyncio.create_task(ask())
        with contextlib.suppress(ConnectionError):
            while data := await there.read(1 << 16):
                self._left_bytes -= len(data)
                if self._left_bytes < 0 and not self._open.is_set():
                    self.reached.set()
                    await self._open.wait()
                writer.write(data)
                await writer.drain()
        asking.cancel()
        writer.close()


def test_a_chain_of_nodes_reads_equal_bytes_and_the_origin_sends_them_once(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b", "c", "d") as (nodes, events, _):
            settings = {name: SETTINGS[name] for name in ("key", "epoch", "orphan_s")} | {
                "run_id": tmp_path.name,
                "ports": list(range(29700, 29720)),
            }
            mirrors = Mirrors(nodes, RealClock(), "", nodes.host_of, settings, events)
            with Publisher(tmp_path.name, directory=tmp_path) as publisher:
                for version in range(5):  # more than a mirror has slots
                    expected = tensors(version)
                    published = publisher.publish(version, expected)
                    copies = await asyncio.gather(*(mirrors.on_node(published, node) for node in "bcd"))
                    assert len({copy.path for copy in copies} | {published.path}) == 4
                    assert all(same(copy, expected) for copy in copies)
                    assert await mirrors.on_node(published, "") == published
                origin, _ = await mirrors._mirror("")
                sent = (await origin.call("statistics"))["served_bytes"]
                assert sent <= 1.02 * 5 * published.size_bytes
            await mirrors.stop()
            assert not slots(tmp_path)

    run(main)


def test_a_source_killed_in_mid_transfer_leaves_nothing_that_can_be_read(tmp_path: Path):
    async def main() -> None:
        launcher = LocalLauncher(RealClock())
        arguments = SETTINGS | {"run_id": tmp_path.name, "node": "a"}
        spec = WorkerSpec(name="mirror-a", factory="headway.weights.mirror:MirrorService", arguments=arguments)
        source = await launcher.start(spec)
        here = mirror(tmp_path, "b")
        with Publisher(tmp_path.name, directory=tmp_path) as publisher:
            expected = tensors(0)
            published = publisher.publish(0, expected)
            await source.call("serve_published", published)
            throttle = Throttle(await source.call("address"), published.size_bytes // 2)
            async with throttle.listening() as address:
                fetching = asyncio.create_task(asyncio.to_thread(here.fetch, published, [(address, ())]))
                await throttle.reached.wait()
                os.kill(source.pid, signal.SIGKILL)
                await source.died
                throttle.open()
                with pytest.raises(WeightsCorrupt, match="version 0 "):
                    await fetching
            (half,) = slots(tmp_path)
            with pytest.raises(WeightsCorrupt):
                Subscriber().fetch(published_at(published, half))
            successor = await launcher.start(spec)
            await successor.call("serve_published", published)
            assert same(
                await asyncio.to_thread(here.fetch, published, [(await successor.call("address"), ())]), expected
            )
            await successor.stop()
        here.close()

    run(main)


def parts_of(folder: Path, version: int, nodes: Sequence[str] = "ab") -> PublishedWeights:
    """A version that ranks on several nodes have published together."""

    def of_rank(writer: ThreadWriter) -> PublishedWeights:
        publisher = Publisher(folder.name, directory=folder, writers=writer)
        return publisher.begin_rows(version, rows_of(tensors(version), writer.rank, len(nodes))).finish()

    return WriterThreads(*nodes).run(of_rank)[0]


def serve(published: PublishedWeights, part: PublishedPart, source: MirrorService) -> tuple[str, Any]:
    source.serve_published(msgspec.structs.replace(published, path=part.path), part.ranges)
    return source.address(), part.ranges


def overwrite(path: str) -> None:
    """Leave the header of a slot that is being written."""
    content = bytearray(Path(path).read_bytes())
    content[8:24] = bytes(16 * [255])
    Path(path).write_bytes(content)


def test_each_range_comes_from_the_node_that_has_it(tmp_path: Path):
    """Also to the nodes that have the parts, which fetch from one another at once, and then from one of them."""

    async def main() -> None:
        owners, readers = [mirror(tmp_path, node) for node in "ab"], [mirror(tmp_path, node) for node in "cd"]
        for version in range(2):
            published = parts_of(tmp_path, version)
            sources = [serve(published, *pair) for pair in zip(published.parts, owners, strict=True)]
            old_bytes = [owner.served_bytes for owner in owners]
            assert same(await asyncio.to_thread(readers[0].fetch, published, sources), tensors(version))
            sent = [owner.served_bytes - old for owner, old in zip(owners, old_bytes, strict=True)]
            assert sum(sent) <= 1.02 * published.size_bytes
            assert min(sent) >= 0.4 * published.size_bytes, "each sends its half"
            copies = await asyncio.gather(*(asyncio.to_thread(owner.fetch, published, sources) for owner in owners))
            assert all(same(copy, tensors(version)) and not copy.parts for copy in copies)
            chained = [(owners[1].address(), ())]
            assert same(await asyncio.to_thread(readers[1].fetch, published, chained), tensors(version))
        for each in (*owners, *readers):
            each.close()

    run(main)


def test_nodes_that_have_parts_and_ask_at_once_wait_for_no_patience(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b") as (nodes, events, _):
            settings = {name: SETTINGS[name] for name in ("key", "epoch", "orphan_s")} | {
                "run_id": tmp_path.name,
                "ports": list(range(29720, 29740)),
            }
            mirrors = Mirrors(nodes, RealClock(), "", nodes.host_of, settings, events)
            assert await mirrors.problems([], ["", "b"]) == []
            for version in range(3):
                published = parts_of(tmp_path, version, nodes=("", "b"))
                askers = ("b", "") if version % 2 else ("", "b")
                asking = asyncio.gather(*(mirrors.on_node(published, node) for node in askers))
                copies = await asyncio.wait_for(asking, 15.0)
                assert len({copy.path for copy in copies}) == 2
                assert all(same(copy, tensors(version)) and not copy.parts for copy in copies)
            await mirrors.stop()

    run(main)


@pytest.mark.parametrize("fault", [pytest.param("killed", marks=pytest.mark.slow), "overwritten"])
def test_a_part_that_ends_in_mid_transfer_leaves_nothing_that_can_be_read(tmp_path: Path, fault: str):
    async def main() -> None:
        launcher, here, first = LocalLauncher(RealClock()), mirror(tmp_path, "c"), mirror(tmp_path, "a")
        arguments = SETTINGS | {"run_id": tmp_path.name, "node": "b"}
        spec = WorkerSpec(name="mirror-b", factory="headway.weights.mirror:MirrorService", arguments=arguments)
        other = await launcher.start(spec)
        published = parts_of(tmp_path, 0)
        own_part, other_part = published.parts
        sources = [serve(published, own_part, first)]
        other_file = msgspec.structs.replace(published, path=other_part.path)
        await other.call("serve_published", other_file, other_part.ranges)
        throttle = Throttle(await other.call("address"), published.size_bytes // 4)
        async with throttle.listening() as address:
            fetching = asyncio.create_task(
                asyncio.to_thread(here.fetch, published, [*sources, (address, other_part.ranges)])
            )
            await throttle.reached.wait()
            if fault == "killed":
                os.kill(other.pid, signal.SIGKILL)
                await other.died
            else:
                overwrite(other_part.path)
            throttle.open()
            with pytest.raises(WeightsCorrupt, match="version 0 "):
                await fetching
        for half in slots(tmp_path):
            with pytest.raises(WeightsCorrupt):
                Subscriber().fetch(published_at(published, half))
        if fault == "killed":
            other = await launcher.start(spec)
        later = parts_of(tmp_path, 1)
        await other.call(
            "serve_published", msgspec.structs.replace(later, path=later.parts[1].path), later.parts[1].ranges
        )
        sources = [serve(later, later.parts[0], first), (await other.call("address"), later.parts[1].ranges)]
        assert same(await asyncio.to_thread(here.fetch, later, sources), tensors(1))
        await other.stop()
        for each in (here, first):
            each.close()

    run(main)


@pytest.mark.long
def test_a_dead_link_of_the_chain_is_gone_round(tmp_path: Path):
    async def main() -> None:
        async with joined_nodes(tmp_path, "b", "c") as (nodes, events, _):
            settings = {name: SETTINGS[name] for name in ("key", "epoch", "orphan_s")} | {
                "run_id": tmp_path.name,
                "ports": list(range(29700, 29720)),
            }
            mirrors = Mirrors(nodes, RealClock(), "", nodes.host_of, settings, events)
            with Publisher(tmp_path.name, directory=tmp_path) as publisher:
                expected = tensors(0)
                published = publisher.publish(0, expected)
                await mirrors.on_node(published, "b")
                dead, _ = await mirrors._mirror("b")
                os.kill(dead.pid, signal.SIGKILL)
                await dead.died
                assert same(await mirrors.on_node(published, "c"), expected)
            await mirrors.stop()

    run(main)


def test_a_slow_reader_has_its_version_while_the_publisher_goes_on(tmp_path: Path):
    """The publisher leaves the slot that is read to its reader, and takes it again afterwards."""

    async def main() -> None:
        source, here = mirror(tmp_path, "a"), mirror(tmp_path, "b")
        with Publisher(tmp_path.name, slots=2, directory=tmp_path) as publisher:
            published = publisher.publish(0, tensors(0))
            source.serve_published(published)
            throttle = Throttle(source.address(), published.size_bytes // 2)
            async with throttle.listening() as address:
                fetching = asyncio.create_task(asyncio.to_thread(here.fetch, published, [(address, ())]))
                await throttle.reached.wait()
                publisher.publish(1, tensors(1))
                newest = publisher.publish(2, tensors(2))
                throttle.open()
                assert same(await fetching, tensors(0))
            source.serve_published(newest)
            assert same(await asyncio.to_thread(here.fetch, newest, [(source.address(), ())]), tensors(2))
        source.close()
        here.close()

    run(main)


def test_an_earlier_version_that_is_published_again_reaches_the_nodes(tmp_path: Path):
    """As the best one does, for the evaluation at a run's end."""

    async def main() -> None:
        first, second = (mirror(tmp_path, node) for node in "ab")
        with Publisher(tmp_path.name, directory=tmp_path) as publisher:
            for version in (0, 1, 2, 3, 4, 1):
                expected = tensors(version, 1)
                published = publisher.publish(version, expected)
                first.serve_published(published)
                copy = await asyncio.to_thread(second.fetch, published, [(first.address(), ())])
                assert same(copy, expected)
        for each in (first, second):
            each.close()

    run(main)


def test_a_version_that_a_mirror_no_longer_has_is_refused_at_once(tmp_path: Path):
    """Not after the patience for one that it may still get: a node that joins would miss the next ones meanwhile."""

    async def main() -> None:
        first, second, third = (mirror(tmp_path, node) for node in "abc")
        with Publisher(tmp_path.name, directory=tmp_path) as publisher:
            for version in range(5):
                published = publisher.publish(version, tensors(version, 1))
                first.serve_published(published)
                await asyncio.to_thread(second.fetch, published, [(first.address(), ())])
            for source in (first, second):
                gone = msgspec.structs.replace(published, version=1)
                with pytest.raises(WeightsCorrupt, match="version 1 is no longer at"):
                    await asyncio.wait_for(asyncio.to_thread(third.fetch, gone, [(source.address(), ())]), 5.0)
        for each in (first, second, third):
            each.close()

    run(main)


def test_a_mirror_serves_nobody_without_the_key(tmp_path: Path):
    source, stranger = mirror(tmp_path, "a"), mirror(tmp_path, "b", key=make_key())
    later = mirror(tmp_path, "c", epoch=2)
    with Publisher(tmp_path.name, directory=tmp_path) as publisher:
        published = publisher.publish(0, tensors(0, 1))
        source.serve_published(published)
        with pytest.raises(WeightsCorrupt, match="another key"):
            stranger.fetch(published, [(source.address(), ())])
        with pytest.raises(WeightsCorrupt, match="epoch 2 has ended"):
            later.fetch(published, [(source.address(), ())])
        assert source.served_bytes == 0
    for service in (source, stranger, later):
        service.close()


def test_a_thousand_silent_connections_keep_no_mirror_out(tmp_path: Path):
    async def main() -> None:
        source, here = mirror(tmp_path, "a"), mirror(tmp_path, "b")
        host, port = source.address().split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        with Publisher(tmp_path.name, directory=tmp_path) as publisher:
            expected = tensors(0, 1)
            published = publisher.publish(0, expected)
            source.serve_published(published)
            assert same(await asyncio.to_thread(here.fetch, published, [(source.address(), ())]), expected)
        for _, writer in silent:
            writer.close()
        source.close()
        here.close()

    run(main)


def published_at(published: PublishedWeights, path: Path) -> PublishedWeights:
    """What a replica would be told, had the transfer succeeded."""
    return PublishedWeights(
        version=published.version, path=str(path), checksum=published.checksum, size_bytes=published.size_bytes
    )
