"""Reports of policies in simulators: returns, successes and rates where a language model's run has solve rates."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from embodied_runs import walk_experiment
from rich.console import Console

from headway.records.ledger import (
    Distribution,
    EpisodeStatistics,
    EvaluationRecord,
    EventRecord,
    LedgerLine,
    StepRecord,
)
from headway.report.live_view import LiveState, evaluation_line, screen, step_line
from headway.report.run_view import as_json, view_run
from headway.report.several.run_list import list_runs
from headway.report.tables import summary_rows
from headway.report.watch.run_series import names
from headway.report.watch.view_report import report
from headway.report.watch.watched_runs import WatchedRun
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger
from headway.telemetry.metrics import scalars
from headway.telemetry.summary import summarise

EPISODES: dict[str, Any] = {
    "episodes": 4,
    "return_mean": 512.4,
    "return_interval": (480.0, 540.0),
    "length_mean": 200.0,
    "transitions": 2048,
    "steps_per_s": 1024.0,
    "simulate_s": 0.2,
    "constructions": 16,
}


def step(version: int, **episodes: Any) -> StepRecord:
    return StepRecord(
        step=version - 1,
        version=version,
        time_s=2.0 * version,
        step_s=2.0,
        samples=2,
        groups=2,
        trainer_compute_s=0.5,
        trainer_wait_s=1.5,
        trainer_wait_ratio=0.75,
        generator_wait_ratio=0.2,
        trajectory_staleness=Distribution(mean=0.0, max=0, histogram={"0": 2}),
        endings={"trained": 2},
        episodes=EpisodeStatistics(**EPISODES | episodes),
    )


def evaluation(version: int, mean: float, interval: tuple[float, float], success: float) -> EvaluationRecord:
    return EvaluationRecord(
        split="validation",
        phase="during",
        step=version,
        first_version=version,
        last_version=version,
        held=True,
        tasks=8,
        samples=8,
        solve_rate=success,
        standard_error=0.1,
        reward_mean=mean,
        return_interval=interval,
        length_mean=200.0,
    )


def lines(last: tuple[float, tuple[float, float]]) -> list[LedgerLine]:
    return [
        EventRecord(event="start"),
        evaluation(0, 10.0, (5.0, 15.0), 0.25),
        step(1),
        step(2, success_rate=0.5, success_interval=(0.4, 0.6), rebuilt=2, cut=8),
        evaluation(2, *last, 0.75),
        EventRecord(event="accounting", data={"balanced": 1, "trained": 4}),
        EventRecord(event="end", detail="all steps, at version 2"),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    directory = RunDirectory(folder)
    directory.begin(walk_experiment(folder), resume=False)
    with Ledger(folder, RealClock()) as ledger:
        for line in lines((500.0, (450.0, 550.0))):
            ledger.record(line)
    directory.release()
    return folder


def test_verdict_judges_returns_and_speaks_of_simulators(run: Path):
    sentences = view_run(run).verdict.sentences
    assert sentences["Is it learning?"].startswith(
        "Yes: mean return of 8 episodes with fixed seeds 10 [5, 15] (version 0) → 500 [450, 550] (version 2), success "
        "rate 0.250 → 0.750"
    )
    assert "the simulators 20%" in sentences["Who waits for whom?"]
    assert (
        "every fragment is open at the end or ended exactly once: 4 trained"
        in sentences["Is every rollout accounted for?"]
    )
    assert sentences["How fast?"].startswith("4,096 environment steps, 1,024/s")
    assert sentences["How fast?"].endswith("2 blocks again, which cut 8 episodes.")


@pytest.mark.parametrize(
    ("interval", "learning"),
    [((16.0, 20.0), "improved"), ((1.0, 4.0), "worse"), ((14.0, 20.0), "no measurable change")],
)
def test_learning_follows_from_disjoint_intervals(tmp_path: Path, interval: tuple[float, float], learning: str):
    from headway.report.verdict import judge

    recorded = lines((12.0, interval))
    assert judge(recorded, summarise(recorded), 0).learning == learning


def test_lines_have_returns_in_the_place_of_solve_rates(tmp_path: Path):
    state = LiveState(walk_experiment(tmp_path))
    for line in lines((500.0, (450.0, 550.0))):
        state.take(line)
    text = step_line(state)
    assert "return 512.4 [480, 540], success 0.5 [0.4, 0.6]" in text
    assert "simulators 20%" in text
    assert "1,024 environment steps/s" in text
    assert "buffered" not in text
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(state))
    assert "environment steps/s" in console.export_text()
    assert evaluation_line(evaluation(2, 500.0, (450.0, 550.0), float("nan"))) == (
        "validation during: return 500 [450, 550] (8 episodes, version 2)"
    )


def test_summary_list_page_and_metrics_have_them(run: Path):
    rows = summary_rows(view_run(run).summary)
    assert rows["last 100 episodes"].startswith("return 512.4 [480, 540], success 0.5")
    assert "solve rate" not in rows
    [listed] = list_runs([run])
    assert (listed.reward, listed.solve_rate, listed.problems) == (512.4, 0.75, ())
    json.dumps(as_json(view_run(run)), allow_nan=False)
    (run / "videos").mkdir()
    (run / "videos" / "step_00000002.gif").write_bytes(b"GIF89a")
    page = report(WatchedRun("run", run))
    assert page["problems"] == []
    assert any(section.get("picture", "").startswith("data:image/gif;base64,") for section in page["sections"])
    listed_names = {row["name"]: row for row in names(WatchedRun("run", run))["series"]}
    assert listed_names["episodes/return_mean"]["section"] == "Learning"
    assert listed_names["rates/environment_steps_per_s"]["unit"] == "steps/s"
    values = scalars(step(1))
    assert (values["episodes/return_low"], values["episodes/return_high"]) == (480.0, 540.0)
    assert "episodes/success_rate" not in values
