"""`headway report RUN RUN... --compare --json` compares several runs and their configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, HeadwayError
from headway.report.run_view import RunView, as_json, view_run


def compare_json(run_dirs: Sequence[str | Path]) -> dict[str, Any]:
    """Convert several runs to one JSON object: each as in `headway report RUN --json`, and the keys that differ."""
    views, left_out = read_runs(run_dirs)
    return {
        "runs": [as_json(view) for view in views],
        "configuration": differences([view.configuration for view in views]),
        "left_out": left_out,
    }


def read_runs(run_dirs: Sequence[str | Path]) -> tuple[list[RunView], dict[str, str]]:
    """Read the runs; returns those that can be read, and the errors of the others by path. Raises ConfigurationError
    when no run can be read."""
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
    """Return the keys whose values differ, each with its value in every configuration as JSON (– where it has none);
    run.directory is left out."""
    flat_configurations = [_flat(configuration, "") for configuration in configurations]
    keys = dict.fromkeys(key for text_by_key in flat_configurations for key in text_by_key if key != "run.directory")
    texts_by_key = {key: [text_by_key.get(key, "–") for text_by_key in flat_configurations] for key in keys}
    return {key: texts for key, texts in texts_by_key.items() if len(set(texts)) > 1}


def _flat(value: Any, name: str) -> dict[str, str]:
    if isinstance(value, list) and any(isinstance(member, dict) for member in value):
        value = {str(index): member for index, member in enumerate(value)}
    if not isinstance(value, dict) or not value:
        return {name: json.dumps(value, ensure_ascii=False)}
    return {
        key: text
        for key_part, member in value.items()
        for key, text in _flat(member, f"{name}.{key_part}" if name else key_part).items()
    }
