"""Tests of the environment and of the tasks: `make test`."""

from __future__ import annotations

import json
import random
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_tasks
from myproject import Shop

from headway.api import Task, ToolError, load_experiment


def episode(prices: dict[str, int]) -> Any:
    """Return what the tool sees of an episode."""
    return SimpleNamespace(task=Task(task_id="1", prompt="pear+fig", metadata={"prices": prices}))


class Tool(unittest.TestCase):
    def test_price_is_the_task_s(self) -> None:
        assert Shop().price("pear", episode({"pear": 4})) == "4"

    def test_unknown_item_is_told_to_the_model(self) -> None:
        with self.assertRaisesRegex(ToolError, "there is no gold"):
            Shop().price("gold", episode({"pear": 4}))


class Tasks(unittest.TestCase):
    def test_answers_are_right(self) -> None:
        rng = random.Random(1)
        for _ in range(200):
            task = make_tasks.make_task(("kiwi", "leek"), rng)
            first, second = task["prompt"].split("+")
            assert int(task["answer"]) == task["prices"][first] + task["prices"][second]

    def test_about_half_of_the_demonstrations_guess(self) -> None:
        rng = random.Random(1)
        task = make_tasks.make_task(("kiwi", "leek"), rng)
        rows = [make_tasks.demonstrate(task, rng) for _ in range(500)]
        assert 0.4 < sum(len(row["messages"]) == 2 for row in rows) / len(rows) < 0.6

    def test_no_pair_is_in_two_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            make_tasks.write_tasks(Path(folder))
            rows = {
                name: Path(folder, f"{name}.jsonl").read_text().splitlines() for name in ("train", "validation", "test")
            }
        prompts = {name: {json.loads(line)["prompt"] for line in lines} for name, lines in rows.items()}
        assert len(set.union(*prompts.values())) == sum(make_tasks.PAIRS[name] for name in prompts)


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        assert load_experiment("experiment.toml").environment.name == "myproject:Shop"


if __name__ == "__main__":
    unittest.main()
