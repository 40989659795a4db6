"""The pictures of docs/concepts.md are what the traces kept beside it give."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.trace_pictures import FIGURES, IMAGES, TRACES, keep, picture

PAGE = (TRACES.parent / "concepts.md").read_text(encoding="utf-8")
MOST_BYTES = 64_000


@pytest.mark.parametrize("name", FIGURES)
def test_picture_is_up_to_date_and_shown(name: str) -> None:
    drawn = picture(name)
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == drawn, "run: python -m docs.trace_pictures"
    assert f"](images/{name}.svg)" in PAGE
    assert "prefers-color-scheme:dark" in drawn
    assert ElementTree.fromstring(drawn).findall("{*}rect[@class='page']")


def test_traces_are_small_and_all_drawn() -> None:
    kept = {file.stem: file.stat().st_size for file in TRACES.iterdir()}
    assert kept.keys() == {panel.trace for _, panels in FIGURES.values() for panel in panels}
    assert max(kept.values()) < MOST_BYTES


def test_no_group_in_the_pictures_is_older_than_its_budget() -> None:
    shown = [int(age) for age in re.findall(r">staleness (\d+)<", picture("concepts-staleness"))]
    assert len(shown) > 8
    assert 0 < max(shown) <= 2


def test_work_of_the_two_sides_never_overlaps_at_budget_0() -> None:
    """As the page says: they take turns. Asynchronously they overlap."""

    def together_s(trace: str) -> float:
        rows = [json.loads(line) for line in (TRACES / f"{trace}.jsonl").read_text(encoding="utf-8").splitlines()]
        busy = [(row["start_s"], row["end_s"]) for row in rows if row.get("name") == "busy"]
        steps = [(row["end_s"] - max(row["rank_compute_s"]), row["end_s"]) for row in rows if row["kind"] == "step"]
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in busy for b in steps)

    assert together_s("budget-0") < 0.1 < together_s("budget-2")


def test_part_of_a_trace_begins_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"kind": "session", "clock_s": 100.0, "unix_s": 1000.0},
        {"kind": "span", "track": "trainer-0", "name": "wait", "start_s": 100.0, "end_s": 101.0, "step": -1},
        {"kind": "step", "step": 0, "version": 1, "start_s": 101.0, "end_s": 103.0, "rank_compute_s": [1.0]},
        {"kind": "step", "step": 1, "version": 2, "start_s": 103.0, "end_s": 110.0, "rank_compute_s": [1.0]},
        {"kind": "step", "step": 2, "version": 3, "start_s": 110.0, "end_s": 111.0, "rank_compute_s": [1.0]},
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("docs.trace_pictures.TRACES", tmp_path / "kept")
    kept = [json.loads(line) for line in keep(tmp_path, "part", 1.0, 4.0).read_text().splitlines()]
    assert [(row["kind"], row.get("start_s"), row.get("end_s")) for row in kept] == [
        ("session", None, None),
        ("step", -1.0, 1.0),
        ("step", 1.0, 8.0),
        ("mark", None, None),
    ]
