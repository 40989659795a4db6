"""Findings on a run's machines before the start: whether its books survive them, and whether its nodes can serve it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from headway.config.schema import Experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.nodes.machines import Machines, NodeCheck, device_names, open_machines
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.memory import existing, gibibytes, memory_findings, memory_places, memory_uses
from headway.records.errors import HeadwayError
from headway.records.node import NodeConditions
from headway.runtime.addresses import own_addresses
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.file_systems import require_local
from headway.runtime.nodes.files import FilesService
from headway.runtime.nodes.node import Node
from headway.runtime.workers import WorkerHandle, WorkerSpec
from headway.weights.leftovers import SHARED_MEMORY

LARGEST_TIME_OFFSET_S = 5.0  # a run compares no Unix times of two machines; access tokens and readers of logs do
LEAST_DISK_BYTES = 256 << 20  # of a node's temporary folder: logs and what its workers keep there
_KEY = "cluster.nodes"


def books_key(experiment: Experiment) -> str:
    """The key that says where the books lie."""
    return "run.directory" if experiment.cluster.accounting_directory is None else "cluster.accounting_directory"


def cluster_findings(experiment: Experiment) -> Findings:
    """Findings on where the books and their copy lie, and the environment that workers on nodes get."""
    findings, cluster, given = Findings(), experiment.cluster, experiment.cluster.environment
    with findings.refused(books_key(experiment)):
        require_local(Path(cluster.accounting_directory or experiment.run.directory))
    if cluster.address and cluster.replicate_to is None:
        findings.warning(
            "cluster.replicate_to",
            "isn't set: the books are on this machine alone; should it be lost, no other can resume the run",
        )
    node, _, copy = (cluster.replicate_to or "").partition(":")
    if copy and not node and (why := FilesService.copy_problem(copy)):
        findings.error("cluster.replicate_to", why)
    if given:
        shown = (
            f"{n}={'***' if n.upper().endswith(('KEY', 'TOKEN', 'SECRET', 'PASSWORD')) else v}"
            for n, v in given.items()
        )
        findings.info("cluster.environment", f"workers on nodes get {', '.join(shown)}")
    return findings


def node_findings(
    experiment: Experiment, *, deep: bool = False, on_progress: Callable[[str], object] = lambda text: None
) -> Findings:
    """Findings on the nodes that the run needs: who doesn't join within ``cluster.join_timeout_s`` and why, and whether
    those that do have its model files (``deep``: every byte), user modules, devices, memory and disk.

    Opens ``cluster.address`` and starts agents as the run does; those that a person started wait for the run then. A
    model folder that a node lacks is sent there. ``on_progress`` is told who is waited for and who comes.
    """
    return asyncio.run(_look(experiment, deep, on_progress)) if experiment.cluster.nodes else Findings()


async def _look(experiment: Experiment, deep: bool, on_progress: Callable[[str], object]) -> Findings:
    findings, cluster, missing = Findings(), experiment.cluster, dict[str, str]()
    start = f"; start there: headway node --join {cluster.address} --name NAME" if cluster.launcher == "local" else ""
    on_progress(f"waits up to {cluster.join_timeout_s:g} s for nodes{start}")

    def on_event(name: str, detail: str, /, **fields: object) -> None:
        on_progress(f"{name.replace('_', ' ')}: {detail}")

    with findings.refused(_KEY):
        async with open_machines(experiment, RealClock(), on_event, check=NodeCheck(deep=deep, missing=missing)) as its:
            assert its.nodes is not None  # there is an address
            for found in await asyncio.gather(*(_look_at(node, its, deep) for node in its.nodes.joined.values())):
                findings += found
            assert its.mirrors is not None
            readers = (parse_device(device).node for device in its.experiment.generator.devices)
            for why in await its.mirrors.problems(name for name in readers if not name or name in its.nodes.joined):
                findings.error("cluster.port_range", f"{why}; open these ports between the machines of the run")
    reach = f"it must reach {cluster.address} past firewalls (this machine is {', '.join(own_addresses())})"
    for name, why in missing.items():
        findings.error(_KEY, f"{why}; {reach}{start.replace('NAME', name)}")
    return findings


async def _look_at(node: Node, machines: Machines, deep: bool) -> Findings:
    """Findings on a node that has joined."""
    found, device = Findings(), f"{node.name}/cpu:all"
    spec = WorkerSpec(name=f"check-{node.name}", factory="headway.runtime.nodes.files:FilesService", device=device)
    try:
        _look_at_conditions(node, await node.call("conditions"), machines.experiment, found)
        with found.refused(_KEY):
            worker = await machines.launcher.start(spec)  # compares model folders, and sends those that are missing
            compared = "every byte" if deep else "names, sizes, headers and samples; every byte: --deep"
            found.info(_KEY, f"node {node.name}: model files as here ({compared})")
            try:
                await _look_at_paths(worker, node.name, machines.experiment, found)
                place, _, copy = (machines.experiment.cluster.replicate_to or "").partition(":")
                if place == node.name and (why := await worker.call("copy_problem", copy)):
                    found.error("cluster.replicate_to", f"on node {node.name}: {why}")
            finally:
                await worker.stop()
    except (HeadwayError, TimeoutError) as error:
        found.error(_KEY, f"node {node.name}: {error or 'no answer'}")
    return found


def _look_at_conditions(node: Node, seen: NodeConditions, experiment: Experiment, found: Findings) -> None:
    facts, name, offset_s = node.facts, f"node {node.name}", node.time_offset_s
    assert facts is not None  # it has joined
    memory, shared, disk = seen.memory_free_bytes, seen.shared_memory_free_bytes, seen.disk_free_bytes
    free = f"{gibibytes(memory)} of memory, {gibibytes(shared)} of {SHARED_MEMORY}, {gibibytes(disk)} of disk free"
    found.info(_KEY, f"{name}: {facts.cores} cores, {facts.gpus} GPUs, system clock {offset_s:+.3f} s, {free}")
    if abs(offset_s) > LARGEST_TIME_OFFSET_S:
        found.warning(_KEY, f"{name}: its system clock is {offset_s:+.0f} s off: synchronise it by NTP")
    if disk < LEAST_DISK_BYTES:
        found.error(_KEY, f"{name}: only {gibibytes(disk)} free at {facts.scratch}: make room, or set TMPDIR there")
    for key, device in ((key, parse_device(each)) for key, names in device_names(experiment) for each in names):
        there = facts.gpus if device.kind == "cuda" else facts.cores
        if device.node == node.name and device.last >= there:
            found.error(key, f"{device}: {name} has {there} {device.kind} device(s), counted from 0")
    rooms = {f"memory of {name}": (facts.memory_bytes, memory), f"{SHARED_MEMORY} of {name}": (shared, shared)}
    for gpu in seen.gpus:
        rooms[f"{node.name}/cuda:{gpu.index}"] = (gpu.memory_bytes, gpu.memory_bytes - gpu.memory_used_bytes)
    uses = memory_uses(experiment, sizes_of(experiment.model.path))
    uses = [use for use in uses if use.place in rooms]
    found += memory_findings(uses, memory_places(uses, rooms))


async def _look_at_paths(worker: WorkerHandle, node: str, experiment: Experiment, found: Findings) -> None:
    """The user's modules that its workers import, and ``run.directory`` where a trainer's rank is there."""
    trains = any(parse_device(device).node == node for device in experiment.trainer.devices)
    names = {"algorithm.loss": experiment.algorithm.loss} if trains else {}
    if node in experiment.verifier.nodes:
        names |= {f"verifiers.{key}.name": each.name for key, each in experiment.verifiers.items()}
        names["verifier.name"] = experiment.verifier.name
    if node in experiment.environment.nodes:
        names |= {"environment.name": experiment.environment.name, "environment.agent": experiment.environment.function}
    own = {key: name for key, name in names.items() if ":" in name}
    with tempfile.NamedTemporaryFile(dir=existing(Path(experiment.run.directory)), prefix=".headway-check-") as marker:
        problems: dict[str, str] = await worker.call("problems", own, marker.name if trains else "")
    for key, why in problems.items():
        found.error(key, f"on node {node}: {why}; mount its folder on all machines under one path")
