"""`headway report RUN RUN... --compare --json`: several runs, and how their files differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, HeadwayError
from headway.report.run_view import RunView, as_json, view_run


def compare_json(run_dirs: Sequence[str | Path]) -> dict[str, Any]:
    """Several runs as one JSON object: each as `headway report RUN --json` has it, and how their files differ."""
    views, left_out = read_runs(run_dirs)
    return {
        "runs": [as_json(view) for view in views],
        "configuration": differences([view.configuration for view in views]),
        "left_out": left_out,
    }


def read_runs(run_dirs: Sequence[str | Path]) -> tuple[list[RunView], dict[str, str]]:
    """The runs that can be read, and what is wrong with the others. Raises ConfigurationError when none can."""
    views, left_out = list[RunView](), dict[str, str]()
    for run in run_dirs:
        try:
            views.append(view_run(run))
        except (HeadwayError, OSError) as error:
            left_out[str(run)] = str(error)
    if not views:
        raise ConfigurationError("; ".join(left_out.values()))
    return views, left_out


def differences(configurations: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Key -> its value in each configuration as JSON, – where it has none; only of keys that differ, run.directory left
    out."""
    flat = [_flat(configuration, "") for configuration in configurations]
    keys = dict.fromkeys(key for one in flat for key in one if key != "run.directory")
    rows = {key: [one.get(key, "–") for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _flat(value: Any, name: str) -> dict[str, str]:
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {name: json.dumps(value, ensure_ascii=False)}
    return {
        key: text
        for part, entry in value.items()
        for key, text in _flat(entry, f"{name}.{part}" if name else part).items()
    }
