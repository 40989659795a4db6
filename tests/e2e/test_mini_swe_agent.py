"""The real mini-swe-agent, as its own command in its own environment, against a run's endpoint with the real engine.

`make install-agents` installs it. Its model is a tiny one that `headway sft` taught to count by shell commands; what
the model writes reaches no shell (harmless_shell.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import HERE, write_experiment, write_inputs

from headway.config.load import load_experiment
from headway.generator.client import GeneratorPool
from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.orchestrator.actors.agents import open_agents
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.tokens.tokenizer import Tokenizer
from tests.conformance.reference import forced_logprobs

MINI = Path(os.environ.get("HEADWAY_MINI", HERE.parents[1] / ".venv-agents" / "bin" / "mini"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MINI.exists(), reason=f"no {MINI}: make install-agents"),
]
TEMPERATURE = 0.7
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# tools as Hermes and Qwen have them called; of their descriptions the names alone, so that a tiny model can read it
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM = "Count."
CONFIG = {
    "agent": {"system_template": SYSTEM, "instance_template": "{{task}}", "step_limit": 8, "cost_limit": 0},
    "environment": {"environment_class": "harmless_shell.HarmlessShell"},
    "model": {
        "cost_tracking": "ignore_errors",
        "observation_template": "{{output.output}}",
        "format_error_template": "Call bash.",
    },
}


def call_of(command: str) -> str:
    arguments = json.dumps({"command": command})
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def transcript(number: int) -> list[dict[str, str]]:
    """What the model learns: a command a turn, each after the output of the one before."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": str(number)}]
    for n in range(1, number + 1):
        messages.append({"role": "assistant", "content": call_of(f"echo {n}")})
        messages.append({"role": "tool", "content": f"{n}\n"})
    return [*messages, {"role": "assistant", "content": call_of(DONE)}]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that counts to 2 and to 3."""
    folder = tmp_path_factory.mktemp("mini")
    talks = [transcript(number) for number in (2, 3)]
    texts = [message["content"] for talk in talks for message in talk] + ["[system][user][assistant][tool]"]
    initialise_model(
        folder / "raw", texts, layers=2, width=64, heads=4, kv_heads=2, intermediate=128, character_level=True
    )
    (folder / "raw" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [json.dumps({"messages": talk}) for talk in talks for _ in range(8)]
    (folder / "talks.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "tasks.jsonl").write_text('{"prompt": "2", "answer": "1"}\n{"prompt": "3", "answer": "1"}\n')
    sft = {"data": str(folder / "talks.jsonl"), "output": str(folder / "model"), "steps": 150, "batch_sequences": 8}
    config = write_experiment(
        folder, model={"path": str(folder / "raw"), "template": "chat"}, sft={**sft, "max_tokens": 1024}
    )
    command = [sys.executable, "-m", "headway.cli.main", "sft", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untaught")
    write_inputs(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def rollouts_of(folder: Path, scratch: Path, prompt: str, members: int, **model: Any) -> list[tuple[Rollout, Any]]:
    """A group's rollouts through a run's own parts, each with the trajectory that mini-swe-agent wrote of it."""
    config = scratch / "mini.yaml"  # JSON is YAML
    config.write_text(json.dumps({**CONFIG, "model": {**CONFIG["model"], **model}}))
    command = [str(MINI), "-m", "openai/headway", "-t", "{prompt}", "-y", "--exit-immediately", "-c", str(config)]
    variables = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(scratch / "settings"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "PYTHONPATH": str(HERE),
    }
    sections = {
        "environment": {
            "name": "agent",
            "agent": [*command, "-o", f"{scratch}/{{rollout}}.json"],
            "variables": variables,
        },
        "rollout": {
            "group_size": members,
            "max_prompt_tokens": 40,
            "max_response_tokens": 900,
            "temperature": TEMPERATURE,
        },
        "queue": {"groups_per_step": 2},
        "model": {"path": str(folder / "model"), "template": "chat"},
    }
    experiment = load_experiment(str(write_experiment(folder, **sections)), [])
    task = Task(task_id="t", prompt=prompt)
    group = Group(index=3, task=task, prompt_ids=(5,), size=members, admitted_version=0, admitted_s=0.0)

    async def main() -> list[Rollout]:
        clock, tokenizer = RealClock(), Tokenizer.load(folder / "model")
        pool = GeneratorPool(LocalLauncher(clock), experiment, clock)
        await pool.start()
        try:
            async with open_agents(experiment, lambda name, detail, **data: None, scratch / "logs") as agents:
                seed = experiment.run.seed
                sampler = TurnSampler(pool.generate, tokenizer, experiment.rollout, clock, run_seed=seed, requests=pool)
                rollouts = make_rollouts(experiment, sampler, agents)
                return list(await asyncio.gather(*(rollouts.generate_member(group, m) for m in range(members))))
        finally:
            await pool.stop()

    found = asyncio.run(main())
    for rollout in found:
        assert rollout.failure is None, rollout.failure
    return [(rollout, json.loads((scratch / f"3-{m}.json").read_text())) for m, rollout in enumerate(found)]


def require_forced(folder: Path, rollout: Rollout) -> None:
    """Sampled tokens' log-probabilities, in the trunk and in every branch, are those of one forward at the sampling
    temperature over the sequence that holds them."""
    model = load_model(folder / "model")
    for branch in rollout.sequences:
        forced = forced_logprobs(model, branch.prompt_ids, branch.response_ids, TEMPERATURE)
        got, mask = torch.tensor(branch.response_logprobs), torch.tensor(branch.response_mask)
        assert mask.any()
        assert (got - forced)[mask].abs().max() < 1e-3
        other = forced_logprobs(model, branch.prompt_ids, branch.response_ids, 1.0)
        assert (got - other)[mask].abs().max() > 1e-3  # what would be seen without the temperature


def test_turns_of_executed_commands(taught: Path, tmp_path: Path) -> None:
    played = rollouts_of(taught, tmp_path, "3", 3)
    tokenizer = Tokenizer.load(taught / "model")
    submitted = 0
    for rollout, trajectory in played:
        require_forced(taught, rollout)
        said = [message for message in trajectory["messages"] if message["role"] == "assistant"]
        assert rollout.calls == trajectory["info"]["model_stats"]["api_calls"]
        commands = [action["command"] for message in said for action in message["extra"]["actions"]]
        text = tokenizer.decode(rollout.response_ids, keep_special=True)
        assert all(call_of(command) in text for command in commands)  # to the letter: nothing was written anew
        if trajectory["info"]["exit_status"] == "Submitted" and not rollout.branches:
            outputs = [message["content"] for message in trajectory["messages"] if message["role"] == "tool"]
            assert commands == ["echo 1", "echo 2", "echo 3", DONE]
            assert outputs[:3] == ["1\n", "2\n", "3\n"]
            assert (rollout.turns, rollout.calls, rollout.finish_reason) == (4, 4, "stop")
            assert len(rollout.turn_ends) == 4
            submitted += 1
    assert submitted >= 2  # it was taught well enough that nearly all are


def test_answers_that_are_no_commands(untaught: Path, tmp_path: Path) -> None:
    """mini-swe-agent drops an answer without a command from its history: each ends a branch of its own."""
    [(rollout, trajectory)] = rollouts_of(untaught, tmp_path, "3", 1, model_kwargs={"max_tokens": 24})
    assert trajectory["info"]["exit_status"] == "RepeatedFormatError"
    assert (rollout.calls, rollout.turns, len(rollout.branches)) == (3, 3, 2)
    assert [message["content"] for message in trajectory["messages"][2:5]] == ["Call bash."] * 3
    require_forced(untaught, rollout)
