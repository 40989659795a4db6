"""The machines of a workflow: this one alone, or with the nodes that have joined."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headway.config.cluster import ClusterConfig
from headway.flow.segments import new_folder
from headway.runtime.clock import Clock
from headway.runtime.devices import split_node
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import make_key, read_key
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher

EPOCH = 1  # a workflow keeps no books that an older process of it could write to


@dataclass(frozen=True, kw_only=True)
class FlowMachines:
    """The machines of a workflow: what starts its workers there, and how they find and trust each other."""

    launcher: Launcher
    key: str
    folder: str  # of shared memory and sockets, the same on all machines
    ports: tuple[int, ...] = ()
    certificate: str = ""
    orphan_s: float = 60.0
    nodes: Nodes | None = None

    def host_of(self, device: str) -> str:
        """The address by which others reach the machine of a device; empty where there is one machine."""
        return "" if self.nodes is None else self.nodes.host_of(split_node(device)[0])


@asynccontextmanager
async def open_machines(
    cluster: ClusterConfig | None, local: Launcher, clock: Clock, on_event: EventCallback
) -> AsyncIterator[FlowMachines]:
    """The machines, when all nodes of ``cluster`` have joined. Raises ConfigurationError (key, address), NodeLost."""
    folder = str(new_folder())
    if cluster is None or not isinstance(local, LocalLauncher):
        yield FlowMachines(launcher=local, key=make_key(), folder=folder)
        return
    key = read_key(cluster.key_file)
    certificate = make_certificate() if cluster.encryption == "tls" else ""
    async with Nodes(
        cluster.address,
        key,
        EPOCH,
        clock,
        local,
        orphan_s=cluster.orphan_s,
        return_s=cluster.join_timeout_s,
        environment=cluster.environment,
        certificate=certificate,
        on_event=on_event,
    ) as nodes:
        for name in cluster.nodes:
            await nodes.wait_for(name, cluster.join_timeout_s)
        yield FlowMachines(
            launcher=nodes,
            key=key,
            folder=folder,
            ports=tuple(cluster.ports),
            certificate=certificate,
            orphan_s=cluster.orphan_s,
            nodes=nodes,
        )
