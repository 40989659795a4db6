"""Finding the answer inside a response."""

from __future__ import annotations

import re
from collections import deque
from decimal import Context, Decimal, InvalidOperation
from typing import Literal

Extract = Literal["all", "last_line", "answer_tag", "boxed"]

# a sign counts only where no digit, letter or bracket precedes it: "5-3" ends in 3, "= -3" in -3
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
_UNTRAPPED = Context(prec=60, traps=[])  # a response like 1e999999999 is a wrong answer, not an error


def extract_answer(response: str, extract: Extract) -> str | None:
    """The part of ``response`` that is compared; None when there is none.

    "all": the whole response; "last_line": its last line that isn't blank; "answer_tag": the inside of its last
    ``<answer>...</answer>``; "boxed": the inside of its last ``\\boxed{...}``, braces balanced.
    """
    if extract == "all":
        return response
    if extract == "last_line":
        return response.rstrip().rpartition("\n")[2]
    if extract == "boxed":
        return _last_boxed(response)
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return response[start + len("<answer>") : end] if 0 <= start < end else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for position in range(inside, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":  # an escaped one is shown and pairs with nothing
            depth += 1 if character == "{" else -1
            if not depth:
                return text[inside:position]
    return None


def last_number(text: str, marker: str = "") -> Decimal | None:
    """The last number in ``text``, or with ``marker`` the first one after the marker's last occurrence.

    Reads integers, decimals, exponents, thousands separators and a leading sign; None when there is none.
    """
    text = text.replace("\u2212", "-")
    if marker:
        _, found, rest = text.rpartition(marker)
        match = _NUMBER.search(rest) if found else None
        return _decimal(match.group()) if match else None
    last = last_match(_NUMBER, text)
    return _decimal(last.group()) if last else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last non-overlapping match of ``pattern`` in ``text``."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # an exponent of more digits than a number can have
        return None


def close(a: Decimal, b: Decimal, tolerance: float) -> bool:
    """|a - b| <= tolerance; exact equality at tolerance 0, however large the numbers."""
    if tolerance == 0:
        return a == b
    difference = _UNTRAPPED.abs(_UNTRAPPED.subtract(a, b))
    return difference.is_finite() and difference <= Decimal(tolerance)
