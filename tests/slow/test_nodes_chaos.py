"""Faults by seed, several a run, over network namespaces: whatever happens, no group is lost or trained twice."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from node_processes import (
    KEY,
    disk_full,
    is_generator,
    namespaces,
    no_namespaces,
    recoveries_s,
    set_link,
    start_agent,
)

from headway.runtime.nodes.handshake import KEY_VARIABLE

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]
ADDRESS = "10.77.0.1:7400"
ORPHAN_S = 8.0
FAULTS_A_RUN = 3
FAULTS = (
    "kill_worker",
    "kill_generator",
    "kill_agent",
    "kill_orchestrator",
    "stop_worker",
    "short_cut",
    "long_cut",
    "slow_link",
    "disk_full",
    "add_node",
)


# A node's own /dev/shm, where its scratch files lie as well.
SMALL_SHM = "mount -t tmpfs -o size=16m tmpfs /dev/shm; export TMPDIR=/dev/shm"


class Cluster:
    """A run over three namespaces and the agents on two of them, with the means to break it."""

    def __init__(self, folder: Path, names: list[str], rng: random.Random, nodes: tuple[str, ...] = ("b", "c")) -> None:
        self.folder, self.names, self.rng, self.nodes = folder, names, rng, nodes
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.journal: list[dict[str, Any]] = []
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def begin(self) -> None:
        resume = ["--resume"] if self.starts else []
        self.starts += 1
        command = [sys.executable, "-m", "headway.cli.main", "train", str(self.folder / "experiment.toml"), "--quiet"]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[0], *command, *resume],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "1"},
        )

    def keep_agents(self) -> None:
        """Start the agents that don't run, as a machine's service manager would."""
        for index, name in enumerate(self.nodes, 1):
            if name not in self.agents or self.agents[name].poll() is not None:
                self.agents[name] = start_agent(
                    ADDRESS,
                    name,
                    log=self.folder / f"{name}.log",
                    namespace=self.names[index],
                    arguments=("--offer", "cpu:0") if name == "c" else (),
                    mounts=SMALL_SHM,
                )

    def pids(self, index: int, *words: str) -> list[int]:
        """Process ids in a namespace whose command line has all ``words``."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=True)
        found = []
        for pid in listed.stdout.split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            if all(word in command for word in words):
                found.append(int(pid))
        return found

    # --- faults ---------------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        self._signal(signal.SIGKILL)

    def kill_generator(self) -> None:
        generators = [pid for index in range(3) for pid in self.pids(index) if is_generator(pid)]
        back = len(tiny_run.events_of(self.run, "generator_restarted"))
        os.kill(self.rng.choice(generators), signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while len(tiny_run.events_of(self.run, "generator_restarted")) == back:
            assert time.monotonic() < deadline, self.story()
            time.sleep(0.1)

    def stop_worker(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        workers = [pid for index in range(3) for pid in self.pids(index, "headway.runtime.child")]
        if workers:
            os.kill(self.rng.choice(workers), number)

    def kill_agent(self) -> None:
        self.agents[self.rng.choice(self.nodes)].kill()

    def kill_orchestrator(self) -> None:
        for pid in self.pids(0, "headway.cli.main", "train"):
            os.kill(pid, signal.SIGKILL)

    def short_cut(self) -> None:
        self._cut(self.rng.uniform(1.0, ORPHAN_S - 4.0))

    def long_cut(self) -> None:
        self._cut(self.rng.uniform(ORPHAN_S + 6.0, ORPHAN_S + 12.0))

    def _cut(self, seconds: float) -> None:
        index = self.rng.choice([1, 2])
        set_link(self.names[index], index, up=False)
        time.sleep(seconds)
        set_link(self.names[index], index, up=True)

    def slow_link(self) -> None:
        tc = ["tc", "-n", self.names[1], "qdisc"]
        limit = ["rate", "1mbit", "burst", "32kb", "latency", "400ms"]
        subprocess.run([*tc, "add", "dev", "e1", "root", "tbf", *limit], check=False, capture_output=True)
        time.sleep(4.0)
        subprocess.run([*tc, "del", "dev", "e1", "root"], check=False, capture_output=True)

    def disk_full(self) -> None:
        """Of a node's /dev/shm, while its mirror has to make room for weights anew."""
        index, name = self.rng.choice([(1, "b"), (2, "c")])
        with disk_full(self.agents[name]):
            for pid in self.pids(index, "headway.runtime.child", "cpu:all"):  # the mirror, and the verifier beside it
                os.kill(pid, signal.SIGKILL)
            time.sleep(6.0)

    def add_node(self) -> None:
        log = self.folder / "d.log"
        extra = f"d{len(self.journal)}"
        self.agents[extra] = start_agent(
            ADDRESS, extra, log=log, namespace=self.names[2], arguments=("--offer", "cpu:1"), warm=False
        )

    # --- the whole ------------------------------------------------------------------------------------------

    def until_step(self, step: int, limit_s: float = 180.0) -> None:
        """Wait until ``step`` steps are recorded, starting again what has ended."""
        deadline = time.monotonic() + limit_s
        while len(tiny_run.steps_of(self.run)) < step:
            assert time.monotonic() < deadline, self.story()
            self.keep_agents()
            assert self.process is not None
            if (code := self.process.poll()) is not None:
                output = self.process.communicate()[0]
                self.journal.append({"ended": code, "output": output[-600:]})
                assert code in (3, 130, -signal.SIGKILL), self.story()
                self.begin()
            time.sleep(0.2)

    def interrupt(self) -> None:
        for pid in self.pids(0, "headway.cli.main", "train"):
            os.kill(pid, signal.SIGINT)
        assert self.process is not None
        output, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 130, output + self.story()

    def end(self) -> None:
        """Kill all that is left in the namespaces."""
        for index in range(len(self.names)):
            for pid in self.pids(index):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()

    def story(self) -> str:
        logs = "".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))
        return "\n".join(map(json.dumps, self.journal)) + "\n" + logs + tiny_run.tail_of(self.run)


def play(folder: Path, seed: int, faults: tuple[str, ...] = ()) -> Cluster:
    """One run with ``faults``, or with `FAULTS_A_RUN` that are chosen by ``seed``, to its end."""
    rng = random.Random(seed)
    tiny_run.write_inputs(folder)
    tiny_run.write_experiment(
        folder,
        **tiny_run.inputs_in(folder),
        run={"steps": 1_000_000, "directory": str(folder / "run")},
        generator={"devices": ["cpu:0", "b/cpu:0"]},
        verifier={"name": "tiny_verifiers:parity", "workers": 2, "nodes": ["", "b"]},
        cluster={"address": ADDRESS, "nodes": ["b"], "disconnect_timeout_s": ORPHAN_S, "join_timeout_s": 60.0},
        checkpoint={"every_steps": 20},
    )
    with namespaces(3) as names:
        cluster = Cluster(folder, names, rng)
        cluster.begin()
        done = 0
        try:
            for at in range(len(faults) or FAULTS_A_RUN):
                wanted = done + rng.randint(3, 12)
                cluster.until_step(wanted)
                fault = faults[at] if faults else rng.choice(FAULTS)
                at_s = time.monotonic()
                getattr(cluster, fault)()
                done = len(tiny_run.steps_of(cluster.run))
                cluster.until_step(done + 3)
                took_s = round(time.monotonic() - at_s, 2)
                cluster.journal.append({"fault": fault, "step": done, "three_steps_s": took_s})
            cluster.interrupt()
        finally:
            cluster.end()
    return cluster


def check(cluster: Cluster) -> None:
    """0 groups lost, 0 trained twice, and what the faults did is in the ledger."""
    report = tiny_run.audited(cluster.run)
    assert report.max_staleness <= 2
    assert report.rollouts.get("failed", 0) == 0, cluster.story()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_faults_by_seed(tmp_path: Path, seed: int) -> None:
    cluster = play(tmp_path, seed)
    print(json.dumps({"seed": seed, "journal": cluster.journal, "first_tokens_s": recoveries_s(cluster.run)}))
    check(cluster)


@pytest.mark.long
def test_killed_generators_and_one_on_a_full_disk_come_back(tmp_path: Path) -> None:
    cluster = play(tmp_path, 0, ("disk_full", *["kill_generator"] * 5, "disk_full"))
    recoveries = recoveries_s(cluster.run)
    assert len(recoveries) >= 5
    result = {"journal": cluster.journal, "first_tokens_s": recoveries, "median_s": statistics.median(recoveries)}
    print(json.dumps(result | {"load": os.getloadavg()[0]}))
    check(cluster)
