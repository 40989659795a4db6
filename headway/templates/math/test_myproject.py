"""Tests of the tasks and of the verifier: `make test`."""

from __future__ import annotations

import random
import tempfile
import tomllib
import unittest
from pathlib import Path

import make_tasks
from myproject import score

from headway.api import Task


def task(answer: str) -> Task:
    return Task(task_id="1", prompt="19+8-3=", answer=answer)


class Verifier(unittest.TestCase):
    def test_last_number_counts(self) -> None:
        assert score(task("24"), "27-3=24") == {"reward": 1.0, "solved": True, "steps": 2}

    def test_wrong_answers_are_worth_nothing(self) -> None:
        for response in ("27-3=25", "24=25", "", "24 or 25"):
            assert score(task("24"), response)["reward"] == 0.0, response


class Tasks(unittest.TestCase):
    def test_answers_are_right(self) -> None:
        rng = random.Random(1)
        for _ in range(200):
            prompt, answer = make_tasks.make_task(rng)
            assert eval(prompt[:-1]) == int(answer)

    def test_demonstrations_are_sometimes_wrong(self) -> None:
        rng = random.Random(1)
        tasks = [make_tasks.make_task(rng) for _ in range(500)]
        right = [score(task(answer), make_tasks.demonstrate(prompt, rng))["solved"] for prompt, answer in tasks]
        assert 0.3 < sum(right) / len(right) < 0.7

    def test_no_prompt_is_in_two_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            make_tasks.write_tasks(Path(folder))
            lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
        assert len({line.split('"')[3] for line in lines}) == sum(make_tasks.SIZES.values())


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        experiment = tomllib.loads(Path("experiment.toml").read_text())
        assert experiment["verifier"]["name"] == "myproject:score"


if __name__ == "__main__":
    unittest.main()
