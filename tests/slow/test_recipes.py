"""The recipes of deploy/, run as written: the Slurm job requeues itself; ssh's section; KubeRay's manifest."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import tiny_run
from launcher_programs import COMMAND, FOLDERS, NO_SLURM, free_port, slurm, wait_until

from headway.config.cluster import ClusterConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
pytestmark = pytest.mark.slow


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)
def test_slurm_job_requeues_itself_and_finishes_the_run(tmp_path: Path):
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 120, "directory": "elsewhere"},
        generator={"devices": ["b/cpu:0"]},
        cluster={"address": "127.0.0.1:0", "nodes": {"b": "0"}, "command": COMMAND},
        checkpoint={"every_steps": 10},
    )
    run = tmp_path / "run"
    with slurm(tmp_path / "slurm") as conf:
        environment = os.environ | conf | {"PYTHONPATH": FOLDERS, "HEADWAY": COMMAND, "HEADWAY_PORT": str(free_port())}

        def slurm_says(*command: str) -> str:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
            return ended.stdout

        job = slurm_says("sbatch", "--parsable", "--nodes=1", str(DEPLOY / "slurm/train.sbatch"), str(config), str(run))
        job = job.strip()

        def output() -> str:
            path = tmp_path / f"slurm-{job}.out"
            return (path.read_text() if path.exists() else "") + slurm_says("scontrol", "show", "job", job)

        wait_until(lambda: len(tiny_run.steps_of(run)) >= 5, output, 90.0)
        slurm_says("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: "Restarts=1" in slurm_says("scontrol", "show", "job", job), output, 60.0)
        before = len(tiny_run.steps_of(run))
        assert before < 120
        wait_until(lambda: "JobState=PENDING" in slurm_says("scontrol", "show", "job", job), output, 60.0)
        time.sleep(2.0)  # slurmd refuses a job that starts again in the second in which it was killed
        slurm_says("scontrol", "update", f"jobid={job}", "StartTime=now")  # else in two minutes
        wait_until(lambda: "JobState=COMPLETED" in slurm_says("scontrol", "show", "job", job), output, 150.0)
    report = tiny_run.audited(run)
    assert report.completed_steps == 120
    assert len(tiny_run.events_of(run, "node_joined")) == 2


def test_ssh_section_is_valid():
    raw = tomllib.loads((DEPLOY / "ssh/cluster.toml").read_text())
    assert ClusterConfig.model_validate(raw["cluster"]).launcher == "ssh"
