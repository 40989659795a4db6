"""Sessions of model calls: keys, the rollouts they belong to, and the limits of each."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.answer_tree import CallRequest, RecordedCall
from headway.generator.recording.inflight_call import InflightCall
from headway.generator.recording.recorder import Planned, Recorder, RecordingLimits
from headway.records.conversations import ChatAnswer, ClientSampling, RecordedConversation, RequestRefused, SampleTurn
from headway.records.generation import GenerationResult
from headway.tokens.continuing import Chat
from headway.tokens.messages import normal_messages, normal_tools
from headway.tokens.output_parsing import client_form

_LARGE_CHARACTERS = 100_000  # a conversation of more is rendered aside: it takes long
_SEALED_KEPT = 32768  # newest keys that are told that their rollout has ended; older ones are unknown
OnEvent = Callable[[str, str], object]  # name, detail


class KeyRefused(Exception):
    """No key, or one that names nothing."""


class NoSuchRollout(Exception):
    """A rollout that doesn't exist, or isn't this key's: which of the two isn't said."""


class Session:
    """A rollout that takes calls: *open* -> *sealed*, once.

    ``sampling`` says whose parameters hold: the experiment's, which the client's own are counted against, or the
    client's.
    """

    def __init__(
        self,
        rollout: str,
        recorder: Recorder,
        sample: SampleTurn,
        call_timeout_s: float,
        *,
        key: str = "",
        reward_key: str = "",
        fixed_sampling: bool = True,
        on_client_sampling: Callable[[ClientSampling], object] = lambda client: None,
        on_call_end: Callable[[Session], object] = lambda session: None,
        on_seal: Callable[[Session], object] = lambda session: None,
    ) -> None:
        self.rollout = rollout
        self.key = key
        self.reward_key = reward_key
        self.recorder = recorder
        self.fixed_sampling = fixed_sampling
        self.reward: float | None = None
        self.solved = False
        self._sample = sample
        self._call_timeout_s = call_timeout_s
        self._on_client_sampling = on_client_sampling
        self._on_call_end = on_call_end
        self._on_seal = on_seal
        self._open: dict[RecordedCall, InflightCall] = {}
        self._attended = 0  # requests of it that are read or answered
        self._sealed: RecordedConversation | None = None

    @property
    def chat(self) -> Chat:
        return self.recorder.chat

    @property
    def open_calls(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Somebody is being served: this is no time to end it."""
        return bool(self._open or self._attended)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """A request of it is read, and answered, inside the block."""
        self._attended += 1
        try:
            yield
        finally:
            self._attended -= 1

    def call(
        self,
        request: CallRequest,
        client: ClientSampling = ClientSampling(),
        fingerprint: str = "",
        planned: Planned | None = None,
    ) -> InflightCall:
        """Have a request answered. One with the same ``fingerprint`` as a call before it joins that call, or gets its
        answer again; "": it has none. ``planned``: by `Recorder.plan`. Raises RequestRefused."""
        earlier = self.recorder.earlier(fingerprint)
        if earlier is not None and self._sealed is None:
            return self._open.get(earlier) or InflightCall(self.recorder, earlier)
        call = self.recorder.begin(request, fingerprint, planned)
        if self.fixed_sampling:
            self._on_client_sampling(client)
        answering = self._open[call] = InflightCall(self.recorder, call)
        answering.begin(self._sample, client, self._call_timeout_s)
        if answering.task is not None:
            answering.task.add_done_callback(lambda task: self._ended(call))
        return answering

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """See :class:`headway.records.conversations.OpenConversation`."""
        request = _request(messages, tools, stop, max_tokens)
        long = sum(len(message.content) for message in request.messages) > _LARGE_CHARACTERS
        planned = await asyncio.to_thread(self.recorder.plan, request) if long else None
        answering = self.call(request, planned=planned)
        leave = answering.join(lambda: None)
        try:
            assert answering.task is not None
            await asyncio.wait((answering.task,))
        finally:
            leave()
        if answering.error is not None:
            raise answering.error
        return self._said(answering.call)

    def replay(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        result: GenerationResult,
        *,
        stop: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """See :class:`headway.records.conversations.OpenConversation`."""
        call = self.recorder.begin(_request(messages, tools, stop, max_tokens))
        self.recorder.commit(call, [result])
        return self._said(call)

    def _said(self, call: RecordedCall) -> ChatAnswer:
        """The answer of a call for its caller in this process, who has it at once."""
        self.recorder.note_received(call)
        turn = call.turns[0]
        assert turn is not None
        return ChatAnswer(message=client_form(turn.message, self.chat.written), cut=turn.finish_reason == "length")

    def _ended(self, call: RecordedCall) -> None:
        self._open.pop(call, None)
        self._on_call_end(self)

    def post_reward(self, reward: float, solved: bool | None = None) -> None:
        """Its reward; the last one posted counts. ``solved``: by default from a reward of 1 upwards. Raises
        RequestRefused for a rollout that has ended."""
        if self._sealed is not None:
            raise RequestRefused("this rollout has ended: it takes no reward", code="rollout_closed")
        self.reward, self.solved = reward, reward >= 1 if solved is None else solved

    def seal(self) -> RecordedConversation:
        """Close the session and return its recording; open calls end without an answer, new ones are refused."""
        if self._sealed is None:
            for answering in list(self._open.values()):
                answering.cancel()
            recorded = self.recorder.close()
            self._sealed = msgspec.structs.replace(recorded, reward=self.reward, solved=self.solved)
            self._on_seal(self)
        return self._sealed


class Sessions:
    """The rollouts of a run that take calls (records.conversations.Conversations): a random key of 256 bits for each,
    and another one that posts its reward: whatever a model has run by its agent may find the first.

    Keys are looked up by their digests, so how long that takes says nothing about a key.
    """

    def __init__(
        self,
        chat: Chat,
        settings: EndpointConfig,
        context_tokens: int,
        on_event: OnEvent = lambda name, detail: None,
        *,
        new_key: Callable[[], str] = lambda: "hw-" + secrets.token_urlsafe(32),
    ) -> None:
        """``context_tokens``: prompt and response of a call. ``on_event(name, detail)`` is told once of clients that
        ask to be sampled otherwise than the experiment says."""
        self.address = ""  # of the server, once it listens
        self._chat = chat
        self._settings = settings
        self._context_tokens = context_tokens
        self._on_event = on_event
        self._new_key = new_key
        self._open: dict[bytes, Session] = {}
        self._rewarding: dict[bytes, Session] = {}  # the same, by their other keys
        self._sealed: OrderedDict[bytes, None] = OrderedDict()
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rollout: str, sample: SampleTurn) -> Session:
        """See :class:`headway.records.conversations.Conversations`."""
        key = self._new_key()
        session = Session(
            rollout,
            new_recorder(self._chat, self._settings, self._context_tokens),
            sample,
            self._settings.call_timeout_s,
            key=key,
            reward_key=self._new_key(),
            on_client_sampling=self._note,
            on_seal=self._revoke,
        )
        self._open[key_digest(key)] = self._rewarding[key_digest(session.reward_key)] = session
        return session

    def session(self, key: str, name: str = "") -> Session:
        """The one that takes calls with this key; ``name``, by which a client tells its conversations apart, doesn't
        matter: a rollout's calls are all its own. Raises KeyRefused, or RequestRefused for one that has ended."""
        if not key:
            raise KeyRefused("no API key: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'")
        digest = key_digest(key)
        session = self._open.get(digest)
        if session is None:
            if digest in self._sealed:
                raise RequestRefused("this rollout has ended: its key takes no further calls", code="rollout_closed")
            raise KeyRefused("incorrect API key provided")
        return session

    def rollout(self, key: str, rollout: str) -> Session:
        """The one of this name, if ``key`` posts its reward. Raises as `session`, and NoSuchRollout."""
        session = self._rewarding.get(key_digest(key))
        if session is None and self.session(key).rollout == rollout:
            raise RequestRefused("this key takes calls, and posts no reward: docs/agents.md", code="reward_refused")
        if session is None or session.rollout != rollout:
            raise NoSuchRollout(f"the rollout {rollout!r} does not exist, or this key has no access to it")
        return session

    def _revoke(self, session: Session) -> None:
        digest, rewarding = key_digest(session.key), key_digest(session.reward_key)
        del self._open[digest], self._rewarding[rewarding]
        self._sealed[digest] = self._sealed[rewarding] = None
        while len(self._sealed) > _SEALED_KEPT:
            self._sealed.popitem(last=False)

    def _note(self, client: ClientSampling) -> None:
        for name, value in msgspec.structs.asdict(client).items():
            if value is not None and name not in (*self._told, "seed"):  # a seed has its effect
                self._told.add(name)
                self._on_event(
                    "client_sampling", f"a client asks for {name} = {value}: the experiment's holds; said once"
                )


def _request(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    stop: tuple[str, ...],
    max_tokens: int | None,
) -> CallRequest:
    normal = normal_messages(messages)
    return CallRequest(messages=normal, tools=normal_tools(tools), stop=stop, max_tokens=max_tokens)


def new_recorder(chat: Chat, settings: EndpointConfig, context_tokens: int) -> Recorder:
    """A rollout's, within the limits of ``settings``."""
    limits = RecordingLimits(
        context_tokens=context_tokens,
        calls=settings.calls,
        open_calls=settings.open_calls,
        choices=settings.choices,
        sampled_tokens=settings.sampled_tokens,
    )
    return Recorder(chat, limits, settings.history_reasoning)


def key_digest(key: str) -> bytes:
    """Return the digest by which a key is looked up and recorded; the key can't be computed from it."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
