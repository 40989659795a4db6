"""How a client's script tells its test what it did: sessions, how many calls each had, and the texts it was handed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

OPENAI_URL = os.environ["OPENAI_BASE_URL"]
ANTHROPIC_URL = os.environ["ANTHROPIC_BASE_URL"]
MODEL = "headway"
TEMPERATURE = 0.3  # at which the model makes no mistakes
PERSON = {"name": "Ada", "age": 36}
_CLIENT = os.environ["HEADWAY_CLIENT"]
_done: list[dict[str, Any]] = []


def headers(session: str) -> dict[str, str]:
    """What names a session at the endpoint."""
    return {"X-Session-ID": f"{_CLIENT}-{session}"}


def report(session: str, *texts: str, calls: int = 1) -> None:
    """The session made so many calls, and ``texts`` are among what the client handed its user."""
    _done.append({"session": f"{_CLIENT}-{session}", "calls": calls, "texts": texts})


def finish() -> None:
    """The script's last line."""
    sys.stdout.write("\n" + json.dumps(_done) + "\n")


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    assert (a, b) == (2, 3)
    return a + b


ADD_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers.", "parameters": ADD_PARAMETERS},
}
