"""Writes the tasks: what two things cost together, at prices that only a tool knows.

    prompt    pear+fig
    solution  calls price(pear), reads 4, calls price(fig), reads 7, answers 11

The demonstrations of the cold start (``sft.jsonl``) are imperfect on purpose: a share GUESS of them answers without the
tool. A model that imitates them well does the same; that the tool is worth its while is for reinforcement learning to
find out, from right and wrong answers alone.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

GUESS = 0.5
ITEMS = ("pear", "fig", "plum", "lime", "date", "kiwi", "leek", "kale", "rice", "salt")
SIZES = {"sft": 6000, "train": 6000, "validation": 96, "test": 192}


def make_task(rng: random.Random) -> dict[str, Any]:
    """One task; what it has beside prompt and answer is in ``task.metadata``."""
    first, second = rng.sample(ITEMS, 2)
    prices = {item: rng.randint(1, 9) for item in ITEMS}
    return {"prompt": f"{first}+{second}", "answer": str(prices[first] + prices[second]), "prices": prices}


def demonstrate(task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A conversation about ``task``; sometimes a guess."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    if rng.random() < GUESS:
        return {"messages": [*messages, {"role": "assistant", "content": str(rng.randint(2, 18))}]}
    for item in task["prompt"].split("+"):
        call = {"id": item, "type": "function", "function": {"name": "price", "arguments": {"item": item}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(task["prices"][item]), "tool_call_id": item})
    return {"messages": [*messages, {"role": "assistant", "content": task["answer"]}]}


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(size):
                task = make_task(rng)
                file.write(json.dumps(demonstrate(task, rng) if name == "sft" else task) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
