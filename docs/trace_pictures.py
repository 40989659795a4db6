"""Draws the pictures of docs/concepts.md from parts of real runs' traces, which are kept in docs/traces/.

    python -m docs.trace_pictures                                    # draw docs/images/concepts-*.svg
    python -m docs.trace_pictures --keep RUN NAME FROM_S SECONDS     # keep a part, counted from its first step

A picture has a background of its own, and colours for dark screens: it can be read on any page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import msgspec

from headway.records.trace import StepTrace, TraceLine
from headway.report.trace import Timeline, timeline_of
from headway.report.trace_groups import GroupLife, group_phases
from headway.telemetry.trace_file import FILE_NAME, decoded_lines

TRACES = Path(__file__).parent / "traces"
IMAGES = Path(__file__).parent / "images"
WIDTH, LEFT, RIGHT = 760, 96, 92  # pixels; the middle is time
ROW, GAP = 18, 30  # heights of a row, and of what is above a panel
MOST_GROUPS = 18  # rows of a panel
_TIMES = ("clock_s", "unix_s", "start_s", "end_s", "time_s", "admitted_s", "finished_s")
_DRAWN = ("session", "span", "group", "end", "step", "mark")
_TRACKS = ("generator", "trainer", "weights")
_STYLE = """<style>
text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600}.soft,.axis{fill:#59636e}.axis{font-size:10px}
.page{fill:#fff;stroke:#d1d9e0}.wait{fill:#eef1f4}.generating{fill:#3f7fc4}.verifying{fill:#7a5bb5}
.buffered{fill:#b9c6d6}.step{fill:#d9772b}.update{fill:#1f2328}.line{stroke:#9aa4af;stroke-dasharray:2 3}
.stop{fill:#cf222e;opacity:.16}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft,.axis{fill:#9aa6b2}.page{fill:#161b22;stroke:#3d444d}
.wait{fill:#262d36}.generating{fill:#5b9ee6}.verifying{fill:#a98be0}.buffered{fill:#56657a}.step{fill:#ec9450}
.update{fill:#e6edf3}.line{stroke:#667080}.stop{opacity:.3}}
</style>"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A part of a picture: rows drawn from one kept trace."""

    trace: str
    title: str
    draw: Callable[[Canvas, Timeline], None]


class Canvas:
    """An SVG in the making: panels below each other, with one scale of time each."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 10.0
        self.until_s = 1.0

    def x(self, at_s: float) -> float:
        return LEFT + min(max(at_s / self.until_s, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def bar(self, kind: str, start_s: float, end_s: float, height: float = ROW - 5, below: float = 0.0) -> None:
        """A bar in the present row, at least a pixel wide; outside the panel's time nothing."""
        if end_s < 0 or start_s > self.until_s:
            return
        left, right = self.x(start_s), self.x(end_s)
        width = max(right - left, 1.0)
        self.parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{self.y + below:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )

    def text(self, words: str, x: float, kind: str = "", anchor: str = "start", down: float = 11.0) -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{self.y + down:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, at_s: float, top: float, label: str = "") -> None:
        """A vertical line from ``top`` down to the present row, where something happened."""
        if 0 <= at_s <= self.until_s:
            x = self.x(at_s)
            self.parts.append(f'<path class="line" d="M{x:.1f} {top:.1f}V{self.y:.1f}"/>')
            self.parts.append(f'<text class="axis" x="{x:.1f}" y="{top - 3:.1f}" text-anchor="middle">{label}</text>')

    def axis(self) -> None:
        every = next(step for step in (0.5, 1, 2, 5, 10) if self.until_s / step <= 12)
        for mark in range(int(self.until_s / every) + 1):
            self.text(f"{mark * every:g}" + (" s" if not mark else ""), self.x(mark * every), "axis", "middle", 10)
        self.y += 22

    def svg(self, about: str) -> str:
        height = round(self.y + 4)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">\n<title>{escape(about)}</title>\n{_STYLE}\n'
            f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def lanes(canvas: Canvas, timeline: Timeline) -> None:
    """A row for each worker: when it worked, and what share of the time it didn't."""
    spans = [span for span in timeline.spans if span.track != "weights"]
    trainers = max((len(step.rank_compute_s) for step in timeline.steps), default=1)
    names = sorted({span.track for span in spans} | {f"trainer-{rank}" for rank in range(trainers)})
    for name in names:
        worked: list[tuple[float, float]] = []
        if name.startswith("generator"):
            worked = [(span.start_s, span.end_s) for span in spans if span.track == name and span.name == "busy"]
        else:
            worked = [computing(step, int(name.rpartition("-")[2])) for step in timeline.steps]
        canvas.text(name, 12, "soft")
        canvas.bar("wait", 0, canvas.until_s)
        for start_s, end_s in worked:
            canvas.bar("generating" if name.startswith("generator") else "step", start_s, end_s)
        for span in spans:
            if span.track == name and span.name == "update":
                canvas.bar("update", span.start_s, span.end_s, 4, -4)
        inside = sum(max(0.0, min(end, canvas.until_s) - max(start, 0.0)) for start, end in worked)
        canvas.text(f"works {inside / canvas.until_s:.0%}", WIDTH - RIGHT + 10, "soft")
        canvas.y += ROW + 4


def queue(canvas: Canvas, timeline: Timeline) -> None:
    """The workers' rows, and how many groups are finished and wait for the trainer."""
    lanes(canvas, timeline)
    begun = {step.step: computing(step, 0)[0] for step in timeline.steps}
    changes: list[tuple[float, int]] = []
    for life in timeline.groups.values():
        if life.finished_s is not None:
            changes += [(life.finished_s, 1), (begun.get(life.step, life.end_s), -1)]
    points, waiting = [(0.0, 0)], 0
    for at_s, change in sorted(changes):
        waiting += change
        points.append((max(at_s, 0.0), waiting))
    most = max(8, *(count for _, count in points))
    height = 3 * ROW
    canvas.text("buffered", 12, "soft", down=height / 2)
    canvas.text(f"{most} groups", WIDTH - RIGHT + 10, "axis", down=8)
    canvas.text("0", WIDTH - RIGHT + 10, "axis", down=height)
    canvas.bar("wait", 0, canvas.until_s, height)
    for (start_s, count), (end_s, _) in zip(points, [*points[1:], (canvas.until_s, 0)], strict=True):
        if count and end_s > start_s:
            canvas.bar("buffered", start_s, end_s, height * count / most, height * (1 - count / most))
    canvas.y += height + 8


def groups(canvas: Canvas, timeline: Timeline) -> None:
    """A row for each group that was trained, until its step has ended; lines where a version was applied."""
    begun = {step.step: computing(step, 0)[0] for step in timeline.steps}
    lives = [life for life in timeline.groups.values() if life.ending == "trained" and life.end_s > 0]
    lives = [life for life in lives if life.start_s < canvas.until_s and life.end_s <= canvas.until_s]
    lives = thinned(sorted(lives, key=lambda life: (life.start_s, life.index)))
    canvas.y += 8
    top = canvas.y
    for life in lives:
        canvas.text(f"group {life.index}", 12, "soft")
        for name, start_s, end_s in group_phases(life, begun.get(life.step)):
            canvas.bar(name.partition(" ")[0], start_s, end_s)
        canvas.text(f"staleness {life.staleness}", WIDTH - RIGHT + 10, "soft")
        canvas.y += ROW
    for span in timeline.spans:
        if span.track == "weights":
            canvas.line(span.end_s, top, span.name.rpartition(" ")[2])
    for start_s, end_s in stops(timeline):
        canvas.y, bottom = top, canvas.y
        canvas.bar("stop", start_s, end_s, bottom - top)
        canvas.y = bottom


def computing(step: StepTrace, rank: int) -> tuple[float, float]:
    """When a rank computed a step."""
    seconds = step.rank_compute_s[rank] if rank < len(step.rank_compute_s) else 0.0
    return max(step.start_s, step.end_s - seconds), step.end_s


def thinned(lives: list[GroupLife]) -> list[GroupLife]:
    """At most MOST_GROUPS of them, evenly chosen."""
    every = -(-len(lives) // MOST_GROUPS) or 1
    return lives[::every]


def stops(timeline: Timeline) -> Iterator[tuple[float, float]]:
    """From the last step of a session to the resume of the run."""
    for at_s in (mark.time_s for mark in timeline.marks if mark.event == "resume"):
        yield max(step.end_s for step in timeline.steps if step.end_s <= at_s), at_s


FIGURES: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "concepts-async": (
        "Who works when, synchronous and asynchronous",
        (
            Panel(trace="budget-0", title="η = 0: the two sides take turns", draw=lanes),
            Panel(trace="budget-2", title="η = 2: both work", draw=lanes),
        ),
    ),
    "concepts-staleness": (
        "The life of groups, and the versions that were applied meanwhile",
        (Panel(trace="budget-2", title="η = 2: groups, and the version applied at each line", draw=groups),),
    ),
    "concepts-queue": (
        "Workers, and finished groups that wait for the trainer",
        (
            Panel(trace="budget-2", title="the run as it is", draw=queue),
            Panel(trace="slow", title="each move takes 0.3 s more: the trainer waits", draw=queue),
        ),
    ),
    "concepts-books": (
        "Groups of a run that was stopped and resumed",
        (Panel(trace="resumed", title="Ctrl-C, and a resume", draw=groups),),
    ),
    "concepts-plans": (
        "Replicas and ranks that take turns on shared devices",
        (Panel(trace="shared", title="both devices shared: the side that would wait lends them", draw=lanes),),
    ),
}


def picture(name: str) -> str:
    """Draw a figure of FIGURES as SVG."""
    about, panels = FIGURES[name]
    canvas = Canvas()
    for panel in panels:
        file = TRACES / f"{panel.trace}.jsonl"
        lines = decoded_lines(file, file.read_bytes(), msgspec.json.Decoder(TraceLine).decode)
        timeline = timeline_of(lines)
        canvas.until_s = next(mark.time_s for mark in timeline.marks if mark.event == "until")
        canvas.text(panel.title, 12, "title", down=13)
        canvas.y += GAP
        panel.draw(canvas, timeline)
        canvas.axis()
    return canvas.svg(about)


def keep(run: Path, name: str, from_s: float, seconds: float) -> Path:
    """Keep ``seconds`` of a run's trace, from ``from_s`` after the start of its first step on, with times from 0."""
    rows = [json.loads(line) for line in (run / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["kind"] in _DRAWN]
    offset = 0.0
    for row in rows:  # of each session's own clock
        if row["kind"] == "session":
            offset = row["unix_s"] - row["clock_s"]
            row["clock_s"] = row["unix_s"]
        else:
            _shift(row, offset)
    first_s = next(row["start_s"] for row in rows if row["kind"] == "step") + from_s
    for row in rows:
        _shift(row, -first_s)
    for row in rows:
        if row["kind"] == "group":
            row["rollouts"] = _members_that_count(row["rollouts"])
    until = {"kind": "mark", "event": "until", "detail": f"of {seconds:g} s", "time_s": seconds}
    ends = {row["index"]: row["time_s"] for row in rows if row["kind"] == "end"}
    kept = [row for row in rows if _inside(row, seconds, ends)] + [until]
    TRACES.mkdir(exist_ok=True)
    file = TRACES / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept), encoding="utf-8")
    return file


def _shift(row: dict[str, Any], by_s: float) -> None:
    for key in row.keys() & set(_TIMES):
        row[key] = round(row[key] + by_s, 4)
    for member in row.get("rollouts", ()):
        member[1:4] = [round(at_s + by_s, 4) if at_s else 0 for at_s in member[1:4]]


def _members_that_count(members: list[list[Any]]) -> list[list[Any]]:
    """Of a group's members the oldest and the one that ended last: what its row is drawn from."""
    chosen = (min(members, key=lambda member: member[6]), max(members, key=lambda member: member[2]))
    return [member for member in members if member in chosen]


def _inside(row: dict[str, Any], seconds: float, ends: dict[int, float]) -> bool:
    """Whether a row has to do with the time from 0 to ``seconds``, and is drawn."""
    if row["kind"] == "session":
        return True
    if row["kind"] == "span" and not row["track"].startswith(_TRACKS):
        return False
    if row["kind"] in ("group", "end"):
        return row["admitted_s"] < seconds and ends.get(row["index"], seconds) > 0
    start_s, end_s = (row.get(key, row.get("time_s", 0.0)) for key in ("start_s", "end_s"))
    return start_s < seconds and end_s > 0


if __name__ == "__main__":
    if "--keep" in sys.argv:
        folder, kept_as, begin_s, length_s = sys.argv[sys.argv.index("--keep") + 1 :]
        print(keep(Path(folder), kept_as, float(begin_s), float(length_s)))
    else:
        for figure in FIGURES:
            (IMAGES / f"{figure}.svg").write_text(picture(figure), encoding="utf-8")
