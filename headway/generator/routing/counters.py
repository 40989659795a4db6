"""Counters of a replica that outlive its processes."""

from __future__ import annotations

import msgspec

from headway.records.generation import EngineStatistics

_COUNTERS = (
    "generated_tokens",
    "prefilled_tokens",
    "finished",
    "preemptions",
    "busy_s",
    "idle_s",
    "paused_s",
    "yielded_s",
    "decode_steps",
)


def accumulated(past: EngineStatistics, present: EngineStatistics, dead: bool = False) -> EngineStatistics:
    """Return ``present`` with the counters of ``past`` added; ``dead``: with no request and no KV."""
    sums_by_name = {name: getattr(past, name) + getattr(present, name) for name in _COUNTERS}
    total = msgspec.structs.replace(present, **sums_by_name)
    return msgspec.structs.replace(total, running=0, waiting=0, kv_used_tokens=0) if dead else total
