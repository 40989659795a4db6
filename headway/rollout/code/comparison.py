"""Comparison of a program's output or a function's return value with the expected one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any, Literal

Compare = Literal["tokens", "lines"]

_UNTRAPPED = Context(prec=60, traps=[])  # an exponent like e999999999 is a wrong answer, not an error
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,6})?")
_NUMBER = re.compile(rf"{_FLOAT.pattern}|[-+]?[0-9]+")
_LONGEST_NUMBER = 400  # characters; longer ones are compared as text


def same_text(printed: str, expected: str, compare: Compare, tolerance: float) -> bool:
    """Return whether two texts are equal. ``tokens``: equal words, with any spacing; ``lines``: equal lines, except for
    blanks at their ends and empty lines at the end. Where a number with a decimal point or an exponent is expected, one
    within ``tolerance`` (as of `close`) is accepted; a whole number must be equal, but may be written in any form."""
    if compare == "tokens":
        return _same_words(printed.split(), expected.split(), tolerance)
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    return len(printed_lines) == len(expected_lines) and all(
        a == b or (_same_blanks(a, b) and _same_words(a.split(), b.split(), tolerance))
        for a, b in zip(printed_lines, expected_lines, strict=True)
    )


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two values are equal by Python's rules, within ``tolerance`` where a float is expected. Both must
    be plain values of JSON or literals: none of their methods is called."""
    try:
        return _same(value, expected, tolerance)
    except RecursionError:
        return False


def close(value: float, expected: float, tolerance: float) -> bool:
    """Return whether ``value`` equals ``expected``, or is within ``tolerance`` x max(1, |expected|) of it."""
    return value == expected or (
        math.isfinite(expected) and abs(value - expected) <= tolerance * max(1.0, abs(expected))
    )


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, float):
        if not isinstance(value, (int, float)):
            return False
        try:
            return close(value, expected, tolerance) or (value != value and expected != expected)
        except OverflowError:  # an integer that no float can hold
            return False
    if isinstance(expected, (list, tuple)):
        if type(value) is not type(expected) or len(value) != len(expected):
            return False
        return all(_same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(_same(value[key], expected_value, tolerance) for key, expected_value in expected.items())
    return value == expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_blanks(a: str, b: str) -> bool:
    return re.findall(r"\s+", a) == re.findall(r"\s+", b)


def _same_words(ours: Sequence[str], theirs: Sequence[str], tolerance: float) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b, tolerance) for a, b in pairs)


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    if max(len(word), len(expected)) > _LONGEST_NUMBER or not (_FLOAT.fullmatch(word) or _FLOAT.fullmatch(expected)):
        return False
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    number, expected_number = Decimal(word), Decimal(expected)
    if not _FLOAT.fullmatch(expected):
        return number == expected_number
    difference = _UNTRAPPED.abs(_UNTRAPPED.subtract(number, expected_number))
    limit = _UNTRAPPED.multiply(Decimal(tolerance), max(Decimal(1), abs(expected_number)))
    return number == expected_number or (difference.is_finite() and difference <= limit)
