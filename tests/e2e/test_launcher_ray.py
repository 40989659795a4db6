"""Agents that Ray starts, in a real cluster of two Ray nodes on this machine."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_programs import FOLDERS, NO_RAY
from node_processes import Events
from test_launchers import cluster_of, machines, shown_to_others
from worker_processes import run, spec, until

from headway.records.errors import ConfigurationError

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
needs_ray = pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores and nothing else yet."""
    monkeypatch.setenv("PYTHONPATH", FOLDERS)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000}
    )
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def add_machine(cluster: Any, cores: int = 1) -> Any:
    return cluster.add_node(num_cpus=cores, object_store_memory=80_000_000, resources={"rollouts": 1})


@needs_ray
@pytest.mark.slow
def test_ray_places_agents_and_replaces_a_dead_machine(tmp_path: Path, ray_cluster: Any):
    async def main() -> None:
        events, machine = Events(), add_machine(ray_cluster)
        async with machines(tmp_path, cluster_of("ray", "rollouts"), events) as opened:
            assert opened.nodes is not None
            worker = await opened.launcher.start(spec(device="b/cpu:0"))
            assert await worker.call("echo", 1) == 1
            ray_cluster.remove_node(machine, allow_graceful=False)
            assert "node b" in (await worker.died).cause
            await until(lambda: bool(events.of("agent_ended")), 30.0)
            assert "b: Ray reports: " in events.of("agent_ended")[0]
            add_machine(ray_cluster)
            await opened.nodes.wait_for("b", 60.0)
            worker = await opened.launcher.start(spec(device="b/cpu:0"))
            assert await worker.call("echo", 2) == 2
            assert not shown_to_others((tmp_path / "run/cluster.key").read_text().strip())

    run(main)


@needs_ray
@pytest.mark.long
def test_agent_is_started_again_while_another_nodes_machine_is_missing(tmp_path: Path, ray_cluster: Any):
    ray = importlib.import_module("ray")
    both = {add_machine(ray_cluster).node_id for _ in range(2)}

    async def main() -> None:
        async with machines(tmp_path, cluster_of("ray", "", nodes={"b": "", "c": ""}), Events()) as opened:
            assert opened.nodes is not None
            await opened.nodes.wait_for("c", 60.0)

            def group() -> Any:
                return next(g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED")

            places = group()["bundles_to_node_id"]
            assert set(places.values()) == both
            (machine,) = [each for each in ray_cluster.worker_nodes if each.node_id == places[0]]
            ray_cluster.remove_node(machine, allow_graceful=False)
            await until(lambda: group()["state"] == "RESCHEDULING", 60.0)
            before = opened.nodes.joined["c"]
            assert before.facts is not None
            os.kill(before.facts.pid, signal.SIGKILL)
            await until(lambda: opened.nodes.joined.get("c") not in (None, before), 60.0)
            assert group()["state"] == "RESCHEDULING"

    run(main)


@needs_ray
@pytest.mark.slow
def test_trainers_ranks_are_packed_on_one_machine_and_replicas_go_to_another(tmp_path: Path, ray_cluster: Any):
    ray = importlib.import_module("ray")
    add_machine(ray_cluster, cores=1)
    large = add_machine(ray_cluster, cores=2)

    async def main() -> None:
        cluster = cluster_of("ray", "", nodes={"b": "", "c": ""})
        counts = {"trainer": {"devices": ["2*cpu"]}, "generator": {"devices": ["1*cpu"]}}
        async with machines(tmp_path, cluster, Events(), **counts) as opened:
            ranks, replicas = opened.experiment.trainer.devices, opened.experiment.generator.devices
            assert (ranks, replicas) == (("b/cpu:0", "b/cpu:1"), ("c/cpu:0",))
            (group,) = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
            assert [group["bundles"][index]["CPU"] for index in (0, 1)] == [2.0, 1.0]
            places = group["bundles_to_node_id"]
            assert places[0] == large.node_id
            assert places[1] != large.node_id
            workers = [await opened.launcher.start(spec(device=device)) for device in (*ranks, *replicas)]
            assert [await worker.call("echo", 1) for worker in workers] == [1, 1, 1]

    run(main)


def test_ray_that_is_not_installed_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(importlib.import_module("sys").modules, "ray", None)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"needs the package ray .*: pip install 'headway\[ray\]'"):
            async with machines(tmp_path, cluster_of("ray", ""), Events()):
                pass

    run(main)


@needs_ray
def test_ray_without_a_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS" not in os.environ

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="no Ray cluster"):
            async with machines(tmp_path, cluster_of("ray", ""), Events()):
                pass

    run(main)
