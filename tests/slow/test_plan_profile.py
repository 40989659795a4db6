"""`headway plan --profile` on this machine, and a run as its plan says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from page_answers import words
from tiny_run import headway, output_of, refused, require_nothing_left, train, write_experiment, write_inputs

from headway.config.load import load_experiment
from headway.planner.profile import Profile
from headway.runtime.devices import machine_cores

pytestmark = [pytest.mark.real, pytest.mark.skipif(len(machine_cores()) < 2, reason="two sides need two cores")]


def test_a_profile_a_plan_and_the_run_that_it_says(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_experiment(tmp_path)
    profile, pool, plan, whole = (tmp_path / name for name in ("profile.json", "pool.toml", "plan.json", "whole.toml"))
    with headway(
        "plan", config, "--profile", "--calibrate-s=2", f"--output={profile}", run=tmp_path / "run"
    ) as command:
        assert command.wait() == 0, command.output
        require_nothing_left(command)
    measured = msgspec.json.decode(profile.read_bytes(), type=Profile)
    cores = len(machine_cores())
    assert {(point.generators, point.trainers) for point in measured.points} >= {(1, 1), (cores, cores)}
    assert all(point.measured.decode_tokens_per_s > 50 for point in measured.points)
    assert set(measured.missed) == {"generate", "train"}

    pool.write_text(f'profile = {json.dumps(str(profile))}\n[[devices]]\ndevice = "cpu"\ncount = {cores}\n')
    output_of("plan", config, f"--pool={pool}", f"--output={plan}", f"--write={whole}")
    found = json.loads(plan.read_text())
    assert found["refused"] == []
    output_of("check", whole, "--no-calibrate")
    assert list(load_experiment(whole).trainer.devices) == found["stages"][1]["names"]

    assert train(config, f"--plan={plan}").process.returncode == 0
    run = tmp_path / "run"
    assert json.loads((run / "config.json").read_text())["trainer"]["devices"] == found["stages"][1]["names"]
    output_of("report", run)
    assert "Plan: a steady step, device by device" in words(run / "report.html")

    profile.write_bytes(msgspec.json.encode(msgspec.structs.replace(measured, machine="another")))
    assert "measured on another machine" in refused("plan", config, f"--pool={pool}")
