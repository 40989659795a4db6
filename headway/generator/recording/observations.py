"""Finds the tokens that a tool's answers became, for cross-entropy on them (``algorithm.environment_coefficient``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from headway.records.conversations import RequestRefused
from headway.records.environment import LEFT_OUT
from headway.records.tokens import TokenIds
from headway.tokens.messages import Message
from headway.tokens.tokenizer import Tokenizer

Runs = tuple[tuple[int, int], ...]  # [first, behind), ascending

_LEFT_OUT = re.compile(re.escape(LEFT_OUT).replace(r"\{count\}", r"\d+"))


def observed_runs(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    text: str,
    prior_id: int | None,
    ids: TokenIds,
    secrets: Sequence[str] = (),
) -> Runs:
    """Return the runs of ``ids`` that lie within the contents of the tools' ``messages``, as the template wrote them to
    ``text``; ``ids`` is that text, behind the token ``prior_id``. ``render`` writes messages in the place of these, and
    what stands before them: where a content stands is read from such a text with a mark in its place.

    Left out are the note in place of what was cut, ``secrets``, special tokens, such as those of pictures, and tokens
    that cross the border of a content. A content that the template writes otherwise (escaped, say) has none, and so has
    a text that the tokenizer splits otherwise when it reports characters."""
    contents = [message.content if message.role == "tool" else "" for message in messages]
    if not any(contents):
        return ()
    starts = _content_starts(contents, text, lambda marks: render(_marked(messages, marks)))
    spans = [span for start, content in starts for span in _without(content, start, secrets)]
    if not spans:
        return ()
    encoded_ids, token_spans = tokenizer.encode_with_spans(text, prior_id)
    if encoded_ids != list(ids):
        return ()
    observed = [
        index
        for index, (first, end) in enumerate(token_spans)
        if encoded_ids[index] not in tokenizer.special_ids and any(a <= first < end <= b for a, b in spans)
    ]
    return runs_of(observed)


def _marked(messages: Sequence[Message], marks: Sequence[str]) -> list[Message]:
    pairs = zip(messages, marks, strict=True)
    return [replace(message, content=mark) if mark else message for message, mark in pairs]


def _content_starts(
    contents: Sequence[str], text: str, render: Callable[[Sequence[str]], str]
) -> list[tuple[int, str]]:
    """Where in ``text`` each of ``contents`` begins that isn't empty, from the last one on, until one that the template
    writes otherwise; nowhere if it refuses other contents. Templates may leave out white space around a content."""
    label = next(label for number in range(len(text) + 1) if (label := f"Content{number}of") not in text)
    marks = [content and f"{label}{index}." for index, content in enumerate(contents)]
    try:
        rest, end, starts = render(marks), len(text), list[tuple[int, str]]()
    except RequestRefused:  # by a template that takes contents of some form alone
        return []
    for content, mark in reversed([(content, mark) for content, mark in zip(contents, marks, strict=True) if mark]):
        rest, separator, tail = rest.rpartition(mark)
        end -= len(tail)
        forms = (content, content.strip(), content.rstrip(), content.lstrip())
        written = next((form for form in forms if form and text.endswith(form + tail, 0, end + len(tail))), "")
        if not separator or not written:
            break
        end -= len(written)
        starts.append((end, written))
    return starts


def runs_of(indices: Sequence[int]) -> Runs:
    """The runs of ascending ``indices``: (2, 3, 7) gives (2, 4), (7, 8)."""
    if not indices:
        return ()
    firsts = [indices[0], *(b for a, b in pairwise(indices) if b > a + 1)]
    stops = [*(a + 1 for a, b in pairwise(indices) if b > a + 1), indices[-1] + 1]
    return tuple(zip(firsts, stops, strict=True))


def _without(content: str, start: int, secrets: Sequence[str]) -> list[tuple[int, int]]:
    """The spans of ``content``, at character ``start``, between notes of what was cut and secrets."""
    found_secrets = (match for secret in secrets if secret for match in re.finditer(re.escape(secret), content))
    excluded = sorted(match.span() for matches in (_LEFT_OUT.finditer(content), found_secrets) for match in matches)
    spans, first = list[tuple[int, int]](), 0
    for excluded_first, excluded_end in [*excluded, (len(content), len(content))]:
        if excluded_first > first:
            spans.append((start + first, start + excluded_first))
        first = max(first, excluded_end)
    return spans
