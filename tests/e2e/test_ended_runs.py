"""Runs that have ended, and those whose tasks have changed: a resume says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_an_ended_run_says_why_and_isnt_trained_on_by_a_resume(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    tasks, held = tmp_path / "tasks.jsonl", tmp_path / "held.jsonl"
    rows = tasks.read_text().splitlines(keepends=True)
    tasks.write_text("".join(rows[:150]))
    held.write_text("".join(rows[150:160]))
    evaluation = {"every_steps": 1, "stop_at_solve_rate": 0.01, "samples_per_task": 2, "temperature": 1.0}
    more = {"tasks.validation": {"path": str(held)}, "evaluation": evaluation}
    config = tiny_run.write_experiment(tmp_path, run={"steps": 100}, **more)
    run = tmp_path / "run"

    begun = tiny_run.train(config)
    assert begun.process.returncode == 0, begun.output
    version = tiny_run.steps_of(run)[-1].version
    (end,) = tiny_run.events_of(run, "end")
    assert end.detail.endswith(f" >= evaluation.stop_at_solve_rate 0.01, at version {version}")
    assert "ended              validation solve rate" in begun.output

    done = ["--evaluation.stop_at_solve_rate=1.0", f"--run.steps={version}"]
    for aim, why in (([], "stop_at_solve_rate 0.01"), (done, f"all {version} steps of run.steps are done")):
        again = tiny_run.train(config, "--resume", *aim)
        assert again.process.returncode == 0, again.output
        assert f"{why} already, nothing was trained; a larger --" in " ".join(again.output.split())
    assert len(tiny_run.steps_of(run)) == version
    assert tiny_run.events_of(run, "resume") == []

    tasks.write_text("".join(rows[:140]))
    on = tiny_run.train(config, "--resume", done[0], f"--run.steps={version + 1}")
    assert on.process.returncode == 0, on.output
    assert tiny_run.steps_of(run)[-1].version == version + 1
    (changed,) = tiny_run.events_of(run, "tasks_changed")
    assert changed.detail.startswith("tasks.train has changed since this run began (140 tasks, were 150): make clean")
    assert "warning: tasks.train: has changed since this run began (140 tasks, were 150)" in on.output
