"""A cache of encoded pieces, for prompts with a common beginning."""

from __future__ import annotations

import re
from array import array
from functools import lru_cache

from headway.tokens.tokenizer import Tokenizer

_CACHED_PIECES = 256  # number of pieces kept, by last use
# in characters: shorter pieces are encoded as quickly as looked up; a few longer ones would fill memory
_CACHED_LENGTHS = range(64, 32_769)


class PieceEncoder:
    """Encodes as ``Tokenizer.encode`` does, and caches the pieces between special tokens: thousands of rollouts begin
    with the same system message and the same tools.

    A tokenizer splits the text at a special token first, so pieces are independent, unless that token swallows the
    blanks before it or admits no letter beside it: such tokens begin no piece. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        verbatim = tokenizer.verbatim_tokens()
        self._borders = frozenset(text for text, special in verbatim.items() if special)
        by_length = sorted(verbatim, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, by_length))) if self._borders else None
        self._encode_cached = lru_cache(_CACHED_PIECES)(self._encode_piece)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encode ``text``; ``max_tokens``: as in `Tokenizer.encode`."""
        if self._token is None or len(text) not in _CACHED_LENGTHS:
            return self._tokenizer.encode(text, max_tokens=max_tokens)
        border_starts = [match.start() for match in self._token.finditer(text) if match.group() in self._borders]
        ids: list[int] = []
        for start, end in zip([0, *border_starts], [*border_starts, len(text)], strict=True):
            encode_piece = self._encode_cached if end - start in _CACHED_LENGTHS else self._encode_piece
            ids.extend(encode_piece(text[start:end]))
        return ids

    def _encode_piece(self, piece: str) -> array[int]:
        return array("i", self._tokenizer.encode(piece))
