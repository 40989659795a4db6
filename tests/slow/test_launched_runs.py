"""Whole runs whose generator is on a node that ssh, Slurm or Ray starts: the same weights as on one machine."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from launcher_programs import COMMAND, FOLDERS, NO_RAY, NO_SLURM, NO_SSH, slurm, sshd

from headway.trainer.checkpoints import find_checkpoints

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = {"queue": {"budget": 0}, "checkpoint": {"every_steps": 4}}
Launched = tuple[str, list[str], dict[str, str], Any]  # a node's place, words before the command, its environment


@contextmanager
def by_ssh(folder: Path) -> Iterator[Launched]:
    with sshd(folder) as destination:
        yield destination, [], {}, None


@contextmanager
def by_slurm(folder: Path) -> Iterator[Launched]:
    with slurm(folder) as environment:
        yield "0", ["salloc", "--nodes=1"], environment, None


@contextmanager
def by_ray(folder: Path, machines: int = 1) -> Iterator[Launched]:
    """A cluster, given last, of a head without cores and machines of one core."""
    os.environ["PYTHONPATH"] = FOLDERS
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000}
    )
    for _ in range(machines):
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    try:
        yield "", [], {"RAY_ADDRESS": cluster.address}, cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    """The inputs of all runs, and the weights of a run on this machine alone."""
    folder = tmp_path_factory.mktemp("one")
    tiny_run.write_inputs(folder)
    run = {"steps": 4, "seed": 7, "deterministic": True, "directory": str(folder / "run")}
    command = tiny_run.train(tiny_run.write_experiment(folder, run=run, **SETTINGS))
    assert command.process.returncode == 0, command.output
    return tiny_run.inputs_in(folder), newest_weights(folder / "run")


def newest_weights(run: Path) -> bytes:
    return (find_checkpoints(run)[-1] / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        pytest.param("ssh", by_ssh, marks=pytest.mark.skipif(bool(NO_SSH), reason=NO_SSH)),
        pytest.param("slurm", by_slurm, marks=pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)),
        pytest.param("ray", by_ray, marks=[pytest.mark.long, pytest.mark.skipif(bool(NO_RAY), reason=NO_RAY)]),
    ],
)
def test_launched_run_trains_the_weights_of_one_machine(
    launcher: str, start: Callable[[Path], Any], one_machine: tuple[Any, bytes], tmp_path: Path
):
    inputs, weights = one_machine
    with start(tmp_path / "programs") as (place, before, environment, _):
        config = tiny_run.write_experiment(
            tmp_path,
            run={"steps": 4, "seed": 7, "deterministic": True, "directory": str(tmp_path / "run")},
            generator={"devices": ["b/cpu:0" if launcher == "ssh" else "1*cpu"]},
            cluster={"address": "127.0.0.1:0", "launcher": launcher, "nodes": {"b": place}, "command": COMMAND},
            **SETTINGS,
            **inputs,
        )
        ended = subprocess.run(
            [*before, sys.executable, "-m", "headway.cli.main", "train", str(config), "--quiet"],
            env=os.environ | environment | {"PYTHONPATH": FOLDERS},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert tiny_run.audited(tmp_path / "run").completed_steps == 4
    assert newest_weights(tmp_path / "run") == weights
    assert len(tiny_run.events_of(tmp_path / "run", "node_joined")) == 1
