"""Demonstrations as token ids and a loss mask, exact to the token.

Where the chat template marks the assistant's text (``{% generation %}``), the marks decide. Elsewhere the conversation
is rendered turn by turn: a turn is the part of the whole text after the rendering of all earlier messages with the
generation prompt, which is the prompt that a generator would be given. In both cases a turn ends with the first token
that ends a response; the template's line break after it carries no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from headway.records.errors import ConfigurationError
from headway.tokens.chat_template import LOSS, PROBE, reasoning_of
from headway.tokens.messages import common_prefix
from headway.tokens.template_check import require_rendered
from headway.tokens.tokenizer import Template, Tokenizer

TrainOn = Literal["assistant", "last_assistant", "all"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]  # [first character, end)


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A training sequence: token ids and their loss mask."""

    ids: list[int]
    learned: list[bool]  # for each id, whether its prediction carries loss; False for the first, which has none
    empty_turns: int = 0  # number of turns of the assistant without a text or a call, which aren't learned
    dropped: frozenset[str] = frozenset()  # kinds of text that the template drops by design


def encode_pair(
    tokenizer: Tokenizer, prompt: str, solution: str, template: Template, train_on: TrainOn
) -> Demonstration | None:
    """Encode a prompt, its solution and the end of a response as a task's prompt and a sampled answer are encoded;
    None when prompt or solution has no token. Raises as `encode_conversation` for ``template`` = "chat"."""
    if template == "chat":
        return _encode_chat_pair(tokenizer, prompt, solution, train_on) if prompt and solution else None
    prompt_ids = list(tokenizer.render(prompt, template))
    solution_ids = tokenizer.encode_after(prompt_ids[-1], solution) if prompt_ids else []
    if not set(solution_ids) - {*tokenizer.stop_ids}:
        return None
    ids = [*prompt_ids, *solution_ids] + ([] if solution_ids[-1] in tokenizer.stop_ids else [tokenizer.eos_id])
    first_learned = 1 if train_on == "all" else len(prompt_ids)
    return Demonstration(ids=ids, learned=[index >= first_learned for index in range(len(ids))])


def _encode_chat_pair(tokenizer: Tokenizer, prompt: str, solution: str, train_on: TrainOn) -> Demonstration | None:
    question, answer = {"role": "user", "content": prompt}, {"role": "assistant", "content": solution}
    try:
        return encode_conversation(tokenizer, [question, answer], None, train_on)
    except ConfigurationError:
        prompt_text = tokenizer.render_messages([question])
        if not prompt_text.rstrip().endswith("<think>") or "</think>" not in solution:
            raise
    # the prompt begins reasoning that the template drops from earlier turns: it is learned as it would be sampled
    answer["content"] = PROBE
    end = tokenizer.render_messages([question, answer], add_generation_prompt=False).rpartition(PROBE)[2].rstrip()
    body = _strip_stop_tokens(tokenizer, solution).lstrip().removeprefix("<think>").lstrip("\n")
    loss_start = 0 if train_on == "all" else len(prompt_text)
    return _loss_inside(tokenizer, prompt_text + body + end, [(loss_start, len(prompt_text + body + end))])


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages, tools: Tools, train_on: TrainOn
) -> Demonstration | None:
    """Encode a conversation by the folder's chat template; None when the assistant's turns are empty.

    Tokens with loss: "assistant": those of all its turns; "last_assistant": those of its last turn, and messages after
    it are left out; "all": every token. Tokens of an empty turn have none, nor those of a message that excludes itself
    (``weight``, ``loss`` or ``trainable``). Raises ConfigurationError when there is no template or it fails; when the
    assistant has no turn; when the template drops a text (`require_rendered`) or closes a turn without a token that
    ends a response (generation would not stop there); and for "assistant" when the template rewrites earlier turns
    (drops their reasoning, say), so that they would be learned in a text that no generator ever sees.
    """
    turn_numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turn_numbers:
        raise ConfigurationError("no message is the assistant's, so there is nothing to learn")
    chosen = {"assistant": turn_numbers, "last_assistant": turn_numbers[-1:], "all": [*range(len(messages))]}[train_on]
    with_loss = [number for number in chosen if _has_loss(messages[number], number, True)]
    for number in {*range(len(messages))} - {*chosen, *turn_numbers}:
        if _has_loss(messages[number], number, False):
            hint = "valid: the assistant's messages, or any with sft.train_on = 'all'"
            raise ConfigurationError(f"messages[{number}] (role {messages[number]['role']!r}) is to be learned: {hint}")
    empty_numbers = [number for number in with_loss if number in turn_numbers and not _has_output(messages[number])]
    with_loss = [number for number in with_loss if number not in empty_numbers]
    learned_turns = [number for number in with_loss if number in turn_numbers]
    if not learned_turns:
        return None
    # messages after the last turn that is learned teach nothing
    used = [_trimmed(tokenizer, raw) for raw in (messages if train_on == "all" else messages[: with_loss[-1] + 1])]
    text, spans = tokenizer.render_marked(used, tools=tools)

    def count_marks(count: int) -> int:
        """Count the marks in the first ``count`` messages: a turn may have several."""
        return len(tokenizer.render_marked(used[:count], tools=tools)[1]) if count else 0

    if train_on == "all":
        unlearned = [number for number in chosen if number not in with_loss]
        demo = _loss_outside(tokenizer, text, [_span_of(tokenizer, used, number, tools, text) for number in unlearned])
    else:
        if not spans:
            spans = [_span_of(tokenizer, used, number, tools, text) for number in with_loss]
        elif {number for number in turn_numbers if number < len(used)} - {*with_loss}:
            spans = [span for number in with_loss for span in spans[count_marks(number) : count_marks(number + 1)]]
        demo = _loss_inside(tokenizer, text, spans, calls=bool(used[-1].get("tool_calls")))
    dropped_texts = require_rendered(tokenizer, used, tools, learned_turns)
    return replace(demo, empty_turns=len(empty_numbers), dropped=frozenset(dropped_texts))


def _has_loss(message: Mapping[str, Any], number: int, default: bool) -> bool:
    """Whether a message is learned, by its own keys or else by ``default``. Raises ConfigurationError for a weight that
    is neither 0 nor 1."""
    weight_by_key = {key: message[key] for key in LOSS if message.get(key) is not None}
    for key, weight in weight_by_key.items():
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise ConfigurationError(f"messages[{number}].{key} = {weight!r}: valid: true, false, 1, 0")
    if len({bool(weight) for weight in weight_by_key.values()}) > 1:
        raise ConfigurationError(f"messages[{number}]: {weight_by_key} contradict each other")
    return bool(next(iter(weight_by_key.values()), default))


def _has_output(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    content = content.strip() if isinstance(content, str) else content
    return bool(content or message.get("tool_calls") or reasoning_of(message))


def _strip_stop_tokens(tokenizer: Tokenizer, text: str) -> str:
    """Remove the tokens that end a response from the end of an answer: the template writes them."""
    ends = tuple(filter(None, map(tokenizer.token, tokenizer.stop_ids)))
    while (end := next(filter(text.endswith, ends), None)) is not None:
        text = text.removesuffix(end)
    return text


def _trimmed(tokenizer: Tokenizer, message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _strip_stop_tokens(tokenizer, content)}


def _span_of(tokenizer: Tokenizer, messages: Messages, number: int, tools: Tools, text: str) -> Span:
    """Find the span of turn ``number`` in ``text``, with its end of turn and the template's text after it."""
    is_assistant = messages[number]["role"] == "assistant"
    prefix = ""
    if number or is_assistant:
        prefix = tokenizer.render_messages(messages[:number], tools=tools, add_generation_prompt=is_assistant)
    prefix = prefix if is_assistant else common_prefix(text, prefix)
    if number == len(messages) - 1:
        prefix_and_turn = text
    else:
        # a template may close the conversation, so only the text common to both renderings is the turn's
        text_so_far = tokenizer.render_messages(messages[: number + 1], tools=tools, add_generation_prompt=False)
        prefix_and_turn = common_prefix(text, text_so_far)
        stop_ids = set(tokenizer.stop_ids) & {*tokenizer.encode(prefix_and_turn[len(prefix) :])}
        if text_so_far[len(prefix_and_turn) :].strip() and not stop_ids:
            raise _rewritten_turn(number)
    if not text.startswith(prefix) or len(prefix_and_turn) <= len(prefix):
        raise _rewritten_turn(number) if number < len(messages) - 1 else _prompt_mismatch(text, prefix)
    return len(prefix), len(prefix_and_turn)


def _prompt_mismatch(text: str, prompt_text: str) -> ConfigurationError:
    agreed = len(common_prefix(text, prompt_text))
    return ConfigurationError(
        f"the chat template asks for the assistant's turn with {prompt_text[max(agreed - 20, 0) :][:60]!r}, "
        f"and renders that turn as {text[max(agreed - 20, 0) :][:60]!r}: what the model would be asked to continue is "
        "not how its turn begins here; a template with {% generation %} marks says what is to be learned"
    )


def _rewritten_turn(number: int) -> ConfigurationError:
    return ConfigurationError(
        f"the chat template renders message {number} (the assistant's) differently once others follow, so a model "
        "would learn what it is never asked to write: valid for such a template: sft.train_on = 'last_assistant' (or "
        "a template with {% generation %} marks)"
    )


def _loss_inside(tokenizer: Tokenizer, text: str, spans: Sequence[Span], *, calls: bool = False) -> Demonstration:
    """Encode ``text`` with loss on the tokens in ``spans``; ``calls``: the last turn ends with calls."""
    ids, token_spans = tokenizer.encode_with_spans(text)
    edges = {edge for span in spans for edge in span}
    if any(start < edge < end for edge in edges for start, end in token_spans):
        # a token across the border of a turn: a generator's prompt ends at the border, and so must the tokens
        cuts, ids, token_spans = sorted({0, len(text), *edges}), list[int](), list[Span]()
        for start, end in pairwise(cuts):
            piece, piece_spans = tokenizer.encode_with_spans(text[start:end], prior_id=ids[-1] if ids else None)
            ids += piece
            token_spans += [(start + first, start + stop) for first, stop in piece_spans]
    learned = [False] * len(ids)
    for number, span in enumerate(spans):
        last = _mark_loss(tokenizer, ids, token_spans, learned, span)
        mark_id = tokenizer.next_marks.get(calls)
        if number < len(spans) - 1 or last is None or ids[last] in tokenizer.stop_ids:
            continue
        if mark_id is not None and last == len(ids) - 1:  # the next message would end the turn
            ids, learned = [*ids, mark_id], [*learned, True]
        else:
            stops, end = ", ".join(repr(tokenizer.token(i)) for i in tokenizer.stop_ids), tokenizer.token(ids[last])
            raise ConfigurationError(
                f"the chat template ends the assistant's turn with {end!r}, and generation stops "
                f"only at {stops}: add the id of the template's end of turn to eos_token_id in generation_config.json, "
                "or end turns with a token that is there"
            )
    learned[0] = False
    return Demonstration(ids=ids, learned=learned)


def _loss_outside(tokenizer: Tokenizer, text: str, spans: Sequence[Span]) -> Demonstration:
    """Encode the whole ``text`` with loss, except on the tokens in ``spans``."""
    ids, token_spans = tokenizer.encode_with_spans(text)
    exclusions = [any(start < stop and first < end for first, stop in spans) for start, end in token_spans]
    return Demonstration(ids=ids, learned=[index > 0 and not excluded for index, excluded in enumerate(exclusions)])


def _mark_loss(
    tokenizer: Tokenizer, ids: Sequence[int], spans: Sequence[Span], learned: list[bool], span: Span
) -> int | None:
    """Mark the span's tokens up to the first one that ends a response, in it or right after it. Returns the index of
    the last marked token."""
    start, end = span
    indices = [index for index, (first, last) in enumerate(spans) if start <= first and last <= end and last > start]
    if not indices:
        return None
    next_index = indices[-1] + 1
    if next_index < len(ids) and ids[next_index] in tokenizer.stop_ids:
        indices.append(next_index)
    for index in indices:
        learned[index] = True
        if ids[index] in tokenizer.stop_ids:
            return index
    return indices[-1]
