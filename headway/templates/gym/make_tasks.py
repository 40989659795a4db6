"""Writes demonstrations of the cold start: games that are played badly, a third of the steps towards the goal and the
others anywhere. That goals are worth reaching is for reinforcement learning to find out, from rewards alone.

Tasks need no file: they are seeds of the game (``[tasks.train]``), other ones than the demonstrations'.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from myproject import ACTIONS, MOVES, Field, distance

PROMPT = "go"  # as experiment.toml has it
TOWARDS = 0.3
FIRST_SEED, COUNT = 1_000_000, 5000


def demonstrate(seed: int, rng: random.Random) -> tuple[list[dict[str, str]], bool]:
    """A game as a conversation, and whether it reached the goal."""
    game = Field()
    seen, _ = game.reset(seed)
    messages = [{"role": "user", "content": f"{PROMPT}\n\n{seen}"}]
    while True:
        action = rng.randrange(len(ACTIONS))
        if rng.random() < TOWARDS:
            ahead = [(game.place[0] + x, game.place[1] + y) for x, y in MOVES]
            action = min(range(len(ACTIONS)), key=lambda a: (distance(ahead[a], game.goal), rng.random()))
        messages.append({"role": "assistant", "content": ACTIONS[action]})
        seen, _, reached, over, _ = game.step(action)
        if reached or over:
            return messages, reached
        messages.append({"role": "user", "content": seen})


def write_tasks(folder: Path, seed: int = 0) -> None:
    """Write ``sft.jsonl`` into ``folder``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sft.jsonl", "w", encoding="utf-8") as file:
        for game in range(FIRST_SEED, FIRST_SEED + COUNT):
            file.write(json.dumps({"messages": demonstrate(game, rng)[0]}) + "\n")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
