"""The keys in which the configurations of several runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


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
