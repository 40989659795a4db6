"""Ranks of one model on two nodes: each node's mirror has what its ranks have written, and every node gets it all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from node_processes import KEY, joined_nodes
from tiny_trainer import make_batch, make_experiment, make_model

from headway.config.load import validate_experiment
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores
from headway.trainer.client import TrainerClient
from headway.weights.mirrors import Mirrors
from headway.weights.shared_memory import Subscriber

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(180)]


async def published(folder: Path, nodes: Any, devices: list[str], run_id: str, mirrors: Mirrors | None) -> Any:
    """The versions before and after a step, and what the nodes' replicas read of each."""
    cluster = {"address": nodes.address, "nodes": ["b", "c"], "port_range": "29740-29759"}
    sections: dict[str, Any] = {"trainer": {"devices": devices, "shards": "all"}, "cluster": cluster}
    raw = make_experiment(str(folder / "model"), folder, **sections)
    trainer = TrainerClient(nodes, validate_experiment(raw, "test"), run_id, host_of=nodes.await_host)
    await trainer.start()
    outcomes = []
    try:
        for version in range(2):
            weights, copies = await trainer.publish(version), []
            for node in ("", "b", "c") if mirrors is not None else ():
                copy = await mirrors.on_node(weights, node)
                copies.append({name: tensor.clone() for name, tensor in Subscriber().fetch(copy).items()})
            outcomes.append((weights, copies))
            await trainer.train_step(make_batch(version, step=version))
    finally:
        await trainer.stop()
    return outcomes


def test_every_node_reads_what_ranks_on_two_nodes_publish(tmp_path: Path) -> None:
    last = len(machine_cores()) - 1
    make_model(tmp_path / "model", width=64)

    async def main() -> None:
        async with joined_nodes(tmp_path, "b", "c") as (nodes, events, _):
            settings = {"key": KEY, "epoch": 1, "orphan_s": 10.0, "run_id": tmp_path.name}
            settings["ports"] = list(range(29760, 29780))
            mirrors = Mirrors(nodes, RealClock(), "b", nodes.host_of, settings, events)
            devices = ["b/cpu:0", f"c/cpu:{last}"]
            versions = await published(tmp_path, nodes, devices, tmp_path.name, mirrors)
            alone = await published(tmp_path, nodes, ["cpu:0"], f"{tmp_path.name}-alone", None)
            await mirrors.stop()
        assert versions[0][0].checksum == alone[0][0].checksum
        for weights, copies in versions:
            assert [part.node for part in weights.parts] == ["b", "c"]
            assert len(copies) == 3
            assert all(torch.equal(copies[0][name], copy[name]) for copy in copies for name in copies[0])

    asyncio.run(main())
