"""Tests of tasks and solutions, judged by Headway's evaluator on this machine: `make test`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import make_tasks

from headway.api import load_experiment

CANDIDATES = (  # task, the slots that aren't right
    ("leak", {}),
    ("square", {"bound": "n - 1"}),
    ("bump", {"semicolon": ""}),
)


class Solutions(unittest.TestCase):
    def test_right_wrong_and_broken_kernels_are_told_apart(self) -> None:
        answers = [
            {"task": name, "text": make_tasks.write_module(name, {**make_tasks.RIGHT, **choices})}
            for name, choices in CANDIDATES
        ]
        with tempfile.TemporaryDirectory() as folder:
            make_tasks.write_tasks(Path(folder))
            Path(folder, "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
            files = [f"--tasks={folder}/train.jsonl", f"--answers={folder}/answers.jsonl", f"--out={folder}/report"]
            command = [sys.executable, "-m", "headway.cli.main", "kernels", "eval", *files, "--local", "--trials=1"]
            subprocess.run(command, check=True, capture_output=True)
            row = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))["row"]
        assert row["candidates"] == 3
        assert abs(row["compiled_pass@1"][0] - 2 / 3) < 1e-6
        assert abs(row["correct_pass@1"][0] - 1 / 3) < 1e-6


class Demonstrations(unittest.TestCase):
    def test_slots_have_their_right_choice(self) -> None:
        for slot, options in make_tasks.SLOTS.items():
            assert make_tasks.RIGHT[slot] in [text for text, _ in options]

    def test_some_are_right(self) -> None:
        rng = random.Random(1)
        rows = [make_tasks.demonstrate(rng) for _ in range(500)]
        right = [row["solution"] == make_tasks.write_module(row["prompt"], make_tasks.RIGHT) for row in rows]
        assert 0.1 < sum(right) / len(right) < 0.5


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        assert load_experiment("experiment.toml").environment.name == "kernel"


if __name__ == "__main__":
    unittest.main()
