"""A workflow graph and its pool as a JSON file: {"workflow": {...}, "pool": {...}}."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import msgspec

from headway.records import plan
from headway.records.errors import ConfigurationError


class PlacementProblem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workflow, and the devices that it may be placed on."""

    workflow: plan.Workflow
    pool: plan.DevicePool


_RECORDS = (plan.Workflow, plan.WorkflowStage, plan.WorkflowEdge, plan.WorkflowLoop, plan.TimePoint)
_POOLS = (PlacementProblem, plan.DevicePool, plan.PoolDevices)
_KEYS = sorted({field.encode_name for record in _RECORDS + _POOLS for field in msgspec.structs.fields(record)})


def read_problem(path: str | Path) -> PlacementProblem:
    """Read the JSON file at ``path``. Raises ConfigurationError that names the file, the key, and what would be
    valid. Names and values are checked when it is placed."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PlacementProblem)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        field_match = re.search(r"unknown field `([^`]*)`", str(error))
        close_fields = difflib.get_close_matches(field_match[1], _KEYS, n=1, cutoff=0.5) if field_match else []
        hint = f"; did you mean {close_fields[0]!r}?" if close_fields else ""
        raise ConfigurationError(f"{path}: {error}{hint}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from None
