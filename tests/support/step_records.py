"""Steps of a ledger from flat arguments: ``lengths__mean=26.0`` is the field ``mean`` of the section ``lengths``."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.records.ledger import StepRecord


def step_of(step: int, **fields: object) -> StepRecord:
    """A step's record; the version after it is the next one."""
    return changed(StepRecord(step=step, version=step + 1), **fields)


def changed(record: StepRecord, **fields: object) -> StepRecord:
    """``record`` with other values of fields; a section that it lacks has its defaults in what isn't named."""
    raw: dict[str, Any] = msgspec.to_builtins(record)
    for name, value in msgspec.to_builtins(fields).items():
        section, _, field = name.rpartition("__")
        if section:
            raw[section] = {**raw.get(section, {}), field: value}
        else:
            raw[name] = value
    return msgspec.convert(raw, StepRecord)
