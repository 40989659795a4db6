"""The endpoint as an ASGI application: routes, keys and limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol, TypeVar

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.anthropic import Messages
from headway.generator.endpoint.chat import ChatCompletions
from headway.generator.endpoint.completions import Completions
from headway.generator.endpoint.dialect import Dialect, ParsedRequest, Setting, answers
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.exchange import ClientGone, HttpExchange
from headway.generator.endpoint.http_app import HttpApp, ResponseCounts, decoded, require_method, unknown_url
from headway.generator.endpoint.logprobs import TokenTexts
from headway.generator.endpoint.openapi import REWARD, document
from headway.generator.endpoint.responses import Responses
from headway.generator.endpoint.streams import stream
from headway.generator.recording.answer_tree import CallPlan, CallRequest, RecordedCall
from headway.generator.recording.sessions import Session
from headway.records.conversations import RequestRefused
from headway.records.errors import ConfigurationError, Overloaded
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.tokens.continuation import Chat
from headway.tokens.grammar import GrammarRefused, Grammars
from headway.tokens.output_parsing import OutputFormat, begins_inside_reasoning
from headway.tokens.tool_grammar import Constraint, answer_grammar

T = TypeVar("T")
PromptScorer = Callable[[TokenIds, int, str], Awaitable[PromptLogprobs]]
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}
_COUNT = "/v1/messages/count_tokens"
_MODELS = "/v1/models"
_ROLLOUTS = "/v1/rollouts/"
_REWARD = "/reward"
_LARGE_BYTES = 20_000  # requests from this size on are tokenized in a thread: it would block the event loop too long
_MANY_TEXTS = 2_000  # as do responses with texts of more tokens
_MAX_REPORTED = 64  # kinds of hosted tools that are reported
_THREADS = 2  # for large requests
_GRAMMAR_S = 20.0  # longest wait for a grammar that is compiled behind others ...
_GRAMMAR_RETRY_S = 5  # ... and Retry-After of a request that waited so long
_FAULT_S = 10.0  # limit for trying all schemas of a refused grammar together, as other requests wait meanwhile


class Access(Protocol):
    """Maps API keys to the sessions of rollouts."""

    def session(self, key: str, name: str = "") -> Session:
        """Return the session that takes calls with ``key``. Raises KeyRefused, or RequestRefused if it has ended."""
        ...

    def rollout(self, key: str, rollout: str) -> Session:
        """Return the session whose reward ``key`` may post. Raises as `session`, and NoSuchRollout."""
        ...


class App(HttpApp):
    """ASGI application: answers requests of OpenAI's and Anthropic's APIs with the calls of sessions.

    A request is authorised before its body is read, and read whole before anything is sampled.
    """

    def __init__(
        self,
        access: Access,
        chat: Chat,
        settings: EndpointConfig,
        model_path: str,
        context_tokens: int,
        *,
        adapters: Collection[str] = (),
        now_s: Callable[[], float] = time.time,
        metrics: Callable[[ResponseCounts], bytes] | None = None,
        further: Mapping[str, Callable[[HttpExchange], Awaitable[None]]] = {},
        on_event: Callable[[str, str], object] = lambda name, detail: None,
        prompt_logprobs: PromptScorer | None = None,
    ) -> None:
        """``model_path``: the model's folder; requests may name the model by its path or last component. ``adapters``:
        names of those that are served beside it. ``now_s``: seconds since the epoch, for the answers' creation times.
        ``metrics``: renders `/metrics`; None: no such route. ``further``: routes of a service beside this one, by path;
        each checks its own keys. ``on_event(name, detail)`` reports once what clients request and don't get.
        ``prompt_logprobs(ids, top, adapter)``: see `PromptCalls.logprobs`; None: given tokens aren't scored."""
        super().__init__(settings, proxied=bool(further))
        self._access = access
        self._chat = chat
        self._context_tokens = context_tokens
        self._names = (settings.model, PurePath(model_path).name, model_path, *settings.aliases)
        self._adapters = tuple(adapters)
        self._texts = TokenTexts(chat.tokenizer)
        self._now_s = now_s
        self._metrics = metrics
        self._further = further
        self._on_event = on_event
        self._prompt_logprobs = prompt_logprobs
        self._reported: set[str] = set()
        self._threads = asyncio.Semaphore(_THREADS)
        self._grammars = Grammars(chat.tokenizer)
        self.compiling = 0  # requests that wait for their grammars

    async def answer(self, exchange: HttpExchange) -> None:
        path = exchange.path
        if path in ("/health", "/"):
            require_method(exchange, "GET")
            await exchange.reply(200, b'{"status":"ok"}')
        elif path == "/openapi.json":
            require_method(exchange, "GET")
            openapi_document = document(self.settings, _DIALECTS, metrics=self._metrics is not None)
            await exchange.reply(200, msgspec.json.encode(openapi_document))
        elif path == "/metrics" and self._metrics is not None:
            require_method(exchange, "GET")
            self._access.session(exchange.key)
            await exchange.reply_with(self._metrics(self.responses))
        elif path in _DIALECTS:
            require_method(exchange, "POST")
            await self._call(exchange, _DIALECTS[path])
        elif path == _MODELS or path.startswith(_MODELS + "/"):
            require_method(exchange, "GET")
            self._access.session(exchange.key)
            await exchange.reply(200, msgspec.json.encode(self._models(path)))
        elif path == _COUNT:
            require_method(exchange, "POST")
            await self._count(exchange)
        elif path.startswith(_ROLLOUTS) and path.endswith(_REWARD):
            require_method(exchange, "POST")
            await self._reward(exchange, path[len(_ROLLOUTS) : -len(_REWARD)])
        elif path in self._further:
            await self._further[path](exchange)
        else:
            raise unknown_url(exchange)

    # --- the routes -----------------------------------------------------------------------------------------------

    async def _call(self, exchange: HttpExchange, dialect: Dialect) -> None:
        """Answer a model call, whole or as a stream."""
        session = self._access.session(exchange.key, exchange.header("x-session-id"))
        with session.attended():
            raw_body = await exchange.body()
            body = decoded(raw_body)
            adapter = self._adapter_of(body)
            fingerprint = _fingerprint(exchange, raw_body)
            with fields.limited_nesting(body), fields.client_names(dialect.names):
                parsed = dialect.read(body, self._setting(session, exchange, adapter))
                self._report(parsed.left_out)
                call_plan: CallPlan | None = None
                needs_thread = len(raw_body) > _LARGE_BYTES or parsed.constraint is not None
                if needs_thread and session.recorder.earlier(fingerprint) is None:
                    call_plan = await self._in_thread(session.recorder.plan, parsed.request)
                    parsed = await self._constrained(parsed, dialect, call_plan.text)
                if parsed.scored is not None and not parsed.request.answers:
                    prompt_ids = (call_plan or session.recorder.plan(parsed.request)).context_ids
                    response_body = await exchange.while_connected(self._scored_body(parsed, dialect, prompt_ids, None))
                    await exchange.reply(200, response_body)
                    return
                inflight_call = session.call(parsed.request, parsed.client, fingerprint, call_plan)
            if parsed.stream:
                await stream(exchange, dialect, parsed, inflight_call)
                return
            if not inflight_call.over:
                await inflight_call.wait(exchange.gone())
            if not inflight_call.over:
                raise ClientGone
            if inflight_call.error is not None:
                with fields.client_names(dialect.names):
                    raise inflight_call.error
            if parsed.scored is not None:
                prompt_ids = inflight_call.call.prompt_ids
                scoring = self._scored_body(parsed, dialect, prompt_ids, inflight_call.call)
                response_body = await exchange.while_connected(scoring)
            else:
                response_body = msgspec.json.encode(dialect.response_body(parsed, inflight_call.call))
            await exchange.reply(200, response_body)
            exchange.note_received(inflight_call.note_received)

    async def _scored_body(
        self, parsed: ParsedRequest, dialect: Dialect, prompt_ids: TokenIds, call: RecordedCall | None
    ) -> bytes:
        """The response to a request with `Scored`: one pass over the prompt and each answer of ``call``, if any."""
        assert isinstance(dialect, Completions)
        assert self._prompt_logprobs is not None
        assert parsed.scored is not None
        paths = [prompt_ids] if call is None else [TokenIds.joined((prompt_ids, t.answer.ids)) for t in answers(call)]
        passes = (self._prompt_logprobs(ids, parsed.scored.top, parsed.setting.adapter) for ids in paths)
        try:
            scores = await asyncio.gather(*passes)
        except ConfigurationError as error:
            raise RequestRefused(str(error), param="prompt") from None

        def encode() -> bytes:
            return msgspec.json.encode(dialect.scored_body(parsed, prompt_ids, call, scores))

        texts = (1 + parsed.scored.top) * sum(map(len, paths))
        return await self._in_thread(encode) if texts > _MANY_TEXTS else encode()

    def _report(self, left_out: Sequence[str]) -> None:
        """Report hosted tools that a request names and the model isn't offered, each once."""
        for kind in dict.fromkeys(left_out):
            if kind not in self._reported and len(self._reported) < _MAX_REPORTED:
                self._reported.add(kind)
                detail = f"a client offers the hosted tool {fields.formatted(kind)}: it is left out (reported once)"
                self._on_event("hosted_tool", detail)

    async def _constrained(self, parsed: ParsedRequest, dialect: Dialect, prompt: str) -> ParsedRequest:
        """Return the request with the grammar of its constraint after ``prompt``; the grammar was compiled once. Raises
        RequestRefused naming the schema at fault, and Overloaded."""
        constraint = parsed.constraint
        if constraint is None:
            return parsed
        try:
            output_format = self._chat.written if dialect.parsed else OutputFormat()
            grammar = answer_grammar(constraint, output_format, opened=begins_inside_reasoning(prompt, output_format))
            await self._compiled(grammar)
        except GrammarRefused as error:
            param, schema_error = await self._at_fault(constraint) or (constraint.param, error)
            raise RequestRefused(f"{param}: {schema_error}", param=param) from None
        return dataclasses.replace(parsed, request=dataclasses.replace(parsed.request, grammar=grammar))

    async def _at_fault(self, constraint: Constraint) -> tuple[str, GrammarRefused] | None:
        """Find the first schema that is refused by itself, and its error; None if none was found in time."""
        with contextlib.suppress(TimeoutError, Overloaded):
            async with asyncio.timeout(_FAULT_S):
                for schema in constraint.schemas:
                    try:
                        await self._compiled(answer_grammar(Constraint(text=schema), OutputFormat()))
                    except GrammarRefused as schema_error:
                        return schema.param, schema_error
        return None

    async def _compiled(self, grammar: str) -> None:
        """Compile a grammar in its thread. Raises GrammarRefused, and Overloaded when others take too long."""
        self.compiling += 1
        try:
            async with asyncio.timeout(_GRAMMAR_S):
                await asyncio.wrap_future(self._grammars.start(grammar))
        except TimeoutError:
            raise Overloaded("other requests' grammars are being compiled", _GRAMMAR_RETRY_S) from None
        finally:
            self.compiling -= 1

    async def _count(self, exchange: HttpExchange) -> None:
        """Answer Anthropic's count_tokens: the prompt tokens of a request, which is not recorded."""
        session = self._access.session(exchange.key, exchange.header("x-session-id"))
        raw = await exchange.body()
        body = decoded(raw)
        adapter = self._adapter_of(body)
        count = self._tokens_of
        with fields.limited_nesting(body):
            parsed = Messages().read({"max_tokens": 1, **body}, self._setting(session, exchange, adapter))
            tokens = await self._in_thread(count, parsed.request) if len(raw) > _LARGE_BYTES else count(parsed.request)
        await exchange.reply(200, msgspec.json.encode({"input_tokens": tokens}))

    def _tokens_of(self, request: CallRequest) -> int:
        prompt_text = self._chat.prompt(request.messages, request.tools, request.variables, continues=request.continues)
        return len(self._chat.tokenizer.encode(prompt_text))

    async def _reward(self, exchange: HttpExchange, rollout: str) -> None:
        """Post a rollout's reward, ``{"reward": number, "solved"?: true or false}``; the last one posted counts."""
        session = self._access.rollout(exchange.key, rollout)
        with session.attended():
            body = decoded(await exchange.body())
        field_values = fields.read(body, REWARD)
        session.post_reward(field_values["reward"], field_values["solved"])
        reply_fields = {"rollout": rollout, "reward": session.reward, "solved": session.solved}
        await exchange.reply(200, msgspec.json.encode(reply_fields))

    def _models(self, path: str) -> dict[str, Any]:
        """Describe the served models: the model and its adapters in a list, or the one that ``path`` names."""
        served_name = self.settings.model
        model = {
            "id": served_name,
            "object": "model",
            "created": int(self._now_s()),
            "owned_by": "headway",
            "max_model_len": self._context_tokens,
        }
        if path == _MODELS:
            return {
                "object": "list",
                "data": [model, *({**model, "id": adapter, "parent": served_name} for adapter in self._adapters)],
            }
        path_name = path[len(_MODELS) + 1 :]
        return {**model, "id": path_name} | ({"parent": served_name} if self._adapter_of({"model": path_name}) else {})

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in a thread, at most `_THREADS` at once: other parts of the process share the thread pool."""
        async with self._threads:
            return await asyncio.to_thread(work, *arguments)

    # --- shared by all routes ---------------------------------------------------------------------------------------

    def _adapter_of(self, body: Mapping[str, Any]) -> str:
        """Return the adapter that a request's ``model`` names; "" if it names the model itself."""
        model_name = body.get("model")
        if not isinstance(model_name, str):
            raise RequestRefused("you must provide a model parameter", param="model")
        if model_name in self._adapters:
            return model_name
        if model_name not in self._names and "*" not in self.settings.aliases:
            valid = ", ".join(dict.fromkeys((self.settings.model, *self.settings.aliases, *self._adapters)))
            raise HttpError(
                404, f"the model {model_name!r} does not exist; valid: {valid}", code="model_not_found", param="model"
            )
        return ""

    def _setting(self, session: Session, exchange: HttpExchange, adapter: str) -> Setting:
        return Setting(
            settings=self.settings,
            chat=self._chat,
            texts=self._texts,
            fixed_sampling=session.fixed_sampling,
            constraints=session.constraints,
            created=int(self._now_s()),
            answer_id=exchange.request_id[4:],
            scores=self._prompt_logprobs is not None,
            adapter=adapter,
        )

    def error_body(self, exchange: HttpExchange, error: HttpError) -> bytes:
        is_anthropic = exchange.path.startswith("/v1/messages")
        return error.anthropic(exchange.request_id) if is_anthropic else error.openai()

    def route(self, path: str) -> str:
        if path in _DIALECTS or path in (_COUNT, "/health", "/metrics"):
            return path
        matching_prefixes = [prefix for prefix in (_MODELS, _ROLLOUTS) if path.startswith(prefix)]
        return matching_prefixes[0] if matching_prefixes else "other"


def _fingerprint(exchange: HttpExchange, raw: bytes) -> str:
    """Return the fingerprint of a request with an Idempotency-Key, which its retries share. "" without a key: retry
    counters don't identify the request, and equal bodies may be separate requests for separate samples."""
    idempotency_key = exchange.header("idempotency-key")
    if not idempotency_key:
        return ""
    return hashlib.blake2b(f"{exchange.path}\n{idempotency_key}\n".encode() + raw, digest_size=16).hexdigest()
