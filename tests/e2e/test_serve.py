"""`headway serve` and `environment = "agent"` with the real engine: the openai client, recorded tokens, a forward."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import openai
import pytest
import torch
import warm_programs
from openai import OpenAI
from tiny_run import refused, tail_of, train, write_experiment, write_inputs

from headway.config.load import load_experiment
from headway.generator.client import GeneratorPool
from headway.models.loading import load_model
from headway.orchestrator.actors.agents import open_agents
from headway.records.conversations import RecordedConversation
from headway.records.ledger import StepRecord
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.records.tokens import restored
from headway.rollout.makers.select import make_rollouts
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.telemetry.ledger import read_ledger
from headway.tokens.tokenizer import Tokenizer
from tests.conformance.reference import forced_logprobs

pytestmark = pytest.mark.real
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    write_inputs(folder)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its base URL."""
    command = ["serve", str(folder / "model"), "--address", "127.0.0.1:0", *arguments]
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = warm_programs.start(warm_programs.HEADWAY, *command, environment=dict(os.environ), **outputs)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("OPENAI_BASE_URL="):
                yield process, line.strip().partition("=")[2]
                return
        raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def require_forced(model: Any, sequences: Any, tolerance: float = 1e-3) -> int:
    """Sampled tokens' log-probabilities are those of one forward over the sequence; how many there were."""
    count = 0
    for branch in sequences:
        forced = forced_logprobs(model, branch.prompt_ids, branch.response_ids, 1.0)
        got, mask = torch.tensor(branch.response_logprobs), torch.tensor(branch.response_mask)
        assert (got - forced)[mask].abs().max() < tolerance
        count += int(mask.sum())
    return count


def test_serving_a_model_folder(inputs: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving(inputs, "--record", str(record), "--generator.slots=4") as (process, url):
        client = OpenAI(base_url=url, api_key="any", default_headers={"X-Session-ID": "mine"}, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "12+3="}]
        sampled = 0
        for number in range(3):
            answer = client.chat.completions.create(model="model", messages=messages, max_tokens=12, temperature=1.0)
            assert answer.usage is not None
            sampled += answer.usage.completion_tokens
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"{number}"}]
        pieces = client.chat.completions.create(
            model="headway", messages=messages, stream=True, temperature=0, max_tokens=8
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        # alone and greedy: the same again
        alone = OpenAI(base_url=url, api_key="any", max_retries=0)
        same = [
            alone.chat.completions.create(model="headway", messages=messages[:1], temperature=0)
            .choices[0]
            .message.content
            for _ in range(2)
        ]
        assert same[0] == same[1]
        seeded = [
            alone.chat.completions.create(model="headway", messages=messages[:1], seed=5).choices[0].message.content
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]
        client.post("/rollouts/mine/reward", body={"reward": 0.5}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.post("/rollouts/other/reward", body={"reward": 0.5}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="presence_penalty"):
            alone.chat.completions.create(model="headway", messages=messages[:1], presence_penalty=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"
    [line] = record.read_text().splitlines()
    data = json.loads(line)
    assert (data.pop("rollout"), data["reward"], data["calls"]) == ("mine", 0.5, 4)
    recorded = msgspec.convert(data, RecordedConversation, dec_hook=restored)
    model = load_model(inputs / "model")
    greedy = len(text) + 1
    learned = sum(sum(branch.response_mask) for branch in recorded.branches)
    assert sampled < learned <= sampled + greedy
    # the greedy call's behaviour log-probabilities are those of an argmax: all but its tokens
    trunk, *others = recorded.branches
    assert require_forced(model, others) + sum(trunk.response_mask) == learned


def read_and_close(url: str, path: str, body: dict[str, Any], name: str, most: float) -> bool:
    """Whether a client that closes its connection after ``most`` bytes of the response has read all of it."""
    host, _, port = url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nx-session-id: {name}\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        got = b""
        while len(got) < most and not whole(got):
            piece = connection.recv(int(min(4096, most - len(got))))
            assert piece
            got += piece
    assert got.startswith(b"HTTP/1.1 200 ")
    return whole(got)


def whole(response: bytes) -> bool:
    head, _, body = response.partition(b"\r\n\r\n")
    if b"chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return length is not None and len(body) == int(length[1])


SUM: Any = {
    "type": "object",
    "properties": {"sign": {"enum": ["+", "-"]}, "digits": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}},
    "required": ["sign", "digits"],
    "additionalProperties": False,
}


def test_a_model_that_knows_no_json_answers_in_it(inputs: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving(inputs, "--record", str(record), "--generator.slots=4") as (process, url):
        client = OpenAI(base_url=url, api_key="any", default_headers={"X-Session-ID": "mine"}, max_retries=0)
        asked: Any = {"model": "headway", "messages": [{"role": "user", "content": "12+3="}]}
        form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}
        answer = client.chat.completions.create(**asked, response_format=form, n=8)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema_rs.validate(SUM, json.loads(choice.message.content or ""))
        assert len({choice.message.content for choice in answer.choices}) > 1
        form["json_schema"]["schema"] = {"properties": {"a": {"type": "sum"}}}
        with pytest.raises(openai.BadRequestError, match="JSON schema at /properties/a: Invalid type: sum"):
            client.chat.completions.create(**asked, response_format=form)
        free = client.completions.create(model="headway", prompt="12+3=", max_tokens=8)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert free.usage is not None
    [line] = record.read_text().splitlines()
    data = json.loads(line)
    data.pop("rollout")
    recorded = msgspec.convert(data, RecordedConversation, dec_hook=restored)
    assert recorded.turns == 9
    require_forced(load_model(inputs / "model"), recorded.branches)


def test_connections_that_are_cut_leave_no_loss(inputs: Path, tmp_path: Path) -> None:
    """50 clients that close their connections after some bytes: only the sessions of those that read all are lines."""
    record, chance = tmp_path / "record.jsonl", random.Random(3)
    messages = [{"role": "user", "content": "12+3="}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 12},
        "/v1/completions": {"prompt": "12+3=", "max_tokens": 12},
        "/v1/responses": {"input": "12+3=", "max_output_tokens": 12},
        "/v1/messages": {"messages": messages, "max_tokens": 12},
    }
    read = {}
    with serving(inputs, "--record", str(record), "--generator.slots=4") as (process, url):
        for number in range(50):
            path = chance.choice(list(bodies))
            body = {"model": "headway", "stream": chance.random() < 0.5, **bodies[path]}
            most = chance.choice([chance.randrange(20, 400), chance.randrange(400, 3000), float("inf")])
            read[f"s{number}"] = read_and_close(url, path, body, f"s{number}", most)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert 10 < sum(read.values()) < 40
    assert {line["rollout"] for line in lines} == {name for name, all_of_it in read.items() if all_of_it}
    assert all(sum(branch["response_mask"]) for line in lines for branch in line["branches"])


def test_sessions_that_a_full_disk_does_not_take_are_told_of(inputs: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving(inputs, "--record", str(record), "--generator.slots=4") as (process, url):
        client = OpenAI(base_url=url, api_key="any", default_headers={"X-Session-ID": "mine"}, max_retries=0)
        client.completions.create(model="headway", prompt="12+3=", max_tokens=4)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 1
        assert process.stdout is not None
        assert f"error: 1 sessions are lost: {record} can't be written" in process.stdout.read()
    assert record.read_bytes() == b""


def test_refusals(inputs: Path, tmp_path: Path) -> None:
    assert "no such folder" in refused("serve", tmp_path / "none")
    model = inputs / "model"
    assert "--keys FILE" in refused("serve", model, "--address", "0.0.0.0:0")
    assert "valid: 2 to" in refused("serve", model, "--context", "100000000")
    assert "valid: keys of [generator]" in refused("serve", model, "--run.seed=3")
    (tmp_path / "keys").write_text("short\n")
    assert "shorter than 16" in refused("serve", model, "--keys", tmp_path / "keys")


AGENT = "counting_agent:solve"


def sections() -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": 2},
        "environment": {"name": "agent", "agent": AGENT},
        "rollout": {"group_size": 2, "max_prompt_tokens": 40, "max_response_tokens": 60},
        "queue": {"groups_per_step": 2, "budget": 0, "filter_zero_variance": False},
        "model": {"template": "chat"},
    }


def test_an_agents_rollouts_are_those_of_the_model(inputs: Path, tmp_path: Path) -> None:
    """Sampled tokens of every branch have the log-probabilities of a forward over that branch."""
    experiment = load_experiment(str(write_experiment(inputs, **sections())), [])
    group = Group(
        index=3,
        task=Task(task_id="t", prompt="12+3="),
        prompt_ids=(5,),
        size=2,
        admitted_version=0,
        admitted_s=0.0,
    )

    async def main() -> list[Rollout]:
        clock, tokenizer = RealClock(), Tokenizer.load(inputs / "model")
        pool = GeneratorPool(LocalLauncher(clock), experiment, clock)
        await pool.start()
        try:
            async with open_agents(experiment, lambda name, detail, **data: None, tmp_path) as agents:
                seed = experiment.run.seed
                sampler = TurnSampler(pool.generate, tokenizer, experiment.rollout, clock, run_seed=seed, requests=pool)
                rollouts = make_rollouts(experiment, sampler, agents)
                return list(await asyncio.gather(*(rollouts.generate_member(group, m) for m in range(2))))
        finally:
            await pool.stop()

    found = asyncio.run(main())
    model = load_model(inputs / "model")
    for rollout in found:
        assert rollout.failure is None, rollout.failure
        assert (rollout.calls, rollout.turns, rollout.reward in (0.0, 1.0)) == (3, 6, True)
        assert len(rollout.branches) == 3  # the choices that the agent didn't go on from
        assert require_forced(model, rollout.sequences) > 6
        assert rollout.environment_s > 0
    assert len({rollout.response_ids for rollout in found}) == 2


@pytest.mark.slow
def test_an_agent_is_trained(inputs: Path, tmp_path: Path) -> None:
    for name in ("model", "tasks.jsonl"):
        source = inputs / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    config = write_experiment(tmp_path, **sections())
    command = train(config, limit_s=150)
    assert command.process.returncode == 0, command.output + tail_of(tmp_path / "run")
    steps = [line for line in read_ledger(tmp_path / "run") if isinstance(line, StepRecord)]
    assert len(steps) == 2
    for step in steps:
        assert (step.samples, step.agents.calls, step.agents.branches) == (4, 12, 12)
        assert not step.failures
    logs = list((tmp_path / "run" / "logs" / "agents").glob("*-*.log"))
    assert len(logs) >= 8
    audit = subprocess.run([sys.executable, "-m", "headway.buffer.audit", str(tmp_path / "run")], capture_output=True)
    assert audit.returncode == 0, audit.stdout
