"""Sums of eight operations, worked out in eight turns, with a reward for each right step and one for the answer.

The model rewrites what remains, "19+8-3=" -> "27-3", and writes "24" in the next turn. A step is right if it follows
from the one before, whether or not that was.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

STEPS = 8
LOWEST, HIGHEST = 10, 29  # of every intermediate result


def tasks(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows of a task source: "19+8-3-5+7-9+2+1-6=" and its result."""
    rng = random.Random(seed)
    for _ in range(count):
        total = rng.randint(LOWEST, HIGHEST)
        prompt = str(total)
        for _ in range(STEPS):
            change = rng.choice([n for n in range(-9, 10) if n and LOWEST <= total + n <= HIGHEST])
            total += change
            prompt += f"{change:+d}"
        yield {"prompt": f"{prompt}=", "answer": str(total)}


def next_step(expression: str) -> str:
    """The expression after one operation: "27-3+4" -> "24+4"; "" of anything else than an expression."""
    if not re.fullmatch(r"\d\d([+-]\d)+", expression):
        return ""
    return f"{int(expression[:2]) + int(expression[2:4])}{expression[4:]}"


async def by_step(attempt: Any) -> None:
    """hooks.rollout: an eighth for each right step, beside what the verifier gives for the answer."""
    await _work_out(attempt, 1 / STEPS)


async def by_outcome(attempt: Any) -> None:
    """hooks.rollout: no reward but the verifier's."""
    await _work_out(attempt, 0.0)


async def _work_out(attempt: Any, reward_of_step: float) -> None:
    expression = attempt.task.prompt.removesuffix("=")
    for operations in reversed(range(STEPS)):
        text = await attempt.generate(max_tokens=2 + 2 * operations)  # tokens are characters
        if reward_of_step and text == next_step(expression):
            attempt.reward(reward_of_step)
        expression = text
        if operations:
            attempt.observe("=")
