"""Axes over which runs are compared: steps, samples, tokens, hours, dollars."""

from __future__ import annotations

import math

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord, StepRecord
from headway.report.run_cost import cost_of_run
from headway.report.run_view import RunView
from headway.telemetry.ledger import EVENT_RESUME, EVENT_START

AXES = {
    "steps": "training steps",
    "samples": "samples trained",
    "tokens": "tokens trained, prompts included",
    "hours": "hours, waits included",
    "dollars": "US dollars",
}


def places_of(view: RunView, price: float | None) -> dict[str, dict[int, float]]:
    """Axis -> version -> its place on the axis; time goes on over all sessions. Without tokens in its ledger, or the
    price and the devices, a run has no place on their axes."""
    places: dict[str, dict[int, float]] = {axis: {0: 0.0} for axis in AXES}
    samples, tokens, earlier_s, session_s = 0, 0, 0.0, 0.0
    for line in view.lines:
        if isinstance(line, EventRecord) and line.event in (EVENT_START, EVENT_RESUME):
            earlier_s, session_s = earlier_s + session_s, 0.0
        session_s = max(session_s, line.time_s)
        if isinstance(line, StepRecord) and not line.skipped:
            samples, tokens = samples + line.samples, tokens + line.flow.trained_tokens
            hours = (earlier_s + session_s) / 3600
            for axis, value in (("steps", line.version), ("samples", samples), ("tokens", tokens), ("hours", hours)):
                places[axis][line.version] = float(value)
    if not tokens:
        del places["tokens"]
    try:
        usd_per_hour = cost_of_run(view, price).devices * price if price is not None else math.nan
    except ConfigurationError:
        usd_per_hour = math.nan
    places["dollars"] = {version: hours * usd_per_hour for version, hours in places["hours"].items()}
    if math.isnan(usd_per_hour):
        del places["dollars"]
    return places
