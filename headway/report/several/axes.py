"""Defines the axes over which runs are compared: steps, samples, tokens, hours, dollars."""

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


def axis_positions(view: RunView, price: float | None) -> dict[str, dict[int, float]]:
    """Return the position of each version on each axis, as axis -> version -> position. Time is summed over all
    sessions. The axis of tokens is left out for ledgers without tokens, that of dollars without ``price`` (dollars of a
    device-hour) or devices."""
    positions: dict[str, dict[int, float]] = {axis: {0: 0.0} for axis in AXES}
    samples, tokens, earlier_s, session_s = 0, 0, 0.0, 0.0
    for line in view.lines:
        if isinstance(line, EventRecord) and line.event in (EVENT_START, EVENT_RESUME):
            earlier_s, session_s = earlier_s + session_s, 0.0
        session_s = max(session_s, line.time_s)
        if isinstance(line, StepRecord) and not line.skipped:
            samples, tokens = samples + line.samples, tokens + line.flow.trained_tokens
            hours = (earlier_s + session_s) / 3600
            for axis, position in (("steps", line.version), ("samples", samples), ("tokens", tokens), ("hours", hours)):
                positions[axis][line.version] = float(position)
    if not tokens:
        del positions["tokens"]
    try:
        usd_per_hour = cost_of_run(view, price).devices * price if price is not None else math.nan
    except ConfigurationError:
        usd_per_hour = math.nan
    positions["dollars"] = {version: hours * usd_per_hour for version, hours in positions["hours"].items()}
    if math.isnan(usd_per_hour):
        del positions["dollars"]
    return positions
