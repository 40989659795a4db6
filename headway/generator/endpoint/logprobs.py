"""Log-probabilities of sampled tokens, as OpenAI's API writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headway.tokens.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoded out of a part of a character


class TokenTexts:
    """The text that each token stands for inside other text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a")[-1:]  # what stands at the beginning may lose its leading blank
        self._before = len(tokenizer.decode(self._anchor))
        self._texts: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._text(token)
        return text

    def _text(self, token: int) -> str:
        if token in self._tokenizer.special_ids:
            return self._tokenizer.token(token) or ""
        return self._tokenizer.decode([*self._anchor, token], keep_special=True)[self._before :]

    def chat(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        """Entries of ``choices[].logprobs.content``, one for each token. ``bytes`` of a token that is a part of a
        character are unknown."""
        return [
            {
                "token": self[token],
                "logprob": logprob,
                "bytes": None if _BROKEN in self[token] else list(self[token].encode()),
                "top_logprobs": [],
            }
            for token, logprob in zip(ids, logprobs, strict=True)
        ]

    def completions(self, ids: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        """``choices[].logprobs`` of tokens whose text begins ``offset`` characters behind the prompt's."""
        texts = [self[token] for token in ids]
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": list(_offsets(texts, offset)),
        }


def _offsets(texts: Sequence[str], offset: int) -> Iterator[int]:
    for text in texts:
        yield offset
        offset += len(text)
