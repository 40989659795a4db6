"""Manages the mirrors of a run for its orchestrator: decides from which node each node fetches a version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import msgspec

from headway.records.errors import HeadwayError, RemoteError, WeightsCorrupt
from headway.records.generation import PublishedPart, PublishedWeights
from headway.runtime.clock import Clock
from headway.runtime.supervision import cancel_all
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.weights.mirror:MirrorService"
_FETCH_S = 600.0
_START_S = 60.0
_KEPT_VERSIONS = 3  # versions
_SLOWER = 2.0  # times its own seconds, that a node may wait for another's copy


class Mirrors:
    """Brings published versions to the nodes that need them, each version once to each node.

    The nodes that want a version form a chain in the order in which they ask: the first fetches from the trainer's
    machine, each other one from the last before it that isn't much slower, while that is still fetching. A node whose
    predecessor fails fetches from the trainer's machine. Where the trainer's ranks have published a version on several
    nodes, each of them is the source of its part, and fetches the others' if it needs the version.
    """

    def __init__(
        self,
        launcher: Launcher,
        clock: Clock,
        origin: str,
        host_of: Callable[[str], str],
        settings: Mapping[str, Any],
        on_event: EventCallback = lambda name, detail, /, **fields: None,
    ) -> None:
        """``origin``: the node of the trainer's rank 0; "": this machine. ``host_of(node)``: its address for others.
        ``settings``: the other arguments of `MirrorService`."""
        self._launcher, self._clock, self._on_event = launcher, clock, on_event
        self._origin = origin
        self._host_of = host_of
        self._settings = dict(settings)
        self._slots: dict[str, WorkerSlot] = {}  # by node
        self._addresses: dict[str, tuple[WorkerHandle, str]] = {}  # of mirrors, by node
        self._chains: dict[int, list[str]] = {}  # version -> nodes, in the order of the chain
        self._seconds: dict[str, float] = {}  # of each node's last fetch
        # The last version, by itself and its checksum, with the whole version in the store, if there is one.
        self._served: tuple[tuple[int, str], asyncio.Future[PublishedWeights | None]] | None = None
        self._copies: dict[tuple[int, str, str], asyncio.Task[PublishedWeights]] = {}  # version, its checksum, node

    async def on_node(self, published: PublishedWeights, node: str) -> PublishedWeights:
        """Return ``published`` as ``node`` can read it, fetched there first if need be. Raises WeightsCorrupt when that
        fails: a later version, or the same once more, may succeed."""
        if node == self._origin and not published.parts:
            return published
        copy_key = (published.version, published.checksum, node)
        task = self._copies.get(copy_key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._copies[copy_key] = asyncio.create_task(self._copy(published, node), name=f"mirror on {node}")
            for old_key in [known for known in self._copies if known[0] <= published.version - _KEPT_VERSIONS]:
                del self._copies[old_key]
                self._chains.pop(old_key[0], None)
        return await asyncio.shield(task)

    async def problems(self, nodes: Iterable[str], publishers: Sequence[str] = ()) -> list[str]:
        """List what keeps ``nodes`` from fetching, each from the trainer's machine, from ``publishers``, where the
        trainer's ranks publish a part, and from the node before it."""
        failures, node_names = list[str](), list(dict.fromkeys((self._origin, *nodes)))
        sources_by_reader: dict[str, tuple[str, ...]] = {
            reader: (self._origin, *publishers, previous_node) for previous_node, reader in pairwise(node_names)
        }
        if other_publishers := tuple(node for node in publishers if node != self._origin):
            sources_by_reader[self._origin] = other_publishers  # it has a part alone
        if sources_by_reader:  # start them together; failures are found below
            await asyncio.gather(*map(self._mirror, {*node_names, *publishers}), return_exceptions=True)
        for reader, sources in sources_by_reader.items():
            for source in dict.fromkeys(sources):
                try:
                    (_, address), (mirror_worker, _) = await self._mirror(source), await self._mirror(reader)
                    why = await mirror_worker.call("problem_with", address, timeout_s=_START_S)
                except (HeadwayError, TimeoutError) as error:
                    why = str(error)
                if why:
                    failures.append(f"{reader or 'this machine'} gets nothing from {source or 'this machine'}: {why}")
        return failures

    async def stop(self) -> None:
        """Stop all mirrors."""
        await cancel_all(*self._copies.values())
        await asyncio.gather(*(slot.stop(1.0) for slot in self._slots.values()))

    async def _copy(self, published: PublishedWeights, node: str) -> PublishedWeights:
        chain_nodes = self._chains.setdefault(published.version, [])
        limit_s = _SLOWER * self._seconds.get(node, min(self._seconds.values(), default=inf))
        fast_nodes = [other for other in chain_nodes if self._seconds.get(other, 0.0) <= limit_s]
        previous_node, started_s = fast_nodes[-1] if fast_nodes else None, self._clock.now()
        chain_nodes.append(node)
        try:
            try:
                stored = None
                if previous_node is None or published.parts or self._settings.get("store"):
                    stored = await self._serve_once(published)
                if stored is not None:
                    return await self._fetch_stored(published, node, stored)
                copy = await self._fetch(published, node, previous_node)
                self._seconds[node] = self._clock.now() - started_s
                return copy
            except WeightsCorrupt:  # a mirror has died, here or there: its successor may do better
                await self._serve(published, directly=True)
                return await self._fetch(published, node, None)
        except BaseException:
            chain_nodes.remove(node)
            raise

    async def _fetch(self, published: PublishedWeights, node: str, source: str | None) -> PublishedWeights:
        """Fetch from ``source``'s mirror into ``node``'s; None: from where it was published."""
        try:
            parts = self._parts_of(published) if source is None else [PublishedPart(node=source, path="", ranges=())]
            sources = [((await self._mirror(part.node))[1], part.ranges) for part in parts]
            node_mirror, _ = await self._mirror(node)
            return await node_mirror.call("fetch", published, sources, timeout_s=_FETCH_S)
        except (HeadwayError, TimeoutError) as error:
            raise _corrupt(published, node, error) from error

    async def _fetch_stored(self, published: PublishedWeights, node: str, stored: PublishedWeights) -> PublishedWeights:
        try:
            node_mirror, _ = await self._mirror(node)
            return await node_mirror.call("fetch", published, [], stored, timeout_s=_FETCH_S)
        except (HeadwayError, TimeoutError) as error:
            raise _corrupt(published, node, error) from error

    async def _serve_once(self, published: PublishedWeights) -> PublishedWeights | None:
        """Have a version served from where it was published, before the first fetch: a mirror that fetches takes no
        other call, and two would wait for each other's parts. Returns the whole version that is in the store."""
        key = published.version, published.checksum
        if self._served is None or self._served[0] != key:
            self._served = key, asyncio.ensure_future(self._serve(published))
        return await asyncio.shield(self._served[1])

    async def _serve(self, published: PublishedWeights, *, directly: bool = False) -> PublishedWeights | None:
        """Let the mirrors of the nodes where it was published serve a version; or, unless it is to come ``directly``,
        put it into the store, if there is one and one node has all of the version. Raises WeightsCorrupt."""
        if self._settings.get("store") and not (published.parts or directly):
            try:
                origin_mirror, _ = await self._mirror(self._origin)
                return await origin_mirror.call("store_published", published, timeout_s=_FETCH_S)
            except (HeadwayError, TimeoutError) as error:
                self._on_event("weights_not_stored", f"version {published.version}: {error}")
        for part in self._parts_of(published):
            try:
                mirror_worker, _ = await self._mirror(part.node)
                own_file = msgspec.structs.replace(published, path=part.path, parts=())
                await mirror_worker.call("serve_published", own_file, part.ranges)
            except (HeadwayError, TimeoutError) as error:
                raise _corrupt(published, part.node, error) from error
        return None

    def _parts_of(self, published: PublishedWeights) -> Sequence[PublishedPart]:
        return published.parts or [PublishedPart(node=self._origin, path=published.path, ranges=())]

    async def _mirror(self, node: str) -> tuple[WorkerHandle, str]:
        """The mirror of ``node`` and its address for others, started if there is none. Raises the errors of the
        launcher and of calls."""
        host = self._host_of(node)  # raises NodeLost: nothing is started, or waited for, on a node that isn't there
        slot = self._slots.get(node)
        if slot is None or slot.spec.arguments["host"] != host:
            arguments = {**self._settings, "node": node, "host": host}
            device_prefix = f"{node}/" if node else ""
            spec = WorkerSpec(
                name=f"mirror-{node or 'head'}", factory=_FACTORY, arguments=arguments, device=f"{device_prefix}cpu:all"
            )
            slot = self._slots[node] = WorkerSlot(spec, self._launcher, self._clock, self._on_event)
        worker = slot.live or await slot.restart(timeout_s=_START_S)
        if worker is None:
            raise slot.fault or WeightsCorrupt(f"the mirror of {node or 'this machine'} can't be started")
        # Asked before its first fetch: a mirror answers no call while it fetches, and others wait for its address.
        if node not in self._addresses or self._addresses[node][0] is not worker:
            self._addresses[node] = (worker, await worker.call("address"))
        return self._addresses[node]


def _corrupt(published: PublishedWeights, node: str, error: Exception) -> WeightsCorrupt:
    """The error of a version that doesn't get to a node."""
    cause = error.__cause__ if isinstance(error, RemoteError) else error
    return (
        cause
        if isinstance(cause, WeightsCorrupt)
        else WeightsCorrupt(f"version {published.version} on node {node}: {error}")
    )
