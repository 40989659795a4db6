"""The calls and answers of a rollout: a tree, and as sequences for training a trunk and a branch for each other end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.records.conversations import Cause
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch
from headway.records.token_block import TokenBlock
from headway.records.tokens import LogprobSequence, TokenIds
from headway.tokens.continuing import SampledAnswer
from headway.tokens.messages import Message


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedTurn:
    """An answer that was sampled."""

    number: int  # in the order of answers
    call: int
    choice: int
    parent: RecordedTurn | None  # the answer its prompt goes on from
    text: str  # its prompt's text behind the parent's prompt, the parent's answer as the template has it included
    context_ids: TokenIds  # its prompt's tokens behind the parent's answer
    answer: SampledAnswer
    logprobs: LogprobSequence
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    own_limit: bool = False  # it was its client that cut it, not the context or a limit of the rollout's
    messages: int  # of the request, and the answer: where it stands in a conversation that goes on
    received: bool = False  # a client got every byte of it: only then do its tokens carry loss
    children: list[RecordedTurn] = field(default_factory=list["RecordedTurn"])

    @property
    def message(self) -> Message:
        return self.answer.message

    @property
    def path(self) -> list[RecordedTurn]:
        """From the first answer to this one."""
        found: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def start(self) -> int:
        """Where the text of its own prompt begins behind those of the answers before it."""
        return sum(len(earlier.text) for earlier in self.path[:-1])

    def read_as_fed(self, text: str) -> int | None:
        """Where it stands in a prompt's ``text``; None when that doesn't begin with its own prompt."""
        at = 0
        for step in self.path:
            if not text.startswith(step.text, at):
                return None
            at += len(step.text)
        return at


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """A call's request in its normal form: messages, or a raw prompt as a text or as token ids."""

    messages: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, Any]] | None = None  # as chat templates take them
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further arguments of the chat template
    prompt: str | tuple[int, ...] | None = None  # in place of messages
    calls: bool = True  # tools given may be called: tool_choice isn't "none"
    choices: int = 1  # n
    max_tokens: int | None = None  # of each response; None: what is left
    stop: tuple[str, ...] = ()
    seed: int | None = None  # the client's: tells its calls apart, never rollouts

    @property
    def param(self) -> str:
        """The field of the APIs that its prompt is in."""
        return "messages" if self.prompt is None else "prompt"


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedCall:
    """A request and what became of it: *open* -> *answered* (`commit`) or *abandoned* (`abandon`), once."""

    number: int
    request: CallRequest
    prompt_ids: TokenIds  # what is to be generated from
    max_tokens: int  # of each choice, at least 1
    purposes: tuple[str, ...]  # of each choice's random numbers: by what is asked, not by when
    cause: Cause
    parent: RecordedTurn | None
    text: str  # of the prompt, behind the parent's
    context_ids: TokenIds  # of the prompt, behind the parent's answer
    keys: list[bytes]  # of the conversation up to each message
    fingerprint: str = ""
    state: Literal["open", "answered", "abandoned"] = "open"
    turns: tuple[RecordedTurn | None, ...] = ()  # by choice; None: its generation failed or gave nothing
    readers: int = 0  # clients that got every byte of its answers

    def forget_question(self) -> None:
        """Its answers are what a retry repeats: the conversation before them needn't be kept with every call."""
        self.request = dataclasses.replace(self.request, messages=(), tools=None, variables={}, prompt=None)
        self.keys = []


def ids_to(turn: RecordedTurn | None) -> TokenIds:
    """The tokens up to the end of this answer."""
    return _ids_of(turn.path if turn is not None else ())


def _ids_of(turns: Sequence[RecordedTurn]) -> TokenIds:
    return TokenIds.joined(ids for turn in turns for ids in (turn.context_ids, turn.answer.ids))


def branches_of(turns: Sequence[RecordedTurn]) -> tuple[Branch, ...]:
    """Return a sequence for each received answer that no other received one continues: the latest call's first, then
    in the order of calls.

    Each answer is learned in the first of them that holds it; it has the same tokens before it in all of them. One that
    no client received is masked where others go on from it, and left out elsewhere.
    """
    kept: set[int] = set()  # those that a received one goes on from
    ends: list[RecordedTurn] = []
    for turn in reversed(turns):  # whoever goes on from an answer has a higher number
        if turn.received and turn.number not in kept:
            ends.append(turn)
        if turn.parent is not None and (turn.received or turn.number in kept):
            kept.add(turn.parent.number)
    if not ends:
        return ()
    trunk = max(ends, key=lambda turn: (turn.call, -turn.choice))
    ends.remove(trunk)
    ends.sort(key=lambda turn: (turn.call, turn.choice))  # not the order they came back in
    learned: set[int] = set()
    branches: list[Branch] = []
    for end in (trunk, *ends):
        path = end.path
        own = [turn for turn in path if turn.number not in learned]  # its answers from some point on
        learned |= {turn.number for turn in own}
        before = path[: len(path) - len(own)]
        branches.append(_branch(before, own))
    return tuple(branches)


def _branch(before: Sequence[RecordedTurn], own: Sequence[RecordedTurn]) -> Branch:
    block, ends = TokenBlock(), list[int]()
    for turn in own:
        if turn is not own[0]:
            ends.append(len(block) + len(turn.context_ids))
            block.append_reply(turn.context_ids)
        block.extend(turn.answer.ids, turn.logprobs, turn.versions, learned=turn.received)
    ends.append(len(block))
    return Branch(
        prompt_ids=TokenIds.joined((_ids_of(before), own[0].context_ids)),
        response_ids=block.ids,
        response_logprobs=block.logprobs,
        response_mask=block.mask,
        versions=block.versions,
        turn_ends=tuple(ends),
        finish_reason="stop" if own[-1].own_limit else own[-1].finish_reason,
    )
