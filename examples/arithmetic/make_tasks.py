"""Writes the arithmetic tasks: sums whose solution is written out step by step.

A task is a two-digit number followed by one-digit additions and subtractions; every intermediate result has two
digits. The solution rewrites what remains, one operation a step:

    prompt    47+8-3+6=
    solution  55-3+6=52+6=58        (only the number after the last "=" is verified)

The number of operations varies, and the solution's length grows with its square: the longest are about ten times
the median. No prompt is in two of the files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

# operations in a task -> share of tasks
OPERATIONS = {2: 0.14, 3: 0.46, 4: 0.14, 5: 0.08, 6: 0.055, 7: 0.04, 8: 0.03, 9: 0.025, 10: 0.02, 11: 0.02}
SIZES = {"sft": 20000, "train": 30000, "validation": 256, "test": 512}


def make_task(rng: random.Random) -> tuple[str, str, str]:
    """One task: (prompt, solution, answer)."""
    operations = rng.choices(list(OPERATIONS), weights=list(OPERATIONS.values()))[0]
    total = start = rng.randint(10, 99)
    steps: list[tuple[str, int]] = []
    for _ in range(operations):
        sign, digit = rng.choice([(s, d) for s in "+-" for d in range(1, 10) if 10 <= _apply(total, s, d) <= 99])
        steps.append((sign, digit))
        total = _apply(total, sign, digit)
    terms = [f"{sign}{digit}" for sign, digit in steps]
    prompt = f"{start}{''.join(terms)}="
    value, written = start, []
    for position, (sign, digit) in enumerate(steps):
        value = _apply(value, sign, digit)
        written.append(f"{value}{''.join(terms[position + 1 :])}")
    return prompt, "=".join(written), str(total)


def _apply(value: int, sign: str, digit: int) -> int:
    return value + digit if sign == "+" else value - digit


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    wanted = sum(SIZES.values())
    tasks: dict[str, tuple[str, str]] = {}
    while len(tasks) < wanted:
        prompt, solution, answer = make_task(rng)
        tasks.setdefault(prompt, (solution, answer))
    rows = [{"prompt": p, "solution": s, "answer": a} for p, (s, a) in tasks.items()]
    rng.shuffle(rows)  # short prompts run out of new ones first: mix before cutting
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        part, rows = rows[:size], rows[size:]
        keys = ("prompt", "solution") if name == "sft" else ("prompt", "answer")
        lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tasks(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
