"""Verifiers of the runs in `tiny_run`, which their processes import: no torch here, it takes seconds."""

from __future__ import annotations

import math
import time
from pathlib import Path

from headway.records.task import Task


def parity(task: Task, response: str) -> float:
    """1 for a response of an even number of characters: random responses differ, so groups teach something."""
    return float(len(response) % 2 == 0)


def digits(task: Task, response: str) -> float:
    """The share of digits in the response: learned in few steps."""
    return sum(one.isdigit() for one in response) / max(1, len(response))


def odd_is_wrong(task: Task, response: str) -> float:
    """Of half a response: whether the task's first number is even."""
    return float(int(task.prompt[:2]) % 2 == 0)


def troubled(task: Task, response: str, folder: str) -> float:
    """Parity; but every 7th call raises, every 11th gives no number, and the 5th hangs, then and when asked again."""
    calls, hanging = Path(folder) / "calls", Path(folder) / "hanging"
    with calls.open("a") as file:
        file.write(".")
    number, asked = calls.stat().st_size, f"{task.prompt} {response}"
    if number == 5:
        hanging.write_text(asked)
    if hanging.exists() and hanging.read_text() == asked:
        time.sleep(1000)  # it hangs: the pool kills it at verifier.timeout_s
    if number % 7 == 0:
        raise RuntimeError("the checker broke")
    return math.nan if number % 11 == 0 else parity(task, response)


def gated(task: Task, response: str, gate: str) -> float:
    """Parity, but no answer while the file ``gate`` exists."""
    while Path(gate).exists():
        time.sleep(0.05)  # a test in another process opens it
    return parity(task, response)
