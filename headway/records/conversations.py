"""Records of an agent's calls to a model: requests, sampling parameters, refusals, the recorded conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Branch, Failure, Group, Rollout
from headway.records.tokens import IdSequence

HistoryReasoning = Literal["as_sent", "restore"]  # of an answer that a client sends back without its reasoning
# Of tool calls. auto: as the chat template writes them.
_Format = Literal["hermes", "llama_json", "qwen_xml", "glm", "minimax", "deepseek", "kimi", "mistral", "gpt_oss"]
ToolFormat = Literal["auto", _Format, "gemma", "python", "none"]
# The point of the recorded conversation at which a call's prompt continues: none; the end of an answer; a point from
# which another call has continued already (another conversation, or edited messages); a prompt that was answered
# before; or an earlier point than its messages have, because the chat template renders an answer otherwise.
Cause = Literal["start", "continued", "branched", "sibling", "rewritten"]
Refusal = Literal[
    "invalid_request_error",
    "context_length_exceeded",
    "thread_unsupported_request",
    "rollout_limit_exceeded",
    "rollout_busy",
    "rollout_closed",
    "reward_refused",
]  # rollout_busy may pass: its caller waits and tries again
OnTokens = Callable[[PartialResponse], None]  # of all tokens of a response so far


class RequestRefused(Exception):
    """A request is refused, and its caller has to fix it. ``code`` and ``param`` (the field) are those of the API."""

    def __init__(self, message: str, *, param: str | None = None, code: Refusal = "invalid_request_error") -> None:
        super().__init__(message)
        self.param = param
        self.code: Refusal = code


class ClientSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that a client requests; None: not given. A run's rollouts use the experiment's instead:
    greedy or truncated answers couldn't be trained on."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    further: dict[str, Any] | None = None  # other servers' ways of sampling, by name: penalties, min_p, ...
    strict_tools: bool | None = None  # arguments of calls match their tools' schemas, where answers aren't constrained


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one answer of a conversation: prompt, limits and client sampling."""

    prompt_ids: IdSequence  # of everything before it
    max_tokens: int
    stop: tuple[str, ...] = ()  # strings that end it
    purpose: str  # of its random numbers; no other answer of its rollout has the same
    client: ClientSampling = ClientSampling()
    grammar: str = ""  # as in SamplingParameters
    adapter: str = ""  # as in GenerationRequest
    rows_known: int = 0  # as in GenerationRequest


class SampleTurn(Protocol):
    """The call by which a conversation reaches the generator."""

    def __call__(self, request: TurnRequest, on_tokens: OnTokens, /) -> Awaitable[GenerationResult]:
        """Sample ``request``. ``on_tokens`` is called with its tokens meanwhile; the first call has none and means that
        the request won't be refused any more. A failure is a result with finish_reason "error"; cancelling this call
        ends the request in the engine. Raises Overloaded where the request is refused for now."""
        ...


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, as in OpenAI's chat API."""

    message: dict[str, Any]
    cut: bool  # at a limit of tokens


class OpenConversation(Protocol):
    """A rollout that takes model calls."""

    @property
    def key(self) -> str:
        """The API key that names it."""
        ...

    @property
    def reward_key(self) -> str:
        """The only key that posts its reward."""
        ...

    @property
    def answered(self) -> bool:
        """Whether a client has received an answer."""
        ...

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """Answer a call from this process: the whole conversation and its tools, as in OpenAI's chat API. Raises
        RequestRefused, and any other error of a call."""
        ...

    def replay(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        result: GenerationResult,
        *,
        stop: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """Record a call to `ask` that ``result`` answered, in this process or an earlier one. Raises as `ask`."""
        ...

    def seal(self) -> RecordedConversation:
        """Return what was recorded. From now on its key takes no calls; open calls end."""
        ...


class Conversations(Protocol):
    """The server where rollouts take calls: one address, and a key for each rollout."""

    @property
    def address(self) -> str:
        """The server's address, say http://127.0.0.1:8000; the API is below it, at /v1."""
        ...

    def open(self, rollout: str, sample: SampleTurn, *, constraints: bool) -> OpenConversation:
        """Take calls for the rollout of this name, until it is sealed. ``constraints``: its answers may be constrained
        by grammars."""
        ...


class RecordedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """All answered calls of one rollout, token-exact.

    Invariant: every sampled token of an answered call stands in the response of exactly one branch, its mask True.

    Example, an answer a1 that was continued by a2 and, later, a second attempt b at a1's own prompt: the trunk ends in
    b, the latest call; the other branch has a1 and a2.
    """

    branches: tuple[Branch, ...] = ()  # the one with the latest answered call first; (): no call was answered
    turns: int = 0  # answers sampled, those of one call counted one by one
    calls: int = 0  # answered ones
    abandoned_calls: int = 0  # whose caller left or whose generation failed: they have no loss
    abandoned_tokens: int = 0  # sampled for those
    causes: dict[str, int] = {}  # Cause -> answered calls that began so
    cut: bool = False  # its last request was refused for the context's or the rollout's limit of tokens or calls
    first_token_s: float = 0.0  # clock at the first sampled token; 0: unknown
    resumes: int = 0  # how often its generations were moved off a dead engine
    reprefills: int = 0  # how often their KV was recomputed
    reward: float | None = None  # posted for it; None: none was
    solved: bool = False  # posted with the reward


def rollout_from(
    conversation: RecordedConversation, group: Group, member: int, now: float, failure: Failure | None = None
) -> Rollout:
    """Make the unverified rollout of ``conversation``, ended at ``now`` (clock seconds). Without any answered call it
    fails at the boundary "environment" unless ``failure`` says why; a conversation that was cut counts as truncated.
    With a posted reward it is verified."""
    base_rollout = Rollout(
        group=group.index,
        member=member,
        prompt_ids=group.prompt_ids,
        failure=failure,
        calls=conversation.calls,
        abandoned_tokens=conversation.abandoned_tokens,
        opened_s=group.admitted_s,
        generated_s=now,
    )
    if not conversation.branches:
        reason = "the agent made no call that was answered"
        failure = failure or Failure(boundary="environment", cause=reason, infrastructure=False)
        return msgspec.structs.replace(base_rollout, finish_reason="error", failure=failure, finished_s=now)
    trunk, *other_branches = conversation.branches
    is_rewarded = conversation.reward is not None and failure is None
    return msgspec.structs.replace(
        base_rollout,
        prompt_ids=trunk.prompt_ids,
        response_ids=trunk.response_ids,
        response_logprobs=trunk.response_logprobs,
        response_mask=trunk.response_mask,
        versions=trunk.versions,
        token_rows=trunk.token_rows,
        grammars=trunk.grammars,
        observations=trunk.observations,
        turn_ends=trunk.turn_ends,
        finish_reason="error" if failure is not None else "length" if conversation.cut else trunk.finish_reason,
        branches=tuple(other_branches),
        turns=conversation.turns,
        rewritten=conversation.causes.get("rewritten", 0),
        first_token_s=conversation.first_token_s,
        finished_s=0.0 if failure is None and not is_rewarded else now,
        reward=conversation.reward if conversation.reward is not None and is_rewarded else 0.0,
        solved=conversation.solved and is_rewarded,
        resumes=conversation.resumes,
        reprefills=conversation.reprefills,
    )
