"""Ten faults by seed in runs with Ray: workers, agents and machines die, others come: nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from launcher_programs import FOLDERS, NO_RAY
from node_processes import is_generator, recoveries_s
from test_launched_runs import by_ray

from headway.records.ledger import EventRecord

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY),
]
FAULTS = ("kill_worker", "kill_generator", "kill_agent", "stop_worker", "remove_machine")
LIMIT_S = 120.0  # until three more steps, and until the nodes are there again


class RayRun:
    """A run with two nodes in a Ray cluster of two machines, with the means to break it."""

    def __init__(self, run: Path, cluster: Any, rng: random.Random, story: Callable[[], str]) -> None:
        self.run, self.cluster, self.rng, self.story = run, cluster, rng, story
        self.machines = list(cluster.worker_nodes)
        self.measured: dict[str, float] = {}  # by the fault under way

    def workers(self) -> list[int]:
        """Process ids of the run's workers on its nodes, by the environment that the run gave them."""
        mark = f"CHAOS_RUN={self.run}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    b"headway.runtime.child" in (path / "cmdline").read_bytes()
                    and mark in (path / "environ").read_bytes()
                ):
                    found.append(int(path.name))
            except OSError:
                continue
        return sorted(found)

    def kill_worker(self) -> None:
        os.kill(self.rng.choice(self.workers()), signal.SIGKILL)

    def kill_generator(self) -> None:
        os.kill(self.rng.choice([pid for pid in self.workers() if is_generator(pid)]), signal.SIGKILL)

    def stop_worker(self) -> None:
        os.kill(self.rng.choice(self.workers()), signal.SIGSTOP)

    def kill_agent(self) -> None:
        parents = {_parent(pid) for pid in self.workers()}
        agents = [pid for pid in sorted(parents) if "AgentActor" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(self.rng.choice(agents), signal.SIGKILL)

    def remove_machine(self) -> None:
        """A machine dies; the other one's agent dies while it is missing; then another machine comes."""
        lost = self.lost()
        self.cluster.remove_node(self.machines.pop(self.rng.randrange(2)), allow_graceful=False)
        # On a real machine they die with it; here its processes outlive Ray's there by a second, and could be chosen.
        self.wait_until(lambda: self.lost() > lost, "the machine's agent outlives it")
        steps, joined = len(tiny_run.steps_of(self.run)), self.joined()
        self.wait_until(lambda: len(tiny_run.steps_of(self.run)) >= steps + 3, "no step with one machine left")
        self.kill_agent()
        killed_s = time.monotonic()
        self.wait_until(lambda: self.joined() > joined, "the agent of the machine that is left stays away")
        back_s = time.monotonic()
        self.machines.append(self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000))
        self.wait_until(lambda: self.joined() > joined + 1, "no agent on the new machine")
        self.measured = {"back_s": round(back_s - killed_s, 2), "added_s": round(time.monotonic() - back_s, 2)}

    def wait_until(self, condition: Callable[[], bool], cause: str) -> None:
        wait_until(condition, lambda: f"{cause}\n{self.story()}")

    def lost(self) -> int:
        return len(tiny_run.events_of(self.run, "node_lost"))

    def joined(self) -> int:
        return len(tiny_run.events_of(self.run, "node_joined"))

    def whole(self) -> bool:
        """Whether all that was lost is there again."""
        last = {}  # of each generator's outages
        for line in tiny_run.lines_of(self.run):
            if isinstance(line, EventRecord) and line.event.startswith("generator_") and line.worker:
                last[line.worker] = line.event
        return self.joined() >= 2 + self.lost() and not {"generator_died", "generator_restart_failed"} & set(
            last.values()
        )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition: Any, cause: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, cause()
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_faults_by_seed(tmp_path: Path, seed: int) -> None:
    rng, journal = random.Random(seed), []
    run = tmp_path / "run"
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path,
        **tiny_run.inputs_in(tmp_path),
        run={"steps": 1_000_000, "directory": str(run)},
        generator={"devices": ["cpu:0", "b/cpu:0", "c/cpu:0"]},
        verifier={"name": "tiny_verifiers:parity", "workers": 2, "nodes": ["", "b"]},
        cluster={
            "address": "127.0.0.1:0",
            "launcher": "ray",
            "nodes": {"b": "", "c": ""},
            "environment": {"CHAOS_RUN": str(run)},
            "disconnect_timeout_s": 8.0,
        },
        checkpoint={"every_steps": 100},
    )
    faults = [*FAULTS, *FAULTS]
    rng.shuffle(faults)
    with by_ray(tmp_path, machines=2) as (_, _, environment, cluster):
        command = [sys.executable, "-m", "headway.cli.main", "train", str(config), "--quiet"]
        environment = os.environ | environment | {"PYTHONPATH": FOLDERS, "OMP_NUM_THREADS": "1"}
        with open(tmp_path / "output", "wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

        def story() -> str:
            return "\n".join(map(json.dumps, journal)) + (tmp_path / "output").read_text() + tiny_run.tail_of(run)

        broken = RayRun(run, cluster, rng, story)

        try:
            wait_until(lambda: len(tiny_run.steps_of(run)) >= 5, story)
            for fault in faults:
                before_s, broken.measured = time.monotonic(), {}
                getattr(broken, fault)()
                steps = len(tiny_run.steps_of(run))
                wait_until(lambda steps=steps: len(tiny_run.steps_of(run)) >= steps + 3, story)
                stepped_s = time.monotonic()
                wait_until(broken.whole, story)
                whole_s = time.monotonic()
                journal.append(
                    {
                        "fault": fault,
                        "step": steps,
                        "three_steps_s": round(stepped_s - before_s, 2),
                        "whole_s": round(whole_s - before_s, 2),
                        **broken.measured,
                    }
                )
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130, story()
        finally:
            process.kill()
            process.wait()
    print(json.dumps({"launcher": "ray", "seed": seed, "journal": journal, "first_tokens_s": recoveries_s(run)}))
    report = tiny_run.audited(run)
    assert report.max_staleness <= 2
    assert report.rollouts.get("failed", 0) == 0, story()
