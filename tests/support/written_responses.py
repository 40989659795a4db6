"""A verifier that writes down what it is given to score."""

from __future__ import annotations

import json
from pathlib import Path

from headway.records.task import Task


def score(task: Task, response: str, file: str) -> float:
    """Append the response to ``file``, a JSON text a line."""
    with Path(file).open("a", encoding="utf-8") as written:
        written.write(json.dumps(response) + "\n")
    return float(len(response) % 2)
