"""Writes the tasks: sums whose solution is written out step by step.

    prompt    19+8-3=
    solution  27-3=24        (the number after the last "=" is the answer)

The demonstrations of the cold start (``sft.jsonl``) are imperfect on purpose: a written result is wrong with
probability SLIP. A model that imitates them well slips as often; that it should not is for reinforcement learning to
find out, from right and wrong answers alone. No prompt is in two of the files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SLIP = 0.15
LOWEST, HIGHEST = 10, 29  # of every result on the way
SIZES = {"sft": 8000, "train": 8000, "validation": 128, "test": 256}


def make_task(rng: random.Random) -> tuple[str, str]:
    """Make one task: (prompt, answer)."""
    value = rng.randint(LOWEST, HIGHEST)
    prompt = str(value)
    for _ in range(rng.choice([3, 4, 5])):
        change = rng.choice([d for d in range(-9, 10) if d and LOWEST <= value + d <= HIGHEST])
        prompt, value = f"{prompt}{change:+d}", value + change
    return prompt + "=", str(value)


def demonstrate(prompt: str, rng: random.Random) -> str:
    """The solution of ``prompt``, written out with slips."""
    value, rest = int(prompt[:2]), prompt[2:-1]
    written: list[str] = []
    while rest:
        value, rest = value + int(rest[:2]), rest[2:]
        slips = [slip for slip in (value - 10, value - 1, value + 1, value + 10) if LOWEST <= slip <= HIGHEST]
        if rng.random() < SLIP:
            value = rng.choice(slips)
        written.append(f"{value}{rest}")
    return "=".join(written)


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    tasks: dict[str, str] = {}
    while len(tasks) < sum(SIZES.values()):
        tasks.setdefault(*make_task(rng))
    left = iter(tasks.items())
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for prompt, answer in (next(left) for _ in range(size)):
                row = {"solution": demonstrate(prompt, rng)} if name == "sft" else {"answer": answer}
                file.write(json.dumps({"prompt": prompt, **row}) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
