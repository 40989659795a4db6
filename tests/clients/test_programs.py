"""Coding agents as npm installs them: each does a task of three tool calls with a scripted model, over HTTP.

Each runs without a person, in a home folder of its own, and asks nobody but the endpoint. A relay keeps what was on the
wire; of each call there is one recorded answer, whose tokens are those that the model said, behind a prompt whose
tokens are those of the chat template's text of what the client sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pytest
from api_wire import WireCall, wire_call
from endpoint_server import Served, served
from recorded_agent import QWEN25
from test_clients import ROOT, recorded_answers, says
from wire_tap import tapped

from headway.records.conversations import TurnRequest

PROGRAMS = Path(os.environ.get("HEADWAY_PROGRAMS", ROOT / ".npm-clients" / "node_modules" / ".bin"))
TASK = "Do the three steps."
STEPS = 3
DONE = "All three steps are done."
CONTEXT_TOKENS = 400_000  # of a tokenizer that has few words: a token is a character or two
LIMIT_S = 240
QUIET = {  # no updates, measurements or lists of models from elsewhere
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "IS_SANDBOX": "1",  # as root it else refuses to run commands without asking
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "PI_OFFLINE": "1",
    "PI_SKIP_VERSION_CHECK": "1",
    "PI_TELEMETRY": "0",
    "http_proxy": "http://127.0.0.1:9",  # whatever else they ask for fails at once
    "https_proxy": "http://127.0.0.1:9",
    "no_proxy": "127.0.0.1,localhost",
}
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Program:
    """How a program is configured and started, and the tool by which it runs commands."""

    arguments: tuple[str, ...]
    tool: str
    parameter: str
    files: Callable[[str], dict[str, Any]] = lambda address: {}  # by path in its home folder; JSON, or text
    variables: dict[str, str] = field(default_factory=dict)


def _codex(address: str) -> dict[str, Any]:
    return {
        ".codex/config.toml": f"""
model = "headway"
model_provider = "headway"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.headway]
name = "headway"
base_url = "{address}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    }


def _opencode(address: str) -> dict[str, Any]:
    options = {"baseURL": f"{address}/v1", "apiKey": "{env:OPENAI_API_KEY}"}
    models = {"headway": {"name": "headway"}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "headway", "options": options, "models": models}
    small = {"model": "headway/headway", "small_model": "headway/headway", "provider": {"headway": provider}}
    return {"work/opencode.json": {"autoupdate": False, "share": "disabled", "permission": "allow", **small}}


def _pi(address: str) -> dict[str, Any]:
    provider = {"baseUrl": f"{address}/v1", "api": "openai-completions", "apiKey": "OPENAI_API_KEY"}
    return {".pi/agent/models.json": {"providers": {"headway": {**provider, "models": [{"id": "headway"}]}}}}


AGENTS = {
    "codex": Program(("exec", "--skip-git-repo-check", TASK), "exec_command", "cmd", _codex),
    "claude": Program(
        ("-p", TASK, "--dangerously-skip-permissions", "--model", "headway"), "Bash", "command",
        variables={"ANTHROPIC_MODEL": "headway", "ANTHROPIC_SMALL_FAST_MODEL": "headway"},
    ),
    "opencode": Program(("run", TASK), "bash", "command", _opencode),
    "pi": Program(("-p", "--provider", "headway", "--model", "headway", TASK), "bash", "command", _pi),
}  # fmt: skip


def script(program: Program) -> Callable[[str], str]:
    """What the model answers to a prompt: the next step's call, or that all of them are done."""

    def answer(prompt: str) -> str:
        if "Tools: [" not in prompt or TASK not in prompt:
            return "Three steps"  # a title
        done = sum(f"step-{40 + step}" in prompt for step in range(STEPS))
        if done == STEPS:
            return DONE
        command = f"printf 'step-%s\\n' $((40+{done})) | tee -a steps.txt"  # the text of the command isn't its output
        arguments = {program.parameter: command, "description": "A step"}
        if program.parameter == "cmd":
            del arguments["description"]
        return f'<tool_call>\n{{"name": "{program.tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'

    return answer


@dataclass(frozen=True)
class Ended:
    """What a program printed and did, what the wire and the engine saw, and the record."""

    output: str
    code: int
    steps: str
    calls: list[WireCall]
    asked: list[TurnRequest]
    record: Any
    server: Served


async def run(name: str, home: Path) -> Ended:
    program = AGENTS[name]
    answer, tokenizer = script(program), None

    def answered(wanted: TurnRequest) -> str:
        assert tokenizer is not None
        return answer(tokenizer.decode(wanted.prompt_ids, keep_special=True))

    async with served(answered, context_tokens=CONTEXT_TOKENS, batch=7) as server:
        tokenizer = server.engine.chat.tokenizer
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        with tapped((host, int(port))) as tap:
            for path, content in program.files(tap.address).items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(content if isinstance(content, str) else json.dumps(content))
            (home / "work").mkdir(exist_ok=True)
            key, addresses = server.session.key, {"ANTHROPIC_BASE_URL": tap.address}
            keys = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
            variables = {"PATH": os.environ["PATH"], "HOME": str(home), **addresses, **keys, **program.variables}
            process = await asyncio.create_subprocess_exec(
                str(PROGRAMS / name), *program.arguments, env=variables | QUIET, cwd=home / "work",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(LIMIT_S):
                    output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            calls = [call for call in map(wire_call, tap.exchanges()) if call is not None]
        steps = home / "work" / "steps.txt"
        return Ended(
            output.decode(), process.returncode or 0, steps.read_text() if steps.is_file() else "", calls,
            server.engine.asked, server.session.seal(), server,
        )  # fmt: skip


def prompt_text(call: WireCall) -> str:
    """The chat template's text of what the wire had."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    tools = [{"type": "function", **tool} for tool in call.tools] or None
    return environment.from_string(QWEN25).render(messages=call.messages, tools=tools, add_generation_prompt=True)


@pytest.mark.parametrize("name", AGENTS)
def test_program_does_its_task_and_is_recorded(name: str, tmp_path: Path) -> None:
    if shutil.which(str(PROGRAMS / name)) is None:
        pytest.skip(f"no {PROGRAMS / name}: make install-clients, with npm")
    ended = asyncio.run(run(name, tmp_path))
    assert ended.code == 0, ended.output[-6000:]
    assert DONE in ended.output
    assert ended.steps == "".join(f"step-{40 + step}\n" for step in range(STEPS))
    tokenizer = ended.server.engine.chat.tokenizer
    line = json.loads(json.dumps({"branches": [branch_line(branch) for branch in ended.record.branches]}))
    answers = recorded_answers(line)
    assert ended.record.turns == len(answers) == len(ended.asked) == len(ended.calls) >= STEPS + 1
    fed = [list(wanted.prompt_ids) for wanted in ended.asked]
    wanted = [(prompt_text(call), answer, call) for call in ended.calls for answer in call.answers]
    for found in answers:
        fed.remove(found.prompt)
        text, prompt = tokenizer.decode(found.ids), tokenizer.decode(found.prompt, keep_special=True)
        assert found.ids == [i for letter in text for i in tokenizer.encode(letter)] + [tokenizer.eos_id]
        at = [
            n
            for n, (asked, got, call) in enumerate(wanted)
            if same_prompt(asked, prompt) and says(text, got, call.stop)
        ]
        assert at, (prompt, text)
        wanted.pop(at[0])
    assert len(ended.record.branches) == 1 + sum(not call.tools for call in ended.calls)  # the task, and titles


def same_prompt(one: str, other: str) -> bool:
    """Equal, the tools' JSON by what it says: the wire's reader leaves fields out that the endpoint passes on."""
    (mine, rest), (theirs, others) = _parts(one), _parts(other)
    return rest == others and mine == theirs


def _parts(prompt: str) -> tuple[list[Any], str]:
    """(name, description and parameters of the tools; the text behind them)."""
    head = "<|im_start|>system\nTools: "
    if not prompt.startswith(head):
        return [], prompt
    tools, end = json.JSONDecoder().raw_decode(prompt, len(head))
    return [[tool["function"].get(key) for key in ("name", "description", "parameters")] for tool in tools], prompt[
        end:
    ]


def branch_line(branch: Any) -> dict[str, Any]:
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "turn_ends")
    spans = [{"tokens": span.tokens} for span in branch.versions]
    return {name: list(getattr(branch, name)) for name in names} | {"versions": spans}
