"""The endpoint on a loopback port, over an engine that says what a test wants, and clients to talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import uvicorn.server
from openai import AsyncOpenAI
from recorded_agent import chat_of
from scratch_folders import scratch_folder

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.app import App, PromptScorer
from headway.generator.endpoint.server import serving
from headway.generator.recording.sessions import Session, Sessions
from headway.records.conversations import OnTokens, RecordedConversation, TurnRequest
from headway.records.generation import GenerationResult, PartialResponse, VersionSpan
from headway.tokens.continuation import Chat

USER: Any = {"role": "user", "content": "1+2?"}
BODY = {"model": "headway", "messages": [USER]}
TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
CALL = 'so\n<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n3"
CONTEXT_TOKENS = 1500


class _Hurried:
    """asyncio as uvicorn sees it: at its shutdown it looks every millisecond whether its connections are closed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


uvicorn.server.asyncio = _Hurried()  # type: ignore[attr-defined]
Says = Callable[[TurnRequest], str]


@cache
def chat(kind: str = "qwen2.5") -> Chat:
    return chat_of(kind, scratch_folder("endpoint"))


@dataclass
class ScriptedEngine:
    """Samples what ``says`` says, a token for every character, in batches of ``batch`` tokens."""

    chat: Chat
    says: Says
    batch: int = 3
    asked: list[TurnRequest] = field(default_factory=list)
    cancelled: int = 0
    gate: asyncio.Event | None = None  # waited for before the last batch
    error: Exception | None = None
    finish_reason: str = ""  # in place of the right one

    async def __call__(self, wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
        self.asked.append(wanted)
        if self.error is not None:
            raise self.error
        tokenizer, text = self.chat.tokenizer, self.says(wanted)
        stopped = [stop for stop in wanted.stop if stop in text]
        if stopped:
            text = text[: min(text.index(stop) + len(stop) for stop in stopped)]
        ids = [i for character in text for i in tokenizer.encode(character)]
        if not stopped:
            ids.append(tokenizer.eos_id)
        reason = "stop"
        if len(ids) > wanted.max_tokens:
            ids, reason = ids[: wanted.max_tokens], "length"
        response = PartialResponse()
        try:
            for end in (*range(self.batch, len(ids), self.batch), len(ids)):
                if end == len(ids) and self.gate is not None:
                    await self.gate.wait()
                response = PartialResponse(
                    ids=tuple(ids[:end]),
                    logprobs=tuple(-0.25 - place / 64 for place in range(end)),
                    versions=(VersionSpan(version=3, tokens=end),),
                )
                told(response)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finish: Any = self.finish_reason or reason
        return GenerationResult(request_id=wanted.purpose, response=response, finish_reason=finish, first_token_s=1.0)


@dataclass
class Served:
    address: str
    sessions: Sessions
    engine: ScriptedEngine
    session: Session  # one that is open
    events: list[tuple[str, str]]

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def open(self, rollout: str = "8-0") -> Session:
        return self.sessions.open(rollout, self.engine, constraints=True)

    async def post(self, path: str, body: Any, **how: Any) -> tuple[int, dict[str, str], Any]:
        """(status, headers, body: JSON where it is, else text); otherwise as `raw`."""
        status, found, raw = await self.raw(path, body, **how)
        kind = found.get("content-type", "")
        return status, found, json.loads(raw) if kind.startswith("application/json") else raw.decode()

    async def raw(
        self,
        path: str,
        body: Any,
        *,
        key: str | None = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """``body``: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"authorization": f"Bearer {self.session.key if key is None else key}", **(headers or {})}
        if not given["authorization"].removeprefix("Bearer "):
            del given["authorization"]
        return await request(self.address, method, path, data, given)


async def request(
    address: str, method: str, path: str, data: bytes, headers: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = {"host": host, "content-length": str(len(data)), "connection": "close", **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
    raw = await reader.read()
    writer.close()
    top, _, body = raw.partition(b"\r\n\r\n")
    status, *rest = top.decode().split("\r\n")
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    if found.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return int(status.split()[1]), found, body


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait for something that comes from the other side of a connection."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def unchunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


@asynccontextmanager
async def served(
    says: str | Says = "hello",
    kind: str = "qwen2.5",
    *,
    batch: int = 3,
    context_tokens: int = CONTEXT_TOKENS,
    adapters: Sequence[str] = (),
    prompt_logprobs: PromptScorer | None = None,
    **keys: Any,
) -> AsyncIterator[Served]:
    """``keys``: of [endpoint]."""
    said = says if callable(says) else lambda wanted: says
    engine = ScriptedEngine(chat(kind), said, batch)
    settings = EndpointConfig(**{"address": "127.0.0.1:0", "aliases": ("gpt-4o",), **keys})
    events: list[tuple[str, str]] = []
    sessions = Sessions(engine.chat, settings, context_tokens, lambda name, detail: events.append((name, detail)))
    model = "models/tiny"
    app = App(
        sessions, engine.chat, settings, model, context_tokens, adapters=adapters, now_s=lambda: 1_800_000_000.5,
        on_event=lambda name, detail: events.append((name, detail)), prompt_logprobs=prompt_logprobs,
    )  # fmt: skip
    async with serving(app, settings) as address:
        sessions.address = address
        yield Served(address, sessions, engine, sessions.open("7-0", engine, constraints=True), events)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Server-sent events: (name, data)."""
    found: list[tuple[str, Any]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


Test = Callable[[Served, AsyncOpenAI], Awaitable[Any]]


def play(test: Test, says: Any = "hello", **options: Any) -> Any:
    """Run a test against a server; the client validates what it gets."""

    async def main() -> Any:
        async with served(says, **options) as server:
            client = AsyncOpenAI(
                base_url=server.base_url,
                api_key=server.session.key,
                max_retries=0,
                _strict_response_validation=True,
            )
            async with client:
                return await test(server, client)

    return asyncio.run(main())


def talk(*messages: Any) -> Any:
    return list(messages)


def recorded(server: Served) -> RecordedConversation:
    """What was recorded, each answer behind the very tokens it was sampled after."""
    conversation = server.session.seal()
    fed = [wanted.prompt_ids for wanted in server.engine.asked]
    for branch in conversation.branches:
        ids = (*branch.prompt_ids, *branch.response_ids)
        assert any(ids[: len(prompt)] == prompt for prompt in fed)
    return conversation
