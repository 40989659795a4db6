"""`headway doctor --live`: the wait graph that a run keeps, in words."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from headway.records.errors import ConfigurationError
from headway.records.stalls import Wait, WaitGraph
from headway.report.live_waits import live_waits_text, read_live_waits


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
