"""Lists deaths, stalls, restarts and replays of a run's workers for `headway report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.records.ledger import EventRecord, LedgerLine
from headway.report.formats import duration
from headway.telemetry.ledger import EVENT_ALERT, EVENT_STALLED
from headway.telemetry.pages import alert_page, stall_page
from headway.telemetry.summary import is_incident

_STALLED = ("worker_stalled", EVENT_STALLED)
HEADINGS = ("what", "worker", "when", "version", "found by", "cause", "lost time", "rollouts or samples again")


def event_detail(event: EventRecord) -> str:
    """Return the detail of an event; for a stall or an alert also the section of the documentation about it."""
    if event.event == EVENT_STALLED:
        return f"{event.detail} ({stall_page(str(event.data.get('wait', 'event loop')))})"
    return f"{event.detail} ({alert_page(str(event.data['rule']))})" if event.event == EVENT_ALERT else event.detail


def incidents(lines: Sequence[LedgerLine]) -> list[EventRecord]:
    """Return the events of ``lines`` about workers, in order."""
    return [line for line in lines if isinstance(line, EventRecord) and is_incident(line)]


def incident_text(lines: Sequence[LedgerLine]) -> str:
    """Summarise deaths, stalls and replacements by worker, and their cost, in a sentence; "" without incidents."""
    events = incidents(lines)
    if not events:
        return ""
    deaths = Counter(event.worker for event in events if event.event.endswith("_died"))
    stalls = Counter(event.worker for event in events if event.event in _STALLED)
    restored_count = sum(event.event.endswith(("_restarted", "_restored")) for event in events)
    replayed_samples = sum(event.lost_samples for event in events if event.event.endswith("restored"))
    moved_rollouts = sum(event.lost_samples for event in events) - replayed_samples
    part_texts = [f"{verb}: {_counts(workers)}" for verb, workers in (("died", deaths), ("stalled", stalls)) if workers]
    part_texts += [f"{restored_count} brought back"] if restored_count else []
    part_texts += [f"{replayed_samples:,} samples trained again"] if replayed_samples else []
    part_texts += [f"{moved_rollouts:,} rollouts moved, scored or generated again"] if moved_rollouts else []
    lost_s = sum(event.lost_s for event in events if event.event not in _STALLED)  # its end's event has the total
    part_texts += [f"{duration(lost_s)} of workers' time lost"] if lost_s else []
    return "Workers: " + "; ".join(part_texts) + "."


def incident_rows(lines: Sequence[LedgerLine]) -> list[list[str]]:
    """Make a row of cells under `HEADINGS` for each incident."""
    return [
        [
            event.event,
            event.worker,
            duration(event.time_s),
            f"{event.step:,}",
            event.found_by or "–",
            _first_line(event.cause or event.detail),
            duration(event.lost_s) if event.lost_s else "–",
            f"{event.lost_samples:,}" if event.lost_samples else "–",
        ]
        for event in incidents(lines)
    ]


def _counts(workers: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} {count} times" for name, count in sorted(workers.items()))


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
