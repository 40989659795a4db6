"""Demonstrations as token ids and a loss mask, exact to the token.

Where the chat template marks the assistant's text (``{% generation %}``), the marks decide. Elsewhere the conversation
is rendered turn by turn: a turn is the part of the whole text beyond the rendering of everything before it with the
generation prompt, which is the prompt a generator would be given. In both cases a turn ends with the first token that
ends a response; the template's line break behind it carries no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from headway.records.errors import ConfigurationError
from headway.tokens.tokenizer import Template, Tokenizer

TrainOn = Literal["assistant", "last_assistant", "all"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]  # first character and the one behind the last


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A training sequence: token ids and their loss mask."""

    ids: list[int]
    learned: list[bool]  # for each id, whether its prediction carries loss; False for the first, which has none


def encode_pair(
    tokenizer: Tokenizer, prompt: str, solution: str, template: Template, train_on: TrainOn
) -> Demonstration | None:
    """Prompt, solution and the end of a response; None when prompt or solution has no token."""
    before, after = list(tokenizer.render(prompt, template)), tokenizer.encode(solution)
    if not before or not after:
        return None
    ids = [*before, *after, tokenizer.eos_id]
    first = 1 if train_on == "all" else len(before)
    return Demonstration(ids=ids, learned=[place >= first for place in range(len(ids))])


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, train_on: TrainOn
) -> Demonstration | None:
    """Encode a conversation by the folder's chat template; None when the assistant's turns are empty.

    Tokens with loss: "assistant": those of all its turns; "last_assistant": those of its last turn, and the rest of the
    conversation is left out; "all": every token. Raises ConfigurationError when there is no template or it fails; when
    the assistant has no turn; when the template closes a turn without a token that ends a response (generation would
    not stop there); and for "assistant" when the template rewrites earlier turns (drops their reasoning, say), so that
    they would be learned in a text that no generator ever sees.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ConfigurationError("no message is the assistant's, so there is nothing to learn")
    if train_on == "all":
        ids = tokenizer.encode(tokenizer.render_messages(messages, tools=tools, add_generation_prompt=False))
        return Demonstration(ids=ids, learned=[place > 0 for place in range(len(ids))])
    used = messages[: turns[-1] + 1]  # messages behind the assistant's last turn teach nothing
    text, marked = tokenizer.render_marked(used, tools=tools)
    wanted = turns if train_on == "assistant" else turns[-1:]
    if not any(used[number].get("content") or used[number].get("tool_calls") for number in wanted):
        return None
    if not marked:
        return _masked(tokenizer, text, [_span_of(tokenizer, used, number, tools, text) for number in wanted])
    if train_on == "last_assistant" and len(turns) > 1:  # a turn may have several marks
        marked = marked[len(tokenizer.render_marked(used[:-1], tools=tools)[1]) :]
    return _masked(tokenizer, text, marked)


def _span_of(tokenizer: Tokenizer, messages: Messages, number: int, tools: Tools, text: str) -> Span:
    """Span of turn ``number`` in ``text``, with its end of turn and the template's text behind it."""
    before = tokenizer.render_messages(messages[:number], tools=tools, add_generation_prompt=True)
    if number == len(messages) - 1:
        until = text
    else:
        # a template may close the conversation, so only what both renderings share is the turn's
        so_far = tokenizer.render_messages(messages[: number + 1], tools=tools, add_generation_prompt=False)
        until = _shared_beginning(text, so_far)
        ends = set(tokenizer.stop_ids) & {*tokenizer.encode(until[len(before) :])}
        if so_far[len(until) :].strip() and not ends:
            raise _rewritten(number)
    if not text.startswith(before) or len(until) <= len(before):
        raise _rewritten(number) if number < len(messages) - 1 else _unprompted(text, before)
    return len(before), len(until)


def _shared_beginning(text: str, other: str) -> str:
    if text.startswith(other):
        return other
    return text[: next(place for place, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)]


def _unprompted(text: str, before: str) -> ConfigurationError:
    agreed = len(_shared_beginning(text, before))
    return ConfigurationError(
        f"the chat template asks for the assistant's turn with {before[max(agreed - 20, 0) :][:60]!r}, "
        f"and renders that turn as {text[max(agreed - 20, 0) :][:60]!r}: what the model would be asked to continue is "
        "not how its turn begins here; a template with {% generation %} marks says what is to be learned"
    )


def _rewritten(number: int) -> ConfigurationError:
    return ConfigurationError(
        f"the chat template renders message {number} (the assistant's) differently once others follow, so a model "
        "would learn what it is never asked to write: valid for such a template: sft.train_on = 'last_assistant' (or "
        "a template with {% generation %} marks)"
    )


def _masked(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Demonstration:
    ids, covers = tokenizer.encode_with_spans(text)
    edges = {edge for span in spans for edge in span}
    if any(start < edge < end for edge in edges for start, end in covers):
        # a token across the border of a turn: a generator's prompt ends at the border, and so must the tokens
        cuts = sorted({0, len(text), *edges})
        pieces = [(start, tokenizer.encode_with_spans(text[start:end])) for start, end in pairwise(cuts)]
        ids = [i for _, (piece, _) in pieces for i in piece]
        covers = [(start + first, start + end) for start, (_, found) in pieces for first, end in found]
    learned = [False] * len(ids)
    for number, span in enumerate(spans):
        last = _learn(tokenizer, ids, covers, learned, span)
        if number == len(spans) - 1 and last is not None and ids[last] not in tokenizer.stop_ids:
            stops, end = ", ".join(repr(tokenizer.token(i)) for i in tokenizer.stop_ids), tokenizer.token(ids[last])
            raise ConfigurationError(
                f"the chat template ends the assistant's turn with {end!r}, and generation stops "
                f"only at {stops}: add the id of the template's end of turn to eos_token_id in generation_config.json, "
                "or end turns with a token that is there"
            )
    learned[0] = False
    return Demonstration(ids=ids, learned=learned)


def _learn(
    tokenizer: Tokenizer, ids: Sequence[int], covers: Sequence[Span], learned: list[bool], span: Span
) -> int | None:
    """Mark the span's tokens up to the first that ends a response, inside it or right behind it. Returns the index of
    the last one marked."""
    start, end = span
    inside = [place for place, (first, last) in enumerate(covers) if start <= first and last <= end and last > start]
    if not inside:
        return None
    behind = inside[-1] + 1
    if behind < len(ids) and ids[behind] in tokenizer.stop_ids:
        inside.append(behind)
    for place in inside:
        learned[place] = True
        if ids[place] in tokenizer.stop_ids:
            return place
    return inside[-1]
