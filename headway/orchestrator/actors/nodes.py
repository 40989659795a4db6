"""The machines of a run: this one alone, or with the nodes that its file names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.generation import PublishedWeights
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.nodes.handshake import make_key, read_key
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher
from headway.weights.mirrors import Mirrors


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines that a run's workers are started on."""

    launcher: Launcher
    nodes: Nodes | None = None  # None: this machine alone
    mirrors: Mirrors | None = None  # of published weights, on the nodes

    def host_of(self, node: str) -> str:
        """The address of a node (of this machine: "") by which the others reach it. Raises NodeLost."""
        return "127.0.0.1" if self.nodes is None else self.nodes.host_of(node)

    async def bring_to(self, weights: PublishedWeights, node: str) -> PublishedWeights:
        """The weights as workers on ``node`` can read them. Raises WeightsCorrupt."""
        return weights if self.mirrors is None else await self.mirrors.on_node(weights, node)


@asynccontextmanager
async def open_machines(
    experiment: Experiment,
    clock: Clock,
    on_event: EventCallback = lambda name, detail, /, **fields: None,
    *,
    epoch: int = 1,
    run_id: str = "",
    key_folder: Path | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[Machines]:
    """The machines that ``experiment`` needs, when all nodes that its devices name have joined.

    ``run_id`` names the weights' files; ``key_folder``: where the run's key is written when it has to be made;
    ``waits``: where workers and calls to them are registered. Raises ConfigurationError (address, key, a device on a
    node that isn't listed), NodeLost when a node doesn't join in time."""
    start_timeout_s = experiment.run.worker_start_timeout_s
    local = LocalLauncher(clock, start_timeout_s=start_timeout_s, on_event=on_event, waits=waits)
    cluster = experiment.cluster
    needed = needed_nodes(experiment)
    if not cluster.address:
        yield Machines(launcher=local)
        return
    key = _key(experiment, key_folder)
    nodes = Nodes(
        cluster.address,
        key,
        epoch,
        clock,
        local,
        orphan_s=cluster.orphan_s,
        environment=cluster.environment,
        on_event=on_event,
    )
    async with nodes:
        on_event("nodes_awaited", f"{', '.join(needed) or 'none'} at {nodes.address}")
        for name in needed:
            await nodes.wait_for(name, cluster.join_timeout_s)
        origin = parse_device(experiment.trainer.devices[0]).node if experiment.trainer.devices else ""
        settings = {
            "run_id": run_id,
            "ports": list(cluster.ports),
            "key": key,
            "epoch": epoch,
            "orphan_s": cluster.orphan_s,
        }
        mirrors = Mirrors(nodes, clock, origin, nodes.host_of, settings, on_event)
        try:
            yield Machines(launcher=nodes, nodes=nodes, mirrors=mirrors)
        finally:
            await mirrors.stop()


def needed_nodes(experiment: Experiment) -> list[str]:
    """Names of the nodes on which the run has a device. Raises ConfigurationError for one that isn't listed."""
    named: list[str] = []
    for key, devices in (
        ("generator.devices", experiment.generator.devices),
        ("trainer.devices", experiment.trainer.devices),
        ("sft.device", (experiment.sft.device,)),
    ):
        for name in devices:
            node = parse_device(name).node
            if node and node not in experiment.cluster.nodes:
                known = ", ".join(experiment.cluster.nodes) or "none"
                raise ConfigurationError(f"{key} has {name!r}: cluster.nodes has no {node!r} (it has: {known})")
            if node and node not in named:
                named.append(node)
    return named


def _key(experiment: Experiment, folder: Path | None) -> str:
    """The run's key: as the experiment says, or a new one, kept in ``folder`` for nodes that join later."""
    cluster = experiment.cluster
    if cluster.key_file is not None or cluster.launcher == "local":
        return read_key(cluster.key_file)
    key = make_key()
    if folder is not None:
        path = folder / "cluster.key"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(key + "\n", encoding="ascii")
    return key
