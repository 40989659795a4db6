"""Agents that a run starts itself, through a real sshd and a real Slurm of this one machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from launcher_programs import COMMAND, NO_SLURM, NO_SSH, free_port, slurm, sshd
from node_processes import Events
from tiny_run import experiment_of, write_experiment, write_inputs
from worker_processes import exists, run, spec, until

from headway.orchestrator.nodes.machines import Machines, open_machines
from headway.orchestrator.preflight.cluster import node_findings
from headway.records.errors import ConfigurationError
from headway.runtime.clock import RealClock
from headway.runtime.nodes.nodes import NodeLost

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def cluster_of(launcher: str, place: str, **more: Any) -> dict[str, Any]:
    return {
        "address": "127.0.0.1:0",
        "launcher": launcher,
        "nodes": {"b": place},
        "command": COMMAND,
        "disconnect_timeout_s": 10.0,
        "join_timeout_s": 30.0,
        **more,
    }


@asynccontextmanager
async def machines(
    folder: Path, cluster: dict[str, Any], events: Events, **sections: dict[str, Any]
) -> AsyncIterator[Machines]:
    """The machines of a run, whose generator is on node b unless ``sections`` say otherwise."""
    (folder / "run").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")  # the same file on every node, as no worker here reads it
    config = write_experiment(folder, **{"generator": {"devices": ["b/cpu:0"]}, "cluster": cluster} | sections)
    async with open_machines(experiment_of(config), RealClock(), events, key_folder=folder / "run") as opened:
        yield opened


def shown_to_others(key: str) -> list[str]:
    """Command lines and environments of this machine's processes that have the key."""
    shown = []
    for process in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        with contextlib.suppress(OSError):
            shown += [process.read_text()] if key in process.read_text(errors="replace") else []
    return shown


async def require_service_and_restart(folder: Path, cluster: dict[str, Any]) -> None:
    """Workers run on node b; its killed agent is reported and started again; the run's end ends it."""
    events = Events()
    async with machines(folder, cluster, events) as opened:
        assert opened.nodes is not None
        worker = await opened.launcher.start(spec(device="b/cpu:0"))
        assert await worker.call("echo", 1) == 1
        facts = opened.nodes.joined["b"].facts
        assert facts is not None
        os.kill(facts.pid, signal.SIGKILL)
        assert "node b" in (await worker.died).cause
        await until(lambda: bool(events.of("agent_ended")))
        assert "b: its agent ended with exit code" in events.of("agent_ended")[0]
        await opened.nodes.wait_for("b", 30.0)
        worker = await opened.launcher.start(spec(device="b/cpu:0"))
        assert await worker.call("echo", 2) == 2
        facts = opened.nodes.joined["b"].facts
        assert facts is not None
        assert not shown_to_others((folder / "run/cluster.key").read_text().strip())
    await until(lambda: not exists(facts.pid))
    assert len(events.of("agent_ended")) == 1  # the regular end isn't reported
    assert "the run is over" in (folder / "run/logs/node-b.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SSH), reason=NO_SSH)
def test_ssh_agents_are_started_and_restarted_until_the_run_ends(tmp_path: Path):
    with sshd(tmp_path / "sshd") as destination:
        run(lambda: require_service_and_restart(tmp_path, cluster_of("ssh", destination)))


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SSH), reason=NO_SSH)
def test_check_looks_at_nodes_that_ssh_starts_and_ends_their_agents(tmp_path: Path):
    write_inputs(tmp_path)
    with sshd(tmp_path / "sshd") as destination:
        nodes, address = {"b": destination, "c": "-p 1 ::1"}, f"127.0.0.1:{free_port()}"
        cluster = cluster_of("ssh", "", nodes=nodes, address=address, join_timeout_s=8.0)
        config = write_experiment(tmp_path, generator={"devices": ["b/cpu:0", "c/cpu:0"]}, cluster=cluster)
        looked, compared, refused = node_findings(experiment_of(config))
    assert looked.message.startswith("node b: ")
    assert compared.message.startswith("node b: model files as here")
    assert "node c has not joined within 8 s (joined: b): its agent ended with exit code 255: ssh:" in refused.message
    agents = subprocess.run(["pgrep", "-f", f"headway.* node --join {address}"], capture_output=True, check=False)
    assert not agents.stdout


@pytest.mark.skipif(bool(NO_SSH), reason=NO_SSH)
def test_node_that_refuses_ssh_is_named_with_sshs_own_words(tmp_path: Path):
    async def main() -> None:
        cluster = cluster_of("ssh", "-p 1 127.0.0.1", join_timeout_s=1.0)
        with pytest.raises(NodeLost, match=r"b has not joined .*exit code 255: ssh: connect to host .* refused"):
            async with machines(tmp_path, cluster, Events()):
                pass

    run(main)


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_slurm_agents_are_steps_of_the_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with slurm(tmp_path / "slurm") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        ended = subprocess.run(
            ["salloc", "--nodes=1", "--no-shell"], capture_output=True, text=True, check=True, timeout=30
        )
        monkeypatch.setenv("SLURM_JOB_ID", ended.stderr.split()[-1])
        run(lambda: require_service_and_restart(tmp_path, cluster_of("slurm", "0")))
        subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]], check=True)


def test_slurm_outside_an_allocation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="not in an allocation: start the run by sbatch"):
            async with machines(tmp_path, cluster_of("slurm", "0"), Events()):
                pass

    asyncio.run(main())
