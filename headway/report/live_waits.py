"""`headway doctor --live`: who waits for whom now, from the file that a living run keeps."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from headway.control.stalls import place_of
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.records.stalls import Wait, WaitGraph
from headway.report.formats import duration
from headway.telemetry.ledger import EVENT_STALLED, read_ledger
from headway.telemetry.pages import stall_page

_FILE = "waits.json"
_STALE_S = 8.0  # it is written every two seconds: then the event loop doesn't turn
_MOST_LINES = 20


class LiveWaits(msgspec.Struct, frozen=True, kw_only=True):
    """A run's last wait graph, and whether the run still lives."""

    graph: WaitGraph
    age_s: float  # of the graph
    alive: bool  # whether the orchestrator's process is there
    last_stall: str  # the ledger's last line about one; "": none


def read_live_waits(run: str, now_s: float | None = None) -> LiveWaits:
    """The waits of the run in a folder, as it wrote them last. Raises ConfigurationError when none is active there."""
    try:
        graph = msgspec.json.decode((Path(run) / _FILE).read_bytes(), type=WaitGraph)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(f"no run is active in {run}: there is no {Path(run) / _FILE}") from None
    stalls = [e for e in read_ledger(run) if isinstance(e, EventRecord) and e.event == EVENT_STALLED]
    return LiveWaits(
        graph=graph,
        age_s=(time.time() if now_s is None else now_s) - graph.written_s,
        alive=Path(f"/proc/{graph.pid}").exists() if os.path.isdir("/proc") else True,
        last_stall=stalls[-1].detail if stalls else "",
    )


def live_waits_text(found: LiveWaits) -> str:
    """Say in words who waits for whom."""
    graph = found.graph
    if not found.alive:
        last = f"; its last stall: {found.last_stall}" if found.last_stall else ""
        return f"the orchestrator (process {graph.pid}) has died; it was last seen {duration(found.age_s)} ago{last}"
    lines: list[str] = []
    if found.age_s > _STALE_S:
        silent = f"the orchestrator (process {graph.pid}) has been silent for {duration(found.age_s)}"
        lines.append(f"{silent}: {found.last_stall or 'its event loop is blocked'}")
    lines += [f"{stall.sentence(graph.now_s)} ({stall_page(stall.kind)})" for stall in graph.stalls]
    if not lines:
        lines.append("nothing is stalled")
    grouped = Counter((_like(wait), wait.kind, wait.owner) for wait in graph.waits)
    shown: set[tuple[str, str, str]] = set()
    for wait in graph.waits:
        key = _like(wait), wait.kind, wait.owner
        if key in shown or len(shown) >= _MOST_LINES:
            continue
        shown.add(key)
        others = f" (and {grouped[key] - 1} like it)" if grouped[key] > 1 else ""
        waited, expected = duration(graph.now_s - wait.since_s), duration(graph.expected_s.get(wait.kind, 0.0))
        lines.append(f"  {wait.waiter}{others} -> {wait.owner}: {wait.kind}, {waited} (expected at most {expected})")
    for one in graph.workers:
        place, _ = place_of(one)
        lines.append(f"  {one.worker} {one.condition}, runs {one.call or 'nothing'}, is at {place or 'unknown'}")
    return "\n".join(lines)


def _like(wait: Wait) -> str:
    """The sort of thing that waits: "group" of "group 7"."""
    return wait.waiter.rstrip("-/0123456789")
