"""Extraction of the answer from a response."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from decimal import Context, Decimal, InvalidOperation
from typing import Literal

Extract = Literal["all", "last_line", "answer_tag", "boxed"]

MINUS = "\u2212\u2012\u2013\u2014\ufe63\uff0d"  # characters by which a minus is typeset
_TYPESET = str.maketrans({**dict.fromkeys(MINUS, "-"), **dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")})
_LATEX_BLANK = re.compile(r"\\[,;:! ]|~")
_NUMBER = re.compile(
    r"(?:(?P<sign>[-+])(?P<apart>[^\S\n]*))?(?:(?<=[-+\s])(?:US)?\\?[$€£¥] ?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|(?<![0-9.] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]+)?"
)
_THOUGHT, _ANSWERED = "<think>", "</think>"
# text allowed around a reference's only number: words, currencies, equality signs; no operator, no numeral word
_BESIDE = re.compile(r"(?:[^\W\d_]|[\s$€£¥%°.,:;=#*'\"]|(?<=[a-z])/(?=[a-z])|\\(?:\$|%|boxed\{|text\{)|\}|\^\\circ)*")
_NUMERALS = re.compile(r"\b(?:hundred|thousand|[mb]illion|trillion|dozen|half|pi|e)s?\b|π", re.IGNORECASE)
_UNTRAPPED = Context(prec=60, traps=[])  # a response like 1e999999999 is a wrong answer, not an error


def extract_answer(response: str, extract: Extract, *, reasoning: bool = False) -> str | None:
    """Return the part of ``response`` that is compared; None when there is none.

    "all": the whole response; "last_line": its last line that isn't blank; "answer_tag": the inside of its last
    ``<answer>...</answer>``; "boxed": the inside of its last ``\\boxed{...}``, braces balanced. Reasoning between
    ``<think>`` and ``</think>``, closed or not, is excluded unless ``reasoning``.
    """
    response = response if reasoning else without_reasoning(response)
    if extract == "all":
        return response
    if extract == "last_line":
        return response.rstrip().rpartition("\n")[2]
    if extract == "boxed":
        return _last_boxed(response)
    close_tag_index = response.rfind("</answer>")
    open_tag_index = response.rfind("<answer>", 0, max(close_tag_index, 0))
    tagged = 0 <= open_tag_index < close_tag_index
    return response[open_tag_index + len("<answer>") : close_tag_index] if tagged else None


def _last_boxed(text: str) -> str | None:
    start_index = text.rfind("\\boxed{")
    if start_index < 0:
        return None
    inside_index = start_index + len("\\boxed{")
    depth = 1
    for position in range(inside_index, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":  # an escaped brace is text and doesn't pair
            depth += 1 if character == "{" else -1
            if not depth:
                return text[inside_index:position]
    return None


def without_reasoning(text: str, start: str = _THOUGHT, end: str = _ANSWERED, *, opened: bool = False) -> str:
    """Return ``text`` from behind the last end mark of reasoning up to a further start mark; ``opened``: the prompt
    ended with a start mark."""
    _, end_mark, rest = text.rpartition(end)
    return "" if opened and not end_mark else rest.partition(start)[0].lstrip() if end_mark or start in rest else text


def last_number(text: str, marker: str = "") -> Decimal | None:
    """Return the last number in ``text``, or with ``marker`` the first one after the marker's last occurrence.

    Integers, decimals, exponents, thousands separators and a leading sign are parsed; None when there is no number. A
    sign with a gap before its digits counts where no digit, letter or closing bracket precedes: "= - 5" is -5, "7 - 5"
    ends in 5.
    """
    text = _typed(text)
    if marker:
        _, marker_match, rest = text.rpartition(_typed(marker))
        match = _NUMBER.search(rest) if marker_match else None
        return _decimal(match) if match else None
    last_number_match = last_match(_NUMBER, text)
    return _decimal(last_number_match) if last_number_match else None


def only_number(text: str) -> Decimal | None:
    """Return a reference's single number (after its last "####", where there is one); None where there is no number,
    several, or a part of an expression: ``1/2``, ``10^5``, ``12:30``."""
    text = _typed(text.rpartition("####")[2])
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    prefix, suffix = text[: matches[0].start()], text[matches[0].end() :]
    context = (prefix, suffix)
    is_attached = prefix.rstrip(" \t")[-1:].isalpha() or re.match(r"[^\W\d_](?![^\W\d_])", suffix)
    if is_attached or not all(_BESIDE.fullmatch(part) for part in context) or any(map(_NUMERALS.search, context)):
        return None
    return _decimal(matches[0])


def _typed(text: str) -> str:
    """Return ``text`` with numbers in ASCII: digits, minus and blanks, without LaTeX between digits."""
    text = text.translate(_TYPESET).replace("{,}", ",")
    text = _LATEX_BLANK.sub(" ", re.sub(r"(?<=[0-9])\\!,\\!(?=[0-9])", ",", text))
    return "".join(unicodedata.normalize("NFKC", c) if "\uff10" <= c <= "\uff19" else c for c in text)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last non-overlapping match of ``pattern`` in ``text``."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _decimal(match: re.Match[str]) -> Decimal | None:
    digits = match["digits"].replace(",", "").replace(" ", "") + (match["exponent"] or "")
    sign = "-" if match["sign"] == "-" and _is_sign(match) else ""
    try:
        return Decimal(sign + digits)
    except InvalidOperation:  # an exponent of more digits than a number can have
        return None


def _is_sign(match: re.Match[str]) -> bool:
    """Return whether the minus before a number's digits is its sign rather than that of a difference."""
    line = match.string[: match.start()].rpartition("\n")[2]
    prefix = line.rstrip().rstrip("$\\").rstrip()
    last_character = prefix[-1:]
    if last_character.isalpha() and not match["apart"] and line[-1:] in (" ", "\t"):
        return prefix[-2:-1].isalpha()  # "it is -5", but "x -5"
    return not (last_character.isalnum() or last_character in tuple(")]}._"))


def close(a: Decimal, b: Decimal, tolerance: float) -> bool:
    """Return whether |a - b| <= tolerance; exact equality at tolerance 0, even of large numbers."""
    if tolerance == 0:
        return a == b
    difference = _UNTRAPPED.abs(_UNTRAPPED.subtract(a, b))
    return difference.is_finite() and difference <= Decimal(tolerance)
