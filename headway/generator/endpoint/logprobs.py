"""Log-probabilities of sampled tokens in OpenAI's formats."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

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

    def completions(self, ids: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        """``choices[].logprobs`` of tokens whose text begins ``offset`` characters after the prompt's end."""
        token_texts = [self.text(token) for token in ids]
        end_offsets = itertools.accumulate(map(len, token_texts), initial=offset)
        return {
            "tokens": token_texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": list(end_offsets)[:-1],
        }
