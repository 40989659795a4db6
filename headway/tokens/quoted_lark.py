"""Conversion of a Lark grammar to that of its texts inside a JSON string: each terminal becomes its JSON text.

Example: ``start: "a" /[^\\n]+/ "\\n"`` matches the text between the quotes of a JSON string, where a line's end is
``\\n`` in two characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_LAST = 0x10FFFF
_ESCAPED = [*range(0x20), 0x22, 0x5C]  # characters that JSON escapes
_DIGIT, _SPACE = [(48, 57)], [(9, 13), (32, 32)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_COMMON = {  # of Lark's common terminals, those with such characters
    "ESCAPED_STRING": r"/\"([^\"\\\n]|\\.)*\"/", "WS": r"/[ \t\f\r\n]+/", "WS_INLINE": r"/[ \t]+/",
    "LF": r'"\n"', "CR": r'"\r"', "NEWLINE": r"/(\r?\n)+/",
}  # fmt: skip
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<range>"(?:\\.|[^"\\])+"\s*\.\.\s*"(?:\\.|[^"\\])+")|(?P<text>"(?:\\.|[^"\\\n])*"i?)"""
    r"""|(?P<regex>/(?![*+?/])(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/[imslux]*)"""
    r"""|(?P<imported>%import\s+common\s*(?:\.\s*\w+(?:\s*->\s*\w+)?|\([^)]*\)))|(?P<other>%(?!ignore\b)\w*)""",
)
_RULE = re.compile(r"^[?!]?([a-z_][a-z0-9_]*)(?:\.\d+)?\s*:((?:.*(?:\n(?![?!]?\w+(?:\.\d+)?\s*:|%))?)*)", re.MULTILINE)
_WORDS = re.compile(
    r"""(?P<directive>^%.*$)|(?P<alias>->\s*\w+)|(?P<literal>"(?:\\.|[^"\\])*"i?|/(?![*+?/])(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/)"""
    r"""|[?!]?\b(?P<name>[a-z_][a-z0-9_]*)\b(?:\.\d+(?=\s*:))?""", re.MULTILINE,
)  # fmt: skip
_Ranges = list[tuple[int, int]]


def quoted_lark(text: str) -> str:
    """Convert a grammar in Lark: the result matches the JSON texts, without quotes, of its texts. Raises ValueError for
    lookarounds, references to groups, and directives other than %ignore and %import of common terminals."""
    definitions: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        token_kind, token_text = str(match.lastgroup), match[0]
        if token_kind == "comment":
            return ""
        if token_kind == "text":
            literal_text = json.loads(token_text.removesuffix("i"))
            if token_text.endswith("i"):
                return f"/{_regex(re.escape(literal_text), re.IGNORECASE)}/"
            return json.dumps(_json(literal_text), ensure_ascii=False)
        if token_kind == "range":
            first, last = (json.loads(end.strip()) for end in re.split(r"(?<=\")\s*\.\.\s*(?=\")", token_text))
            if not len(first) == len(last) == 1 or last < first:
                raise ValueError(f"{token_text}: a range goes from one character to a later one")
            return f"/{_characters([(ord(first), ord(last))])}/"
        if token_kind == "regex":
            body, _, flag_letters = token_text[1:].rpartition("/")
            literal_text = body.replace(r"\/", "/")
            return f"/{_regex(literal_text, _flags(flag_letters))}/"
        if token_kind == "imported":
            return _imported(token_text, definitions)
        raise ValueError(f"{token_text}: valid directives are %ignore and %import common")

    return _as_terminals("\n".join([_TOKEN.sub(replaced, text), *definitions]))


def _as_terminals(grammar: str) -> str:
    """Turn the rules of a grammar into terminals, where none is recursive: the library's lexer ends a terminal at the
    first character that can't continue it, and an escape has two. A grammar with %ignore or recursion stays as it is:
    then a terminal that may be followed by an escape can end too late, and less is allowed."""
    rules = {match[1]: match[2] for match in _RULE.finditer(grammar)}
    called = {name: {word["name"] for word in _WORDS.finditer(body)} & set(rules) for name, body in rules.items()}
    while leaves := [name for name, names in called.items() if not names]:
        called = {name: names - set(leaves) for name, names in called.items() if names}
    if called or "%ignore" in grammar or "start" not in rules:
        return grammar

    def renamed(match: re.Match[str]) -> str:
        if match["literal"] or match["directive"]:
            return match[0]
        return "" if match["alias"] else f"R_{match['name'].upper()}"

    return f"start: R_START\n{_WORDS.sub(renamed, grammar)}"


def _imported(written: str, definitions: list[str]) -> str:
    """Return the imports of terminals without escaped characters; add the others to ``definitions``."""
    names = re.findall(r"\w+(?:\s*->\s*\w+)?", written.partition("common")[2])
    import_lines: list[str] = []
    for name in names:
        source, _, alias = (part.strip() for part in name.partition("->"))
        if source in _COMMON:
            definitions.append(f"{alias or source}: {quoted_lark(_COMMON[source])}")
        else:
            import_lines.append(f"%import common.{source}" + (f" -> {alias}" if alias else ""))
    return "\n".join(import_lines)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _flags(letters: str) -> int:
    flag_by_letter = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "u": 0, "l": 0}
    return sum(flag_by_letter[letter] for letter in set(letters))


def _regex(pattern: str, flags: int = 0) -> str:
    try:
        parsed = re._parser.parse(pattern, flags)  # type: ignore[attr-defined]
    except (re.error, OverflowError) as error:
        raise ValueError(f"/{pattern}/: {error}") from None
    return _sequence(parsed, parsed.state.flags)


def _sequence(parsed: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join(_node_pattern(str(kind), value, flags) for kind, value in parsed)


def _node_pattern(kind: str, value: Any, flags: int) -> str:
    if kind == "AT":
        if "BOUNDARY" in str(value):
            raise ValueError("a word's boundary in a grammar can't be expressed")
        return ""  # a terminal is matched whole
    if kind == "ANY":
        return _characters(_complement([] if flags & re.DOTALL else [(10, 10)]))
    if kind in ("LITERAL", "NOT_LITERAL"):
        ranges = _with_other_case([(value, value)], flags)
        return _characters(ranges if kind == "LITERAL" else _complement(ranges))
    if kind == "IN":
        return _characters(_set_ranges(value, flags))
    if kind == "BRANCH":
        return f"(?:{'|'.join(_sequence(way, flags) for way in value[1])})"
    if kind == "SUBPATTERN":
        return f"(?:{_sequence(value[3], (flags | value[1]) & ~value[2])})"
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        min_count, max_count, inner = value
        return f"(?:{_sequence(inner, flags)}){{{min_count},{'' if str(max_count) == 'MAXREPEAT' else max_count}}}"
    raise ValueError(f"a grammar's regex has {kind.lower()}, which can't be expressed")


def _set_ranges(items: Sequence[tuple[Any, Any]], flags: int) -> _Ranges:
    char_ranges, is_negated = _Ranges(), False
    ranges_by_class = {"DIGIT": _DIGIT, "SPACE": _SPACE, "WORD": _WORD}
    for kind, value in items:
        if str(kind) == "NEGATE":
            is_negated = True
        elif str(kind) == "CATEGORY":
            ranges = ranges_by_class[str(value).rsplit("_", 1)[1]]
            char_ranges += _complement(ranges) if "NOT" in str(value) else ranges
        else:
            char_ranges.append((value, value) if str(kind) == "LITERAL" else value)
    char_ranges = _with_other_case(char_ranges, flags)
    return _complement(char_ranges) if is_negated else char_ranges


def _with_other_case(ranges: _Ranges, flags: int) -> _Ranges:
    """Return the ranges, with the other case of ASCII letters where ``flags`` ignore case."""
    if not flags & re.IGNORECASE:
        return ranges
    swapped = [
        (max(low, a) + by, min(high, z) + by) for low, high in ranges for a, z, by in ((65, 90, 32), (97, 122, -32))
    ]
    return [*ranges, *(swapped_range for swapped_range in swapped if swapped_range[0] <= swapped_range[1])]


def _complement(ranges: _Ranges) -> _Ranges:
    """Return the ranges of all other characters."""
    complement, next_code = _Ranges(), 0
    for low, high in sorted(ranges):
        if next_code < low:
            complement.append((next_code, low - 1))
        next_code = max(next_code, high + 1)
    return [*complement, (next_code, _LAST)] if next_code <= _LAST else complement


def _characters(ranges: _Ranges) -> str:
    """Return a regex of the JSON texts of one of these characters."""
    escaped_codes = [code for code in _ESCAPED if any(low <= code <= high for low, high in ranges)]
    plain_ranges = _complement([*_complement(ranges), *((code, code) for code in _ESCAPED), (0xD800, 0xDFFF)])
    plain_class = "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in plain_ranges)
    choices = [f"[{plain_class}]"] * bool(plain_class)
    choices += ["".join(rf"\x{{{ord(letter):X}}}" for letter in _json(chr(code))) for code in escaped_codes]
    return f"(?:{'|'.join(choices)})"
