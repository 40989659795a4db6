"""The calls and answers of a rollout as a tree, and its training sequences: a trunk and further branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.records.conversations import Cause
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch
from headway.records.token_block import TokenBlock
from headway.records.tokens import LogprobSequence, TokenIds, TokenRows
from headway.tokens.continuation import SampledAnswer
from headway.tokens.messages import Message, assistant_message


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedTurn:
    """A sampled answer, a node of the tree."""

    number: int  # in the order of answers
    call: int
    choice: int
    parent: RecordedTurn | None  # the answer that its prompt continues
    text: str  # its prompt's text after the parent's prompt; begins with the parent's answer as the template writes it
    context_ids: TokenIds  # its prompt's tokens after the parent's answer
    answer: SampledAnswer
    logprobs: LogprobSequence
    versions: tuple[VersionSpan, ...]
    token_rows: Mapping[str, TokenRows] = field(
        default_factory=dict[str, TokenRows]
    )  # of the tokens behind those that its parents have rows for
    grammar: str = ""  # the grammar that constrained it
    finish_reason: Literal["stop", "length"]
    own_limit: bool = False  # cut by the client's max_tokens, not by the context or a limit of the rollout
    begun: Message | None = None  # the beginning of the answer that its request gave, which carries no loss
    messages: int  # in the request and the answer: its place in a conversation that continues it
    observations: tuple[tuple[int, int], ...] = ()  # runs [first, behind) of context_ids that a tool's answer became
    adapter: str = ""  # the adapter that sampled it
    received: bool = False  # a client got every byte: only then its tokens carry loss
    children: list[RecordedTurn] = field(default_factory=list["RecordedTurn"])

    @property
    def message(self) -> Message:
        return self.answer.message

    @property
    def sent(self) -> Message:
        """The message as a client sends it back, with the beginning that its own request gave."""
        begun_message, message = self.begun, self.message
        if begun_message is None:
            return message
        reasoning = begun_message.reasoning or message.reasoning
        return assistant_message(begun_message.content + message.content, reasoning, message.calls, message.name)

    @property
    def path(self) -> list[RecordedTurn]:
        """Answers from the first to this one."""
        turns: list[RecordedTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def start(self) -> int:
        """Character offset of ``text`` in the whole prompt."""
        return sum(len(earlier.text) for earlier in self.path[:-1])

    def read_as_fed(self, text: str) -> int | None:
        """Character offset of this answer in a prompt's ``text``; None unless that begins with the answer's prompt."""
        offset = 0
        for turn in self.path:
            if not text.startswith(turn.text, offset):
                return None
            offset += len(turn.text)
        return offset


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRequest:
    """A call's request in its normal form: messages, or a raw prompt as a text or as token ids."""

    messages: tuple[Message, ...] = ()
    tools: Sequence[Mapping[str, Any]] | None = None  # as chat templates take them
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further arguments of the chat template
    prompt: str | tuple[int, ...] | None = None  # in place of messages
    continues: bool = False  # the last message, the assistant's, is the beginning of the answer
    calls: bool = True  # tools may be called: tool_choice isn't "none"
    choices: int = 1  # n
    max_tokens: int | None = None  # of each response; None: as many as are left
    stop: tuple[str, ...] = ()
    grammar: str = ""  # as in SamplingParameters
    seed: int | None = None  # the client's; distinguishes calls of one rollout only
    adapter: str = ""  # the adapter that answers; "": the served model
    answers: bool = True  # False: its prompt is only scored, and the engine checks length and ids

    @property
    def param(self) -> str:
        """Name of the API field with the prompt."""
        return "messages" if self.prompt is None else "prompt"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """The position of a request in the tree: the answer that it continues, and its prompt after that."""

    parent: RecordedTurn | None
    text: str  # of the prompt, after the parent's
    context_ids: TokenIds  # of the prompt, after the parent's answer
    cause: Cause
    keys: list[bytes]  # keys of the conversation up to each message
    observations: tuple[tuple[int, int], ...] = ()  # as of `RecordedTurn`


@dataclass(eq=False, kw_only=True, slots=True)
class RecordedCall:
    """A call and its outcome: *open* -> *answered* (`commit`) or *abandoned* (`abandon`), once."""

    number: int
    request: CallRequest
    planned: CallPlan
    prompt_ids: TokenIds  # the whole prompt
    max_tokens: int  # of each choice, at least 1
    purposes: tuple[str, ...]  # keys of each choice's random numbers, independent of time
    fingerprint: str = ""
    state: Literal["open", "answered", "abandoned"] = "open"
    turns: tuple[RecordedTurn | None, ...] = ()  # by choice; None: generation failed or gave no token
    readers: int = 0  # clients that got every byte of its answers

    def forget_question(self) -> None:
        """Drop the request's conversation of an answered call: a retry needs only the answers."""
        self.request = dataclasses.replace(self.request, messages=(), tools=None, variables={}, prompt=None)
        self.planned = dataclasses.replace(self.planned, keys=[])


def rows_known(turn: RecordedTurn | None) -> int:
    """Count the leading tokens of the path to this answer that have rows of every kind."""
    return sum(_new_rows(earlier) for earlier in turn.path) if turn is not None else 0


def _new_rows(turn: RecordedTurn) -> int:
    return min(map(len, turn.token_rows.values()), default=0)


def ids_to(turn: RecordedTurn | None) -> TokenIds:
    """Token ids from the first prompt to the end of this answer; empty for None."""
    return _ids_of(turn.path if turn is not None else ())


def _ids_of(turns: Sequence[RecordedTurn]) -> TokenIds:
    return TokenIds.joined(ids for turn in turns for ids in (turn.context_ids, turn.answer.ids))


def branches_of(turns: Sequence[RecordedTurn]) -> tuple[Branch, ...]:
    """Turn the tree into training sequences: one for every received answer that no received answer continues. The
    latest call's (the trunk) comes first, then the others in the order of calls.

    Each answer carries loss in the first sequence that contains it; the tokens before it are the same in all of them.
    An answer that no client received is masked where others continue it, and left out elsewhere.
    """
    continued_numbers: set[int] = set()  # numbers of answers that a received one continues
    end_turns: list[RecordedTurn] = []
    for turn in reversed(turns):  # children have higher numbers than their parents
        if turn.received and turn.number not in continued_numbers:
            end_turns.append(turn)
        if turn.parent is not None and (turn.received or turn.number in continued_numbers):
            continued_numbers.add(turn.parent.number)
    if not end_turns:
        return ()
    trunk = max(end_turns, key=lambda turn: (turn.call, -turn.choice))
    end_turns.remove(trunk)
    end_turns.sort(key=lambda turn: (turn.call, turn.choice))  # turns are in order of completion
    loss_numbers: set[int] = set()
    branches: list[Branch] = []
    for end_turn in (trunk, *end_turns):
        path = end_turn.path
        loss_turns = [turn for turn in path if turn.number not in loss_numbers]  # the path's answers from some point on
        loss_numbers |= {turn.number for turn in loss_turns}
        prefix_turns = path[: len(path) - len(loss_turns)]
        branches.append(_branch(prefix_turns, loss_turns))
    return tuple(branches)


def _branch(prefix_turns: Sequence[RecordedTurn], loss_turns: Sequence[RecordedTurn]) -> Branch:
    token_block, turn_ends, known_rows = TokenBlock(), list[int](), 0
    runs_by_grammar: dict[str, tuple[tuple[int, int], ...]] = {}
    observations = list[tuple[int, int]]()
    for turn in (*prefix_turns, *loss_turns):
        token_block.append_rows(turn.token_rows, known_rows)
        known_rows += _new_rows(turn)
    for turn in loss_turns:
        if turn is not loss_turns[0]:
            turn_ends.append(len(token_block) + len(turn.context_ids))
            observations += [(len(token_block) + first, len(token_block) + stop) for first, stop in turn.observations]
            token_block.append_reply(turn.context_ids)
        if turn.grammar:
            token_run = (len(token_block), len(token_block) + len(turn.answer.ids))
            runs_by_grammar[turn.grammar] = (*runs_by_grammar.get(turn.grammar, ()), token_run)
        token_block.extend(turn.answer.ids, turn.logprobs, turn.versions, learned=turn.received)
    turn_ends.append(len(token_block))
    return Branch(
        prompt_ids=TokenIds.joined((_ids_of(prefix_turns), loss_turns[0].context_ids)),
        response_ids=token_block.ids,
        response_logprobs=token_block.logprobs,
        response_mask=token_block.mask,
        versions=token_block.versions,
        token_rows=token_block.token_rows,
        grammars=runs_by_grammar,
        observations=tuple(observations),
        turn_ends=tuple(turn_ends),
        finish_reason="stop" if loss_turns[-1].own_limit else loss_turns[-1].finish_reason,
    )
