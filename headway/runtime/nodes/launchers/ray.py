"""Agents started by Ray: an actor for each node of the run, in a placement group that holds its cores and GPUs.

Ray places the actors, finds machines (autoscaling, KubeRay) and notices their deaths; the agent's own connection to the
run carries everything else. The run's key is an argument of the actor's method, so Ray's dashboard, which shows
environments, names and logs, doesn't show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_extra
from headway.runtime.nodes.agent import run_agent
from headway.runtime.nodes.launchers.agents import GIVE_UP_S, AgentEnd

_PLACED_S = 10.0  # between two reports that Ray has no room
_SHARE = 0.001  # of a resource that only names a node


def bundle(cores: int, gpus: int, location: str) -> dict[str, float]:
    """Ray's resources for a node of the run; ``location``: a resource that its machine must have (``node:10.0.0.2``, or
    one of the cluster's own); "": any machine."""
    resources = {"CPU": float(max(1, cores))} | ({"GPU": float(gpus)} if gpus else {})
    return resources | ({location: _SHARE} if location else {})


class RayLauncher:
    """Starts each agent as an actor of the Ray cluster that RAY_ADDRESS names, or that this machine is part of."""

    def __init__(self, bundles: Mapping[str, dict[str, float]]) -> None:
        """``bundles``: resources of each node, as `bundle` returns them. Raises ConfigurationError when Ray isn't
        installed."""
        self._ray = import_extra("ray", "ray", "cluster.launcher = 'ray'")
        self._bundles = dict(bundles)
        self._group: Any = None
        self._connected = False  # by this object; else by the program that it is part of

    async def open(self) -> None:
        """See :meth:`AgentLauncher.open`."""
        self._group = await asyncio.to_thread(self._reserve)  # not in the main thread, whose signals Ray would take

    async def run(self, name: str, address: str, key: str) -> AgentEnd:
        """See :meth:`AgentLauncher.run`."""
        if not await asyncio.to_thread(self._placed, name):
            return AgentEnd(code=None, output=f"Ray has no resources yet for {self._bundles} on a machine each")
        actor = self._agent_of(name)
        try:
            return await actor.run.remote(address, name, key)
        except self._ray.exceptions.RayError as error:  # its process or machine is gone, or it could not be started
            return AgentEnd(code=None, output=f"Ray reports: {str(error).strip().splitlines()[0]}")
        finally:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    async def close(self) -> None:
        """See :meth:`AgentLauncher.close`."""
        if self._group is not None:
            await asyncio.to_thread(self._release)

    def _reserve(self) -> Any:
        """Connect to Ray and ask for the nodes' resources. Raises ConfigurationError."""
        try:
            if not self._ray.is_initialized():
                address = os.environ.get("RAY_ADDRESS", "auto")
                self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                self._connected = True
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"cluster.launcher = 'ray': no Ray cluster: {error}; start one (ray start --head), or set "
                "RAY_ADDRESS, and RAY_AUTH_MODE=token where it wants a token"
            ) from None
        return self._ray.util.placement_group(list(self._bundles.values()), strategy="STRICT_SPREAD")

    def _placed(self, name: str) -> bool:
        """Whether Ray has a machine for node ``name``; waits for one for a while."""
        read_table, bundle_index = self._ray.util.placement_group_table, list(self._bundles).index(name)
        if not read_table(self._group)["bundles_to_node_id"][bundle_index]:
            # Of the whole group, so not waited for where this node has its machine: another's may have died.
            self._ray.wait([self._group.ready()], timeout=_PLACED_S)
        return bool(read_table(self._group)["bundles_to_node_id"][bundle_index])

    def _release(self) -> None:
        self._ray.util.remove_placement_group(self._group)
        if self._connected:
            self._ray.shutdown()

    def _agent_of(self, name: str) -> Any:
        """An actor in the node's bundle, with all of its resources."""
        resources = dict(self._bundles[name])
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=list(self._bundles).index(name)
        )
        actor_class = self._ray.remote(AgentActor).options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0.0),
            resources=resources,
            scheduling_strategy=strategy,
        )
        return actor_class.remote()


class AgentActor:
    """The actor of a node: its process is the node's agent."""

    def run(self, address: str, name: str, key: str) -> AgentEnd:
        """Serve the run as node ``name`` to its end."""
        # Ray sets it to the actor's share of cores; the node's workers set their own.
        os.environ.pop("OMP_NUM_THREADS", None)
        lines: list[str] = []
        try:
            asyncio.run(run_agent(address, name, key, give_up_s=GIVE_UP_S, report=lines.append))
        except Exception as error:  # the actor's edge: reported to the run, which starts another
            return AgentEnd(code=1, output="\n".join([*lines, f"{type(error).__name__}: {error}"]))
        return AgentEnd(code=0, output="\n".join(lines))
