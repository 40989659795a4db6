"""`headway doctor --live` reports the current waits of a run, from the file that a live run writes."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from headway.control.stalls import current_frame
from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.records.stalls import Wait, WaitGraph
from headway.report.formats import duration
from headway.telemetry.ledger import EVENT_STALLED, read_ledger
from headway.telemetry.pages import stall_page

_FILE = "waits.json"
_STALE_S = 8.0  # the file is written every two seconds; an older one means that the event loop is blocked
_MAX_LINES = 20


class LiveWaits(msgspec.Struct, frozen=True, kw_only=True):
    """A run's last wait graph, and whether the run is still alive."""

    graph: WaitGraph
    age_s: float  # of the graph
    alive: bool  # whether the orchestrator's process exists
    last_stall: str  # the last stall in the ledger; "": none


def read_live_waits(run: str, now_s: float | None = None) -> LiveWaits:
    """Read the last wait graph of the run in a folder. Raises ConfigurationError when no run is active there."""
    try:
        wait_graph = msgspec.json.decode((Path(run) / _FILE).read_bytes(), type=WaitGraph)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(f"no run is active in {run}: there is no {Path(run) / _FILE}") from None
    stalls = [e for e in read_ledger(run) if isinstance(e, EventRecord) and e.event == EVENT_STALLED]
    return LiveWaits(
        graph=wait_graph,
        age_s=(time.time() if now_s is None else now_s) - wait_graph.written_s,
        alive=Path(f"/proc/{wait_graph.pid}").exists() if os.path.isdir("/proc") else True,
        last_stall=stalls[-1].detail if stalls else "",
    )


def live_waits_text(live: LiveWaits) -> str:
    """Describe each wait: its waiter, its owner, and how long it has lasted."""
    graph = live.graph
    if not live.alive:
        last = f"; its last stall: {live.last_stall}" if live.last_stall else ""
        return f"the orchestrator (process {graph.pid}) has died; it was last seen {duration(live.age_s)} ago{last}"
    lines: list[str] = []
    if live.age_s > _STALE_S:
        silence_text = f"the orchestrator (process {graph.pid}) has been silent for {duration(live.age_s)}"
        lines.append(f"{silence_text}: {live.last_stall or 'its event loop is blocked'}")
    lines += [f"{stall.sentence(graph.now_s)} ({stall_page(stall.kind)})" for stall in graph.stalls]
    if not lines:
        lines.append("nothing is stalled")
    equal_waits = Counter((_waiter_kind(wait), wait.kind, wait.owner) for wait in graph.waits)
    listed_keys: set[tuple[str, str, str]] = set()
    for wait in graph.waits:
        wait_key = _waiter_kind(wait), wait.kind, wait.owner
        if wait_key in listed_keys or len(listed_keys) >= _MAX_LINES:
            continue
        listed_keys.add(wait_key)
        others = f" (and {equal_waits[wait_key] - 1} like it)" if equal_waits[wait_key] > 1 else ""
        waited, expected = duration(graph.now_s - wait.since_s), duration(graph.expected_s.get(wait.kind, 0.0))
        lines.append(f"  {wait.waiter}{others} -> {wait.owner}: {wait.kind}, {waited} (expected at most {expected})")
    for state in graph.workers:
        frame, _ = current_frame(state)
        lines.append(f"  {state.worker} {state.condition}, runs {state.call or 'nothing'}, is at {frame or 'unknown'}")
    return "\n".join(lines)


def _waiter_kind(wait: Wait) -> str:
    """Return the waiter's name without its number: "group " of "group 7"."""
    return wait.waiter.rstrip("-/0123456789")
