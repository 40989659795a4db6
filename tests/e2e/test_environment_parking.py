"""Rollouts in sandboxes that are parked in the middle, by weights and by full batches, and go on with their files and
tokens as they were; also in the next process, after `kill -9`."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_run
from diary import KEPT, digest, turns_of
from repairs import write_repositories

from headway.records.rollout import Rollout
from headway.records.tokens import restored
from headway.tokens.continuation import Chat
from headway.tokens.output_parsing import openai_message
from headway.tokens.tokenizer import Tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parking")
    tiny_run.write_inputs(path)
    write_repositories(path / "repositories.jsonl")
    return path


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEPT, str(tmp_path / "kept.jsonl"))


def repairing(folder: Path) -> dict[str, dict[str, Any]]:
    parameters = {"tools": [], "interpreter": ["python3", "-S"]}
    return {
        "environment": {"name": "repairs:Repairs", "max_turns": 10, "parameters": parameters},
        "tasks.train": {"path": str(folder / "repositories.jsonl")},
    }


def experiment(folder: Path, tmp_path: Path, **sections: dict[str, Any]) -> Path:
    return tiny_run.write_experiment(
        tmp_path,
        **{
            **tiny_run.inputs_in(folder),
            "model": {"path": str(folder / "model"), "template": "chat"},
            "run": {"steps": 10},
            "environment": {"name": "diary:Diary", "max_turns": 10},
            "sandbox": {"live": 12, "limits": {"memory_bytes": 96 << 20, "disk_bytes": 16 << 20}},
            "rollout": {"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 900, "timeout_s": 60},
            "generator": {"slots": 16, "update_mode": "abort"},
            "queue": {"groups_per_step": 3, "budget": 3, "filter_zero_variance": False},
            "hooks": {"group_meta": "diary:keep"},
            **sections,
        },
    )


def rollouts_of(run: Path) -> list[tuple[int | None, Rollout]]:
    """Of groups that finished, with the step they were trained in."""
    lines = Path(os.environ[KEPT]).read_bytes().splitlines()
    kept = [msgspec.json.decode(line, type=Rollout, dec_hook=restored) for line in lines]
    by_member = {(rollout.group, rollout.member): rollout for rollout in kept}  # a kill may come before the commit
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True) as connection:
        steps = dict(connection.execute("SELECT idx, step FROM groups WHERE ending = 'trained'"))
    return [(steps.get(rollout.group), rollout) for rollout in by_member.values()]


def require_intact(run: Path, model: Path) -> list[Rollout]:
    """Each rollout has all its turns, and the environment heard in each what its tokens say. Returns them."""
    tokenizer = Tokenizer.load(model)
    chat = Chat(tokenizer)
    found = [rollout for _, rollout in rollouts_of(run)]
    assert found
    for rollout in found:
        assert rollout.failure is None, rollout.failure
        turns = turns_of(rollout.rollout_id)
        assert len(rollout.verdict["lines"]) == turns == rollout.turns == len(rollout.turn_ends)
        heard = [line.split()[1] for line in rollout.verdict["lines"]]
        assert heard == [digest(text) for text in answers_of(rollout, chat)]
        assert rollout.reward == int(heard[-1], 16) % 2
        assert len(set(rollout.verdict["drawn"])) == turns  # its random numbers went on
    return found


def answers_of(rollout: Rollout, chat: Chat) -> list[str]:
    """The text of each turn, out of its sampled tokens."""
    texts: list[str] = []
    ids: list[int] = []
    mask = (*rollout.response_mask, False)
    for token, sampled in zip((*rollout.response_ids, 0), mask, strict=True):
        if sampled:
            ids.append(token)
        elif ids:
            message = chat.answer(ids, "", calls=False).message  # which a random model may begin with <think>
            texts.append(openai_message(message, chat.written)["content"] or "")
            ids = []
    return texts


def require_nothing_parked(run: Path) -> None:
    assert {path.name for path in (run / "sandboxes").iterdir()} <= {".lock"}


@pytest.mark.slow
@pytest.mark.long
def test_parked_by_weights_and_by_full_batches(folder: Path, tmp_path: Path) -> None:
    queue = {"surplus": "park", "oversampling": 2.0, "groups_per_step": 3, "budget": 3}
    queue |= {"filter_zero_variance": False}
    run = {"steps": 10, "directory": str(tmp_path / "run")}
    config = experiment(folder, tmp_path, queue=queue, run=run, **repairing(folder))
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    steps = 10
    while not trained_after_parking(command.run) and steps < 100:  # on a busy machine few batches park any
        steps += 10
        command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
        assert command.process.returncode == 0, command.output
    assert trained_after_parking(command.run), "none was parked in mid-edit"
    require_intact(command.run, folder / "model")
    require_hand_count(command.run)
    tiny_run.require_nothing_left(command)
    require_nothing_parked(command.run)


def trained_after_parking(run: Path) -> list[tuple[int, Rollout]]:
    """The rollouts that were parked after their environment had heard an answer, with the step they were trained in."""
    found = [(step, rollout) for step, rollout in rollouts_of(run) if step is not None]
    return [(step, rollout) for step, rollout in found if max(rollout.verdict["parked"], default=0) > 0]


def require_hand_count(run: Path) -> None:
    """Environment-state staleness in the ledger, counted by hand: of each of those, the step minus the version of its
    first token."""
    by_step: dict[int, list[int]] = {}
    for step, rollout in trained_after_parking(run):
        by_step.setdefault(step, []).append(step - rollout.versions[0].version)
    recorded = tiny_run.steps_of(run)
    assert by_step
    for step in recorded:
        counted, told = by_step.get(step.step, []), step.environment_staleness
        assert told.histogram == {str(value): counted.count(value) for value in sorted(set(counted))}, step.step
        assert told.max == max(counted, default=0)


KILLS = ("parked:4", "published:2", "parked:3", "step-completed:2")


@pytest.mark.slow
def test_killed_while_some_are_parked(folder: Path, tmp_path: Path) -> None:
    queue = {"surplus": "park", "oversampling": 2.0, "groups_per_step": 3, "budget": 3}
    queue |= {"filter_zero_variance": False}
    run = {"steps": 1000, "directory": str(tmp_path / "run")}  # on a busy machine many batches park none
    config = experiment(folder, tmp_path, queue=queue, run=run, **repairing(folder))
    resume: list[str] = []
    for fault in KILLS:
        command = tiny_run.train(config, *resume, fault=fault)
        assert command.process.returncode == -signal.SIGKILL, command.output
        tiny_run.wait_for_exits(command)
        resume = ["--resume"]
    steps = tiny_run.audited(command.run).completed_steps + 6
    command = tiny_run.train(config, *resume, f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    tiny_run.audited(command.run)
    found = require_intact(command.run, folder / "model")
    assert any(rollout.verdict["resumed"] for rollout in found), "none went on from what a killed process had parked"
    require_hand_count(command.run)
    tiny_run.require_nothing_left(command)
    require_nothing_parked(command.run)


@pytest.mark.slow
@pytest.mark.long
def test_faults_on_purpose_poison_no_reward(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a sandbox in ten fails. Whatever has a reward was played to its end without such a failure: it has
    all its lines, and its reward is what its own tokens say."""
    monkeypatch.setenv("HEADWAY_INJECT_SANDBOX_FAULTS", "0.1")
    config = experiment(
        folder,
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": 4},
        sandbox={"live": 12, "exec_timeout_s": 1, "start_timeout_s": 5},
        rollout={"group_size": 2, "max_prompt_tokens": 100, "max_response_tokens": 900, "timeout_s": 60, "retries": 4},
    )
    command = tiny_run.train(config, limit_s=200)
    assert command.process.returncode == 0, command.output
    tokenizer = Tokenizer.load(folder / "model")
    found = [rollout for _, rollout in rollouts_of(command.run)]
    begun_anew = [rollout for rollout in found if rollout.attempts > 1]
    assert begun_anew, "no fault met a rollout"
    for rollout in found:
        if rollout.failure is not None:
            assert (rollout.failure.boundary, rollout.failure.infrastructure) == ("sandbox", True)
            assert rollout.reward == 0.0
            continue
        answers = answers_of(rollout, Chat(tokenizer))
        assert len(answers) == turns_of(rollout.rollout_id) == len(rollout.verdict["lines"])
        assert rollout.reward == int(digest(answers[-1]), 16) % 2
    report = tiny_run.audited(command.run)
    assert report.failures["sandbox"] == sum(rollout.failure is not None for rollout in found)
    audit = subprocess.run([sys.executable, "-m", "headway.buffer.audit", command.run], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout
