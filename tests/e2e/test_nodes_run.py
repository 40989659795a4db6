"""Whole runs over two network namespaces: the trainer on one, the generator on the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import warm_programs
from node_processes import KEY, namespaces, no_namespaces, set_link, start_agent
from tiers import first

from headway.runtime.nodes.handshake import KEY_VARIABLE
from headway.trainer.checkpoints import find_checkpoints

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]
ADDRESS = "10.77.0.1:7400"
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


def start_run(config: Path, namespace: str, *arguments: str, as_machine: Path | None = None) -> subprocess.Popen[str]:
    """Start `headway train` in a network namespace. ``as_machine``: folder for a boot id and lock files that no other
    namespace shares; the run is there already, with its books in the folder beside it."""
    words = ["train", str(config), "--quiet", *arguments]
    environment = os.environ | {KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "1"}
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    headway = warm_programs.HEADWAY
    if as_machine is None:
        return warm_programs.start(headway, *words, environment=environment, namespace=namespace, **outputs)
    as_machine.mkdir()
    locks = (config.parent / "run/lock", config.parent / "books/lock", Path("/proc/sys/kernel/random/boot_id"))
    own = [as_machine / str(index) for index in range(len(locks))]
    for path in own:
        path.write_text(as_machine.name)
    mounts = " && ".join(f"mount --bind {ours} {theirs}" for ours, theirs in zip(own, locks, strict=True))
    command = ["ip", "netns", "exec", namespace, "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    return subprocess.Popen([*command, sys.executable, "-m", headway, *words], env=environment, text=True, **outputs)


def newest_weights(run: Path) -> bytes:
    return (find_checkpoints(run)[-1] / "model" / "model.safetensors").read_bytes()


def write_cluster_experiment(folder: Path, inputs: Any, **sections: dict[str, Any]) -> Path:
    merged = {**inputs, **sections}
    generator = {**merged.pop("generator", {}), "devices": ["b/cpu:0"]}
    cluster = {"address": ADDRESS, "nodes": ["b"], "disconnect_timeout_s": 10.0, **merged.pop("cluster", {})}
    return tiny_run.write_experiment(folder, generator=generator, cluster=cluster, **merged)


@pytest.mark.parametrize("encryption", first(1, ["none", "tls"], pytest.mark.long))
def test_two_machines_train_the_very_same_weights_as_one(inputs: Any, tmp_path: Path, encryption: str) -> None:
    settings = {"run": {"steps": 5, "deterministic": True}, "queue": {"budget": 0}, "checkpoint": {"every_steps": 5}}
    (tmp_path / "one").mkdir()
    command = tiny_run.train(tiny_run.write_experiment(tmp_path / "one", **settings, **inputs))
    assert command.process.returncode == 0, command.output
    (tmp_path / "two").mkdir()
    config = write_cluster_experiment(
        tmp_path / "two",
        inputs,
        **{**settings, "run": {**settings["run"], "directory": str(tmp_path / "two/run")}},
        cluster={"encryption": encryption},
    )
    with namespaces() as (here, there):
        agent = start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)
        run = start_run(config, here)
        output, _ = run.communicate(timeout=90)
        assert run.returncode == 0, output + (tmp_path / "b.log").read_text()
        assert agent.wait(10) == 0, (tmp_path / "b.log").read_text()
    assert tiny_run.audited(tmp_path / "two/run").completed_steps == 5
    assert newest_weights(tmp_path / "one/run") == newest_weights(tmp_path / "two/run")
    assert [event.detail for event in tiny_run.events_of(tmp_path / "two/run", "node_joined")]
    assert (tmp_path / "two/run/logs/generator-0.log").is_file(), "its folder is seen on the node"


@pytest.mark.long
def test_sides_that_offload_on_another_machine_train_the_weights_of_one(inputs: Any, tmp_path: Path) -> None:
    """Generator and trainer take turns on one core of node b."""
    settings = {"run": {"steps": 5, "deterministic": True}, "queue": {"budget": 0}, "checkpoint": {"every_steps": 5}}
    (tmp_path / "one").mkdir()
    command = tiny_run.train(tiny_run.write_experiment(tmp_path / "one", **settings, **inputs))
    assert command.process.returncode == 0, command.output
    (tmp_path / "two").mkdir()
    run_there = settings["run"] | {"directory": str(tmp_path / "two/run"), "offload": True}
    config = write_cluster_experiment(
        tmp_path / "two", inputs, **{**settings, "run": run_there}, trainer={"devices": ["b/cpu:0"]}
    )
    with namespaces() as (here, there):
        agent = start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)
        run = start_run(config, here)
        output, _ = run.communicate(timeout=150)
        assert run.returncode == 0, output + (tmp_path / "b.log").read_text()
        assert agent.wait(10) == 0
    assert newest_weights(tmp_path / "one/run") == newest_weights(tmp_path / "two/run")
    steps = tiny_run.steps_of(tmp_path / "two/run")
    assert min(step.offload_freed_bytes for step in steps[1:]) > 0
    assert {event.worker for event in tiny_run.events_of(tmp_path / "two/run", "offload")} == {"generator-0", "trainer"}


@pytest.mark.long
def test_a_short_cut_of_the_network_restarts_nothing(inputs: Any, tmp_path: Path) -> None:
    config = write_cluster_experiment(
        tmp_path, inputs, run={"steps": 60, "directory": str(tmp_path / "run")}, cluster={"disconnect_timeout_s": 20.0}
    )
    with namespaces() as (here, there):
        agent = start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)
        run = start_run(config, here)
        command = tiny_run.Command(run, tmp_path / "run", tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(tmp_path / "run")) >= 5, "five steps")
        set_link(there, 1, up=False)
        before = len(tiny_run.steps_of(tmp_path / "run"))
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(7.0)
        set_link(there, 1, up=True)
        output, _ = run.communicate(timeout=90)
        assert run.returncode == 0, output + (tmp_path / "b.log").read_text()
        assert agent.wait(10) == 0
    assert before < 60
    machines = {node.name: node for node in tiny_run.steps_of(tmp_path / "run")[-1].nodes}
    assert machines.keys() == {"", "b"}
    assert machines["b"].shared_memory_free_bytes > 0
    assert tiny_run.audited(tmp_path / "run").completed_steps == 60
    for name in ("node_lost", "generator_died", "generator_restarted"):
        assert not tiny_run.events_of(tmp_path / "run", name), name


@pytest.mark.slow
@pytest.mark.parametrize(("orphan_s", "cut_s"), [(6.0, 0.0), pytest.param(30.0, 60.0, marks=pytest.mark.long)])
def test_after_a_partition_one_trainer_is_left(inputs: Any, tmp_path: Path, orphan_s: float, cut_s: float) -> None:
    """The trainer's node is cut off; another machine takes its place and name; then the first can be reached again."""
    config = write_cluster_experiment(
        tmp_path,
        inputs,
        run={"steps": ENDLESS, "directory": str(tmp_path / "run")},
        generator={},
        trainer={"devices": ["b/cpu:1"]},
        cluster={"disconnect_timeout_s": orphan_s},
        checkpoint={"every_steps": 5},
    )
    run_folder = tmp_path / "run"
    with namespaces(3) as (here, there, elsewhere):
        first = start_agent(ADDRESS, "b", log=tmp_path / "first.log", namespace=there, warm=False)
        run = start_run(config, here)
        command = tiny_run.Command(run, run_folder, tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(run_folder)) >= 8, "eight steps")
        set_link(there, 1, up=False)
        cut_until_s = time.monotonic() + cut_s
        second = start_agent(ADDRESS, "b", log=tmp_path / "second.log", namespace=elsewhere)
        command.until(lambda: tiny_run.events_of(run_folder, "node_lost"), "the loss of the node")
        steps = len(tiny_run.steps_of(run_folder))
        command.until(lambda: len(tiny_run.steps_of(run_folder)) >= steps + 5, "steps by the other trainer")
        left = subprocess.run(["ip", "netns", "pids", there], capture_output=True, text=True, check=True).stdout.split()
        assert left == [str(first.pid)], "the trainer that was cut off has ended itself"
        command.until(lambda: time.monotonic() > cut_until_s, "the end of the cut")
        set_link(there, 1, up=True)
        refusal = "10.77.0.2: node b has joined already, from 10.77.0.3"
        refused = "the refusal of the first node"
        command.until(
            lambda: refusal in [event.detail for event in tiny_run.events_of(run_folder, "connection_refused")], refused
        )
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=90)
        assert run.returncode == 130, output
        assert second.wait(10) == 0
        first.kill()
        first.wait()
    tiny_run.audited(run_folder)  # no step was committed twice
    assert len(tiny_run.events_of(run_folder, "trainer_restored")) == 1


@pytest.mark.slow
def test_a_node_that_offers_a_device_in_mid_run_is_used(inputs: Any, tmp_path: Path) -> None:
    verifier = {"name": "tiny_verifiers:parity", "workers": 2, "nodes": ["b"]}
    config = write_cluster_experiment(
        tmp_path, inputs, run={"steps": ENDLESS, "directory": str(tmp_path / "run")}, verifier=verifier
    )
    with namespaces(3) as (here, there, elsewhere):
        agents = [start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)]
        run = start_run(config, here)
        command = tiny_run.Command(run, tmp_path / "run", tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(tmp_path / "run")) >= 3, "three steps")
        offer = ("--offer", "cpu:0")
        agents.append(start_agent(ADDRESS, "c", log=tmp_path / "c.log", namespace=elsewhere, arguments=offer))
        command.until(lambda: tiny_run.events_of(tmp_path / "run", "generator_joined"), "another replica")
        steps = len(tiny_run.steps_of(tmp_path / "run"))
        command.until(lambda: len(tiny_run.steps_of(tmp_path / "run")) > steps + 3, "three more steps")
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=90)
        assert run.returncode == 130, output + (tmp_path / "c.log").read_text()
        assert [agent.wait(10) for agent in agents] == [0, 0]
    (joined,) = tiny_run.events_of(tmp_path / "run", "generator_joined")
    assert joined.detail.startswith("generator-1 on c/cpu:0: version")
    tiny_run.audited(tmp_path / "run")


@pytest.mark.slow
def test_a_lost_node_comes_back_and_the_run_goes_on(inputs: Any, tmp_path: Path) -> None:
    config = write_cluster_experiment(
        tmp_path, inputs, run={"steps": 40, "directory": str(tmp_path / "run")}, cluster={"disconnect_timeout_s": 5.0}
    )
    with namespaces() as (here, there):
        agent = start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)
        run = start_run(config, here)
        command = tiny_run.Command(run, tmp_path / "run", tmp_path / "journal")
        command.until(lambda: len(tiny_run.steps_of(tmp_path / "run")) >= 5, "five steps")
        agent.kill()
        command.until(lambda: tiny_run.events_of(tmp_path / "run", "node_lost"), "the loss of the node")
        again = start_agent(ADDRESS, "b", log=tmp_path / "b.log", namespace=there)
        output, _ = run.communicate(timeout=90)
        assert run.returncode == 0, output + (tmp_path / "b.log").read_text()
        assert again.wait(10) == 0
    report = tiny_run.audited(tmp_path / "run")
    assert report.completed_steps == 40
    assert report.rollouts["trained"] == 40 * 16
    assert tiny_run.events_of(tmp_path / "run", "generator_restarted")
