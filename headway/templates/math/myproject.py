"""The verifier: what a response is worth. The experiment names it as ``myproject:score``."""

from __future__ import annotations

import re
from typing import Any

from headway.api import Task


def score(task: Task, response: str) -> dict[str, Any]:
    """1 for the right answer, else 0. Keys beside ``reward`` and ``solved`` stay with the rollout: `headway show`."""
    answer = response.rpartition("=")[2].strip()
    right = answer == task.answer
    return {"reward": float(right), "solved": right, "steps": len(re.findall("=", response)) + 1}
