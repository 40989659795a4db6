"""Ten clients as they come against `headway serve`: each script works, and the tokens recorded for it are exact.

The clients are in environments of their own: `make install-agents install-clients`. A relay between them and the server
keeps every byte, and the test reads from those, with no code of the endpoint, what each call asked for and got. Of each
of those calls there is exactly one recorded answer: its tokens decode to what the client received, its prompt's tokens
are the chat template's text, and its log-probabilities are those of one forward over both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from api_wire import Answer, WireCall, wire_call
from talking_model import TEMPLATE, write_talking_model
from tiny_run import HERE
from wire_tap import tapped

from headway.models.loading import load_model
from headway.tokens.tokenizer import Tokenizer
from tests.conformance.reference import forced_logprobs

ROOT = HERE.parents[1]
SCRIPTS = Path(__file__).resolve().parent
AGENTS = Path(os.environ.get("HEADWAY_AGENTS", ROOT / ".venv-agents" / "bin" / "python"))
CLIENTS = Path(os.environ.get("HEADWAY_CLIENTS", ROOT / ".venv-clients" / "bin" / "python"))
# client -> the interpreter that has it
INTERPRETERS = {
    "openai": CLIENTS,
    "anthropic": CLIENTS,
    "litellm": AGENTS,
    "instructor": AGENTS,
    "langchain": CLIENTS,
    "openai_agents": CLIENTS,
    "inspect_ai": CLIENTS,
    "lm_eval": CLIENTS,
    "pydantic_ai": CLIENTS,
    "smolagents": CLIENTS,
}
OFFLINE = {  # what the packages would else ask the network for
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}
CONTEXT_TOKENS = 12_000  # instructions of agents are long
LIMIT_S = 240
TOLERANCE = 1e-3
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Played:
    """What the scripts, the wire and the server's record say."""

    model: Path
    ended: dict[str, subprocess.CompletedProcess[str]]  # by client
    calls: list[WireCall]
    lines: list[dict[str, Any]]  # of the record


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All clients that are installed, two at a time, against one server."""
    folder = tmp_path_factory.mktemp("clients")
    model, record = write_talking_model(folder), folder / "record.jsonl"
    arguments = ["--address", "127.0.0.1:0", "--context", str(CONTEXT_TOKENS), "--record", str(record)]
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(model), *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        server.stdout.readline()
        url = server.stdout.readline().strip().removeprefix("OPENAI_BASE_URL=http://").removesuffix("/v1")
        host, _, port = url.rpartition(":")
        with tapped((host, int(port))) as tap, ThreadPoolExecutor(2) as pool:
            names = [name for name, interpreter in INTERPRETERS.items() if interpreter.exists()]
            running = {name: pool.submit(_run, name, tap.address, folder / name) for name in names}
            ended = {name: future.result() for name, future in running.items()}
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            calls = [call for call in map(wire_call, tap.exchanges()) if call is not None]
    finally:
        server.kill()
        server.communicate()
    return Played(model, ended, calls, [json.loads(line) for line in record.read_text().splitlines()])


def _run(client: str, address: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    scratch.mkdir()
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "any",
        "HEADWAY_CLIENT": client,
        "HEADWAY_SCRATCH": str(scratch),
    }
    command = [str(INTERPRETERS[client]), "-B", str(SCRIPTS / f"with_{client}.py")]
    return subprocess.run(
        command, env=variables | OFFLINE, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@dataclass(frozen=True)
class Recorded:
    """An answer that the record holds."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def recorded_answers(line: dict[str, Any]) -> list[Recorded]:
    """Those of a session, each with all that it was sampled after. A turn is an answer, which has loss, and what was
    replied to it, which hasn't."""
    found = []
    for branch in line["branches"]:
        prompt, ids, mask, logprobs = (
            branch[name] for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
        )
        assert len(ids) == len(mask) == len(logprobs) == branch["turn_ends"][-1]
        assert sum(span["tokens"] for span in branch["versions"]) == len(ids)
        assert all(logprob == 0.0 for logprob, learned in zip(logprobs, mask, strict=True) if not learned)
        before = 0
        for end in branch["turn_ends"]:
            behind = before + sum(mask[before:end])
            assert all(mask[before:behind])
            found.append(Recorded(prompt + ids[:before], ids[before:behind], logprobs[before:behind]))
            before = end
    return found


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment()
    environment.filters["tojson"] = json.dumps
    return environment.from_string(TEMPLATE)


def prompt_text(call: WireCall) -> str:
    """The template's text of a call's messages, or its own prompt."""
    if call.prompt is not None:
        return call.prompt
    return _template().render(messages=call.messages, tools=call.tools, add_generation_prompt=True)


def says(text: str, answer: Answer, stop: Sequence[str]) -> bool:
    """Whether the text that was sampled is the answer that the client got: to the letter, up to a stop string; or calls
    of the same meaning behind the same content."""
    if not answer.calls:
        return answer.text == text or any(text.startswith(answer.text + end) for end in stop)
    content, *pieces = text.split("<tool_call>")
    written = [json.loads(piece.partition("</tool_call>")[0]) for piece in pieces]
    return content.strip() == answer.text.strip() and answer.calls == tuple(
        (call["name"], call["arguments"]) for call in written
    )


def require_prompt(found: Recorded, others: Sequence[Recorded], text: str, tokenizer: Tokenizer) -> None:
    """The prompt's tokens are those of its text: what was sampled earlier as it was sampled, the rest encoded."""
    known: list[int] = []
    for other in others:
        ids = other.prompt + other.ids
        if len(ids) > len(known) and text.startswith(tokenizer.decode(ids, keep_special=True)):
            known = ids
    rest = text[len(tokenizer.decode(known, keep_special=True)) :]
    assert found.prompt == known + tokenizer.encode(rest)


@pytest.mark.parametrize("client", INTERPRETERS)
def test_client_is_served_and_recorded(played: Played, client: str) -> None:
    if client not in played.ended:
        pytest.skip(f"no {INTERPRETERS[client]}: make install-agents install-clients")
    ended = played.ended[client]
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    reports = json.loads(ended.stdout.splitlines()[-1])
    lines = {line["rollout"]: line for line in played.lines if line["rollout"].startswith(f"{client}-")}
    assert set(lines) == {report["session"] for report in reports}
    assert len(lines) == sum(line["rollout"].startswith(f"{client}-") for line in played.lines)
    tokenizer, model = Tokenizer.load(played.model), load_model(played.model)
    for report in reports:
        session, line = report["session"], lines[report["session"]]
        calls = [call for call in played.calls if call.session == session]
        assert line["calls"] == len(calls) == report["calls"], session
        wanted = [(prompt_text(call), answer, call) for call in calls for answer in call.answers]
        answers = recorded_answers(line)
        assert line["turns"] == len(answers) == len(wanted), session
        received = Counter[str]()
        for found in answers:
            text, prompt = tokenizer.decode(found.ids), tokenizer.decode(found.prompt, keep_special=True)
            at = [n for n, (asked, got, call) in enumerate(wanted) if asked == prompt and says(text, got, call.stop)]
            assert at, (session, prompt, text, wanted)
            _, answer, call = wanted.pop(at[0])
            received[answer.text] += 1
            require_prompt(found, answers, prompt, tokenizer)
            forced = forced_logprobs(model, found.prompt, found.ids, call.temperature)
            assert (torch.tensor(found.logprobs) - forced).abs().max() < TOLERANCE, session
        assert not Counter(report["texts"]) - received, session
