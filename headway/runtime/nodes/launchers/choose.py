"""The launcher that a run's file names, set up for its nodes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from headway.config.cluster import ClusterConfig
from headway.records.errors import ConfigurationError
from headway.runtime.devices import Device
from headway.runtime.nodes.launchers.agents import AgentLauncher
from headway.runtime.nodes.launchers.commands import CommandLauncher


def make_launcher(cluster: ClusterConfig, devices: Iterable[Device], logs: Path | None) -> AgentLauncher | None:
    """Make the launcher of ``cluster``; None: a person starts the agents. ``devices``: all of the run, which Ray
    reserves on their nodes; ``logs``: folder for the agents' output. Raises ConfigurationError when Ray isn't
    installed, or outside of an allocation of Slurm."""
    if cluster.launcher == "local":
        return None
    if cluster.launcher == "ssh":
        return CommandLauncher(ssh_prefixes(cluster.nodes), cluster.command, quoted=True, logs=logs)
    if cluster.launcher == "ray":
        from headway.runtime.nodes.launchers.ray import RayLauncher, bundle

        run_devices = list(devices)
        return RayLauncher(
            {
                name: bundle(_required(run_devices, name, "cpu"), _required(run_devices, name, "cuda"), location)
                for name, location in cluster.nodes.items()
            }
        )
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigurationError("cluster.launcher = 'slurm': not in an allocation: start the run by sbatch or salloc")
    return CommandLauncher(srun_prefixes(cluster.nodes), cluster.command, quoted=False, logs=logs)


def _required(devices: Iterable[Device], node: str, kind: str) -> int:
    """Number of cores or GPUs that a node must have: its devices' indices count from 0."""
    return max((device.last + 1 for device in devices if (device.node, device.kind) == (node, kind)), default=0)


def ssh_prefixes(nodes: Mapping[str, str]) -> dict[str, list[str]]:
    """ssh's command line for each node, without the command there; a node's value is the destination, with options
    before it."""
    # A dead connection is noticed in 45 s; what is typed at a prompt never comes: no password is asked for.
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ConnectTimeout=20"]
    return {name: ["ssh", *options, *shlex.split(destination or name)] for name, destination in nodes.items()}


def srun_prefixes(nodes: Mapping[str, str]) -> dict[str, list[str]]:
    """srun's command line for each node, without the command there; a node's value is its host name, or its number in
    the allocation."""
    # One task that may use everything the job has on that node, beside the step of the run itself.
    options = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--mem=0"]
    return {name: ["srun", *options, _node_option(host or name)] for name, host in nodes.items()}


def _node_option(host: str) -> str:
    return f"--relative={host}" if host.isdecimal() else f"--nodelist={host}"
