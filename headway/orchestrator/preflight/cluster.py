"""Findings on a run's machines before the start: whether its books survive them, and whether its nodes can serve it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.orchestrator.nodes.machines import Machines, NodeCheck, device_names, needed_nodes, open_machines
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.memory import (
    existing,
    gibibytes,
    memory_findings,
    memory_of_node,
    memory_places,
    memory_uses,
)
from headway.records.errors import HeadwayError, RemoteError
from headway.records.node import NodeConditions
from headway.runtime.addresses import is_loopback, own_addresses
from headway.runtime.clock import RealClock
from headway.runtime.devices import parse_device
from headway.runtime.file_systems import require_local
from headway.runtime.nodes.node import Node
from headway.runtime.workers import Worker, WorkerSpec
from headway.weights.leftovers import SHARED_MEMORY

LARGEST_TIME_OFFSET_S = 5.0  # nothing of a run compares Unix times across machines; logs, tokens and people do
LEAST_DISK_BYTES = 256 << 20  # of a node's temporary folder: logs and what its workers keep there
_KEY = "cluster.nodes"
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # ends of variables' names whose values aren't shown


def books_key(experiment: Experiment) -> str:
    """The key that says where the books lie."""
    return "run.directory" if experiment.cluster.books_directory is None else "cluster.books_directory"


def cluster_findings(experiment: Experiment) -> Findings:
    """Findings on where the books and their copy lie, and the environment that workers on nodes get."""
    findings, cluster = Findings(), experiment.cluster
    with findings.refused(books_key(experiment)):
        require_local(Path(cluster.books_directory or experiment.run.directory))
    if cluster.address and cluster.replicate_to is None:
        findings.warning(
            "cluster.replicate_to",
            "isn't set: the books are on this machine alone; should it be lost, no other can resume the run",
        )
    if cluster.environment:
        shown = (f"{n}={'***' if n.upper().endswith(_SECRETS) else v}" for n, v in cluster.environment.items())
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
    findings = Findings()
    with findings.refused(_KEY):
        if needed := needed_nodes(experiment):
            asyncio.run(_look(experiment, needed, deep, on_progress, findings))
    return findings


async def _look(
    experiment: Experiment, needed: list[str], deep: bool, on_progress: Callable[[str], object], findings: Findings
) -> None:
    cluster, missing = experiment.cluster, dict[str, str]()
    start = f"headway node --join {cluster.address} --name" if cluster.launcher == "local" else ""
    on_progress(f"waits up to {cluster.join_timeout_s:g} s for nodes" + (f"; on each: {start} NAME" if start else ""))

    def on_event(name: str, detail: str, /, **fields: object) -> None:
        on_progress(f"{name.replace('_', ' ')}: {detail}")

    check = NodeCheck(deep=deep, missing=missing)
    try:
        async with open_machines(experiment, RealClock(), on_event, check=check) as machines:
            assert machines.nodes is not None  # as nodes are needed
            joined = [machines.nodes.joined[name] for name in needed if name in machines.nodes.joined]
            for found in await asyncio.gather(*(_look_at(node, machines) for node in joined)):
                findings += found
    finally:
        for name, why in missing.items():
            findings.error(
                _KEY, f"{why}; {_reach(cluster.address)}" + (f"; start there: {start} {name}" if start else "")
            )


def _reach(address: str) -> str:
    """The first thing to look at when a node doesn't come to ``address``."""
    if is_loopback(address):
        own = ", ".join(own_addresses())
        return f"no other machine reaches cluster.address = {address!r}: this one has {own}"
    return f"does every firewall let {address} through?"


async def _look_at(node: Node, machines: Machines) -> Findings:
    """Findings on a node that has joined."""
    found, experiment, name = Findings(), machines.experiment, node.name
    spec = WorkerSpec(
        name=f"check-{name}", factory="headway.runtime.nodes.files:FilesService", device=f"{name}/cpu:all"
    )
    assert machines.nodes is not None
    try:
        _look_at_conditions(node, await node.call("conditions"), experiment, found)
        worker = await machines.nodes.start(spec)
        try:
            await _look_at_paths(worker, name, experiment, found)
        finally:
            await worker.stop()
        with found.refused(_KEY):
            await (await machines.launcher.start(spec)).stop()  # compares model folders, and sends them
    except (HeadwayError, TimeoutError) as error:
        found.error(_KEY, f"node {name}: {error or 'gives no answer'}")
    return found


def _look_at_conditions(node: Node, seen: NodeConditions, experiment: Experiment, found: Findings) -> None:
    facts, name, offset_s = node.facts, node.name, node.time_offset_s
    assert facts is not None  # it has joined
    memory, disk = seen.memory_free_bytes, seen.disk_free_bytes
    found.info(
        _KEY,
        f"node {name} at {node.peer}: {facts.cores} cores, {facts.gpus} GPUs, clock {offset_s:+.3f} s; free: "
        f"{gibibytes(memory)} of memory, {gibibytes(seen.shared_memory_free_bytes)} of {SHARED_MEMORY}, "
        f"{gibibytes(disk)} at {facts.scratch}",
    )
    if abs(offset_s) > LARGEST_TIME_OFFSET_S:
        off = f"{abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}"
        found.warning(_KEY, f"node {name}: its clock is {off}; set it by NTP: its logs and certificates go by it")
    if disk < LEAST_DISK_BYTES:
        least = f"{gibibytes(disk)} free at {facts.scratch}, less than {gibibytes(LEAST_DISK_BYTES)}"
        found.error(_KEY, f"node {name}: {least}: make room there, or start its agent with another TMPDIR")
    for key, device in ((key, parse_device(each)) for key, names in device_names(experiment) for each in names):
        there = facts.gpus if device.kind == "cuda" else facts.cores
        if device.node == name and device.last >= there:
            found.error(key, f"{device}: node {name} has {there} {device.kind} device(s), counted from 0")
    rooms = {
        f"{name}/cuda:{gpu.index}": (gpu.memory_bytes, gpu.memory_bytes - gpu.memory_used_bytes) for gpu in seen.gpus
    }
    rooms[memory_of_node(name)] = (facts.memory_bytes, memory)
    uses = memory_uses(experiment, DecoderConfig.from_pretrained(Path(experiment.model.path)))
    here = [use for use in uses if use.place in rooms]
    found += memory_findings(here, memory_places(here, rooms))
    mirrored = next(use.total_bytes for use in uses if use.place == str(SHARED_MEMORY))
    generates = any(parse_device(each).node == name for each in experiment.generator.devices)
    if generates and mirrored > seen.shared_memory_free_bytes:
        room = f"node {name}: {SHARED_MEMORY} has no room for {gibibytes(mirrored)} of mirrored weights"
        (found.error if mirrored > disk else found.warning)(
            "weights.transport", f"{room}, and {facts.scratch} {gibibytes(disk)}: it is used, slower, if it has room"
        )


async def _look_at_paths(worker: Worker, node: str, experiment: Experiment, found: Findings) -> None:
    """The user's modules that its workers import, and ``run.directory`` where a trainer's rank is there."""
    trains = any(parse_device(device).node == node for device in experiment.trainer.devices)
    names = {"algorithm.loss": experiment.algorithm.loss} if trains else {}
    if node in experiment.verifier.nodes:
        names["verifier.name"] = experiment.verifier.name
        names |= {f"verifiers.{key}.name": each.name for key, each in experiment.verifiers.items()}
    if node in experiment.environment.nodes:
        names |= {"environment.name": experiment.environment.name, "environment.agent": experiment.environment.agent}
    for key, name in names.items():
        try:
            if ":" in name:
                await worker.call("require_module", name, key)
        except RemoteError as error:
            remedy = "install it there, or mount its folder on all machines under one path"
            found.error(key, f"on node {node}: {error.error}; {remedy}")
    folder = existing(Path(experiment.run.directory))
    if trains and os.access(folder, os.W_OK):  # that it can't be written to is said elsewhere
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".headway-check-") as marker:
            if not await worker.call("sees", marker.name):
                found.error(
                    "run.directory",
                    f"{folder} on node {node} isn't this machine's, or can't be written to: its trainer writes "
                    "checkpoints there; mount one file system on both under this path",
                )
