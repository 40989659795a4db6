"""The real package verifiers: episodes of an environment (lucky_digits.py) as rollouts, and a run that they train."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from endpoint_server import until
from packages import needs
from tiny_run import refused, steps_of, tail_of, train, write_experiment, write_inputs

from headway.buffer.audit import audit_run
from headway.config.load import load_experiment
from headway.config.sources import TaskSource
from headway.generator.client import GeneratorPool
from headway.models.loading import load_model
from headway.orchestrator.actors.agents import open_agents
from headway.records.errors import ConfigurationError
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.hosting.agents.processes import AgentProcesses
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.verifiers_environment import PLAYER, load, tasks
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.tasks.sources import load_tasks
from headway.tokens.tokenizer import Tokenizer
from tests.conformance.reference import forced_logprobs

needs("verifiers", "make install-agents")
pytestmark = pytest.mark.real
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role[0] + ']' + m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
TASKS = {"source": "function", "name": "headway.rollout.verifiers_environment:tasks"}


def sections(**environment: Any) -> dict[str, dict[str, Any]]:
    return {
        "environment": {"name": "verifiers", "parameters": {"taskset": {"id": "lucky-digits"}, **environment}},
        "rollout": {"group_size": 8, "max_prompt_tokens": 40, "max_response_tokens": 40, "temperature": 0.8},
        "model": {"template": "chat"},
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifiers")
    write_inputs(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the package's cache


def played(inputs: Path, made: list[Task], scratch: Path) -> list[Rollout]:
    experiment = load_experiment(str(write_experiment(inputs, **sections())), [])

    async def main() -> list[Rollout]:
        clock, tokenizer = RealClock(), Tokenizer.load(inputs / "model")
        pool = GeneratorPool(LocalLauncher(clock), experiment, clock)
        await pool.start()
        try:
            async with open_agents(experiment, lambda name, detail, **data: None, scratch / "logs") as agents:
                seed = experiment.run.seed
                sampler = TurnSampler(pool.generate, tokenizer, experiment.rollout, clock, run_seed=seed, requests=pool)
                rollouts = make_rollouts(experiment, sampler, agents)
                groups = [
                    Group(index=i, task=task, prompt_ids=(5,), size=1, admitted_version=0, admitted_s=0.0)
                    for i, task in enumerate(made)
                ]
                return list(await asyncio.gather(*(rollouts.generate_member(group, 0) for group in groups)))
        finally:
            await pool.stop()

    return asyncio.run(main())


def source(**parameters: Any) -> TaskSource:
    return TaskSource.model_validate({**TASKS, "parameters": {"id": "lucky-digits", **parameters}})


@pytest.mark.slow
def test_a_tasksets_tasks() -> None:
    found = load_tasks(source(numbers=3, digits="7"))
    assert [task.prompt for task in found] == ["10+3=", "11+4=", "12+5="]
    assert found[1].metadata == {
        "verifiers": {
            "taskset": "lucky-digits",
            "data": {"idx": 1, "name": "n11", "prompt": "11+4=", "digits": "7"},
        }
    }
    assert len(load_tasks(source(select={"skip": 2, "limit": 5}))) == 5
    with pytest.raises(ConfigurationError, match="number"):
        list(tasks("lucky-digits", number=3))
    with pytest.raises(ConfigurationError, match="'nobodys-taskset' not found"):
        list(tasks("nobodys-taskset"))


@pytest.mark.slow
def test_environments_that_are_refused() -> None:
    def because(**settings: Any) -> str:
        with pytest.raises(ConfigurationError) as error:
            load({"taskset": {"id": "lucky-digits"}, **settings})
        return str(error.value)

    assert "environment.parameters: ModuleNotFoundError: taskset 'nobodys'" in because(taskset={"id": "nobodys"})
    assert "agnt" in because(agnt={})
    assert "agent.retries: an attempt that is repeated" in because(agent={"retries": {"max_retries": 1}})
    assert "environment.parameters.retries" in because(retries={"max_retries": 1})
    assert "of agent these have none: no role" in because(agent={"client": {"type": "eval"}})
    loaded = load({"taskset": {"id": "lucky-digits"}})
    assert loaded.environment.config.agent.runtime.type == "subprocess"


@pytest.mark.slow
def test_episodes_are_rollouts_of_the_model(inputs: Path, tmp_path: Path) -> None:
    good = load_tasks(source(numbers=2))
    changed = {"broken": {"name": "broken"}, "long": {"name": "long"}}
    made = [*good]
    for name, data in changed.items():
        row = good[0].metadata["verifiers"]
        metadata = {"verifiers": {**row, "data": {**row["data"], **data}}}
        made.append(Task(task_id=name, prompt=good[0].prompt, metadata=metadata))
    made.append(Task(task_id="other", prompt="1", metadata={"verifiers": {"taskset": "others", "data": {}}}))
    *rollouts, broken, long, other = played(inputs, made, tmp_path)
    model, tokenizer = load_model(inputs / "model"), Tokenizer.load(inputs / "model")
    for rollout in rollouts:
        assert rollout.failure is None, rollout.failure
        assert (rollout.calls, rollout.turns, rollout.branches) == (2, 2, ())
        forced = forced_logprobs(model, rollout.prompt_ids, rollout.response_ids, 0.8)
        got, mask = torch.tensor(rollout.response_logprobs), torch.tensor(rollout.response_mask)
        assert (got - forced)[mask].abs().max() < 1e-3
        assert not mask.all()  # what the harness said in between
        sampled = [i for i, own in zip(rollout.response_ids, rollout.response_mask, strict=True) if own]
        text = tokenizer.decode(sampled)
        assert rollout.reward == pytest.approx(0.5 + sum(map(str.isdigit, text)) / max(1, len(text)))
        assert rollout.finished_s  # it needs no verifier
    assert broken.failure is not None
    assert (broken.failure.boundary, broken.failure.infrastructure) == ("environment", False)
    assert "TaskError" in broken.failure.cause
    assert "nobody knows the digits" in broken.failure.cause
    assert (long.failure, long.finish_reason, long.turns, long.reward) == (None, "length", 1, 0.0)
    assert other.failure is not None
    assert "task other is of 'others'" in other.failure.detail


@pytest.mark.slow
def test_an_episode_that_is_stopped_cleans_up(tmp_path: Path) -> None:
    mark = tmp_path / "episode"
    task = {
        "task_id": "t",
        "metadata": {
            "verifiers": {"taskset": "lucky-digits", "data": {"prompt": "1", "name": f"hangs:{mark}", "digits": ""}}
        },
    }

    async def main() -> None:
        processes = AgentProcesses(PLAYER, {"taskset": {"id": "lucky-digits"}}, grace_s=20.0)
        try:
            scratch = processes.scratch("7-0")
            file = scratch / "task.json"
            file.write_text("the answer")
            names = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "HEADWAY_MODEL": "headway", "HEADWAY_TASK": str(file)}
            playing = asyncio.create_task(processes.run("7-0", [], task, names, scratch))
            await until(lambda: mark.with_suffix(".begun").exists(), 60.0)
            assert not file.exists()
            folders = tmp_path / ".cache" / "verifiers" / "runtimes" / "subprocess"
            assert len(list(folders.iterdir())) == 1
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert mark.with_suffix(".ended").exists()
            assert not list(folders.iterdir())
        finally:
            await processes.stop()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.long
def test_its_rewards_train_a_model(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    config = write_experiment(
        tmp_path,
        **sections(),
        **{
            "tasks.train": {**TASKS, "path": None, "parameters": {"id": "lucky-digits"}},
            "run": {"steps": 8},
            "queue": {"groups_per_step": 3, "budget": 1},
            "trainer": {"learning_rate": 1e-2},
        },
    )
    command = train(config, limit_s=500)
    run = tmp_path / "run"
    assert command.process.returncode == 0, command.output + tail_of(run)
    steps = steps_of(run)
    assert len(steps) == 8
    # whole groups, each rollout with its two calls; a group counts where it finished, which may be before it is trained
    calls = [step.agents.calls for step in steps if step.agents]
    assert [count for count in calls if count % 16] == []
    assert sum(calls) >= 2 * sum(step.samples for step in steps)
    assert [step.failures for step in steps if step.failures] == [], tail_of(run)
    rewards = [step.rewards.mean for step in steps if step.rewards]
    assert 0.5 <= rewards[0] < 0.7  # all had their two turns, few had digits
    assert audit_run(run).violations == []
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.2


@pytest.mark.slow
def test_checked_before_a_run(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"tasks.train": {**TASKS, "path": None, "parameters": {"id": "lucky-digits"}}}
    verifiers = {"taskset": {"id": "lucky-digits", "number": 3}}
    wrong = {"environment": {"name": "verifiers", "parameters": verifiers}}
    broken = write_experiment(inputs, **{**sections(), **wrong, **source})
    assert "environment.parameters" in refused("check", broken, "--no-calibrate")
    shadow = tmp_path / "shadow" / "verifiers"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", f"{shadow.parent}{os.pathsep}{os.environ['PYTHONPATH']}")
    jsonl = {"tasks.train": {"path": str(inputs / "tasks.jsonl")}}
    found = refused("check", write_experiment(inputs, **{**sections(), **jsonl}), "--no-calibrate")
    assert "pip install 'headway[verifiers]'" in " ".join(found.split())
