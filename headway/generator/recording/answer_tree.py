"""The answers of a rollout: a tree, and as sequences for training a trunk and a branch for every other end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.records.generation import VersionSpan
from headway.records.rollout import Branch
from headway.records.token_block import TokenBlock
from headway.records.tokens import LogprobSequence, TokenIds
from headway.tokens.continuing import SampledAnswer
from headway.tokens.messages import Message


@dataclass(eq=False, kw_only=True, slots=True)
class Turn:
    """An answer that was sampled and handed out."""

    number: int  # in the order of answers
    call: int
    choice: int
    parent: Turn | None  # the answer its prompt goes on from
    text: str  # its prompt's text behind the parent's prompt, the parent's answer as the template has it included
    context_ids: TokenIds  # its prompt's tokens behind the parent's answer
    answer: SampledAnswer
    logprobs: LogprobSequence
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    own_limit: bool = False  # it was its client that cut it, not the context or a limit of the rollout's
    messages: int  # of the request, and the answer: where it stands in a conversation that goes on
    children: list[Turn] = field(default_factory=list["Turn"])

    @property
    def message(self) -> Message:
        return self.answer.message

    @property
    def path(self) -> list[Turn]:
        """From the first answer to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
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


def ids_to(turn: Turn | None) -> TokenIds:
    """The tokens up to the end of this answer."""
    return _ids_of(turn.path if turn is not None else ())


def _ids_of(turns: Sequence[Turn]) -> TokenIds:
    return TokenIds.joined(ids for turn in turns for ids in (turn.context_ids, turn.answer.ids))


def branches_of(turns: Sequence[Turn]) -> tuple[Branch, ...]:
    """One sequence for every answer that nothing goes on from: that of the latest call, then in the order of calls.

    Each answer is learned in the first of them that holds it; it has the same tokens before it in all of them.
    """
    ends = [turn for turn in turns if not turn.children]
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


def _branch(before: Sequence[Turn], own: Sequence[Turn]) -> Branch:
    block, ends = TokenBlock(), list[int]()
    for turn in own:
        if turn is not own[0]:
            ends.append(len(block) + len(turn.context_ids))
            block.append_reply(turn.context_ids)
        block.extend(turn.answer.ids, turn.logprobs, turn.versions)
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
