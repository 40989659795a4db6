"""Rollouts, their rewards and their groups."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import msgspec

from headway.records.generation import FinishReason, PartialResponse, VersionSpan
from headway.records.task import Task
from headway.records.tokens import (
    IdSequence,
    LogprobSequence,
    MaskSequence,
    TokenIds,
    TokenLogprobs,
    TokenMask,
    TokenRows,
)

Boundary = Literal["model", "environment", "sandbox", "reward", "engine"]
BOUNDARIES: tuple[Boundary, ...] = ("model", "environment", "sandbox", "reward", "engine")
Ending = Literal["trained", "filtered", "pruned", "discarded", "overdue", "failed"]
ENDINGS: tuple[Ending, ...] = ("trained", "filtered", "pruned", "discarded", "overdue", "failed")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why something failed, recorded once, at the boundary where it was caught."""

    boundary: Boundary
    cause: str  # one line a person can act on
    infrastructure: bool  # true: retry, and never a reward of 0; false: the policy's own doing
    detail: str = ""  # traceback or output
    raised_at: str = ""  # in the user's code that raised: "coins.py:31 in reply"; the cause has it too


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verifier's result for one response."""

    reward: float  # finite
    solved: bool  # counts towards the solve rate
    turn_rewards: tuple[float, ...] = ()  # of each turn, where the verifier distinguishes them
    detail: dict[str, Any] = {}
    verify_s: float = 0.0
    judge_tokens: int = 0  # of a language model that judged it, prompts included
    judge_cost: float = 0.0  # of the same, in the currency of its price
    failure: Failure | None = None  # set: the reward is not valid


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """Why a pruner ended a rollout early, or would have: an audited one runs to its own end all the same."""

    pruner: str  # its name in the experiment file
    reason: str  # one line: what it saw
    at_tokens: int  # response tokens when it decided
    saved_tokens: float = 0.0  # response tokens it is expected to have saved; 0 in an audit
    audited: bool = False  # it ran to its own end, to measure what pruning does
    cut_reward: float | None = None  # audited: the reward pruning would have given; None: it would have left its group


class TeacherMark(msgspec.Struct, frozen=True, kw_only=True):
    """Which teacher scored a rollout, and what that cost."""

    name: str  # of [teachers.NAME]
    identity: str  # digest of its model's name and of its log-probabilities of a probe
    tokens: int = 0  # that it read, retries included
    cost: float = 0.0  # in the currency of its price
    score_s: float = 0.0  # waits included


ConstrainedRuns = dict[str, tuple[tuple[int, int], ...]]
"""Texts of grammars, each with the runs [first, behind) of response tokens that it constrained. A run is an answer,
from its first token on."""


class CallTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """When a rollout's model call ran, in seconds of the run's clock."""

    start_s: float  # it was asked for
    first_token_s: float  # 0: there was none
    end_s: float
    tokens: int  # of the answer


class ToolTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """When a tool that a rollout called ran, or else its environment's reply, in seconds of the run's clock."""

    name: str  # "begin", "reply": of the environment, where it called no tool; "": there is no tool of the name called
    start_s: float
    end_s: float
    error: bool  # the model got an error, or the rollout failed


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A further sequence of a rollout whose model calls don't all extend one another.

    A sampled token has one context, so its loss is taken in one branch; for those that share its answer it is part of
    ``prompt_ids``. Invariant: as of a rollout's own response. The first response token is sampled.
    """

    prompt_ids: IdSequence  # everything before the first token that is this branch's own
    response_ids: IdSequence
    response_logprobs: LogprobSequence
    response_mask: MaskSequence
    versions: tuple[VersionSpan, ...]
    turn_ends: tuple[int, ...] = ()  # response tokens up to the end of each turn
    finish_reason: FinishReason = "stop"  # of its last call; a client's own limit of tokens is no "length"
    token_rows: dict[str, TokenRows] = {}  # by kind, of the tokens from the prompt's first on
    grammars: ConstrainedRuns = {}  # which of its tokens were sampled by a grammar
    observations: tuple[
        tuple[int, int], ...
    ] = ()  # runs [first, behind) of response tokens that a tool's answer became


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt at a task, token-exact.

    Lifecycle: *open* (admitted, generating, parked, verifying) -> *finished* (this record is committed
    to the buffer) -> *ended* exactly once (trained, filtered, pruned, discarded, overdue, failed).

    A member may leave its group when the group finishes, before any advantage is computed: ``failure`` says that it
    failed, ``removal`` that it was filtered, pruned or discarded. Only the others are *valid*.

    Invariant: len(response_ids) == len(response_logprobs) == len(response_mask) == sum of span tokens.
    Masked tokens (an environment's replies) carry log-probability 0.0 and the version of the token before.

    Where model calls don't all extend one another, the fields of the response are those of the trunk, which ends with
    the latest call, and ``branches`` holds the others. All share its reward, its advantage and its weight in the loss.

    Example: prompt "1+2=", response "3<eos>" sampled while version 4 was replaced by version 5:
    ``response_ids=(20, 1), response_mask=(True, True), versions=(VersionSpan(version=4, tokens=1),
    VersionSpan(version=5, tokens=1))``: trajectory version 4, and at step 6 its staleness is 2.
    """

    group: int  # admission index of its group, unique in the run
    member: int  # 0 .. group size - 1
    prompt_ids: IdSequence
    response_ids: IdSequence = TokenIds()
    response_logprobs: LogprobSequence = TokenLogprobs()
    response_mask: MaskSequence = TokenMask()  # True: sampled by the policy, may carry loss
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "stop"
    reward: float = 0.0  # the verifier's; valid only when failure is None
    trained_reward: float | None = None  # what advantages are computed from, after hooks; None: the reward, shaped
    turn_ends: tuple[int, ...] = ()  # response tokens up to the end of each turn, where turns have rewards
    turn_rewards: tuple[float, ...] = ()  # of each turn
    solved: bool = False
    verdict: dict[str, Any] = {}  # the verifier's further fields (JSON types)
    failure: Failure | None = None
    removal: Literal["filtered", "pruned", "discarded"] | None = None  # how it left its group before training
    removal_reason: str = ""
    pruned: Pruned | None = None  # ended early by a pruner, or audited; whether it left the group is in ``removal``
    opened_s: float = 0.0  # clock at admission
    first_token_s: float = 0.0  # clock at its first token
    generated_s: float = 0.0  # clock at its last token
    finished_s: float = 0.0  # clock when verified
    verify_s: float = 0.0  # time inside the verifier
    judge_tokens: int = 0  # of a language model that judged it, prompts included
    judge_cost: float = 0.0  # of the same, in the currency of its price
    teacher: TeacherMark | None = None  # that scored its tokens (rows TEACHER); None: none has
    copies: int = 1  # how often it stands in a padded batch; each copy has that part of its weight
    resumes: int = 0  # how often it was parked and resumed, or moved off a dead engine
    reprefills: int = 0  # how often its KV was recomputed
    turns: int = 1
    attempts: int = 1  # how often it was started: earlier ones failed as infrastructure, and left nothing in it
    environment_s: float = 0.0  # after its turns: tools, and what it waited for its sandbox
    environment_hop_s: float = 0.0  # ... of that, on the way to its environment's worker and back
    environment_version: int = -1  # of the oldest turn whose effect its environment held when it was resumed; -1: none
    branches: tuple[Branch, ...] = ()  # sequences beside the trunk
    calls: int = 0  # of a recorded conversation: model calls that were answered
    abandoned_tokens: int = 0  # sampled for calls that weren't answered: no loss
    rewritten: int = 0  # calls that began a branch because the chat template renders an answer otherwise than sampled
    call_times: tuple[CallTimes, ...] = ()  # of its model calls that this process made, also those without an answer
    tool_times: tuple[ToolTimes, ...] = ()  # of its environment's calls of tools, and its replies without any
    token_rows: dict[str, TokenRows] = {}  # by kind, of the tokens from the prompt's first on
    grammars: ConstrainedRuns = {}  # which of its tokens were sampled by a grammar
    observations: tuple[
        tuple[int, int], ...
    ] = ()  # runs [first, behind) of response tokens that a tool's answer became

    @property
    def rollout_id(self) -> str:
        return f"{self.group}-{self.member}"

    @property
    def response(self) -> PartialResponse:
        """Its one call's tokens and their rows, as the call would be continued."""
        return PartialResponse(
            ids=self.response_ids,
            logprobs=self.response_logprobs,
            versions=self.versions,
            token_rows=self.token_rows,
        )

    @property
    def valid(self) -> bool:
        """Whether it takes part in its group: verified, neither failed nor filtered, pruned or discarded."""
        return self.failure is None and self.removal is None

    @property
    def ended(self) -> tuple[Ending, str] | None:
        """(ending, reason) of a rollout that leaves its group as the group finishes; None for a valid one."""
        if self.failure is not None:
            return "failed", self.failure.boundary
        return None if self.removal is None else (self.removal, self.removal_reason)

    @property
    def first_version(self) -> int:
        """Version of the first sampled token, the oldest over its branches (-1 when there is none): trajectory
        staleness counts from it."""
        if not self.branches:
            return self.versions[0].version if self.versions else -1
        return min((s.versions[0].version for s in self.sequences if s.versions), default=-1)

    @property
    def last_version(self) -> int:
        if not self.branches:
            return self.versions[-1].version if self.versions else -1
        return max((s.versions[-1].version for s in self.sequences if s.versions), default=-1)

    @property
    def sequences(self) -> tuple[Rollout | Branch, ...]:
        """The trunk (the rollout itself) and its branches: the sequences that a model reads."""
        return (self, *self.branches)

    @property
    def judged_ids(self) -> IdSequence:
        """Response tokens that a verifier reads: all of them; of a recorded conversation the last answer's."""
        if not self.calls or False not in self.response_mask:
            return self.response_ids
        return self.response_ids[len(self.response_mask) - list(self.response_mask)[::-1].index(False) :]

    @property
    def response_tokens(self) -> int:
        """Tokens of the responses of all sequences: each sampled token once, and the messages between the turns."""
        tokens = len(self.response_ids)
        return tokens + sum(len(branch.response_ids) for branch in self.branches) if self.branches else tokens

    @property
    def all_tokens(self) -> int:
        """Tokens of all sequences, prompts included: the trainer's input."""
        return self.response_tokens + sum(len(s.prompt_ids) for s in self.sequences)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The G rollouts of one task: the unit of admission, batches and credit.

    Lifecycle: *open* -> (*running* <-> *parked*) -> *buffered* (all members finished and committed)
    -> *ended*. ``index`` is the order of admission and never reused, also across restarts.
    """

    index: int
    task: Task
    prompt_ids: IdSequence
    size: int
    admitted_version: int  # lowest version applied by any live replica that took requests at admission
    admitted_s: float


class FinishedGroup(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # dict: of the cached properties
    """A group whose members have all finished."""

    group: Group
    rollouts: tuple[Rollout, ...]  # valid ones and those that left, by member

    @cached_property
    def valid(self) -> tuple[Rollout, ...]:
        """The rollouts that may be trained: neither failed nor filtered, pruned or discarded."""
        return tuple([r for r in self.rollouts if r.valid])

    @cached_property
    def first_version(self) -> int:
        """Oldest first-token version of its members; the budget is checked against it."""
        versions = [version for version in [r.first_version for r in self.rollouts] if version >= 0]
        return min(versions) if versions else self.group.admitted_version


class LoggedDemonstrations(msgspec.Struct, frozen=True, kw_only=True):
    """The demonstrations of a batch as its log names them."""

    rows: tuple[int, ...]  # numbers among those that can be drawn, in the order of training
    digest: str  # of all of them


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one training step, or of its next part, committed to the batch log before they are trained on."""

    step: int  # trainer version before the step
    groups: tuple[int, ...]  # admission indices, ascending (the order of training)
    demonstrations: LoggedDemonstrations | None = None  # trained beside the groups; None: none are


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with its advantage: the unit the trainer consumes, its branches included."""

    rollout: Rollout
    advantage: float  # of every token; with turn_advantages their mean over its tokens
    turn_advantages: tuple[float, ...] = ()  # of the tokens of each turn (``rollout.turn_ends``); (): the same for all
    weight: float = 1.0  # part of its loss that counts here: 1 / copies
    rule: int = 0  # number of its source's rule (`config.objective.rules.Rules`): losses and their coefficients
    imitates: bool = False  # what tools answered carries cross-entropy (its runs ``observations``)
    rewards: tuple[float, ...] = ()  # one, or of each turn: a critic makes advantages of them; (): there is no critic
    bootstraps: bool = False  # it was cut, and the critic's value stands for what is missing behind its end
