"""Log-probabilities of tokens in OpenAI's formats."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from headway.records.generation import PromptLogprobs
from headway.tokens.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoded from an incomplete character


class TokenTexts:
    """Texts of tokens inside other text: ``text(id)``, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a")[-1:]  # decoders may strip the first token's leading blank
        self._anchor_characters = len(tokenizer.decode(self._anchor))
        self.text = functools.cache(self._text)

    def _text(self, token: int) -> str:
        if token in self._tokenizer.special_ids:
            return self._tokenizer.token(token) or ""
        return self._tokenizer.decode([*self._anchor, token], keep_special=True)[self._anchor_characters :]

    def chat(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        """Entries of ``choices[].logprobs.content``, one for each token. ``bytes`` is None for a token that holds part
        of a character."""
        return [
            {
                "token": text,
                "logprob": logprob,
                "bytes": None if _BROKEN in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in zip(map(self.text, ids), logprobs, strict=True)
        ]

    def completions(self, ids: Sequence[int], logprobs: Sequence[float | None], offset: int) -> dict[str, Any]:
        """``choices[].logprobs`` of tokens whose text begins ``offset`` characters after the prompt's end."""
        token_texts = [self.text(token) for token in ids]
        end_offsets = itertools.accumulate(map(len, token_texts), initial=offset)
        return {
            "tokens": token_texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": list(end_offsets)[:-1],
        }

    def scored(self, ids: Sequence[int], scores: PromptLogprobs, first: int) -> dict[str, Any]:
        """``choices[].logprobs`` of the tokens from ``first`` on, and beside OpenAI's lists ``token_ids`` and
        ``top_ids``: several tokens may have one text. Null for the first token of all."""
        nulls = [None] * (first == 0)
        start = max(first, 1)
        top_ids, top_logprobs = scores.top_ids[start:].tolist(), scores.top_logprobs[start:].tolist()
        likeliest = [
            dict(reversed(list(zip(map(self.text, row_ids), row_logprobs, strict=True))))  # of equal texts the likelier
            for row_ids, row_logprobs in zip(top_ids, top_logprobs, strict=True)
        ]
        has_top = scores.top_ids.shape[1] > 0
        return {
            **self.completions(ids[first:], nulls + scores.logprobs[start:].tolist(), 0),
            "top_logprobs": nulls + likeliest if has_top else None,
            "token_ids": list(ids[first:]),
            "top_ids": nulls + top_ids if has_top else None,
            "top_id_logprobs": nulls + top_logprobs if has_top else None,
        }
