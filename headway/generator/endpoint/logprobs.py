"""Log-probabilities of sampled tokens in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headway.tokens.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoded from an incomplete character


class TokenTexts:
    """Cache of the text of each token inside other text, by token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a")[-1:]  # decoders may strip the first token's leading blank
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
        """Entries of ``choices[].logprobs.content``, one for each token. ``bytes`` is None for a token that holds part
        of a character."""
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
        """``choices[].logprobs`` of tokens whose text begins ``offset`` characters after the prompt's end."""
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
