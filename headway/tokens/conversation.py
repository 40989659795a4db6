"""Demonstrations as token ids and a loss mask, exact to the token.

Where the chat template marks the assistant's text (``{% generation %}``), the marks decide. Elsewhere the conversation
is rendered turn by turn: a turn is the part of the whole text beyond the rendering of everything before it with the
generation prompt, which is the prompt a generator would be given. In both cases a turn ends with the first token that
ends a response; the template's line break behind it carries no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from headway.records.errors import ConfigurationError
from headway.tokens.chat_template import LOSS, PROBE, reasoning_of
from headway.tokens.messages import shared_beginning
from headway.tokens.tokenizer import Template, Tokenizer
from headway.tokens.trace import require_rendered

TrainOn = Literal["assistant", "last_assistant", "all"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]  # first character and the one behind the last


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A training sequence: token ids and their loss mask."""

    ids: list[int]
    learned: list[bool]  # for each id, whether its prediction carries loss; False for the first, which has none
    empty_turns: int = 0  # turns of the assistant without a text or a call, which aren't learned
    dropped: frozenset[str] = frozenset()  # what the template drops by design


def encode_pair(
    tokenizer: Tokenizer, prompt: str, solution: str, template: Template, train_on: TrainOn
) -> Demonstration | None:
    """Prompt, solution and the end of a response, as a task's prompt and an answer to it are; None when prompt or
    solution has no token. Raises as `encode_conversation` where the pair is one (``template`` = "chat")."""
    if template == "chat":
        return _encode_chat_pair(tokenizer, prompt, solution, train_on) if prompt and solution else None
    before = list(tokenizer.render(prompt, template))
    after = tokenizer.encode_behind(before[-1], solution) if before else []
    if not set(after) - {*tokenizer.stop_ids}:
        return None
    ids = [*before, *after] + ([] if after[-1] in tokenizer.stop_ids else [tokenizer.eos_id])
    first = 1 if train_on == "all" else len(before)
    return Demonstration(ids=ids, learned=[place >= first for place in range(len(ids))])


def _encode_chat_pair(tokenizer: Tokenizer, prompt: str, solution: str, train_on: TrainOn) -> Demonstration | None:
    asked, said = {"role": "user", "content": prompt}, {"role": "assistant", "content": solution}
    try:
        return encode_conversation(tokenizer, [asked, said], None, train_on)
    except ConfigurationError:
        before = tokenizer.render_messages([asked])
        if not before.rstrip().endswith("<think>") or "</think>" not in solution:
            raise
    # reasoning that the prompt begins and the template doesn't keep: it is learned as it would be sampled
    said["content"] = PROBE
    end = tokenizer.render_messages([asked, said], add_generation_prompt=False).rpartition(PROBE)[2].rstrip()
    body = _without_end(tokenizer, solution).lstrip().removeprefix("<think>").lstrip("\n")
    start = 0 if train_on == "all" else len(before)
    return _masked(tokenizer, before + body + end, [(start, len(before + body + end))])


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, train_on: TrainOn
) -> Demonstration | None:
    """Encode a conversation by the folder's chat template; None when the assistant's turns are empty.

    Tokens with loss: "assistant": those of all its turns; "last_assistant": those of its last turn, and the rest of the
    conversation is left out; "all": every token; of these not those of an empty turn, nor of a message that says so
    (``weight``, ``loss`` or ``trainable``). Raises ConfigurationError when there is no template or it fails; when the
    assistant has no turn; when the template drops a text (`require_rendered`) or closes a turn without a token that
    ends a response (generation would not stop there); and for "assistant" when the template rewrites earlier turns
    (drops their reasoning, say), so that they would be learned in a text that no generator ever sees.
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ConfigurationError("no message is the assistant's, so there is nothing to learn")
    chosen = {"assistant": turns, "last_assistant": turns[-1:], "all": [*range(len(messages))]}[train_on]
    wanted = [number for number in chosen if _weighs(messages[number], number, True)]
    for number in {*range(len(messages))} - {*chosen, *turns}:
        if _weighs(messages[number], number, False):
            what = "valid: the assistant's messages, or any with sft.train_on = 'all'"
            raise ConfigurationError(f"messages[{number}] (role {messages[number]['role']!r}) is to be learned: {what}")
    empty = [number for number in wanted if number in turns and not _says_something(messages[number])]
    wanted = [number for number in wanted if number not in empty]
    learned = [number for number in wanted if number in turns]
    if not learned:
        return None
    # messages behind the last turn that is learned teach nothing
    used = [_ended(tokenizer, one) for one in (messages if train_on == "all" else messages[: wanted[-1] + 1])]
    text, spans = tokenizer.render_marked(used, tools=tools)

    def marks(count: int) -> int:
        """Number of marks in the first messages: a turn may have several."""
        return len(tokenizer.render_marked(used[:count], tools=tools)[1]) if count else 0

    if train_on == "all":
        left_out = [number for number in chosen if number not in wanted]
        made = _masked_but(tokenizer, text, [_span_of(tokenizer, used, number, tools, text) for number in left_out])
    else:
        if not spans:
            spans = [_span_of(tokenizer, used, number, tools, text) for number in wanted]
        elif {number for number in turns if number < len(used)} - {*wanted}:
            spans = [span for number in wanted for span in spans[marks(number) : marks(number + 1)]]
        made = _masked(tokenizer, text, spans, calls=bool(used[-1].get("tool_calls")))
    dropped = require_rendered(tokenizer, used, tools, learned)
    return replace(made, empty_turns=len(empty), dropped=frozenset(dropped))


def _weighs(message: Mapping[str, Any], number: int, default: bool) -> bool:
    """Whether a message says that it is learned. Raises ConfigurationError for a weight that is neither 0 nor 1."""
    given = {key: message[key] for key in LOSS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ConfigurationError(f"messages[{number}].{key} = {value!r}: valid: true, false, 1, 0")
    if len({bool(value) for value in given.values()}) > 1:
        raise ConfigurationError(f"messages[{number}]: {given} contradict each other")
    return bool(next(iter(given.values()), default))


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else content
    return bool(content or message.get("tool_calls") or reasoning_of(message))


def _without_end(tokenizer: Tokenizer, text: str) -> str:
    """An answer without tokens at its end that end a response, which the template writes."""
    ends = tuple(filter(None, map(tokenizer.token, tokenizer.stop_ids)))
    while (end := next(filter(text.endswith, ends), None)) is not None:
        text = text.removesuffix(end)
    return text


def _ended(tokenizer: Tokenizer, message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _without_end(tokenizer, content)}


def _span_of(tokenizer: Tokenizer, messages: Messages, number: int, tools: Tools, text: str) -> Span:
    """Span of turn ``number`` in ``text``, with its end of turn and the template's text behind it."""
    prompts = messages[number]["role"] == "assistant"
    before = ""
    if number or prompts:
        before = tokenizer.render_messages(messages[:number], tools=tools, add_generation_prompt=prompts)
    before = before if prompts else shared_beginning(text, before)
    if number == len(messages) - 1:
        until = text
    else:
        # a template may close the conversation, so only what both renderings share is the turn's
        so_far = tokenizer.render_messages(messages[: number + 1], tools=tools, add_generation_prompt=False)
        until = shared_beginning(text, so_far)
        ends = set(tokenizer.stop_ids) & {*tokenizer.encode(until[len(before) :])}
        if so_far[len(until) :].strip() and not ends:
            raise _rewritten(number)
    if not text.startswith(before) or len(until) <= len(before):
        raise _rewritten(number) if number < len(messages) - 1 else _unprompted(text, before)
    return len(before), len(until)


def _unprompted(text: str, before: str) -> ConfigurationError:
    agreed = len(shared_beginning(text, before))
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


def _masked(tokenizer: Tokenizer, text: str, spans: Sequence[Span], *, calls: bool = False) -> Demonstration:
    """Tokens of ``text``, those in ``spans`` with loss; ``calls``: the last turn ends with some."""
    ids, covers = tokenizer.encode_with_spans(text)
    edges = {edge for span in spans for edge in span}
    if any(start < edge < end for edge in edges for start, end in covers):
        # a token across the border of a turn: a generator's prompt ends at the border, and so must the tokens
        cuts, ids, covers = sorted({0, len(text), *edges}), list[int](), list[Span]()
        for start, end in pairwise(cuts):
            piece, found = tokenizer.encode_with_spans(text[start:end], before=ids[-1] if ids else None)
            ids += piece
            covers += [(start + first, start + behind) for first, behind in found]
    learned = [False] * len(ids)
    for number, span in enumerate(spans):
        last = _learn(tokenizer, ids, covers, learned, span)
        mark = tokenizer.next_marks.get(calls)
        if number < len(spans) - 1 or last is None or ids[last] in tokenizer.stop_ids:
            continue
        if mark is not None and last == len(ids) - 1:  # the next message would end the turn
            ids, learned = [*ids, mark], [*learned, True]
        else:
            stops, end = ", ".join(repr(tokenizer.token(i)) for i in tokenizer.stop_ids), tokenizer.token(ids[last])
            raise ConfigurationError(
                f"the chat template ends the assistant's turn with {end!r}, and generation stops "
                f"only at {stops}: add the id of the template's end of turn to eos_token_id in generation_config.json, "
                "or end turns with a token that is there"
            )
    learned[0] = False
    return Demonstration(ids=ids, learned=learned)


def _masked_but(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Demonstration:
    """The whole ``text`` with loss, but for the tokens in ``spans``."""
    ids, covers = tokenizer.encode_with_spans(text)
    out = [any(start < behind and first < end for first, behind in spans) for start, end in covers]
    return Demonstration(ids=ids, learned=[place > 0 and not left for place, left in enumerate(out)])


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
