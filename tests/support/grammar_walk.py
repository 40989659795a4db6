"""Texts that a grammar allows: made at random, or checked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.tokens.grammar import GrammarRefused, Grammars, allowed_ids
from headway.tokens.tokenizer import Tokenizer

_MOST_TOKENS = 2000


def allowed_text(grammars: Grammars, tokenizer: Tokenizer, grammar: str, chance: random.Random) -> str:
    """A whole response at random, one that comes to its end."""
    matcher, ids = grammars.matcher(grammar), list[int]()
    texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocabulary_size))
    closing = {i for i, text in texts if text and not text.strip('"}],:')}
    for _ in range(_MOST_TOKENS):
        allowed = [int(i) for i in allowed_ids(matcher.allowed())]
        if chance.random() < 0.5 and (some := [i for i in allowed if i in closing or i in tokenizer.stop_ids]):
            allowed = some
        token = chance.choice(allowed)
        if token in tokenizer.stop_ids:
            return tokenizer.decode(ids)
        matcher.advance(token)
        ids.append(token)
    raise AssertionError(f"no end after {tokenizer.decode(ids)!r}")


def is_allowed(grammars: Grammars, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole response."""
    matcher = grammars.matcher(grammar)
    try:
        for token in [i for character in text for i in tokenizer.encode(character)]:
            matcher.advance(token)
        matcher.advance(tokenizer.eos_id)
    except GrammarRefused:
        return False
    return True


def kept_masks(grammars: Grammars, grammar: str, ids: Sequence[int]) -> NDArray[np.uint32]:
    """The mask that each of a response's tokens was sampled under, [n, w]."""
    masks = list(grammars.masks(grammar, [int(i) for i in ids]))
    return np.stack(masks) if masks else np.empty((0, grammars.words), np.uint32)
