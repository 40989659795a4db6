"""Opens the machines of a run: this one alone, or with the nodes that its file names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config.engines import SERVER_START_S, starts_vllm
from headway.config.load import model_folders
from headway.config.schema import Experiment
from headway.config.section import ANY_NODE
from headway.orchestrator.nodes.file_distribution import FilesLauncher
from headway.orchestrator.nodes.placement import DeviceCapacity, place_devices
from headway.records.errors import ConfigurationError
from headway.records.generation import PublishedWeights
from headway.records.node import NodeConditions
from headway.runtime.clock import Clock
from headway.runtime.devices import parse_device
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import make_key, read_key
from headway.runtime.nodes.launchers.agents import LaunchedAgents, describe
from headway.runtime.nodes.launchers.choose import make_launcher
from headway.runtime.nodes.nodes import NodeLost, Nodes
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback, Launcher, LocalLauncher
from headway.weights.mirrors import Mirrors

# A worker's start without its model: imports of torch or vLLM from a cold disk, kernels that are compiled.
_START_S = 600.0
_READ_BYTES_PER_S = 50e6  # weights are read faster than this, from a network file system that many read from too


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines that a run's workers are started on."""

    launcher: Launcher
    experiment: Experiment  # with a node for every device
    nodes: Nodes | None = None  # None: this machine alone
    mirrors: Mirrors | None = None  # of published weights, on the nodes

    async def host_of(self, node: str) -> str:
        """The address of a node (of this machine: "") for the others; waits for a node that isn't there. Raises
        NodeLost."""
        return "127.0.0.1" if self.nodes is None else await self.nodes.await_host(node)

    def conditions(self) -> list[NodeConditions]:
        """The last known conditions of every machine; empty where this one is alone."""
        return [] if self.nodes is None else self.nodes.conditions()

    def take_offers(self, join: Callable[[str], Awaitable[object]]) -> None:
        """Call ``join(device)`` for every device that a node offers, now and later."""
        if self.nodes is not None:
            self.nodes.take_offers(join)

    async def bring_to(self, weights: PublishedWeights, node: str) -> PublishedWeights:
        """Return the weights as workers on ``node`` can read them. Raises WeightsCorrupt."""
        return weights if self.mirrors is None else await self.mirrors.on_node(weights, node)


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """A check of a run's nodes: agents that a person started wait for the run at its end."""

    deep: bool = False  # compare every byte of model files
    missing: dict[str, str] | None = None  # gets nodes that haven't joined in time -> why; None: that is an error


def _start_limit_s(experiment: Experiment) -> float:
    """Seconds after which a worker whose model isn't loaded is killed; a replica reports its own server before that."""
    folder, generator = Path(experiment.model.path), experiment.generator
    weight_files = folder.glob("*.safetensors") if folder.is_dir() else ()
    has_servers = generator.engine == "vllm-server" and starts_vllm(generator.engine, generator.devices)
    reading_s = sum(file.stat().st_size for file in weight_files) / _READ_BYTES_PER_S
    return _START_S + has_servers * SERVER_START_S + reading_s


@asynccontextmanager
async def open_machines(
    experiment: Experiment,
    clock: Clock,
    on_event: EventCallback = lambda name, detail, /, **fields: None,
    *,
    epoch: int = 1,
    run_id: str = "",
    origin: str | None = None,
    key_folder: Path | None = None,
    waits: Waits | None = None,
    check: NodeCheck | None = None,
) -> AsyncIterator[Machines]:
    """Open the machines that ``experiment`` needs; yields when all nodes that its devices name have joined.

    ``run_id`` names the weights' files; ``origin``: the device from which they are published, by default the trainer's
    first; ``key_folder``: where the run's key is written when it has to be made; ``waits``: where workers and calls to
    them are registered; ``check``: this is no run, but a check of one. Raises ConfigurationError (address, key, a
    device on a node that isn't listed), NodeLost when a node doesn't join in time.
    """
    start_timeout_s = _start_limit_s(experiment)
    local_launcher = LocalLauncher(clock, start_timeout_s=start_timeout_s, on_event=on_event, waits=waits)
    cluster = experiment.cluster
    names = needed_nodes(experiment)
    if not cluster.address:
        yield Machines(launcher=local_launcher, experiment=experiment)
        return
    if cluster.launcher == "ray":  # it finds machines for the devices placed on each node
        experiment = place_devices(experiment, dict.fromkeys(cluster.nodes, DeviceCapacity()))
    key = _key(experiment, key_folder)
    certificate = make_certificate() if cluster.encryption == "tls" else ""
    nodes = Nodes(
        cluster.address,
        key,
        epoch,
        clock,
        local_launcher,
        orphan_s=cluster.disconnect_timeout_s,
        return_s=cluster.join_timeout_s,
        environment=cluster.environment,
        certificate=certificate,
        keep_agents=check is not None and cluster.launcher == "local",
        on_event=on_event,
    )
    async with AsyncExitStack() as stack:
        agents = await _open_nodes(stack, nodes, experiment, key, clock, on_event, key_folder)
        on_event("nodes_awaited", f"{', '.join(names) or 'none'} at {nodes.address}")
        reasons = await asyncio.gather(*(_await_node(name, nodes, agents, cluster.join_timeout_s) for name in names))
        missing_reasons = {name: reason for name, reason in zip(names, reasons, strict=True) if reason}
        if check is not None and check.missing is not None:
            check.missing.update(missing_reasons)
        elif missing_reasons:
            raise NodeLost("; ".join(missing_reasons.values()))
        facts_of = {name: node.facts for name, node in nodes.joined.items() if node.facts is not None}
        joined_names = [name for name in cluster.nodes if name in facts_of]
        capacities = {name: DeviceCapacity(cpu=facts_of[name].cores, cuda=facts_of[name].gpus) for name in joined_names}
        experiment = place_devices(experiment, capacities)
        publisher_node = parse_device(origin or experiment.trainer.devices[0]).node
        mirror_settings = {"run_id": run_id, "ports": list(cluster.ports), "key": key, "epoch": epoch}
        mirror_settings |= {"orphan_s": cluster.disconnect_timeout_s, "certificate": certificate}
        if experiment.generator.engine != "vllm-server":
            mirror_settings["store"] = experiment.weights.exchange or ""
        mirrors = Mirrors(nodes, clock, publisher_node, nodes.host_of, mirror_settings, on_event)
        try:
            launcher = FilesLauncher(nodes, _folders(experiment), on_event, deep=check is not None and check.deep)
            yield Machines(launcher=launcher, experiment=experiment, nodes=nodes, mirrors=mirrors)
        finally:
            await mirrors.stop()


def _folders(experiment: Experiment) -> dict[str, str]:
    """The folders that workers read by path, by the keys that name them."""
    adapter = experiment.model.adapter
    adapter_folder = {} if adapter is None or not adapter.path else {"model.adapter.path": adapter.path}
    return model_folders(experiment) | adapter_folder


async def _open_nodes(
    stack: AsyncExitStack,
    nodes: Nodes,
    experiment: Experiment,
    key: str,
    clock: Clock,
    on_event: EventCallback,
    folder: Path | None,
) -> LaunchedAgents | None:
    """Open the run to its nodes and start their agents; ``stack`` ends both. None: a person starts the agents."""
    cluster = experiment.cluster
    devices = [parse_device(name) for _, names in device_names(experiment) for name in names]
    launcher = make_launcher(cluster, devices, None if folder is None else folder / "logs")
    if launcher is None:
        await stack.enter_async_context(nodes)
        return None
    agents = LaunchedAgents(
        launcher, cluster.nodes, key, clock, joined=lambda name: name in nodes.joined, on_event=on_event
    )
    stack.push_async_callback(agents.stop)
    await stack.enter_async_context(nodes)
    await agents.start(nodes.address)
    stack.callback(agents.run_is_over)
    return agents


async def _await_node(name: str, nodes: Nodes, agents: LaunchedAgents | None, timeout_s: float) -> str:
    """Wait until node ``name`` has joined. Returns the reason, with its agent's last end, where it hasn't; "" where it
    has."""
    try:
        await nodes.wait_for(name, timeout_s)
    except NodeLost as loss:
        return f"{loss}: {describe(agents.last_end[name])}" if agents and name in agents.last_end else str(loss)
    return ""


def needed_nodes(experiment: Experiment) -> list[str]:
    """Names of the nodes on which the run has a device. Raises ConfigurationError for one that isn't listed."""
    nodes: dict[str, None] = {}  # in order
    nodes_by_key = [(key, parse_device(name).node) for key, names in device_names(experiment) for name in names]
    nodes_by_key += [("verifier.nodes", name) for name in experiment.verifier.nodes]
    nodes_by_key += [("environment.nodes", name) for name in experiment.environment.nodes]
    nodes_by_key += [("cluster.replicate_to", (experiment.cluster.replicate_to or "").partition(":")[0])]
    for key, node in nodes_by_key:
        if node.startswith(ANY_NODE):
            nodes |= dict.fromkeys(experiment.cluster.nodes)
        elif node:
            if node not in experiment.cluster.nodes:
                valid = ", ".join(experiment.cluster.nodes) or "none"
                raise ConfigurationError(f"{key} names the node {node!r}: it isn't in cluster.nodes (valid: {valid})")
            nodes[node] = None
    return list(nodes)


def device_names(experiment: Experiment) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The keys of the experiment that name devices, with the names."""
    return (
        ("generator.devices", experiment.generator.devices),
        ("trainer.devices", experiment.trainer.devices),
        ("sft.devices", experiment.sft.devices),
    )


def _key(experiment: Experiment, folder: Path | None) -> str:
    """The run's key: the experiment's, or a new one, kept in ``folder`` for nodes that join later."""
    cluster = experiment.cluster
    if cluster.key_file is not None or cluster.launcher == "local":
        return read_key(cluster.key_file)
    key = make_key()
    if folder is not None:
        key_path = folder / "cluster.key"
        key_path.unlink(missing_ok=True)
        key_path.touch(mode=0o600)
        key_path.write_text(key + "\n", encoding="ascii")
    return key
