"""`headway doctor --live`: the wait graph that a run keeps, in words; and the report's list of deaths and stalls."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from synthetic_run import synthetic_lines, write_run

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.records.stalls import Stall, Wait, WaitGraph
from headway.report.incidents import incident_rows
from headway.report.live_waits import live_waits_text, read_live_waits
from headway.report.run_view import as_json, view_run


def kept(folder: Path, **fields: object) -> str:
    waits = tuple(Wait(kind="verdicts", owner="orchestrator", waiter=f"group {n}", since_s=1.0) for n in range(3))
    given = {"written_s": 100.0, "pid": os.getpid(), "now_s": 4.0, "waits": waits, "expected_s": {"verdicts": 20.0}}
    graph = WaitGraph(**(given | fields))  # type: ignore[arg-type]
    (folder / "waits.json").write_bytes(msgspec.json.encode(graph))
    (folder / "ledger.jsonl").write_text("")
    return str(folder)


def test_wait_graph_groups_waits_of_one_sort(tmp_path: Path) -> None:
    text = live_waits_text(read_live_waits(kept(tmp_path), now_s=101.0))
    assert text.splitlines() == [
        "nothing is stalled",
        "  group 0 (and 2 like it) -> orchestrator: verdicts, 3.0 s (expected at most 20.0 s)",
    ]


def test_stall_is_said_with_the_section_about_it(tmp_path: Path) -> None:
    stall = Stall(owner="verifier-0", kind="verifier.score", since_s=1.0, cause="it waits", expected_s=20.0, hard=False)
    text = live_waits_text(read_live_waits(kept(tmp_path, stalls=(stall,)), now_s=101.0))
    assert text.splitlines()[0] == "stalled 3 s: it waits (docs/troubleshooting.md#stall-verifier)"


def test_wait_graph_that_is_old_means_a_blocked_loop(tmp_path: Path) -> None:
    text = live_waits_text(read_live_waits(kept(tmp_path), now_s=130.0))
    assert text.startswith(f"the orchestrator (process {os.getpid()}) has been silent for 30.0 s: its event loop")


def test_run_that_was_killed_is_said_to_be_gone(tmp_path: Path) -> None:
    assert "has died; it was last seen 1.0 s ago" in live_waits_text(
        read_live_waits(kept(tmp_path, pid=2**22 + 1), now_s=101.0)
    )


def test_run_that_does_not_go_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"waits\.json"):
        read_live_waits(str(tmp_path))


def test_deaths_stalls_and_restarts_are_listed_with_who_why_and_what_they_cost(tmp_path: Path) -> None:
    lines = synthetic_lines(30)
    lines[20:20] = [
        EventRecord(
            event="verifier_died", worker="verifier-0", cause="killed by SIGKILL (9)\nlast output", time_s=21.0,
            found_by="exit", lost_samples=3,
        ),
        EventRecord(event="worker_stalled", worker="generator-0", found_by="health", lost_s=7.5),
        EventRecord(event="worker_answers", worker="generator-0", found_by="health", lost_s=9.0),
        EventRecord(event="verifier_restarted", worker="verifier-0", lost_s=1.5),
        EventRecord(event="trainer_restored", worker="trainer", lost_s=2.0, lost_samples=128),
    ]  # fmt: skip
    view = view_run(write_run(tmp_path, lines))
    assert view.verdict.failures_text == (
        "Workers: died: verifier-0; stalled: generator-0; 2 brought back; 128 samples trained again; 3 rollouts moved, "
        "scored or generated again; 12.5 s of workers' time lost."
    )
    row = ["verifier_died", "verifier-0", "21.0 s", "0", "exit", "killed by SIGKILL (9)", "–", "3"]
    assert row in incident_rows(view.lines)
    assert [event["worker"] for event in as_json(view)["incidents"]][:2] == ["verifier-0", "generator-0"]
