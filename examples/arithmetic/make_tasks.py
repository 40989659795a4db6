"""Writes the arithmetic tasks: sums whose solution is written out step by step.

A task is a number from 10 to 29 followed by one-digit additions and subtractions that stay in that range. The
solution rewrites what remains, one operation a step:

    prompt    19+8-3+4=
    solution  27-3+4=24+4=28        (only the number after the last "=" is verified)

The demonstrations of the cold start (``sft.jsonl``) are imperfect on purpose: each written result is a slip with
probability SLIP (one or ten off), and the rest goes on from it. A model that imitates them well slips as often; that
it should not is for reinforcement learning to find out, from right and wrong final answers alone.

The number of operations varies, and the solution's length grows with its square: the longest are about ten times
the median. No prompt is in two of the files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

# operations in a task -> share of tasks
OPERATIONS = {2: 0.16, 3: 0.46, 4: 0.16, 5: 0.09, 6: 0.05, 7: 0.03, 8: 0.02, 9: 0.01, 10: 0.01, 11: 0.01}
SLIP = 0.12
LOWEST, HIGHEST = 10, 29  # of every intermediate result: two digits, so each step is two characters shorter
SIZES = {"sft": 14000, "train": 14000, "validation": 256, "test": 512}


def make_task(rng: random.Random) -> tuple[str, str]:
    """One task: (prompt, answer)."""
    operations = rng.choices(list(OPERATIONS), weights=list(OPERATIONS.values()))[0]
    value = rng.randint(LOWEST, HIGHEST)
    prompt = str(value)
    for _ in range(operations):
        sign, digit = rng.choice([(s, d) for s in "+-" for d in range(1, 10) if _in_range(_apply(value, s, d))])
        prompt += f"{sign}{digit}"
        value = _apply(value, sign, digit)
    return prompt + "=", str(value)


def demonstrate(prompt: str, rng: random.Random) -> str:
    """The solution of ``prompt``, written out with slips."""
    value, rest = int(prompt[:2]), prompt[2:-1]
    written: list[str] = []
    while rest:
        value, rest = _apply(value, rest[0], int(rest[1])), rest[2:]
        slips = [slip for slip in (value - 10, value - 1, value + 1, value + 10) if _in_range(slip)]
        if slips and rng.random() < SLIP:
            value = rng.choice(slips)
        written.append(f"{value}{rest}")
    return "=".join(written)


def _apply(value: int, sign: str, digit: int) -> int:
    return value + digit if sign == "+" else value - digit


def _in_range(value: int) -> bool:
    return LOWEST <= value <= HIGHEST


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    wanted = sum(SIZES.values())
    tasks: dict[str, str] = {}
    while len(tasks) < wanted:
        tasks.setdefault(*make_task(rng))
    rows = list(tasks.items())
    rng.shuffle(rows)  # short prompts run out of new ones first: mix before cutting
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        part, rows = rows[:size], rows[size:]
        if name == "sft":
            objects = [{"prompt": prompt, "solution": demonstrate(prompt, rng)} for prompt, _ in part]
        else:
            objects = [{"prompt": prompt, "answer": answer} for prompt, answer in part]
        lines = [json.dumps(item) + "\n" for item in objects]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tasks(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
