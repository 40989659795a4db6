"""`headway serve` serves the endpoint over a model folder, without training."""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.adapter import AdapterConfig
from headway.config.endpoint import EndpointConfig
from headway.config.load import apply_overrides
from headway.config.model import ModelConfig
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.app import App
from headway.generator.endpoint.server import serving
from headway.generator.recording.recorder import Recorder
from headway.generator.recording.sessions import NoSuchRollout, Session, key_digest
from headway.generator.routing.limiter import Permit
from headway.models.adapter_targets import stored_metadata
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import read_config
from headway.models.routing import without_replay
from headway.orchestrator.nodes.machines import open_machines
from headway.orchestrator.preflight.experiment_file import prepared
from headway.records.clients import Watch
from headway.records.conversations import OnTokens, RequestRefused, SampleTurn, TurnRequest
from headway.records.errors import ConfigurationError, Overloaded
from headway.records.generation import (
    BASE_MODEL,
    POLICY_ADAPTER,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParameters,
)
from headway.rollout.makers.turn_sampler import Generate
from headway.rollout.seeds import rollout_seed
from headway.runtime.addresses import listening_socket, service_keys
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import parse_device
from headway.runtime.garbage_collection import short_collections
from headway.runtime.line_file import LineFile
from headway.runtime.supervision import until_interrupted
from headway.services.serve_metrics import ServeMetrics
from headway.services.session_record import SessionRecord
from headway.tokens.continuation import Chat
from headway.tokens.tokenizer import Tokenizer

_CONTEXT_TOKENS = 4096  # default of a call, where the model's context is larger
_SLOTS = 16
_SESSIONS = 4096  # named sessions at once; the least recently used ends first
_MAX_KEPT_TOKENS = 10_000_000  # of all sessions, about 100 bytes each; the least recently used session ends first
_IDLE_S = 600.0  # time without use after which a named session ends
_SWEEP_S = 15.0

_FULL_RETRY_S = 30  # Retry-After of a refused new session

_SessionKey = tuple[bytes, str]  # a key's digest, and the client's name for the session
PermitFor = Callable[[int], AbstractAsyncContextManager[Permit]]  # argument: tokens of the request


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `headway serve`: model, adapters, keys and the file of `--record`."""

    experiment: Experiment  # its model, [generator], [router] and [endpoint]
    adapters: Mapping[str, AdapterConfig]  # served beside the model, by name
    keys: tuple[str, ...] = ()  # accepted API keys; (): no key is needed
    record: Path | None = None  # file to which a line is written for each ended named session


def serve_settings_from(
    model: str,
    address: str,
    context_tokens: int | None,
    keys_file: str,
    record: str,
    overrides: list[str],
    adapters: Sequence[str] = (),
) -> ServeSettings:
    """Make the settings from the command's arguments. ``adapters``: NAME=FOLDER. Raises ConfigurationError for a
    missing model or adapter, an address that other machines reach without keys, and a file without keys."""
    max_tokens = read_config(ModelConfig(path=model)).max_positions
    context = context_tokens or min(max_tokens, _CONTEXT_TOKENS)
    if not 2 <= context <= max_tokens:
        raise ConfigurationError(f"--context {context}: valid: 2 to {max_tokens}, the context of {model}")
    raw_settings: dict[str, Any] = {
        "run": {"directory": "none", "offload": False},
        "model": {"path": model, "template": "chat"},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"max_prompt_tokens": context - 1, "max_response_tokens": 1},  # a call may divide their sum freely
        "generator": {"slots": _SLOTS},
        "endpoint": {"address": address},
    }
    for override in overrides:
        section = override.lstrip("-").partition(".")[0]
        if section not in ("generator", "endpoint", "router"):
            raise ConfigurationError(f"{override}: valid: keys of [generator], [router] and [endpoint]")
    experiment = prepared(apply_overrides(raw_settings, overrides, Experiment), "headway serve")
    endpoint_address = experiment.endpoint.address
    keys = service_keys(keys_file, "--keys", endpoint_address, f"endpoint.address = {endpoint_address!r}")
    by_name = _adapters(adapters, experiment)
    return ServeSettings(experiment=experiment, adapters=by_name, keys=keys, record=Path(record) if record else None)


def _adapters(arguments: Sequence[str], experiment: Experiment) -> dict[str, AdapterConfig]:
    """Parse NAME=FOLDER to adapters by name. Their files are read too, so that errors end the command at once."""
    from headway.models.adapter_files import load_adapter  # imports torch, which this process needs for nothing else

    generator, endpoint, adapter_by_name = experiment.generator, experiment.endpoint, dict[str, AdapterConfig]()
    path, config = Path(experiment.model.path), None
    reserved_names = (BASE_MODEL, POLICY_ADAPTER, endpoint.model, *endpoint.aliases, path.name, str(path))
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name or not folder:
            raise ConfigurationError(f"--adapter {argument}: valid: NAME=FOLDER, a folder in PEFT's format")
        if name in reserved_names or name in adapter_by_name:
            raise ConfigurationError(f"--adapter {argument}: the name {name!r} is taken; valid: another")
        if generator.engine != "torch" or any(parse_device(device).node for device in generator.devices):
            raise ConfigurationError(
                f"--adapter {argument}: valid with generator.engine = 'torch' on this machine's devices"
            )
        config = config or read_config(experiment.model)
        if isinstance(config, DecoderConfig):
            load_adapter(folder, path, config)
        elif adapter_by_name:
            raise ConfigurationError(f"--adapter {argument}: beside a model that runs in transformers: valid: one")
        else:
            stored_metadata(Path(folder), path)
        adapter_by_name[name] = AdapterConfig(path=folder)
    return adapter_by_name


async def serve(settings: ServeSettings, on_ready: Callable[[str], None], on_event: Callable[[str, str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once, ``on_event(name, detail)`` at problems."""
    experiment, clock = settings.experiment, RealClock()
    async with until_interrupted() as stop_event, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening_socket(experiment.endpoint.address, "endpoint.address")))
        tokenizer = Tokenizer.of(experiment)
        if tokenizer.added_stops:
            on_event("stops", tokenizer.added_text)

        def worker_event(name: str, detail: str, /, **_: object) -> None:
            on_event(name, detail)

        machines = await stack.enter_async_context(open_machines(experiment, clock, worker_event))
        experiment = without_replay(machines.experiment)
        pool = GeneratorPool(machines.launcher, experiment, clock, on_event=worker_event, adapters=settings.adapters)
        record = None
        if settings.record is not None:
            line_file = stack.enter_context(LineFile(settings.record))
            record = stack.enter_context(SessionRecord(line_file, on_event))
        add = _discard_session if record is None else record.add
        stack.push_async_callback(pool.stop)
        await pool.start()
        api = served_pool(experiment, pool, tokenizer, clock, settings.keys, add, listener, settings.adapters, on_event)
        address, sessions = await stack.enter_async_context(api)
        await stack.enter_async_context(short_collections(clock))
        on_ready(address)
        while not stop_event.is_set():
            try:
                async with asyncio.timeout(_SWEEP_S):
                    await stop_event.wait()
            except TimeoutError:
                sessions.sweep()
                if record is not None:
                    record.write()


def _discard_session(session: Session) -> None:
    """Discard an ended session, which isn't recorded."""


@asynccontextmanager
async def served_pool(
    experiment: Experiment,
    pool: GeneratorPool,
    tokenizer: Tokenizer,
    clock: Clock,
    keys: tuple[str, ...] = (),
    on_session_end: Callable[[Session], object] = _discard_session,
    listener: socket.socket | None = None,
    adapters: Collection[str] = (),
    on_event: Callable[[str, str], object] = lambda name, detail: None,
) -> AsyncIterator[tuple[str, ServedSessions]]:
    """Serve the endpoint over a started pool inside the block; yields its address and its sessions. Each call takes a
    permit from the pool's limiter, since callers aren't the orchestrator. ``adapters``: names of its adapters."""
    chat = Chat(tokenizer, experiment.endpoint.tools)
    sampler_of = sampling(pool.generate, tokenizer, pool.limiter.permit)
    sessions = ServedSessions(chat, experiment, sampler_of, clock, keys, on_session_end)

    def metrics(responses: Mapping[tuple[str, int], int]) -> bytes:
        session_counts = len(sessions), sessions.kept_tokens
        return ServeMetrics(responses, pool.routing(), pool.worker_states, *session_counts, app.compiling).text()

    max_tokens = experiment.max_sequence_tokens
    path = experiment.model.path
    endpoint = EndpointConfig.of(experiment.endpoint)
    options: dict[str, Any] = {"adapters": adapters, "metrics": metrics, "on_event": on_event}
    app = App(sessions, chat, endpoint, path, max_tokens, prompt_logprobs=pool.prompts.logprobs, **options)
    try:
        async with serving(app, endpoint, listener) as address:
            yield address, sessions
    finally:
        sessions.seal_all()


def sampling(generate: Generate, tokenizer: Tokenizer, permit_for: PermitFor) -> Callable[[str], SampleTurn]:
    """Return a factory of samplers by name of the session ("": none), which sample with the client's parameters. A call
    waits in ``permit_for(tokens)``, or is refused there. Without a client's seed, each answer has its own seed."""
    salt, call_count = secrets.randbits(63), 0

    async def sample(session: str, turn: TurnRequest, on_tokens: OnTokens, /) -> GenerationResult:
        nonlocal call_count
        call_count += 1
        client, call_number = turn.client, call_count
        has_seed = client.seed is not None
        seed = rollout_seed(0, 0, 0, turn.purpose) if has_seed else rollout_seed(salt, call_number, 0)
        parameters = SamplingParameters(
            temperature=1.0 if client.temperature is None else client.temperature,
            top_p=1.0 if client.top_p is None else max(client.top_p, 1e-6),
            top_k=max(0, client.top_k or 0),
            max_tokens=turn.max_tokens,
            stop_token_ids=tokenizer.stop_ids,
            stop=turn.stop,
            seed=seed,
            grammar=turn.grammar,
        )
        request = GenerationRequest(
            request_id=f"call-{call_number}",
            prompt_ids=turn.prompt_ids,
            sampling=parameters,
            priority=call_number,
            session=session,
            adapter=turn.adapter,
        )
        prompt_tokens = len(turn.prompt_ids)
        async with permit_for(prompt_tokens + turn.max_tokens) as permit:

            def on_partial(response: PartialResponse) -> None:
                permit.used_tokens = prompt_tokens + len(response.ids)
                on_tokens(response)

            on_partial(PartialResponse())
            generation = await generate(request, Watch(1, on_partial))
            permit.used_tokens = prompt_tokens + len(generation.response.ids)
            return generation

    return lambda session: functools.partial(sample, session)


@dataclass(kw_only=True, slots=True)
class _NamedSession:
    session: Session
    used_s: float = 0.0  # when its last call started or ended
    tokens: int = 0  # that its recorder keeps


class ServedSessions:
    """Groups calls into sessions. The calls of one key with one ``X-Session-ID`` are a rollout, recorded token-exact; a
    call without that header is a separate session.

    A rollout ends, and is reported, _IDLE_S after the end of its last call. While all rollouts together keep more
    tokens than ``max_kept_tokens``, the least recently used ones end as well.
    """

    def __init__(
        self,
        chat: Chat,
        experiment: Experiment,
        sample_of: Callable[[str], SampleTurn],
        clock: Clock,
        keys: tuple[str, ...] = (),
        on_session_end: Callable[[Session], object] = _discard_session,
        max_kept_tokens: int = _MAX_KEPT_TOKENS,
    ) -> None:
        """Start without sessions. ``sample_of``: as returned by `sampling`. ``keys``: accepted API keys; (): no key is
        needed."""
        self._endpoint = EndpointConfig.of(experiment.endpoint)
        self._max_kept_tokens = max_kept_tokens
        self._chat = chat
        self._experiment = experiment
        self._sample_of = sample_of
        self._serials, self._salt = itertools.count(1), secrets.token_hex(4)
        self._clock = clock
        self._keys = ApiKeys(keys)
        self._on_end = on_session_end
        self._named: OrderedDict[_SessionKey, _NamedSession] = OrderedDict()  # the least recently used first
        self._kept_tokens = 0  # of all named sessions

    def __len__(self) -> int:
        return len(self._named)

    @property
    def kept_tokens(self) -> int:
        """Return the tokens kept by the recorders of all named sessions."""
        return self._kept_tokens

    def session(self, key: str, name: str = "") -> Session:
        """See :class:`headway.generator.endpoint.app.Access`."""
        self._keys.require(key)
        digest = key_digest(key)
        if not name:
            return self._new(key, "")
        if len(name) > 256:
            message = "X-Session-ID is longer than 256 characters"
            raise RequestRefused(message, param="X-Session-ID")
        self.sweep(spared=(digest, name))
        if (digest, name) not in self._named:
            if self._kept_tokens > self._max_kept_tokens:  # all in sessions with open calls
                raise Overloaded(f"the sessions at work have {self._kept_tokens} tokens", _FULL_RETRY_S)
            self._named[digest, name] = _NamedSession(session=self._new(key, name, (digest, name)))
        return self._record_use((digest, name)).session

    def rollout(self, key: str, rollout: str) -> Session:
        """See :class:`headway.generator.endpoint.app.Access`."""
        self.session(key)
        if (key_digest(key), rollout) not in self._named:
            raise NoSuchRollout(f"the rollout {rollout!r} does not exist, or this key has no access to it")
        return self._record_use((key_digest(key), rollout)).session

    def sweep(self, spared: _SessionKey | None = None) -> None:
        """End the sessions that are idle for _IDLE_S and, the least recently used first, those beyond the limits on
        sessions and tokens. Sessions with open calls and ``spared`` are never ended."""
        now, max_kept_tokens = self._clock.now(), self._max_kept_tokens
        expired_keys: list[_SessionKey] = []
        kept_tokens = self._kept_tokens
        for session_key, named_session in self._named.items():
            within_limits = len(self._named) - len(expired_keys) <= _SESSIONS and kept_tokens <= max_kept_tokens
            if within_limits and now < named_session.used_s + _IDLE_S:
                break
            if session_key != spared and not named_session.session.busy:
                expired_keys.append(session_key)
                kept_tokens -= named_session.tokens
        for session_key in expired_keys:
            self._end(session_key)

    def seal_all(self) -> None:
        """End all named sessions."""
        for name in list(self._named):
            self._end(name)

    def _end(self, name: _SessionKey) -> None:
        named_session = self._named.pop(name)
        self._kept_tokens -= named_session.tokens
        named_session.session.seal()

    def _record_use(self, name: _SessionKey) -> _NamedSession:
        """Update the session's tokens, time of use and position in the order when a call starts or ends."""
        named_session = self._named[name]
        tokens = named_session.session.recorder.kept_tokens
        self._kept_tokens += tokens - named_session.tokens
        named_session.tokens, named_session.used_s = tokens, self._clock.now()
        self._named.move_to_end(name)
        return named_session

    def _call_ended(self, name: _SessionKey, session: Session) -> None:
        named = self._named.get(name)
        if named is not None and named.session is session:  # else it has ended, and a new session may have its name
            self._record_use(name)

    def _new(self, key: str, name: str, session_key: _SessionKey | None = None) -> Session:
        unique_id = f"{self._salt}-{next(self._serials)}"
        recorder = Recorder(self._chat, self._endpoint, self._experiment.max_sequence_tokens, unique_id)
        options: dict[str, Any] = {"key": key}
        if session_key is not None:
            options |= {"on_seal": self._on_end, "on_call_end": functools.partial(self._call_ended, session_key)}
        sample_turn = self._sample_of(f"session-{unique_id}" if name else "")
        return Session(name, recorder, sample_turn, self._endpoint.call_timeout_s, fixed_sampling=False, **options)
