"""A cache of encoded pieces for prompts that begin alike."""

from __future__ import annotations

import re
from array import array
from functools import lru_cache

from headway.tokens.tokenizer import Tokenizer

_KEPT = 256  # pieces kept, by last use
_WORTH_KEEPING = range(
    64, 32_769
)  # characters: shorter ones are encoded as quickly; of longer ones few would fill memory


class PieceEncoder:
    """Encodes as ``Tokenizer.encode`` does, with the pieces between special tokens kept: thousands of rollouts begin
    with the same system message and the same tools.

    No tokenizer looks across a special token (it splits the text there first), unless that token swallows the blanks
    before it or admits no letter beside it: such tokens begin no piece. Thread-safe.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.verbatim_tokens()
        self._borders = frozenset(text for text, special in found.items() if special)
        longest_first = sorted(found, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, longest_first))) if self._borders else None
        self._kept = lru_cache(_KEPT)(self._encoded)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of ``text``; ``most``: as `Tokenizer.encode` has it."""
        if self._token is None or len(text) not in _WORTH_KEEPING:
            return self._tokenizer.encode(text, most=most)
        starts = [match.start() for match in self._token.finditer(text) if match.group() in self._borders]
        ids: list[int] = []
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            encode = self._kept if end - start in _WORTH_KEEPING else self._encoded
            ids.extend(encode(text[start:end]))
        return ids

    def _encoded(self, piece: str) -> array[int]:
        return array("i", self._tokenizer.encode(piece))
