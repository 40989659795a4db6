"""The text that verifiers are given: without the stop string that ended it and what is marked as reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headway.rollout.verification.extraction import without_reasoning
from headway.rollout.verification.scored_text import ScoredText
from headway.tokens.output_parsing import OutputFormat

THINKS = OutputFormat(reasoning=True, special=(("</think>", 7), ("<think>", 8)))


class Pieces:
    """Tokens are texts; 9 is the end, 8 and 7 are special marks of reasoning."""

    stop_ids = (9,)
    special_ids = frozenset((7, 8, 9))

    def __init__(self, *pieces: str) -> None:
        self.pieces = {n: piece for n, piece in enumerate(pieces)} | {7: "</think>", 8: "<think>", 9: "<end>"}

    def token_id(self, token: str) -> int | None:
        return {piece: n for n, piece in self.pieces.items()}.get(token)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(self.pieces[i] for i in ids if keep_special or i not in self.special_ids)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0, 1], "15"),  # ended by the string
        ([1, 0, 2, 9], ";15 so"),  # by its own end: a stop string of another call stays
        ([0, 9], "15"),
        ([3], "a"),  # and what a token holds behind it
        ([4, 5], "x"),
    ],
)
def test_the_stop_string_that_ended_a_response_is_left_out(ids: list[int], text: str) -> None:
    assert ScoredText(Pieces("15", ";", " so", "a;b", "x#", "#y"), (";", "##"))((), ids) == text


@pytest.mark.parametrize(
    ("before", "ids", "text"),
    [
        ([], [8, 0, 7, 1, 9], "8"),
        ([], [8, 0], ""),
        ([8], [0], ""),  # the prompt's end began it
        ([8, 2], [0, 7, 1, 9], "8"),
        ([], [1, 9], "8"),
        ([8, 0, 7], [1], "8"),
        ([], [8, 0, 7, 1, 8, 0], "8"),
    ],
)
def test_reasoning_is_no_answer(before: list[int], ids: list[int], text: str) -> None:
    codec = Pieces("\\boxed{7}", "8", "\n")
    assert ScoredText(codec, (), THINKS)(before, ids) == text
    plain = "".join(codec.pieces[i] for i in ids if i not in codec.special_ids)
    assert ScoredText(codec)(before, ids) == plain  # as verifier.reasoning asks


def test_a_template_without_marks_has_none() -> None:
    codec = Pieces("<think>a</think>", "b")
    assert ScoredText(codec, (), OutputFormat())((), [0, 1, 9]) == "<think>a</think>b"
    assert without_reasoning("a <b> c", "<b>", "</b>") == "a "
