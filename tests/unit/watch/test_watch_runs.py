"""Watched runs: found by id, read as they grow, with replays resolved; the cache of what is derived from them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pytest
from synthetic_run import evaluation, step_record, synthetic_lines

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, LedgerLine
from headway.report.run_cost import cost_of_run
from headway.report.run_view import view_run
from headway.report.several.axes import AXES, axis_positions
from headway.report.watch import cache, watched_runs
from headway.report.watch.watched_runs import NoSuchRun, RunTail, WatchedRuns, is_inside
from headway.runtime import user_cache
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import SCHEMA
from headway.telemetry.ledger import Ledger
from headway.telemetry.metrics import scalars

RECORDED = Path(__file__).parents[2] / "fixtures" / "run_folders"
RESUMED: list[LedgerLine] = [  # steps 2 and 3 and an evaluation are recorded twice, one step was skipped first
    EventRecord(event="start"),
    *(step_record(step, time_s=float(step + 1)) for step in range(4)),
    evaluation("during", 4, 0.4, split="validation", time_s=4.0),
    EventRecord(event="resume", time_s=0.5),
    *(step_record(step, time_s=step + 5.0, rewards__mean=7.0) for step in (2, 3)),
    evaluation("during", 4, 0.5, split="validation", time_s=9.0),
    step_record(4, time_s=11.0, skipped=True, version=4),
    step_record(4, time_s=12.0),
    step_record(5, time_s=13.0),
]


def write(run: Path, lines: list[LedgerLine]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    with Ledger(run, RealClock()) as ledger:
        for line in lines:
            ledger.record(line)
    shutil.copy(RECORDED / "ended" / "config.json", run)
    return run


def read(run: Path) -> RunTail:
    tail = RunTail(run)
    tail.refresh(wide=True)
    return tail


def test_columns_are_those_of_the_whole_ledger_read_at_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", RESUMED)
    tail, view = read(run), view_run(run)
    trained = [step for step in view.steps if not step.skipped]
    assert tail.names() == sorted({name for step in trained for name in scalars(step)})
    for name in tail.names():
        expected = [scalars(step).get(name, np.nan) for step in trained]
        np.testing.assert_array_equal(tail.column(name), expected, err_msg=name)
    assert tail.column("reward/mean")[2:4].tolist() == [7.0, 7.0]
    assert [record.solve_rate for record in tail.evaluations.values()] == [0.5]
    assert list(tail.events.values()) == view.events
    assert tail.duration_s == 4.0 + 13.0  # what was replayed took its time


def test_places_and_cost_are_those_of_the_report(tmp_path: Path) -> None:
    for name in ("ended", "other"):
        tail, view = read(RECORDED / name), view_run(RECORDED / name)
        places = axis_positions(view, 2.5)
        for axis in AXES:
            assert tail.axis_positions(axis, 2.5).tolist() == pytest.approx(list(places[axis].values())[1:]), axis
        found, expected = tail.cost(2.5), cost_of_run(view, 2.5)
        assert found is not None
        for field in expected.__struct_fields__:
            assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=0.01), field
    resumed = write(tmp_path / "run", RESUMED)
    for axis in ("steps", "samples"):
        assert (
            read(resumed).axis_positions(axis, None).tolist()
            == list(axis_positions(view_run(resumed), None)[axis].values())[1:]
        )
    hours = read(resumed).axis_positions("hours", None)
    assert (hours * 3600).tolist() == pytest.approx([1.0, 2.0, 4.0 + 7.0, 4.0 + 8.0, 4.0 + 12.0, 4.0 + 13.0])
    for axis, words in (("furlongs", "valid: steps"), ("dollars", "--usd-per"), ("tokens", "ledger doesn't say")):
        with pytest.raises(ConfigurationError, match=words):
            read(resumed).axis_positions(axis, None)


def test_only_appended_bytes_are_read(tmp_path: Path) -> None:
    run = write(tmp_path / "run", RESUMED)
    tail = read(run)
    before = tail.column("reward/mean").tolist()
    with (run / "ledger.jsonl").open("r+b") as file:  # in place, but for the end: who read it again would find garbage
        file.write(b"x" * (os.path.getsize(run / "ledger.jsonl") - 300))
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(step_record(6, rewards__mean=0.25)) + b"\n")
    tail.refresh()
    assert tail.column("reward/mean").tolist() == [*before, 0.25]
    assert tail.problems == []


def test_a_line_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    run = write(tmp_path / "run", RESUMED[:3])
    line = msgspec.json.encode(step_record(2)) + b"\n"
    tail = read(run)
    for part, steps, problems in ((line[:40], 2, ["half-written"]), (line[40:-1], 2, ["half-written"]), (b"\n", 3, [])):
        with (run / "ledger.jsonl").open("ab") as file:
            file.write(part)
        tail.refresh()
        assert len(tail.column("version")) == steps
        assert [problem.split()[-1] for problem in tail.problems] == problems


GARBAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "binary in the middle": (lambda data: data.replace(b"\n", b"\n\x00\xff{]\n", 1), "1 damaged lines"),
    "deep nesting": (lambda data: data + b"[" * 100_000 + b"\n", "1 damaged lines"),
    "zeros alone": (lambda data: b"\0" * 10_000, "what follows the last line is damaged"),
    "another kind of line": (lambda data: data + b'{"kind":"wish"}\n', "1 damaged lines"),
    "nothing": (lambda data: b"", ""),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_damage_is_said_and_the_rest_is_shown(tmp_path: Path, kind: str) -> None:
    run = write(tmp_path / "run", RESUMED)
    spoil, words = GARBAGE[kind]
    (run / "ledger.jsonl").write_bytes(spoil((run / "ledger.jsonl").read_bytes()))
    tail = read(run)
    assert words in " ".join(tail.problems)
    assert bool(tail.problems) == bool(words)
    assert len(tail.column("version")) == (0 if kind in ("zeros alone", "nothing") else 6)


def test_missing_and_foreign_files_are_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "ledger.jsonl can't be read: there is no such file" in read(tmp_path / "run").problems[0]
    run = write(tmp_path / "other", RESUMED)
    (tmp_path / "run" / "ledger.jsonl").symlink_to(run / "ledger.jsonl")
    (tmp_path / "run" / "config.json").symlink_to(run / "config.json")
    tail = read(tmp_path / "run")
    assert not tail.names()
    assert "lies outside the run's folder" in tail.problems[-1]
    (run / "config.json").write_text(json.dumps({"schema": SCHEMA, "pipeline": 1}))
    tail = read(run)
    assert "cost and time left aren't known" in tail.problems[0]
    assert tail.cost(1.0) is None
    assert len(tail.column("version")) == 6


def test_a_ledger_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    run = write(tmp_path / "run", RESUMED)
    tail = read(run)
    (run / "ledger.jsonl").unlink()
    write(run, RESUMED[:2])
    tail.refresh()
    assert tail.column("version").tolist() == [1.0]
    assert not tail.evaluations


def test_stalls_and_alerts_last_until_they_are_over(tmp_path: Path) -> None:
    def event(name: str, worker: str = "", **data: str) -> EventRecord:
        return EventRecord(event=name, detail=f"{name} of {worker}", worker=worker, data=data)

    lines: list[LedgerLine] = [
        EventRecord(event="start"),
        event("stalled", "trainer-0"),
        event("stalled", "verifier-0"),
    ]
    lines += [event("alert", rule="disk"), event("alert", rule="entropy")]
    run = write(tmp_path / "run", lines)
    tail = read(run)
    assert list(tail.stalls) == ["trainer-0", "verifier-0"]
    assert list(tail.alerts) == ["disk", "entropy"]
    write(run, [event("stall_ended", "trainer-0"), event("alert_cleared", rule="disk")])
    tail.refresh()
    assert list(tail.stalls) == ["verifier-0"]
    assert list(tail.alerts) == ["entropy"]
    write(run, [EventRecord(event="resume")])
    tail.refresh()
    assert not tail.stalls


def test_events_have_a_time_of_day(tmp_path: Path) -> None:
    run = write(tmp_path / "run", RESUMED)
    written_s = time.time() - 100
    os.utime(run / "ledger.jsonl", (written_s, written_s))
    tail = read(run)
    assert tail.unix_s(0, 0.0) is None  # of the first session's beginning there is no record
    resumed = next(number for number, event in tail.events.items() if event.event == "resume")
    assert tail.unix_s(resumed, 13.0) == pytest.approx(written_s)
    assert tail.unix_column()[-1] == pytest.approx(written_s)
    assert np.isnan(tail.unix_column()[0])


# --- runs and their ids ----------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are searched at every request."""
    monkeypatch.setattr(watched_runs, "_RESCAN_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_ids_are_places_below_a_root_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "ledger.jsonl").write_text("secret")
    for name in ("runs/a", "runs/b/rl", "more/a"):
        write(tmp_path / name, RESUMED)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "secret")
    watched = WatchedRuns([tmp_path / "runs", tmp_path / "more", tmp_path / "runs" / "b" / "rl"])
    ids = {run["id"]: run for run in watched.listing()["runs"]}
    assert sorted(ids) == sorted(["a", "b/rl", str(tmp_path / "more" / "a")])
    assert watched.run("b/rl").path == tmp_path / "runs" / "b" / "rl"
    assert watched.run("a") is watched.run("a")
    for wrong in ("", ".", "..", "b", "linked", "../secret", "a/", "./a", str(tmp_path / "secret"), "a\0"):
        with pytest.raises(NoSuchRun, match="valid: a"):
            watched.run(wrong)
    assert WatchedRuns([tmp_path / "runs" / "a"]).run("a").path == tmp_path / "runs" / "a"


@pytest.mark.usefixtures("at_once")
def test_runs_appear_and_folders_may_vanish(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        WatchedRuns([tmp_path / "nowhere"])
    (tmp_path / "runs").mkdir()
    watched = WatchedRuns([tmp_path / "runs"])
    assert watched.listing() == {"runs": [], "roots": [str(tmp_path / "runs")], "problems": []}
    write(tmp_path / "runs" / "new", RESUMED)
    assert [run["id"] for run in watched.listing()["runs"]] == ["new"]
    shutil.rmtree(tmp_path / "runs")
    assert watched.listing()["runs"] == []
    assert "no such folder" in watched.listing()["problems"][0]


@pytest.mark.usefixtures("at_once")
def test_the_list_is_made_again_for_runs_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, RESUMED)
    listed: list[str] = []
    plain = watched_runs.list_runs
    monkeypatch.setattr(
        watched_runs, "list_runs", lambda paths, price: listed.append(paths[0].name) or plain(paths, price)
    )
    monkeypatch.setattr(watched_runs, "_LISTING_SHARE", 0)
    watched = WatchedRuns([tmp_path])
    assert {run["step"] for run in watched.listing()["runs"]} == {6}
    write(tmp_path / "b", [step_record(6)])
    assert {run["id"]: run["step"] for run in watched.listing()["runs"]} == {"a": 6, "b": 7}
    assert sorted(listed) == ["a", "b", "b"]


def test_a_file_is_inside_with_its_links_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "log").write_text("x")
    (tmp_path / "secret").write_text("x")
    (folder / "within").symlink_to(folder / "log")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "gone").symlink_to(folder / "nothing")
    found = {
        name: is_inside(folder / name, folder) for name in ("log", "within", "out", "gone", "../secret", "logs", "no")
    }
    assert found == dict.fromkeys(found, False) | {"log": True, "within": True}


def test_a_long_run_takes_little_memory(tmp_path: Path) -> None:
    lines = [step_record(step) for step in range(300)]
    tail = read(write(tmp_path / "run", [*lines, *synthetic_lines(0)]))
    held = sum(len(column) * column.itemsize for column in tail._columns.values())
    assert held < 300 * 1200  # bytes a step
    assert len(tail.recent) == watched_runs.RECENT


# --- the cache -------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "watch"


def test_a_cache_is_of_one_folder_and_its_users_alone(tmp_path: Path, root: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "kept").mkdir()
    first = cache.cache_folder(tmp_path / "a")
    assert first == cache.cache_folder(tmp_path / "kept" / ".." / "a")
    assert first.parent == root
    assert (first.stat().st_mode & 0o777, root.stat().st_mode & 0o777) == (0o700, 0o700)
    (tmp_path / "a").rename(tmp_path / "kept" / "a")  # its inode isn't free for the next
    (tmp_path / "a").mkdir()
    assert cache.cache_folder(tmp_path / "a") != first


def test_a_cache_that_cannot_be_written_is_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(user_cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert user_cache.cache_root("watch").is_relative_to(tmp_path / "tmp")


def test_cached_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "columns"
    user_cache.write_cached(path, lambda file: file.write(b"old"))

    def write(file: BinaryIO) -> None:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        user_cache.write_cached(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_caches_used_longest_ago_are_deleted(root: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        (root / name / "deep").mkdir(parents=True)
        (root / name / "deep" / "index").write_bytes(b"x" * 10_000)
        os.utime(root / name, (1e9 - age, 1e9 - age))
    cache.trim_cache(25_000 + 4 * 4096)
    assert sorted(path.name for path in root.iterdir()) == ["middle", "new"]
    cache.trim_cache(0)
    assert [path.name for path in root.iterdir()] == ["new"]
