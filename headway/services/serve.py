"""`headway serve`: the endpoint over a model folder, without training."""

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
from headway.config.load import overridden, validate_experiment
from headway.config.model import ModelConfig
from headway.config.schema import Experiment
from headway.generator.client import GeneratorPool
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.app import App
from headway.generator.endpoint.server import serving
from headway.generator.recording.recorder import Recorder
from headway.generator.recording.sessions import NoSuchRollout, Session, key_digest
from headway.generator.routing.limiter import Place
from headway.models.adapter_targets import stored_metadata
from headway.models.configuration import DecoderConfig
from headway.models.hub.configuration import read_config
from headway.models.routing import without_replay
from headway.orchestrator.nodes.machines import open_machines
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
from headway.runtime.addresses import listening, service_keys
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import parse_device
from headway.runtime.garbage_collection import short_collections
from headway.runtime.line_file import LineFile
from headway.runtime.supervision import until_interrupted
from headway.services.serve_metrics import ServeMetrics
from headway.services.session_record import SessionRecord
from headway.tokens.continuing import Chat
from headway.tokens.tokenizer import Tokenizer

_CONTEXT_TOKENS = 4096  # of a call by default, where the model's context is larger
_SLOTS = 16
_SESSIONS = 4096  # named ones at once; the least recently used ends first
_KEPT_TOKENS = 10_000_000  # of all sessions, about 100 bytes each: the longest unused ends first
_IDLE_S = 600.0  # a named session ends when it wasn't used for so long
_SWEEP_S = 15.0

_FULL_RETRY_S = 30  # Retry-After of a refused new session

_Name = tuple[bytes, str]  # a key's digest, and the client's name for the session
PlaceFor = Callable[[int], AbstractAsyncContextManager[Place]]  # the argument: tokens of the request


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Settings of a server: model, keys and the file of `--record`."""

    experiment: Experiment  # its model, [generator], [router] and [endpoint]
    adapters: Mapping[str, AdapterConfig]  # served beside the model, by name
    keys: tuple[str, ...] = ()  # accepted API keys; (): none is needed
    record: Path | None = None  # file that gets a line for each named session that has ended


def serving_of(
    model: str,
    address: str,
    context_tokens: int | None,
    keys_file: str,
    record: str,
    overrides: list[str],
    adapters: Sequence[str] = (),
) -> Serving:
    """Settings from the command's arguments; ``adapters``: NAME=FOLDER. Raises ConfigurationError: no such model or
    adapter, an address that other machines reach without keys, a file without any."""
    most = read_config(ModelConfig(path=model)).max_positions
    wanted = context_tokens or min(most, _CONTEXT_TOKENS)
    if not 2 <= wanted <= most:
        raise ConfigurationError(f"--context {wanted}: valid are 2 to {most}, the context of {model}")
    raw: dict[str, Any] = {
        "run": {"directory": "none"},
        "model": {"path": model, "template": "chat"},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"max_prompt_tokens": wanted - 1, "max_response_tokens": 1},  # a call may divide their sum freely
        "generator": {"slots": _SLOTS},
        "endpoint": {"address": address},
    }
    for override in overrides:
        section = override.lstrip("-").partition(".")[0]
        if section not in ("generator", "endpoint", "router"):
            raise ConfigurationError(f"{override}: valid are keys of [generator], [router] and [endpoint]")
    experiment = validate_experiment(overridden(raw, overrides, Experiment), "headway serve")
    at = experiment.endpoint.address
    keys = service_keys(keys_file, "--keys", at, f"endpoint.address = {at!r}")
    found = _adapters(adapters, experiment)
    return Serving(experiment=experiment, adapters=found, keys=keys, record=Path(record) if record else None)


def _adapters(given: Sequence[str], experiment: Experiment) -> dict[str, AdapterConfig]:
    """Adapters by name, of NAME=FOLDER. Their files are read here too: an error of theirs ends the command at once."""
    from headway.models.adapter_files import load_adapter  # torch, which this process needs for nothing else

    generator, endpoint, found = experiment.generator, experiment.endpoint, dict[str, AdapterConfig]()
    path, config = Path(experiment.model.path), None
    taken = (BASE_MODEL, POLICY_ADAPTER, endpoint.model, *endpoint.aliases, path.name, str(path))
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ConfigurationError(f"--adapter {one}: valid: NAME=FOLDER, a folder in PEFT's format")
        if name in taken or name in found:
            raise ConfigurationError(f"--adapter {one}: the name {name!r} is taken; valid: another")
        if generator.engine != "torch" or any(parse_device(device).node for device in generator.devices):
            raise ConfigurationError(
                f"--adapter {one}: valid with generator.engine = 'torch' on this machine's devices"
            )
        config = config or read_config(experiment.model)
        if isinstance(config, DecoderConfig):
            load_adapter(folder, path, config)
        elif found:
            raise ConfigurationError(f"--adapter {one}: beside a model that runs in transformers: valid: one")
        else:
            stored_metadata(Path(folder), path)
        found[name] = AdapterConfig(path=folder)
    return found


async def serve(wanted: Serving, on_ready: Callable[[str], None], on_event: Callable[[str, str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once; ``on_event(name, detail)`` at problems."""
    experiment, clock = wanted.experiment, RealClock()
    async with until_interrupted() as stopped, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening(experiment.endpoint.address, "endpoint.address")))
        tokenizer = Tokenizer.of(experiment)
        if tokenizer.added_stops:
            on_event("stops", tokenizer.added_text)

        def worker_event(name: str, detail: str, /, **_: object) -> None:
            on_event(name, detail)

        machines = await stack.enter_async_context(open_machines(experiment, clock, worker_event))
        experiment = without_replay(machines.experiment)
        pool = GeneratorPool(machines.launcher, experiment, clock, on_event=worker_event, adapters=wanted.adapters)
        record = None
        if wanted.record is not None:
            file = stack.enter_context(LineFile(wanted.record))
            record = stack.enter_context(SessionRecord(file, on_event))
        over = _ignore if record is None else record.add
        stack.push_async_callback(pool.stop)
        await pool.start()
        served = served_pool(experiment, pool, tokenizer, clock, wanted.keys, over, listener, wanted.adapters, on_event)
        address, access = await stack.enter_async_context(served)
        await stack.enter_async_context(short_collections(clock))
        on_ready(address)
        while not stopped.is_set():
            try:
                async with asyncio.timeout(_SWEEP_S):
                    await stopped.wait()
            except TimeoutError:
                access.sweep()
                if record is not None:
                    record.write()


def _ignore(session: Session) -> None:
    """Do nothing with an ended session: it isn't recorded."""


@asynccontextmanager
async def served_pool(
    experiment: Experiment,
    pool: GeneratorPool,
    tokenizer: Tokenizer,
    clock: Clock,
    keys: tuple[str, ...] = (),
    on_over: Callable[[Session], object] = _ignore,
    listener: socket.socket | None = None,
    adapters: Collection[str] = (),
    on_event: Callable[[str, str], object] = lambda name, detail: None,
) -> AsyncIterator[tuple[str, ServedSessions]]:
    """Serve the endpoint over a started pool inside the block; yields its address and its sessions. Callers are
    foreign: each call takes a place from the pool's limiter. ``adapters``: names of the pool's."""
    chat = Chat(tokenizer, experiment.endpoint.tools)
    sample_of = sampling(pool.generate, tokenizer, pool.limiter.place)
    access = ServedSessions(chat, experiment, sample_of, clock, keys, on_over)

    def metrics(responses: Mapping[tuple[str, int], int]) -> bytes:
        kept = len(access), access.kept_tokens
        return ServeMetrics(responses, pool.routing(), pool.worker_states, *kept, app.compiling).text()

    tokens = experiment.max_sequence_tokens
    path = experiment.model.path
    endpoint = EndpointConfig.of(experiment.endpoint)
    app = App(access, chat, endpoint, path, tokens, adapters=adapters, metrics=metrics, on_event=on_event)
    try:
        async with serving(app, endpoint, listener) as address:
            yield address, access
    finally:
        access.seal_all()


def sampling(generate: Generate, tokenizer: Tokenizer, place_for: PlaceFor) -> Callable[[str], SampleTurn]:
    """A factory of samplers by name of the session ("": none); they sample with the client's parameters. A call waits
    in ``place_for(tokens)`` for its turn, or is refused there. Without a client's seed, each answer has its own."""
    salt, serial = secrets.randbits(63), 0

    async def sample(session: str, wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
        nonlocal serial
        serial += 1
        client, number = wanted.client, serial
        fixed = client.seed is not None
        seed = rollout_seed(0, 0, 0, wanted.purpose) if fixed else rollout_seed(salt, number, 0)
        parameters = SamplingParameters(
            temperature=1.0 if client.temperature is None else client.temperature,
            top_p=1.0 if client.top_p is None else max(client.top_p, 1e-6),
            top_k=max(0, client.top_k or 0),
            max_tokens=wanted.max_tokens,
            stop_token_ids=tokenizer.stop_ids,
            stop=wanted.stop,
            seed=seed,
            grammar=wanted.grammar,
        )
        request = GenerationRequest(
            request_id=f"call-{number}",
            prompt_ids=wanted.prompt_ids,
            sampling=parameters,
            priority=number,
            session=session,
            adapter=wanted.adapter,
        )
        prompt_tokens = len(wanted.prompt_ids)
        async with place_for(prompt_tokens + wanted.max_tokens) as place:

            def heard(partial: PartialResponse) -> None:
                place.used_tokens = prompt_tokens + len(partial.ids)
                told(partial)

            heard(PartialResponse())
            result = await generate(request, Watch(1, heard))
            place.used_tokens = prompt_tokens + len(result.response.ids)
            return result

    return lambda session: functools.partial(sample, session)


@dataclass(kw_only=True, slots=True)
class _Named:
    session: Session
    used_s: float = 0.0  # when its last call started or ended
    tokens: int = 0  # kept by its recorder


class ServedSessions:
    """Groups calls into sessions: the calls of one key with one ``X-Session-ID`` are a rollout, recorded token-exact;
    a call without that header stands alone.

    A rollout ends, and is reported, after _IDLE_S without a call, counted from the end of its last one. While all of
    them together keep more tokens than ``most_tokens``, the least recently used ones end as well.
    """

    def __init__(
        self,
        chat: Chat,
        experiment: Experiment,
        sample_of: Callable[[str], SampleTurn],
        clock: Clock,
        keys: tuple[str, ...] = (),
        on_over: Callable[[Session], object] = _ignore,
        most_tokens: int = _KEPT_TOKENS,
    ) -> None:
        """``sample_of``: as `sampling` returns it. ``keys``: accepted API keys; (): none is needed."""
        self._endpoint = EndpointConfig.of(experiment.endpoint)
        self._most_tokens = most_tokens
        self._chat = chat
        self._experiment = experiment
        self._sample_of = sample_of
        self._serials, self._salt = itertools.count(1), secrets.token_hex(4)
        self._clock = clock
        self._keys = ApiKeys(keys)
        self._on_over = on_over
        self._named: OrderedDict[_Name, _Named] = OrderedDict()  # the least recently used first
        self._kept_tokens = 0  # of all of them

    def __len__(self) -> int:
        return len(self._named)

    @property
    def kept_tokens(self) -> int:
        """Tokens kept by the recorders of all named sessions."""
        return self._kept_tokens

    def session(self, key: str, name: str = "") -> Session:
        """See :class:`headway.generator.endpoint.app.Access`."""
        self._keys.require(key)
        digest = key_digest(key)
        if not name:
            return self._new(key, "")
        if len(name) > 256:
            what = "X-Session-ID is longer than 256 characters"
            raise RequestRefused(what, param="X-Session-ID")
        self.sweep(spared=(digest, name))
        if (digest, name) not in self._named:
            if self._kept_tokens > self._most_tokens:  # all by sessions with open calls
                raise Overloaded(f"the sessions at work have {self._kept_tokens} tokens", _FULL_RETRY_S)
            self._named[digest, name] = _Named(session=self._new(key, name, (digest, name)))
        return self._used((digest, name)).session

    def rollout(self, key: str, rollout: str) -> Session:
        """See :class:`headway.generator.endpoint.app.Access`."""
        self.session(key)
        if (key_digest(key), rollout) not in self._named:
            raise NoSuchRollout(f"the rollout {rollout!r} does not exist, or this key has no access to it")
        return self._used((key_digest(key), rollout)).session

    def sweep(self, spared: _Name | None = None) -> None:
        """End the sessions that are idle for _IDLE_S and, the least recently used first, those beyond the limits on
        sessions and tokens; never one with an open call, nor ``spared``."""
        now, most_tokens = self._clock.now(), self._most_tokens
        over: list[_Name] = []
        tokens = self._kept_tokens
        for name, named in self._named.items():
            room = len(self._named) - len(over) <= _SESSIONS and tokens <= most_tokens
            if room and now < named.used_s + _IDLE_S:
                break
            if name != spared and not named.session.busy:
                over.append(name)
                tokens -= named.tokens
        for name in over:
            self._end(name)

    def seal_all(self) -> None:
        """End all named sessions."""
        for name in list(self._named):
            self._end(name)

    def _end(self, name: _Name) -> None:
        named = self._named.pop(name)
        self._kept_tokens -= named.tokens
        named.session.seal()

    def _used(self, name: _Name) -> _Named:
        """Note that a call of the session starts or ends: its tokens, the time, its place in the order."""
        named = self._named[name]
        tokens = named.session.recorder.kept_tokens
        self._kept_tokens += tokens - named.tokens
        named.tokens, named.used_s = tokens, self._clock.now()
        self._named.move_to_end(name)
        return named

    def _call_ended(self, name: _Name, session: Session) -> None:
        named = self._named.get(name)
        if named is not None and named.session is session:  # else it has ended, and a new one may have its name
            self._used(name)

    def _new(self, key: str, name: str, place: _Name | None = None) -> Session:
        unique = f"{self._salt}-{next(self._serials)}"
        recorder = Recorder(self._chat, self._endpoint, self._experiment.max_sequence_tokens, unique)
        options: dict[str, Any] = {"key": key}
        if place is not None:
            options |= {"on_seal": self._on_over, "on_call_end": functools.partial(self._call_ended, place)}
        sample = self._sample_of(f"session-{unique}" if name else "")
        return Session(name, recorder, sample, self._endpoint.call_timeout_s, fixed_sampling=False, **options)
