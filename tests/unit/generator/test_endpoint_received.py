"""A token has loss only if its client got every byte of the answer: connections cut at each byte, in memory."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from endpoint_server import CALL, CONTEXT_TOKENS, THOUGHT, TOOLS, USER, ScriptedEngine, chat

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.app import App
from headway.generator.endpoint.exchange import CONNECTION, Connection
from headway.generator.recording.sessions import Session, Sessions
from headway.records.conversations import RecordedConversation, TurnRequest

CHAT: dict[str, Any] = {"model": "headway", "messages": [USER]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "headway", "prompt": "1+2="},
    "/v1/responses": {"model": "headway", "input": "1+2?"},
    "/v1/messages": {**CHAT, "max_tokens": 300},
}
MANNERS = ("raises", "silent", "reset")  # of a connection that is cut: see Client


class Client:
    """One request in memory, whose client reads ``most`` bytes of the body and then closes its connection.

    *raises*: the server's ``send`` fails, as ASGI says. *silent*: it drops what comes; the connection counts as lost.
    *reset*: everything is on its way already, and the connection turns out to be reset.
    """

    def __init__(self, path: str, body: bytes, key: str, most: float, manner: str) -> None:
        self.connection = Connection()
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            "extensions": {CONNECTION: self.connection},
        }
        self.status = 0
        self.got = b""
        self.whole = False
        self._body: bytes | None = body
        self._most = most
        self._manner = manner
        self._closed = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        data = message.get("body", b"")
        room = self._most - len(self.got)
        self.got += data if len(data) <= room else data[: int(room)]
        cut = len(data) > room or self._most == 0
        if not cut:
            self.whole = message["type"] == "http.response.body" and not message.get("more_body")
        elif self._manner == "raises":
            self._closed.set()
            raise BrokenPipeError
        elif self._manner == "silent":
            self._closed.set()
            self.connection.lost = True

    async def ask(self, app: App) -> None:
        await app(self.scope, self.receive, self.send)  # type: ignore[arg-type]
        if self._manner == "reset" and not self.whole and self.connection.on_reset is not None:
            self.connection.on_reset()


class Endpoints:
    """The application over an engine that says what ``says`` says, a session for each request."""

    def __init__(self, says: str, kind: str = "qwen2.5", batch: int = 3) -> None:
        settings = EndpointConfig(address="127.0.0.1:0")
        self.engine = ScriptedEngine(chat(kind), lambda wanted: says, batch)
        self.sessions = Sessions(self.engine.chat, settings, CONTEXT_TOKENS)
        self.app = App(self.sessions, self.engine.chat, settings, "m/t", CONTEXT_TOKENS, now_s=lambda: 1_800_000_000.5)

    async def ask(
        self, path: str, body: Any, most: float = float("inf"), manner: str = "raises", session: Session | None = None
    ) -> tuple[Client, Session]:
        session = session or self.sessions.open("7-0", self.engine, constraints=True)
        client = Client(path, json.dumps(body).encode(), session.key, most, manner)
        await client.ask(self.app)
        return client, session


def learned(conversation: RecordedConversation) -> int:
    return sum(sum(branch.response_mask) for branch in conversation.branches)


async def require_loss_of_what_was_read(
    endpoints: Endpoints, path: str, body: Any, cuts: Any, chance: random.Random | None = None
) -> None:
    """``cuts(length)``: how many bytes clients read, of an answer of ``length`` bytes."""
    whole, session = await endpoints.ask(path, body)
    assert (whole.status, whole.whole) == (200, True), whole.got
    sampled = learned(session.seal())
    assert sampled > 0
    for number, most in enumerate(cuts(len(whole.got))):
        manner = MANNERS[number % 3] if chance is None else chance.choice(MANNERS)
        client, session = await endpoints.ask(path, body, most, manner)
        conversation = session.seal()
        assert client.got == whole.got[:most] or len(client.got) == min(most, len(whole.got))
        found = (learned(conversation), conversation.calls, conversation.abandoned_calls)
        assert found == ((sampled, 1, 0) if client.whole else (0, 0, 1)), (manner, most, len(whole.got))
        assert bool(conversation.branches) == client.whole


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_answer_cut_at_any_byte_has_no_loss(path: str, stream: bool) -> None:
    """At each byte of a short answer and of the end of any; before, a prime number of bytes apart."""
    endpoints = Endpoints("3 é")
    body = {**BODIES[path], "stream": stream}

    def cuts(length: int) -> list[int]:
        apart = next(prime for prime in (1, 5, 11, 23, 47) if length < 300 * prime)
        return sorted({*range(0, length, apart), *range(max(0, length - 40), length + 1)})

    asyncio.run(require_loss_of_what_was_read(endpoints, path, body, cuts))


TEXTS = (
    ("qwen2.5", "hello\n there é 你好"),
    ("qwen2.5", CALL),
    ("qwen2.5", 'x<tool_call>\n{"name": "bash", "arguments": {"a": "\\ud83d"}}\n</tool_call>'),
    ("qwen3", THOUGHT),
    ("qwen3", "<think>\nhm"),
    ("llama3.1", '{"name": "bash", "parameters": {"x": NaN}}'),
    ("qwen2.5", "one two three"),
)


def random_body(path: str, chance: random.Random) -> dict[str, Any]:
    """A request with some of the options that change what its answer looks like."""
    body = {**BODIES[path], "stream": chance.random() < 0.6}
    if path in ("/v1/chat/completions", "/v1/completions"):
        body |= chance.choice([{}, {"n": 2}, {"stop": [" two"]}, {"max_tokens": 4}])
        body |= chance.choice([{}, {"stream_options": {"include_usage": True}}])
        body |= chance.choice([{}, {"logprobs": 0 if path == "/v1/completions" else True}])
    if path == "/v1/chat/completions":
        body |= chance.choice([{}, {"tools": TOOLS}])
    elif path == "/v1/responses":
        body |= chance.choice([{}, {"tools": [{"type": "function", **TOOLS[0]["function"]}], "max_output_tokens": 40}])
    elif path == "/v1/messages":
        tools = [{"name": "bash", "input_schema": {"type": "object"}}]
        body |= chance.choice([{}, {"tools": tools}, {"stop_sequences": ["two"]}])
    return body


def test_answers_cut_at_random_bytes_have_no_loss() -> None:
    async def main() -> None:
        chance = random.Random(5)
        for _ in range(60):
            kind, says = chance.choice(TEXTS)
            endpoints = Endpoints(says, kind, chance.choice([1, 3, 50]))
            path = chance.choice(list(BODIES))
            body = random_body(path, chance)
            await require_loss_of_what_was_read(
                endpoints, path, body, lambda length: [chance.randrange(length) for _ in range(5)], chance
            )

    asyncio.run(main())


def test_conversation_that_goes_on_from_an_answer_that_was_not_read_masks_it() -> None:
    """A client that got an answer some other way, say from a proxy, may send it back: it is context then."""

    async def main() -> None:
        endpoints = Endpoints("hello")
        client, session = await endpoints.ask("/v1/chat/completions", CHAT, 10)
        assert not client.whole
        talk = [USER, {"role": "assistant", "content": "hello"}, USER]
        await endpoints.ask("/v1/chat/completions", {**CHAT, "messages": talk}, session=session)
        conversation = session.seal()
        [branch] = conversation.branches
        tokens = len("hello") + 1
        assert branch.response_mask[:tokens] == (False,) * tokens
        assert branch.response_mask[-tokens:] == (True,) * tokens
        assert (learned(conversation), conversation.turns, conversation.abandoned_tokens) == (tokens, 1, tokens)

    asyncio.run(main())


def test_retry_of_an_answer_that_was_not_read_gets_the_same_answer() -> None:
    async def main() -> None:
        endpoints = Endpoints("hello")
        session = endpoints.sessions.open("7-0", endpoints.engine, constraints=True)
        found: list[Client] = []
        for most in (10.0, float("inf")):
            client = Client("/v1/chat/completions", json.dumps(CHAT).encode(), session.key, most, "raises")
            client.scope["headers"].append((b"idempotency-key", b"k"))  # type: ignore[attr-defined]
            await client.ask(endpoints.app)
            found.append(client)
        assert [client.whole for client in found] == [False, True]
        assert len(endpoints.engine.asked) == 1
        assert (learned(session.seal())) == len("hello") + 1

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_stopping_server_answers_in_the_apis_own_shape(path: str, stream: bool) -> None:
    async def main() -> None:
        endpoints = Endpoints("hello there")
        endpoints.engine.gate = asyncio.Event()
        session = endpoints.sessions.open("7-0", endpoints.engine, constraints=True)
        client = Client(path, json.dumps({**BODIES[path], "stream": stream}).encode(), session.key, 1e9, "raises")
        asking = asyncio.create_task(client.ask(endpoints.app))
        while not endpoints.engine.asked or (stream and not client.got):  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert client.whole
        text = client.got.decode()
        assert "the server is stopping" in text
        if not stream:
            assert client.status == 503
            assert json.loads(text)["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
        conversation = session.seal()
        assert (learned(conversation), conversation.abandoned_calls) == (0, 1)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_surrogate_pair_in_a_call_is_answered_and_goes_on(path: str, stream: bool) -> None:
    says = '<tool_call>\n{"name": "bash", "arguments": {"a": "\\ud83d \\u00e9"}}\n</tool_call>'
    tools: Any = {
        "/v1/chat/completions": TOOLS,
        "/v1/responses": [{"type": "function", **TOOLS[0]["function"]}],
        "/v1/messages": [{"name": "bash", "input_schema": {"type": "object"}}],
    }[path]

    async def main() -> None:
        endpoints = Endpoints(says)
        body = {**BODIES[path], "tools": tools}
        client, session = await endpoints.ask(path, {**body, "stream": stream})
        assert (client.status, client.whole) == (200, True), client.got
        assert b"ud83d" in client.got
        if path == "/v1/chat/completions" and not stream:
            message = json.loads(client.got)["choices"][0]["message"]
            arguments = message["tool_calls"][0]["function"]["arguments"]
            assert json.loads(arguments) == {"a": "\ud83d é"}
            reply = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "?"}
            again, _ = await endpoints.ask(path, {**body, "messages": [USER, message, reply]}, session=session)
            assert again.status == 200, again.got
            assert session.seal().causes == {"start": 1, "continued": 1}

    asyncio.run(main())


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', "\\ud83d", '{"a": NaN}', "1e999", "[" * 2000, "9" * 5000])
def test_arguments_of_a_call_that_a_client_made_up_are_read_or_refused(arguments: str) -> None:
    async def main() -> None:
        for kind in ("qwen2.5", "qwen3", "llama3.1"):
            endpoints = Endpoints("hello", kind)
            call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
            messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": "c", "content": "?"})
            client, _ = await endpoints.ask("/v1/chat/completions", {**CHAT, "messages": messages})
            assert client.status in (200, 400), client.got

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-300),
        ("temperature", 5e-324),
        ("temperature", 1e-9),
        ("temperature", -1e-300),
        ("temperature", 2.0001),
        ("top_p", -5e-324),
        ("top_p", 1e300),
        ("top_k", 1 << 40),
        ("seed", 1 << 64),
        ("presence_penalty", 1e308),
        ("max_tokens", 1 << 70),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_numbers_out_of_range_are_refused_by_name(path: str, field: str, value: float) -> None:
    name = "max_output_tokens" if (field, path) == ("max_tokens", "/v1/responses") else field

    async def main() -> None:
        endpoints = Endpoints("hello")
        client, _ = await endpoints.ask(path, {**BODIES[path], name: value})
        message = json.loads(client.got)["error"]["message"]
        assert client.status == 400
        assert message.startswith(f"{name} = {value!r}: valid: a")
        assert not endpoints.engine.asked

    asyncio.run(main())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 9000])
def test_numbers_that_are_none_are_refused_in_every_field(path: str, number: str) -> None:
    async def main() -> None:
        endpoints = Endpoints("hello")
        app, session = endpoints.app, endpoints.sessions.open("7-0", endpoints.engine, constraints=True)
        names = ("temperature", "top_p", "top_k", "seed", "n", "max_tokens", "max_output_tokens", "logprobs", "stop")
        for name in names:
            given = json.dumps({k: v for k, v in BODIES[path].items() if k != name})
            raw = f'{given[:-1]}, "{name}": {number}}}'.encode()
            client = Client(path, raw, session.key, 1e9, "raises")
            await client.ask(app)
            read = name in ("n", "logprobs") and path in ("/v1/responses", "/v1/messages")
            read |= name == "max_tokens" and path == "/v1/responses"
            read |= name == "max_output_tokens" and path != "/v1/responses"
            read |= name == "stop" and path in ("/v1/responses", "/v1/messages")
            read |= name == "logprobs" and path == "/v1/messages"
            assert client.status == 400 or (read and client.status == 200), (name, client.got)

    asyncio.run(main())


def test_smallest_temperature_that_is_valid_is_sampled_at() -> None:
    seen: list[TurnRequest] = []

    async def main() -> None:
        endpoints = Endpoints("hello")
        for temperature in (0, 1e-8, 2):
            client, _ = await endpoints.ask("/v1/chat/completions", {**CHAT, "temperature": temperature})
            assert client.status == 200
        seen.extend(endpoints.engine.asked)

    asyncio.run(main())
    assert [wanted.client.temperature for wanted in seen] == [0, 1e-8, 2]
