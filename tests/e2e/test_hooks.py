"""Hooks of one's own in a whole run of real processes: two turns a rollout, filtered, padded, logged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import audited, events_of, output_of, refused, steps_of, train, write_experiment, write_inputs

from headway.records.rollout import Rollout
from headway.rollout.makers.user_function import Attempt


async def two_turns(attempt: Attempt) -> None:
    text = await attempt.generate(max_tokens=5)
    attempt.reward(float(len(text) % 2))
    attempt.observe("+1=")
    await attempt.generate(max_tokens=5)


def not_first(group: Any, rollout: Rollout) -> tuple[bool, str]:
    return rollout.member > 0 or group.index % 3 > 0, "first of a third"


def to_file(line: Any) -> None:
    with Path(os.environ["HOOKS_LOG"]).open("a") as file:
        print(type(line).__name__, line.step, file=file)


def test_a_run_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKS_LOG", str(tmp_path / "logged.txt"))
    write_inputs(tmp_path)
    config = write_experiment(
        tmp_path,
        hooks={
            "rollout": "test_hooks:two_turns",
            "filter_item": "test_hooks:not_first",
            "pad_group": "repeat",
            "logging": "test_hooks:to_file",
        },
        algorithm={"turn_discount": 0.5, "aggregation": "seq_mean_token_mean"},
    )
    ended = train(config)
    assert ended.process.returncode == 0, ended.output
    run = tmp_path / "run"
    audited(run)
    assert events_of(run, "accounting")[-1].data["balanced"] == 1
    steps = steps_of(run)
    assert [step.version for step in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(step.filtered.get("user:first of a third", 0) for step in steps) > 0
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
    shown = output_of("show", run, "--ending", "trained", "--limit", "1000", "--json").splitlines()
    samples = [json.loads(line) for line in shown]
    assert all("+1=" in sample["response"] for sample in samples)
    assert {sample["step"] for sample in samples} == set(range(6))
    assert (tmp_path / "logged.txt").read_text().count("StepRecord") == 6


def test_hooks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = write_experiment(tmp_path, hooks={"filter_item": "test_hooks:nowhere"})
    assert "hooks.filter_item = 'test_hooks:nowhere': test_hooks has no 'nowhere'" in refused(
        "train", config, "--quiet"
    )
