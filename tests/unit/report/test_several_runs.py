"""`headway runs` and `headway report --compare` on ten runs: recorded folders, damaged ones, one that runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from page_answers import kept
from synthetic_run import step_record

from headway.cli.main import main as headway
from headway.records.ledger import EventRecord
from headway.report.run_view import view_run
from headway.report.several.axes import axis_positions
from headway.report.several.compare import differences
from headway.report.several.run_list import TAIL_BYTES, ListedRun, find_runs, list_runs
from headway.runtime.run_directory import SCHEMA, RunDirectory

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Ten runs, four as they were recorded and six made of them."""
    for name, source in {
        **{name: name for name in ("ended", "other", "killed", "interrupted")},
        **{"garbage": "ended", "torn": "killed", "old": "other", "resumed": "killed", "no-ledger": "ended"},
        "running": "killed",
    }.items():
        shutil.copytree(RECORDED / source, tmp_path / name)
    with (tmp_path / "garbage" / "ledger.jsonl").open("ab") as file:
        file.write(b"\x00\xff{]\n" + b"[" * 100_000 + b"\n")
    with (tmp_path / "torn" / "ledger.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","st')
    (tmp_path / "old" / "config.json").write_text('{"run": {"steps": 5}, "queue": {"budget": 2}}')
    shutil.rmtree(tmp_path / "old" / "epoch")
    (tmp_path / "no-ledger" / "ledger.jsonl").unlink()
    (tmp_path / "resumed" / "epoch" / "1-0-ac0c3e5742190a5c").rename(tmp_path / "resumed" / "epoch" / "2-0-ab")
    more = (
        EventRecord(event="resume", time_s=0.1),
        step_record(3, time_s=7.0),
        EventRecord(event="interrupt", time_s=9),
    )
    with (tmp_path / "resumed" / "ledger.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in more)
    return tmp_path


def listed(runs: Path, price: float | None = None) -> dict[str, ListedRun]:
    return {Path(run.run).name: run for run in list_runs(find_runs([runs]), price)}


def test_ten_runs_are_listed_with_what_is_wrong(runs: Path) -> None:
    with RunDirectory(runs / "running") as held:
        held.acquire()
        found = listed(runs, price=3600.0)
    assert {name: run.state for name, run in found.items()} == {
        **{"ended": "ended", "other": "ended", "killed": "died", "interrupted": "interrupted", "garbage": "ended"},
        **{"torn": "died", "old": "unknown", "resumed": "interrupted", "no-ledger": "unknown", "running": "running"},
    }
    assert next(iter(found)) == "running"
    assert found["running"].holder.startswith("process ")
    ended = found["ended"]
    assert (ended.step, ended.steps, ended.solve_rate_of, ended.problems) == (4, 4, "validation after", ())
    assert ended.solve_rate == pytest.approx(10 / 12)
    assert ended.usd == pytest.approx(2 * view_run(runs / "ended").summary.duration_s)  # a dollar a second, two devices
    assert ended.disk_bytes > 30_000
    assert found["resumed"].usd == pytest.approx(2 * (9.0 + 0.289), rel=1e-3)  # both sessions
    assert "2 damaged lines" in found["garbage"].problems[0]
    assert "half-written" in found["torn"].problems[0]
    assert f"no schema's number, and this one reads schema {SCHEMA}. Read and resume" in found["old"].problems[0]
    assert found["old"].step == 0
    assert found["no-ledger"].problems == ("ledger.jsonl can't be read: No such file or directory",)


def test_a_run_that_is_being_resumed_is_said_to_be(runs: Path) -> None:
    with RunDirectory(runs / "ended") as held:
        held.acquire()
        run = listed(runs)["ended"]
    assert run.state == "running"
    assert run.problems == ("it is being started or resumed: this session has recorded nothing yet",)


def test_an_orchestrator_elsewhere_is_alive_while_it_renews_its_epoch(runs: Path) -> None:
    folder = runs / "killed" / "epoch"
    holder = {"host": "elsewhere", "pid": 7, "boot": "b", "inode": folder.stat().st_ino, "orphan_s": 60.0}
    (folder / "ac0c3e5742190a5c.json").write_text(json.dumps(holder))
    os.utime(folder)
    assert listed(runs)["killed"].holder == "process 7 on elsewhere"
    (folder / "ac0c3e5742190a5c.json").write_text(json.dumps(holder | {"orphan_s": 0.0}))
    assert listed(runs)["killed"].state == "died"


def test_folders_that_make_no_sense_are_rows_too(runs: Path) -> None:
    (runs / "ended" / "config.json").write_text(json.dumps({"schema": SCHEMA, "run": [1]}))
    (runs / "other" / "config.json").write_bytes(b"\x00\x01")
    found = listed(runs)
    assert found["ended"].problems[0].startswith("can't be read: AttributeError")
    assert found["other"].problems[0].startswith("config.json can't be read")
    assert found["other"].step == 5


def test_hundred_long_runs_are_listed_from_their_ends(tmp_path: Path) -> None:
    lines = b"".join(msgspec.json.encode(step_record(step)) + b"\n" for step in range(300))
    for number in range(100):
        shutil.copytree(RECORDED / "ended", tmp_path / f"run-{number}")
        with (tmp_path / f"run-{number}" / "ledger.jsonl").open("ab") as file:
            file.write(b"not read: garbage\n" + lines)
    assert len(lines) > TAIL_BYTES
    began_s = time.process_time()
    found = list_runs(find_runs([tmp_path]))
    assert {(run.step, run.problems) for run in found} == {(300, ())}
    assert time.process_time() - began_s < 10.0


def test_runs_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "ended").rename(runs / "\x1b[31m<b>")
    assert headway(["runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31m<b>" in shown
    assert "4 of 400" in shown
    assert headway(["runs", str(runs), "--json", "--usd-per-device-hour", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 10
    (tmp_path / "empty").mkdir()
    assert headway(["runs", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'empty'}\n"
    assert headway(["runs", str(tmp_path / "nowhere")]) == 2


# --- compare ---------------------------------------------------------------------------------------------


def test_compare_draws_what_can_be_read_over_five_axes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = runs / "compare.html"
    names = sorted(path.name for path in runs.iterdir() if path.is_dir())
    options = ["--compare", "--usd-per-device-hour", "2.5", "--html", str(page)]
    assert headway(["report", *(str(runs / name) for name in names), *options]) == 0
    told, found = capsys.readouterr(), kept(page)
    assert told.out.startswith("report: ")
    assert sorted(re.findall(r"left out: \S*/([\w-]+): ", told.err)) == ["garbage", "no-ledger", "old"]
    assert len(found["compare"]["runs"]) == 7
    assert sum("Left out: " in problem for problem in found["compare"]["problems"]) == 3
    axes = {axis for of in found["of"].values() for axis, places in of["series"]["axes"].items() if places["x"]}
    assert axes == {"steps", "samples", "tokens", "hours", "dollars"}
    assert "trainer.learning_rate" in found["compare"]["differences"]


def test_places_of_a_run_go_on_over_its_sessions(runs: Path) -> None:
    places = axis_positions(view_run(runs / "resumed"), price=None)
    assert places["steps"] == {version: float(version) for version in range(5)}
    assert places["samples"][3] == 48.0
    assert places["hours"][4] * 3600 == pytest.approx(7.0 + 0.289, rel=1e-3)
    assert "dollars" not in places
    assert axis_positions(view_run(runs / "ended"), 1.0)["tokens"][4] == 988.0


def test_compare_as_json_and_its_usage(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(runs / name) for name in ("ended", "other", "no-ledger")]
    assert headway(["report", *given, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["steps"] for run in found["runs"]] == [4, 5]
    assert sorted(found["configuration"]) == ["run.seed", "run.steps", "trainer.learning_rate"]
    assert found["configuration"]["trainer.learning_rate"] == ["0.002", "0.001"]
    assert list(found["left_out"]) == given[2:]
    assert headway(["report", *given]) == 2
    assert headway(["report", given[0], "--compare"]) == 2
    assert headway(["report", given[2], given[2], "--compare"]) == 2


def test_differences_are_of_leaves_alone() -> None:
    first = {"run": {"directory": "a", "seed": 1}, "tasks": {"train": [{"path": "x"}]}, "sft": {}}
    second = {"run": {"directory": "b", "seed": 1}, "tasks": {"train": [{"path": "y"}]}, "sft": {}, "new": None}
    assert differences([first, second]) == {"tasks.train.0.path": ['"x"', '"y"'], "new": ["–", "null"]}
