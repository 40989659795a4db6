"""Finds the tokens that a tool's answers became, for cross-entropy on them (``algorithm.environment_coefficient``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from headway.records.environment import LEFT_OUT
from headway.records.tokens import TokenIds
from headway.tokens.messages import Message
from headway.tokens.tokenizer import Tokenizer

Runs = tuple[tuple[int, int], ...]  # [first, behind), ascending

_LEFT_OUT = re.compile(re.escape(LEFT_OUT).replace(r"\{count\}", r"\d+"))


def observed_runs(
    tokenizer: Tokenizer,
    messages: Iterable[Message],
    text: str,
    prior_id: int | None,
    ids: TokenIds,
    secrets: Sequence[str] = (),
) -> Runs:
    """Return the runs of ``ids`` that lie within the contents of the tools' ``messages``, as the template wrote them to
    ``text``; ``ids`` is that text, behind the token ``prior_id``.

    Left out are the note in place of what was cut, ``secrets``, special tokens, such as those of pictures, and tokens
    that cross the border of a content. A content that the template writes otherwise (escaped, say) has none, and so has
    a text that the tokenizer splits otherwise when it reports characters."""
    spans, position = list[tuple[int, int]](), 0
    for message in messages:
        content = message.content.strip() if message.role == "tool" else ""
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            spans += _without(content, start, secrets)
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
