"""Runs that have ended, and those whose tasks have changed: a resume says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from headway.models.loading import load_model
from headway.trainer.checkpoints import read_state

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_an_ended_run_says_why_and_isnt_trained_on_by_a_resume(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    tasks, held = tmp_path / "tasks.jsonl", tmp_path / "held.jsonl"
    rows = tasks.read_text().splitlines(keepends=True)
    tasks.write_text("".join(rows[:150]))
    held.write_text("".join(rows[150:160]))
    evaluation = {"every_steps": 1, "stop_at_solve_rate": 0.01, "samples_per_task": 2, "temperature": 1.0}
    demonstrations, row = tmp_path / "demonstrations.jsonl", '{"prompt": "1+1=", "solution": "2"}\n'
    demonstrations.write_text(2 * row)
    more = {"tasks.validation": {"path": str(held)}, "evaluation": evaluation}
    more["demonstrations"] = {"data": str(demonstrations)}
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
    demonstrations.write_text(row)
    on = tiny_run.train(config, "--resume", done[0], f"--run.steps={version + 1}")
    assert on.process.returncode == 0, on.output
    assert tiny_run.steps_of(run)[-1].version == version + 1
    (changed,) = tiny_run.events_of(run, "tasks_changed")
    (shown,) = tiny_run.events_of(run, "demonstrations_changed")
    assert "demonstrations.data has changed since this run began (1 demonstrations, were 2)" in shown.detail
    assert changed.detail.startswith("tasks.train has changed since this run began (140 tasks, were 150): make clean")
    assert "warning: tasks.train: has changed since this run began (140 tasks, were 150)" in on.output


@pytest.mark.slow
def test_best_is_there_whenever_the_summary_says_so(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    config, run = tiny_run.write_experiment(tmp_path, run={"steps": 2}), tmp_path / "run"
    for steps, resume in ((2, []), (3, ["--resume"])):
        ended = tiny_run.train(config, *resume, f"--run.steps={steps}")
        assert ended.process.returncode == 0, ended.output
        assert "best version       none was judged: best/ holds the last" in ended.output
        assert read_state(run / "best").version == steps
        load_model(run / "best")
        assert (run / "best" / "README.md").is_file()

    with tiny_run.headway("train", config, "--resume", "--run.steps=1000", run=run) as killed:
        killed.until(lambda: tiny_run.steps_of(run)[-1].version >= 5, "steps")
        killed.process.kill()
    assert "holds the last" not in tiny_run.output_of("report", run)  # not finished: nothing is said of it
    last = tiny_run.steps_of(run)[-1].version + 1
    ended = tiny_run.train(config, "--resume", f"--run.steps={last}")
    assert ended.process.returncode == 0, ended.output
    assert "best/ holds the last" in ended.output
    assert read_state(run / "best").version == last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluation", "validated"), [({"test": "before", "every_steps": 100}, True), ({"test": "after"}, False)]
)
def test_best_is_there_when_an_evaluation_judges_no_version(
    tmp_path: Path, evaluation: dict[str, Any], validated: bool
) -> None:
    """Before training alone, with a validation that is never due; after it alone."""
    tiny_run.write_inputs(tmp_path)
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"prompt": f"9{i}+9=", "answer": "1"}) + "\n" for i in "12"))
    sections = {"tasks.validation": {"path": str(held)}} if validated else {}
    config = tiny_run.write_experiment(tmp_path, run={"steps": 1}, evaluation=evaluation, **sections)
    done = tiny_run.train(config)
    assert done.process.returncode == 0, done.output
    shown = " ".join(tiny_run.output_of("report", tmp_path / "run").split())
    pages = [file.read_text() for file in (tmp_path / "run").rglob("*.md")]
    says = "best/" in done.output + shown + "".join(pages)
    assert not says or (tmp_path / "run" / "best" / "config.json").is_file()


@pytest.mark.slow
def test_a_best_version_whose_event_a_kill_has_lost_is_named_after_a_resume(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    run, held = tmp_path / "run", tmp_path / "held.jsonl"
    rows = (tmp_path / "tasks.jsonl").read_text().splitlines(keepends=True)
    held.write_text("".join(rows[:8]))
    (tmp_path / "tasks.jsonl").write_text("".join(rows[8:]))
    evaluation = {"every_steps": 1, "samples_per_task": 2, "temperature": 1.0}
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": 3}, **{"tasks.validation": {"path": str(held)}, "evaluation": evaluation}
    )
    ended = tiny_run.train(config)
    assert ended.process.returncode == 0, ended.output
    best = read_state(run / "best").version
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"event":"best"' not in line))
    assert tiny_run.events_of(run, "best") == []
    ended = tiny_run.train(config, "--resume", "--run.steps=4", "--evaluation.every_steps=100")
    assert ended.process.returncode == 0, ended.output
    assert json.loads((run / "summary.json").read_text())["best_version"] == best
    assert read_state(run / "best").version == best
