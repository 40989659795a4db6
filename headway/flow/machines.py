"""The machines of a workflow: this machine, and the nodes that have joined."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from headway.config.cluster import ClusterConfig
from headway.flow.paths import PeerSettings
from headway.flow.segments import new_folder
from headway.runtime.clock import Clock
from headway.runtime.devices import split_node
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import make_key, read_key
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher


@dataclass(frozen=True, kw_only=True)
class FlowMachines:
    """The machines of a workflow: the launcher of its workers, and how its processes find and trust each other."""

    launcher: Launcher
    settings: PeerSettings  # all but the host
    nodes: Nodes | None = None

    def settings_for(self, device: str) -> PeerSettings:
        """Return the settings of a process on ``device``; "" stands for the workflow's own process."""
        host = "" if self.nodes is None else self.nodes.host_of(split_node(device)[0])
        return msgspec.structs.replace(self.settings, host=host)


@asynccontextmanager
async def open_machines(
    cluster: ClusterConfig | None, local: Launcher, clock: Clock, on_event: EventCallback
) -> AsyncIterator[FlowMachines]:
    """Yield the machines once all nodes of ``cluster`` have joined. Raises ConfigurationError (key, address),
    NodeLost."""
    if cluster is None:
        yield FlowMachines(launcher=local, settings=PeerSettings(key=make_key(), folder=new_folder()))
        return
    assert isinstance(local, LocalLauncher), "launcher and cluster exclude each other"
    settings = PeerSettings(
        key=read_key(cluster.key_file),
        folder=new_folder(),
        ports=tuple(cluster.ports),
        certificate=make_certificate() if cluster.encryption == "tls" else "",
        orphan_s=cluster.disconnect_timeout_s,
    )
    async with Nodes(
        cluster.address,
        settings.key,
        settings.epoch,
        clock,
        local,
        orphan_s=cluster.disconnect_timeout_s,
        return_s=cluster.join_timeout_s,
        environment=cluster.environment,
        certificate=settings.certificate,
        on_event=on_event,
    ) as nodes:
        for node in cluster.nodes:
            await nodes.wait_for(node, cluster.join_timeout_s)
        yield FlowMachines(launcher=nodes, settings=settings, nodes=nodes)
