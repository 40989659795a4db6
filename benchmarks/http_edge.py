"""The endpoint of `headway serve` over fake replicas, as a process of its own: what `router.py` drives over HTTP.

    python benchmarks/http_edge.py FOLDER [--replicas 4] [--core 0] [--bare]

All of a call's path is the real one: uvicorn and its parser, the key, the session and what it has recorded, the chat
template, the tokenizer, the limiter, the pool and its router, the answer written as JSON or as a stream. Only the
engine is fake: it has every answer at once, so that what is measured is the edge and nothing else. FOLDER gets a
tokenizer, trained on this repository's documents, with a chat template that knows tools.

Prints its address when it listens, and ends when its standard input does. With ``--bare`` it answers every request with
the same bytes and does nothing else: what this machine takes for the event loop, the sockets and the other process.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from http_load import PASS, pin
from parts.fakes import FakeLauncher

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.records.generation import GenerationRequest
from headway.runtime.clock import RealClock
from headway.runtime.garbage_collection import short_collections
from headway.services.serve import served_pool
from headway.tokens.tokenizer import Tokenizer
from headway.tokens.tokenizer_training import BYTES, train_byte_fallback_tokenizer

SESSIONS = 128  # that call side by side, in turn
TURNS = 4  # calls of a session
RESPONSE_TOKENS = 32
CONTEXT_TOKENS = 4096
KV_TOKENS = 200_000  # of a replica: KV of ended turns makes room for new ones, as in an engine
STREAMED = 8  # every so many-th session wants its answers streamed
MADE_UP = range(8, 999)  # ids that the fake engine answers with (records/counted.py)
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\\n\\nYou may call these functions:\\n' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n\\nAnswer a call with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the repository's folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
DOCUMENTS = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))


def write_tokenizer(folder: Path) -> Tokenizer:
    """4096 tokens, ordered so that what the fake engine makes up is pieces of words rather than single bytes."""
    train_byte_fallback_tokenizer((path.read_text() for path in DOCUMENTS), 4096, folder)
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    behind = sorted((number, token) for token, number in vocabulary.items() if number not in MADE_UP)
    plain = [token for number, token in behind if number >= MADE_UP.stop]
    for byte, token in zip(BYTES, plain, strict=False):
        vocabulary[byte], vocabulary[token] = vocabulary[token], vocabulary[byte]
    file.write_text(json.dumps(whole))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


def experiment_of(folder: Path, replicas: int) -> Experiment:
    """What is served: it has room for all that come, as a server that isn't overloaded has."""
    raw = {
        "run": {"directory": "unused"},
        "model": {"path": str(folder)},
        "tasks": {"train": {"path": "unused"}},
        "rollout": {"max_prompt_tokens": CONTEXT_TOKENS - 1, "max_response_tokens": 1},
        "generator": {"devices": [f"cpu:{index}" for index in range(replicas)], "slots": 256},
        "endpoint": {"address": "127.0.0.1:0"},
    }
    return validate_experiment(raw, "benchmark")


async def serve(folder: Path, replicas: int) -> None:
    """Until standard input ends."""
    clock, experiment, tokenizer = RealClock(), experiment_of(folder, replicas), write_tokenizer(folder)

    def length(request: GenerationRequest) -> int:
        return 1 + request.sampling.seed * 7 % RESPONSE_TOKENS

    costs = ReplicaCosts(token_s=1e-9, slots=256, kv_capacity_tokens=KV_TOKENS)
    pool = GeneratorPool(FakeLauncher(clock, costs, length_of=length, start_s=0.0), experiment, clock)
    await pool.start()
    async with served_pool(experiment, pool, tokenizer, clock) as (address, access), short_collections(clock):
        print(address, flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), 15.0)
            except TimeoutError:
                access.sweep()
    await pool.stop()


class Bare(asyncio.Protocol):
    """One request at a time, of a known length; the answer is about as long as a real one."""

    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 480\r\n\r\n" + b"x" * 480

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, behind, body = self._data.partition(b"\r\n\r\n")
        if behind and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r")[0]):
            self._data = b""
            self._transport.write(self.ANSWER)


async def serve_bare() -> None:
    """Until standard input ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(Bare, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()


# --- what is asked -------------------------------------------------------------------------------------------


def conversation_of(number: int, characters: int) -> list[dict[str, Any]]:
    """What a session's user says, ``characters`` a turn: a task, then what its commands printed."""
    text = DOCUMENTS[number % len(DOCUMENTS)].read_text()
    start = 100 * (number // len(DOCUMENTS))
    pieces = [text[start + characters * turn : start + characters * (turn + 1)] for turn in range(TURNS)]
    system = "You are an engineer who works in a repository, with one tool. Think, then call it, or say what you found."
    return [{"role": "system", "content": system}, *({"role": "user", "content": piece} for piece in pieces)]


def requests_of(address: str, characters: int) -> list[dict[str, Any]]:
    """Lines for `http_load.py`: the calls of SESSIONS conversations, all first turns before all second ones. The
    answers in their histories are the server's: they depend on what is asked, not on who asks when."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    lines: list[list[dict[str, Any]]] = [[] for _ in range(TURNS)]
    for number in range(SESSIONS):
        system, *said = conversation_of(number, characters)
        messages = [system]
        for turn in range(TURNS):
            messages = [*messages, said[turn]]
            body = {
                "model": "headway",
                "messages": messages,
                "tools": [TOOL],
                "max_tokens": RESPONSE_TOKENS,
                "seed": number,
                "stream": number % STREAMED == 0,
            }
            lines[turn].append({"body": body, "headers": {"X-Session-ID": f"{PASS}-{number}"}})
            answer = _asked(connection, {**body, "stream": False}, f"prepared-{number}")
            messages = [*messages, answer["choices"][0]["message"]]
    connection.close()
    return [line for turn in lines for line in turn]


def _asked(connection: http.client.HTTPConnection, body: dict[str, Any], session: str) -> Any:
    headers = {"Content-Type": "application/json", "X-Session-ID": session}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read()
    if response.status != 200:
        raise RuntimeError(f"the endpoint answered {response.status}: {raw.decode()[:500]}")
    return json.loads(raw)


def write_requests(address: str, file: Path, characters: int) -> None:
    """`requests_of`, a line each."""
    file.write_text("".join(json.dumps(line) + "\n" for line in requests_of(address, characters)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets a tokenizer")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--core", type=int, help="to run on")
    parser.add_argument("--bare", action="store_true", help="answer everything with the same bytes")
    options = parser.parse_args(arguments)
    pin(options.core)
    asyncio.run(serve_bare() if options.bare else serve(options.folder, options.replicas))


if __name__ == "__main__":
    main()
