"""Writes demonstrations of the cold start: games that are played badly, three of ten steps towards the goal and
the others anywhere. That goals are worth reaching is for reinforcement learning to find out, from rewards alone.

Tasks need no file: ``myproject.tasks`` makes them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from myproject import MOVES, Field, tasks

TOWARDS = 0.3
GAMES_OF_A_TASK = 8


def demonstrate(task: dict[str, Any], rng: random.Random) -> tuple[list[dict[str, str]], bool]:
    """A game as a conversation, and whether it reached the goal."""
    game = Field()
    seen, _ = game.reset(options=task["gym"]["options"])
    messages = [{"role": "user", "content": f"{task['prompt']}\n\n{seen}"}]
    while True:
        towards = [name for name in MOVES if name in seen]
        action = rng.choice(towards if rng.random() < TOWARDS else list(MOVES))
        messages.append({"role": "assistant", "content": action})
        seen, _, reached, over, _ = game.step(action)
        if reached or over:
            return messages, reached
        messages.append({"role": "user", "content": seen})


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sft.jsonl", "w", encoding="utf-8") as file:
        for task in [*tasks("sft")] * GAMES_OF_A_TASK:
            file.write(json.dumps({"messages": demonstrate(task, rng)[0]}) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
