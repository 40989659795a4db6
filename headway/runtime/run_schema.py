"""The schema of a run's durable files: one number for ledger, record of rollouts, buffer and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.records.errors import ConfigurationError

SCHEMA = 5  # raised whenever files of a run change so that other readers misunderstand them
KEY = "schema"  # of RUN/config.json, beside the sections of the experiment


def require_schema(run_dir: str | Path) -> None:
    """Raise ConfigurationError for a run whose files have another schema. A folder without a configuration that can be
    read says nothing of it, and is accepted: its readers report what is missing."""
    try:
        raw = msgspec.json.decode((Path(run_dir) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return
    without_schema(raw, run_dir)


def without_schema(raw: dict[str, Any], run_dir: str | Path) -> dict[str, Any]:
    """A stored configuration without its schema's number. Raises ConfigurationError where it is another one."""
    if raw.get(KEY) != SCHEMA:
        found = f"schema {raw[KEY]!r}" if KEY in raw else "no schema's number"
        raise ConfigurationError(
            f"{run_dir} was written by another Headway: its files have {found}, and this one reads schema {SCHEMA}. "
            "Read and resume the run with the Headway that wrote it, or start in another run.directory, from its "
            f"weights if you like: --model.path={run_dir}/checkpoints/step_N/model"
        )
    return {name: value for name, value in raw.items() if name != KEY}
