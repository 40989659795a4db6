"""Checks a run's machines before the start: whether its accounting survives them, whether its nodes can serve it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from headway.config.schema import Experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.nodes.machines import Machines, NodeCheck, device_names, open_machines
from headway.orchestrator.preflight.capacity import gibibytes, memory_findings, memory_places, nearest_folder
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.check_report import Findings
from headway.records.errors import HeadwayError
from headway.records.node import NodeConditions
from headway.runtime.addresses import machine_addresses
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.file_systems import require_local
from headway.runtime.nodes.files import FilesService
from headway.runtime.nodes.node import Node
from headway.runtime.workers import WorkerHandle, WorkerSpec
from headway.weights.slots import SHARED_MEMORY

LARGEST_TIME_OFFSET_S = 5.0  # a run compares no Unix times of two machines; access tokens and readers of logs do
LEAST_DISK_BYTES = 256 << 20  # of a node's temporary folder: logs and its workers' files
_KEY = "cluster.nodes"


def accounting_key(experiment: Experiment) -> str:
    """The configuration key of the folder of the accounting."""
    return "run.directory" if experiment.cluster.accounting_directory is None else "cluster.accounting_directory"


def cluster_findings(experiment: Experiment) -> Findings:
    """Check the locations of the accounting and its replica, and the environment that workers on nodes get."""
    findings, cluster, environment = Findings(), experiment.cluster, experiment.cluster.environment
    with findings.refused(accounting_key(experiment)):
        require_local(Path(cluster.accounting_directory or experiment.run.directory))
    if cluster.address and cluster.replicate_to is None:
        findings.warning(
            "cluster.replicate_to",
            "isn't set: the accounting is on this machine only; if it is lost, no other can resume the run",
        )
    node, _, copy_path = (cluster.replicate_to or "").partition(":")
    if copy_path and not node and (reason := FilesService.copy_problem(copy_path)):
        findings.error("cluster.replicate_to", reason)
    if environment:
        setting_texts = (
            f"{variable}={'***' if variable.upper().endswith(('KEY', 'TOKEN', 'SECRET', 'PASSWORD')) else value_text}"
            for variable, value_text in environment.items()
        )
        findings.info("cluster.environment", f"workers on nodes get {', '.join(setting_texts)}")
    return findings


def node_findings(
    experiment: Experiment, *, deep: bool = False, on_progress: Callable[[str], object] = lambda text: None
) -> Findings:
    """Check the nodes that the run needs: whether they join in time, and whether they can serve the run. A node joins
    within ``cluster.join_timeout_s``, or the finding has the reason. A node that has joined needs the run's model files
    (``deep``: compared by every byte), user modules, devices, memory and disk.

    Opens ``cluster.address`` and starts agents as the run does; agents that a person started wait for the run then. A
    model folder that a node lacks is sent there. ``on_progress`` receives which nodes are awaited and which join.
    """
    return asyncio.run(_check_nodes(experiment, deep, on_progress)) if experiment.cluster.nodes else Findings()


async def _check_nodes(experiment: Experiment, deep: bool, on_progress: Callable[[str], object]) -> Findings:
    findings, cluster, missing_reasons = Findings(), experiment.cluster, dict[str, str]()
    advice = f"; start there: headway node --join {cluster.address} --name NAME" if cluster.launcher == "local" else ""
    on_progress(f"waits up to {cluster.join_timeout_s:g} s for nodes{advice}")

    def on_event(name: str, detail: str, /, **fields: object) -> None:
        on_progress(f"{name.replace('_', ' ')}: {detail}")

    with findings.refused(_KEY):
        node_check = NodeCheck(deep=deep, missing=missing_reasons)
        async with open_machines(experiment, RealClock(), on_event, check=node_check) as machines:
            assert machines.nodes is not None  # there is an address
            nodes = machines.nodes.joined
            for node_checks in await asyncio.gather(*(_check_node(node, machines, deep) for node in nodes.values())):
                findings += node_checks
            assert machines.mirrors is not None
            trainer, generator = machines.experiment.trainer, machines.experiment.generator
            first_copy = trainer.devices[: trainer.shards_of(len(trainer.devices))]
            publishers, readers = (
                [name for name in (parse_device(device).node for device in devices) if not name or name in nodes]
                for devices in (first_copy, generator.devices)
            )
            for reason in await machines.mirrors.problems(readers, publishers):
                findings.error("cluster.port_range", f"{reason}; open these ports between the machines of the run")
    reach_hint = f"it must reach {cluster.address} past firewalls (this machine is {', '.join(machine_addresses())})"
    for name, reason in missing_reasons.items():
        findings.error(_KEY, f"{reason}; {reach_hint}{advice.replace('NAME', name)}")
    return findings


async def _check_node(node: Node, machines: Machines, deep: bool) -> Findings:
    """Check a node that has joined."""
    findings, device = Findings(), f"{node.name}/cpu:all"
    spec = WorkerSpec(name=f"check-{node.name}", factory="headway.runtime.nodes.files:FilesService", device=device)
    try:
        _check_conditions(node, await node.call("conditions"), machines.experiment, findings)
        with findings.refused(_KEY):
            worker = await machines.launcher.start(spec)  # compares model folders, and sends those that are missing
            compared_text = "every byte" if deep else "names, sizes, headers and samples; every byte: --deep"
            findings.info(_KEY, f"node {node.name}: model files as here ({compared_text})")
            try:
                await _check_paths(worker, node.name, machines.experiment, findings)
                copy_node, _, copy_path = (machines.experiment.cluster.replicate_to or "").partition(":")
                if copy_node == node.name and (reason := await worker.call("copy_problem", copy_path)):
                    findings.error("cluster.replicate_to", f"on node {node.name}: {reason}")
            finally:
                await worker.stop()
    except (HeadwayError, TimeoutError) as error:
        findings.error(_KEY, f"node {node.name}: {error or 'no answer'}")
    return findings


def _check_conditions(node: Node, conditions: NodeConditions, experiment: Experiment, findings: Findings) -> None:
    facts, name, offset_s = node.facts, f"node {node.name}", node.time_offset_s
    assert facts is not None  # it has joined
    memory, shared, disk = conditions.memory_free_bytes, conditions.shared_memory_free_bytes, conditions.disk_free_bytes
    free_text = f"{gibibytes(memory)} of memory, {gibibytes(shared)} of {SHARED_MEMORY}, {gibibytes(disk)} of disk free"
    findings.info(_KEY, f"{name}: {facts.cores} cores, {facts.gpus} GPUs, system clock {offset_s:+.3f} s, {free_text}")
    if abs(offset_s) > LARGEST_TIME_OFFSET_S:
        findings.warning(_KEY, f"{name}: its system clock is {offset_s:+.0f} s off: synchronise it by NTP")
    if disk < LEAST_DISK_BYTES:
        findings.error(_KEY, f"{name}: only {gibibytes(disk)} free at {facts.scratch}: free space, or set TMPDIR there")
    for key, device in ((key, parse_device(each)) for key, names in device_names(experiment) for each in names):
        device_count = facts.gpus if device.kind == "cuda" else facts.cores
        if device.node == node.name and device.last >= device_count:
            findings.error(key, f"{device}: {name} has {device_count} {device.kind} device(s), counted from 0")
    capacities = {f"memory of {name}": (facts.memory_bytes, memory), f"{SHARED_MEMORY} of {name}": (shared, shared)}
    for gpu in conditions.gpus:
        capacities[f"{node.name}/cuda:{gpu.index}"] = (gpu.memory_bytes, gpu.memory_bytes - gpu.memory_used_bytes)
    uses = memory_uses(experiment, sizes_of(experiment.model.path))
    uses = [use for use in uses if use.location in capacities]
    findings += memory_findings(uses, memory_places(uses, capacities))


async def _check_paths(worker: WorkerHandle, node: str, experiment: Experiment, findings: Findings) -> None:
    """Check the user's modules that the node's workers import, and ``run.directory`` for a trainer's rank there."""
    has_trainer = any(parse_device(device).node == node for device in experiment.trainer.devices)
    rules = experiment.rules.algorithms if has_trainer else ()
    names = {f"{'tasks.train.' if number else ''}algorithm.loss": rule.loss for number, rule in enumerate(rules)}
    if node in experiment.verifier.nodes:
        names |= {f"verifiers.{key}.name": settings.name for key, settings in experiment.verifiers.items()}
        names["verifier.name"] = experiment.verifier.name
    if node in experiment.environment.nodes:
        names |= {"environment.name": experiment.environment.name, "environment.agent": experiment.environment.function}
    user_functions = {key: name for key, name in names.items() if ":" in name}
    folder = nearest_folder(Path(experiment.run.directory))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".headway-check-") as marker:
        problems: dict[str, str] = await worker.call("problems", user_functions, marker.name if has_trainer else "")
    for key, reason in problems.items():
        findings.error(key, f"on node {node}: {reason}; mount its folder on all machines under one path")
