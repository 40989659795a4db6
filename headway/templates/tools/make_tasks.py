"""Writes the tasks: what two things cost together, at prices that only a tool knows.

    prompt    pear+fig
    solution  calls price(pear), reads 1, calls price(fig), reads 3, answers 4

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
ITEMS = (
    "pear fig plum lime date kiwi leek kale rice salt corn bean beet chard cress dill endive fennel garlic ginger "
    "grape guava lemon lentil mango melon mint nut oat okra olive onion orange papaya pea peach quince radish sage"
).split()
PAIRS = {"sft": 500, "train": 700, "validation": 96, "test": 160}  # no pair is in two files
EACH = {"sft": 12, "train": 5}  # tasks of a pair, at prices of their own; else one


def make_task(pair: tuple[str, str], rng: random.Random) -> dict[str, Any]:
    """Make one task; what it has beside prompt and answer is in ``task.metadata``."""
    prices = {item: rng.randint(1, 4) for item in sorted({*rng.sample(ITEMS, 4), *pair})}
    return {"prompt": "+".join(pair), "answer": str(prices[pair[0]] + prices[pair[1]]), "prices": prices}


def demonstrate(task: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A conversation about ``task``; sometimes a guess."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    if rng.random() < GUESS:
        return {"messages": [*messages, {"role": "assistant", "content": str(rng.randint(2, 8))}]}
    for item in task["prompt"].split("+"):
        call = {"id": item, "type": "function", "function": {"name": "price", "arguments": {"item": item}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(task["prices"][item]), "tool_call_id": item})
    return {"messages": [*messages, {"role": "assistant", "content": task["answer"]}]}


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl``, ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    pairs = [(first, second) for first in ITEMS for second in ITEMS if first != second]
    rng.shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in PAIRS.items():
        part, pairs = pairs[:count], pairs[count:]
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for pair in part * EACH.get(name, 1):
                task = make_task(pair, rng)
                file.write(json.dumps(demonstrate(task, rng) if name == "sft" else task) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
