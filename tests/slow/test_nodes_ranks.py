"""A trainer whose ranks divide a model over two namespaces: killed ranks, agents and orchestrators lose no group."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiny_run
from node_processes import computes_on, namespaces, no_namespaces
from test_nodes_chaos import ADDRESS, ORPHAN_S, Cluster, check

from headway.models.loading import load_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]
FAULTS = ("kill_rank", "stop_and_kill_rank", "kill_agent", "kill_orchestrator")


class RankCluster(Cluster):
    """A run of which one rank of the trainer is in the first namespace, and the other in the second."""

    def ranks(self) -> list[int]:
        return [pid for index in (0, 1) for pid in self.pids(index) if computes_on(pid, core=1)]

    def kill_rank(self) -> None:
        self._end_rank(first=None)

    def stop_and_kill_rank(self) -> None:
        self._end_rank(first=signal.SIGSTOP)

    def _end_rank(self, first: signal.Signals | None) -> None:
        deaths = len(tiny_run.events_of(self.run, "trainer_restored"))
        pid = self.rng.choice(self.ranks())
        if first is not None:
            os.kill(pid, first)
            time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while len(tiny_run.events_of(self.run, "trainer_restored")) == deaths:
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_two_machines_are_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tiny_run.write_inputs(tmp_path)
    tiny_run.write_experiment(
        tmp_path,
        **tiny_run.inputs_in(tmp_path),
        run={"steps": 1_000_000, "directory": str(tmp_path / "run")},
        generator={"devices": ["cpu:0", "b/cpu:0"]},
        trainer={"devices": ["cpu:1", "b/cpu:1"], "shards": 2},
        cluster={"address": ADDRESS, "nodes": ["b"], "disconnect_timeout_s": ORPHAN_S, "join_timeout_s": 60.0},
        checkpoint={"every_steps": 5},
    )
    with namespaces(3) as names:
        cluster = RankCluster(tmp_path, names, rng, nodes=("b",))
        cluster.begin()
        try:
            for fault in rng.sample(FAULTS, len(FAULTS)):
                cluster.until_step(len(tiny_run.steps_of(cluster.run)) + rng.randint(3, 8))
                assert len(cluster.ranks()) == 2
                cluster.journal.append({"fault": fault, "step": len(tiny_run.steps_of(cluster.run))})
                getattr(cluster, fault)()
                cluster.until_step(len(tiny_run.steps_of(cluster.run)) + 3)
            cluster.interrupt()
        finally:
            cluster.end()
    check(cluster)
    load_model(sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[-1] / "model")
