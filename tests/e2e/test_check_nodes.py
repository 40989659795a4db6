"""`headway check` looks at nodes as real agents serve them, and leaves the agents to the run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import warm_programs
from node_processes import KEY, namespaces, no_namespaces, start_agent

from headway.orchestrator.preflight.cluster import cluster_findings, node_findings
from headway.records.check_report import Findings
from headway.runtime.nodes.handshake import KEY_VARIABLE, software

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
needs_namespaces = pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
UNSAMPLED = 1_080_000  # an offset in a file of 4 MiB that no sample reads


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    (folder / "model" / "notes.bin").write_bytes(os.urandom(4 << 20))
    return folder


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def write(folder: Path, inputs: Path, *, cluster: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Path:
    given = {
        "address": free_address(),
        "nodes": ["b"],
        "disconnect_timeout_s": 10.0,
        "join_timeout_s": 30.0,
        **(cluster or {}),
    }
    merged = {"generator": {"devices": ["b/cpu:0"]}, **sections, **tiny_run.inputs_in(inputs)}
    return tiny_run.write_experiment(folder, cluster=given, **merged)


@contextmanager
def agent_of(config: Path, **how: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent b of the run that ``config`` describes."""
    address = tiny_run.experiment_of(config).cluster.address
    agent = start_agent(address, "b", log=config.parent / "b.log", **how)
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


def look(config: Path, *, deep: bool = False) -> Findings:
    return node_findings(tiny_run.experiment_of(config), deep=deep)


def only(findings: Findings, level: str, key: str) -> str:
    """The message of the only finding of this level and key."""
    (message,) = [found.message for found in findings if (found.level, found.key) == (level, key)]
    return message


def errors(findings: Findings) -> list[str]:
    return [found.key for found in findings if found.level == "error"]


@pytest.mark.slow
@needs_namespaces
@pytest.mark.long
def test_an_agent_is_checked_calibrated_and_serves_the_run_that_follows(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs, cluster={"address": "10.77.0.1:7400"})

    def headway(namespace: str, *arguments: str) -> tuple[int, str, str]:
        return tiny_run.run_program(warm_programs.HEADWAY, *arguments, namespace=namespace)

    with namespaces() as (here, there), agent_of(config, namespace=there) as agent:
        code, output, errors = headway(here, "check", str(config), "--calibrate-s=1")
        assert code == 0, errors
        assert "info: cluster.nodes: node b: " in output
        assert "start there: headway node --join 10.77.0.1:7400 --name NAME" in errors
        assert not (tmp_path / "run").exists()
        code, _, errors = headway(here, "train", str(config), "--quiet")
        assert code == 0, errors
        assert agent.wait(10) == 0
    log = (tmp_path / "b.log").read_text()
    assert log.count("the check is over; waiting for the run") == 2
    assert log.endswith("joined the run at 10.77.0.1:7400 as b, epoch 1\nthe run is over\n")
    assert tiny_run.audited(tmp_path / "run").completed_steps == 6


def test_a_node_that_does_not_come_is_named_with_what_to_start(inputs: Path, tmp_path: Path) -> None:
    cluster = {"join_timeout_s": 1.0, "nodes": ["b", "c"], "address": (address := free_address())}
    config = write(tmp_path, inputs, cluster=cluster, generator={"devices": ["b/cpu:0", "c/cpu:0"]})
    started = time.monotonic()
    found = look(config)
    assert time.monotonic() - started < 5.0
    for name, error in zip("bc", found, strict=True):
        assert error.level == "error"
        assert f"node {name} has not joined within 1 s (joined: none)" in error.message
        assert error.message.endswith(f"start there: headway node --join {address} --name {name}")


def test_an_address_of_no_interface_is_refused_with_those_that_are(inputs: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.250", 9))  # sends nothing
        own = probe.getsockname()[0]
    message = only(look(write(tmp_path, inputs, cluster={"address": "203.0.113.9:7400"})), "error", "cluster.nodes")
    assert "cluster.address = '203.0.113.9:7400': Cannot assign requested address" in message
    assert own in message


def test_a_silent_connection_is_told_with_the_node_that_is_missing(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.nodes.listener.HANDSHAKE_S", 0.5)
    config = write(tmp_path, inputs, cluster={"join_timeout_s": 3.0, "address": (address := free_address())})
    host, port = address.split(":")

    def connect() -> None:
        while not stopped.wait(0.1):
            try:
                sockets.append(socket.create_connection((host, int(port))))
                return
            except OSError:
                continue

    sockets: list[socket.socket] = []
    stopped = threading.Event()
    thread = threading.Thread(target=connect)
    thread.start()
    message = only(look(config), "error", "cluster.nodes")
    stopped.set()
    thread.join()
    sockets[0].close()
    assert "refused: 127.0.0.1 connected, but sent nothing in 0.5 s: a firewall" in message


def test_other_versions_are_told_for_both_machines(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs, cluster={"join_timeout_s": 5.0})
    other = "import importlib.metadata as m\nreal = m.version\nm.version = lambda p: '9.9' if p == 'torch' else real(p)"
    with agent_of(config, python=other) as agent:
        message = only(look(config), "error", "cluster.nodes")
        assert agent.wait(10) == 3
    assert f"node b has torch 9.9 where the orchestrator has {software()['torch']}: install the same" in message


def test_a_clock_that_is_off_is_found(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs)
    with agent_of(config, python="import time\nreal = time.time\ntime.time = lambda: real() - 90.0"):
        found = look(config)
    assert only(found, "warning", "cluster.nodes").startswith(
        "node b: its system clock is -90 s off: synchronise it by NTP"
    )
    assert not errors(found)


def test_a_device_that_the_node_lacks_is_found(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs, generator={"devices": ["b/cpu:0", "b/cpu:97", "b/cuda:9"]})
    with agent_of(config):
        found = look(config)
    cpu, gpu = [error.message for error in found if error.key == "generator.devices"]
    assert cpu == f"b/cpu:97: node b has {len(os.sched_getaffinity(0))} cpu device(s), counted from 0"
    assert gpu.startswith("b/cuda:9: node b has ")


@needs_namespaces
def test_full_disk_and_small_shared_memory_are_found(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs)
    (tmp_path / "small").mkdir()
    full = f"mount -t tmpfs -o size=1m none {tmp_path}/small; mount -t tmpfs -o size=16k none /dev/shm"
    with agent_of(config, mounts=f"{full}; export TMPDIR={tmp_path}/small"):
        found = look(config)
    assert f"MiB free at {tmp_path}/small/headway-node-b-" in only(found, "error", "cluster.nodes")
    assert "/dev/shm of node b has no space for" in only(found, "warning", "weights")


@needs_namespaces
def test_another_model_is_found_by_samples_or_every_byte(inputs: Path, tmp_path: Path) -> None:
    config, other, model = write(tmp_path, inputs), tmp_path / "other", inputs / "model"
    shutil.copytree(model, other)
    content = bytearray((other / "notes.bin").read_bytes())
    content[UNSAMPLED] ^= 1
    (other / "notes.bin").write_bytes(content)
    with agent_of(config, mounts=f"mount --bind {other} {model}"):
        sampled = look(config)
        assert not errors(sampled)
        assert sampled[-1].message.startswith("node b: model files as here (names, sizes, headers and samples")
        assert "node b differs from here: notes.bin has" in only(look(config, deep=True), "error", "cluster.nodes")
        (other / "config.json").write_text("{}")
        assert "config.json has 2 bytes" in only(look(config), "error", "cluster.nodes")


@needs_namespaces
def test_paths_that_the_node_does_not_share_are_found(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "own_checks.py").write_text("def score(response, task):\n    return 0.0\n")
    (tmp_path / "runs").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    config = write(
        tmp_path,
        inputs,
        trainer={"devices": ["b/cpu:1"]},
        verifier={"name": "own_checks:score", "nodes": ["b"]},
        run={"directory": str(tmp_path / "runs" / "run")},
    )
    with agent_of(config):
        assert not errors(look(config))
    hidden = "; ".join(f"mount -t tmpfs none {tmp_path / name}" for name in ("user", "runs"))
    with agent_of(config, mounts=hidden):
        found = look(config)
    assert "there is no module 'own_checks'" in only(found, "error", "verifier.name")
    assert f"{tmp_path}/runs isn't the orchestrator's" in only(found, "error", "run.directory")
    assert not list((tmp_path / "runs").iterdir())


def test_the_environment_of_workers_is_shown_without_secrets(inputs: Path, tmp_path: Path) -> None:
    config = write(tmp_path, inputs, cluster={"environment": {"NCCL_SOCKET_IFNAME": "eth0", "HF_TOKEN": "hf_1"}})
    shown = only(cluster_findings(tiny_run.experiment_of(config)), "info", "cluster.environment")
    assert shown == "workers on nodes get NCCL_SOCKET_IFNAME=eth0, HF_TOKEN=***"


def test_a_copy_of_the_books_that_can_not_be_kept_is_found(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = write(tmp_path, inputs, cluster={"replicate_to": f"b:{tmp_path}/file/copy"})
    with agent_of(config):
        message = only(look(config), "error", "cluster.replicate_to")
    assert message == f"on node b: {tmp_path}/file is no folder that can be written to"
    here = write(tmp_path, inputs, cluster={"replicate_to": f":{tmp_path}/file/copy"})
    assert only(cluster_findings(tiny_run.experiment_of(here)), "error", "cluster.replicate_to") == message[11:]
    with agent_of(config := write(tmp_path, inputs, cluster={"replicate_to": f"b:{tmp_path}/copies/run"})):
        assert not errors(look(config))


@pytest.mark.slow
@needs_namespaces
def test_ports_that_a_firewall_closes_between_two_nodes_are_found(inputs: Path, tmp_path: Path) -> None:
    cluster = {"address": "10.77.0.1:7400", "nodes": ["b", "c"]}
    config = write(tmp_path, inputs, cluster=cluster, generator={"devices": ["b/cpu:0", "c/cpu:0"]})

    def check(namespace: str) -> tuple[int, str, str]:
        return tiny_run.run_program(warm_programs.HEADWAY, "check", config, "--no-calibrate", namespace=namespace)

    with namespaces(3) as names:
        agents = [
            start_agent("10.77.0.1:7400", name, log=tmp_path / f"{name}.log", namespace=namespace)
            for name, namespace in zip("bc", names[1:], strict=True)
        ]
        try:
            assert "cluster.port_range" not in check(names[0])[1]
            subprocess.run(["ip", "-n", names[1], "route", "add", "unreachable", "10.77.0.3"], check=True)
            code, *outputs = check(names[0])
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert code == 2
    (line,) = [line for line in "".join(outputs).splitlines() if "cluster.port_range" in line]
    assert line.startswith("error: cluster.port_range: c gets nothing from b: 10.77.0.2:29500 ")
    assert line.endswith("; open these ports between the machines of the run")
