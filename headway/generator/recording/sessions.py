"""Authorisation of model calls: keys, the sessions of rollouts they open, and the calls of a session."""

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
from headway.generator.recording.answer_tree import CallPlan, CallRequest, RecordedCall
from headway.generator.recording.inflight_call import InflightCall
from headway.generator.recording.recorder import Recorder
from headway.records.conversations import ChatAnswer, ClientSampling, RecordedConversation, RequestRefused, SampleTurn
from headway.records.generation import GenerationResult
from headway.tokens.continuation import Chat
from headway.tokens.messages import normal_messages, normal_tools
from headway.tokens.output_parsing import openai_message

_LARGE_CHARACTERS = 100_000  # longer conversations are rendered in a thread
_SEALED_KEPT = 32768  # newest revoked keys, refused with "this rollout has ended"; older ones are unknown
OnEvent = Callable[[str, str], object]  # name, detail


class KeyRefused(Exception):
    """A missing or unknown API key."""


class NoSuchRollout(Exception):
    """A rollout that doesn't exist, or that this key has no access to; the error doesn't say which."""


class Session:
    """A rollout that takes calls: *open* -> *sealed*, once.

    ``fixed_sampling``: the experiment's sampling parameters hold, and differing ones of clients are reported; else the
    client's hold. ``constraints``: answers may be constrained by grammars.
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
        constraints: bool = True,
        on_client_sampling: Callable[[ClientSampling], object] = lambda client: None,
        on_call_end: Callable[[Session], object] = lambda session: None,
        on_seal: Callable[[Session], object] = lambda session: None,
    ) -> None:
        self.rollout = rollout
        self.key = key
        self.reward_key = reward_key
        self.recorder = recorder
        self.fixed_sampling = fixed_sampling
        self.constraints = constraints
        self.reward: float | None = None
        self.solved = False
        self._sample = sample
        self._call_timeout_s = call_timeout_s
        self._on_client_sampling = on_client_sampling
        self._on_call_end = on_call_end
        self._on_seal = on_seal
        self._open: dict[RecordedCall, InflightCall] = {}
        self._attended = 0  # requests being read or answered
        self._sealed: RecordedConversation | None = None

    @property
    def chat(self) -> Chat:
        return self.recorder.chat

    @property
    def answered(self) -> bool:
        """See :class:`headway.records.conversations.OpenConversation`."""
        return any(turn.received for turn in self.recorder.turns)

    @property
    def busy(self) -> bool:
        """Whether a request is being served, so that the session should not be ended now."""
        return bool(self._open or self._attended)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Count a request as being served inside the block."""
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
        planned: CallPlan | None = None,
    ) -> InflightCall:
        """Start a call, or return an earlier one with the same ``fingerprint``, open or answered ("": no fingerprint).
        ``planned``: result of `Recorder.plan`. Raises RequestRefused."""
        earlier_call = self.recorder.earlier(fingerprint)
        if earlier_call is not None and self._sealed is None:
            return self._open.get(earlier_call) or InflightCall(self.recorder, earlier_call)
        call = self.recorder.begin(request, fingerprint, planned)
        if self.fixed_sampling:
            self._on_client_sampling(client)
        inflight_call = self._open[call] = InflightCall(self.recorder, call)
        inflight_call.begin(self._sample, client, self._call_timeout_s)
        if inflight_call.task is not None:
            inflight_call.task.add_done_callback(lambda task: self._ended(call))
        return inflight_call

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
        is_long = sum(len(message.content) for message in request.messages) > _LARGE_CHARACTERS
        call_plan = await asyncio.to_thread(self.recorder.plan, request) if is_long else None
        inflight_call = self.call(request, planned=call_plan)
        await inflight_call.wait()
        if inflight_call.error is not None:
            raise inflight_call.error
        return self._delivered(inflight_call.call)

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
        return self._delivered(call)

    def _delivered(self, call: RecordedCall) -> ChatAnswer:
        """Return the answer of a call to its caller in this process, and note it as received."""
        self.recorder.note_received(call)
        turn = call.turns[0]
        assert turn is not None
        return ChatAnswer(message=openai_message(turn.message, self.chat.written), cut=turn.finish_reason == "length")

    def _ended(self, call: RecordedCall) -> None:
        self._open.pop(call, None)
        self._on_call_end(self)

    def post_reward(self, reward: float, solved: bool | None = None) -> None:
        """Set the rollout's reward; the last one posted counts. ``solved``: by default reward >= 1. Raises
        RequestRefused for a rollout that has ended."""
        if self._sealed is not None:
            raise RequestRefused("this rollout has ended: it accepts no reward", code="rollout_closed")
        self.reward, self.solved = reward, reward >= 1 if solved is None else solved

    def seal(self) -> RecordedConversation:
        """Seal the session and return the recorded conversation. Open calls end without an answer, further ones are
        refused."""
        if self._sealed is None:
            for inflight_call in list(self._open.values()):
                inflight_call.cancel(RequestRefused("this rollout has ended", code="rollout_closed"))
            conversation = self.recorder.close()
            self._sealed = msgspec.structs.replace(conversation, reward=self.reward, solved=self.solved)
            self._on_seal(self)
        return self._sealed


def _new_key() -> str:
    return "hw-" + secrets.token_urlsafe(32)


class Sessions:
    """Sessions of a run's rollouts (records.conversations.Conversations). Each has a random key of 256 bits for its
    calls and another to post its reward, because code that a model has its agent run may find the first.

    Keys are looked up by their digests, so that the time of a lookup reveals nothing about a key.
    """

    def __init__(
        self,
        chat: Chat,
        settings: EndpointConfig,
        context_tokens: int,
        on_event: OnEvent = lambda name, detail: None,
    ) -> None:
        """``context_tokens``: limit of a call's prompt and response. ``on_event(name, detail)`` reports, once for each
        parameter, clients that ask for sampling parameters other than the experiment's."""
        self.address = ""  # of the server, once it listens
        self._chat = chat
        self._settings = settings
        self._context_tokens = context_tokens
        self._on_event = on_event
        self._open: dict[bytes, Session] = {}
        self._rewarding: dict[bytes, Session] = {}  # the same sessions, by their reward keys
        self._sealed: OrderedDict[bytes, None] = OrderedDict()
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, rollout: str, sample: SampleTurn, *, constraints: bool) -> Session:
        """See :class:`headway.records.conversations.Conversations`."""
        key, reward_key = _new_key(), _new_key()
        session = Session(
            rollout,
            Recorder(self._chat, self._settings, self._context_tokens, rollout, (key, reward_key)),
            sample,
            self._settings.call_timeout_s,
            key=key,
            reward_key=reward_key,
            constraints=constraints,
            on_client_sampling=self._note,
            on_seal=self._revoke,
        )
        self._open[key_digest(key)] = self._rewarding[key_digest(session.reward_key)] = session
        return session

    def session(self, key: str, name: str = "") -> Session:
        """Return the session that takes calls with this key. ``name``, a client's label of a conversation, is ignored:
        all calls with the key are the rollout's. Raises KeyRefused, or RequestRefused if the rollout has ended."""
        if not key:
            raise KeyRefused("no API key: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'")
        digest = key_digest(key)
        session = self._open.get(digest)
        if session is None:
            if digest in self._sealed:
                raise RequestRefused("this rollout has ended: its key accepts no further calls", code="rollout_closed")
            raise KeyRefused("incorrect API key provided")
        return session

    def rollout(self, key: str, rollout: str) -> Session:
        """Return the session of this rollout if ``key`` is its reward key. Raises as `session`, and NoSuchRollout."""
        session = self._rewarding.get(key_digest(key))
        if session is None and self.session(key).rollout == rollout:
            raise RequestRefused("this key makes calls and can't post a reward: docs/agents.md", code="reward_refused")
        if session is None or session.rollout != rollout:
            raise NoSuchRollout(f"the rollout {rollout!r} does not exist, or this key has no access to it")
        return session

    def _revoke(self, session: Session) -> None:
        call_digest, reward_digest = key_digest(session.key), key_digest(session.reward_key)
        del self._open[call_digest], self._rewarding[reward_digest]
        self._sealed[call_digest] = self._sealed[reward_digest] = None
        while len(self._sealed) > _SEALED_KEPT:
            self._sealed.popitem(last=False)

    def _note(self, client: ClientSampling) -> None:
        parameters = msgspec.structs.asdict(client)
        others = parameters.pop("further") or {}
        known_names = (*self._reported, "seed")  # a client's seed is used
        new_parameters = {
            name: value
            for name, value in (parameters | others).items()
            if value is not None and name not in known_names
        }
        if new_parameters:
            self._reported |= set(new_parameters)
            asked_text = ", ".join(f"{name} = {value}" for name, value in new_parameters.items())
            detail = f"a client asks for {asked_text}: the experiment's value is used (reported once)"
            self._on_event("client_sampling", detail)


def _request(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    stop: tuple[str, ...],
    max_tokens: int | None,
) -> CallRequest:
    chat_messages = normal_messages(messages)
    return CallRequest(messages=chat_messages, tools=normal_tools(tools), stop=stop, max_tokens=max_tokens)


def key_digest(key: str) -> bytes:
    """Irreversible digest of a key, for lookups and records."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
