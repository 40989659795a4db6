"""Values of a call's arguments that aren't part of one JSON object: literals, and texts that a schema gives a type."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any, NoReturn

_MOST_LEVELS = 8  # of references and alternatives in a schema that are followed
_STRING = re.compile(r"""(['"])(?:(?!\1)[^\\]|\\.)*\1""", re.DOTALL)
_WORD = re.compile(r"[^\s,\[\]{}()<>'\":=]+")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


def _refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refused(digits)


JSON = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)  # no NaN, and no number beyond all floats


def kinds_of(schema: Any, root: Any = None, levels: int = _MOST_LEVELS) -> frozenset[str]:
    """JSON types that a schema's values may have; empty: any. ``root``: the schema that its references point into."""
    if not isinstance(schema, Mapping) or not levels:
        return frozenset()
    root = schema if root is None else root
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        steps = [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
        found = reduce(lambda part, step: part.get(step) if isinstance(part, Mapping) else None, steps, root)
        return kinds_of(found, root, levels - 1)
    if isinstance(kinds := schema.get("type"), str | list):
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    ways = [frozenset(_KINDS[type(value)][:1]) for value in values] if isinstance(values, list) else []
    for key in ("anyOf", "oneOf", "allOf"):
        ways += [kinds_of(part, root, levels - 1) for part in schema.get(key) or ()]
    return frozenset[str]().union(*ways) if all(ways) else frozenset()


def typed(text: str, schema: Any, root: Any) -> Any:
    """The value that ``text`` stands for by its schema: a text where only that is allowed, else JSON where it parses
    to a type that is allowed, else the text."""
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return text
    try:
        value = JSON.decode(text.strip())
    except (ValueError, RecursionError):
        try:
            value = literal(text.strip(), "")
        except (ValueError, RecursionError):
            return text
        if not kinds.intersection(_KINDS[type(value)]):  # nobody said that it isn't a text
            return text
    return text if "string" in kinds and not kinds.intersection(_KINDS[type(value)]) else value


def literal(text: str, quote: str) -> Any:
    """The value of a whole text as `literal_at` reads it. Raises ValueError."""
    value, end = literal_at(text, 0, quote)
    return value if not text[end:].strip() else _refused(text)


def literal_at(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value written at ``at``, and its end: as JSON, in Python, or with ``quote`` (a mark) around texts and keys
    that may be bare. Raises ValueError, with a place where the text ends too early."""
    at = _blank(text, at)
    if quote and text.startswith(quote, at):
        start = at + len(quote)
        if (end := text.find(quote, start)) < 0:
            raise _ended(text)
        return text[start:end], end + len(quote)
    if text[at : at + 1] in ("'", '"'):
        if (found := _STRING.match(text, at)) is None:
            raise _ended(text)
        try:
            return json.loads(found[0], strict=False), found.end()
        except ValueError:
            return ast.literal_eval(found[0].replace("\n", "\\n").replace("\r", "\\r")), found.end()
    if text[at : at + 1] in ("[", "{"):
        return _several(text, at, quote)
    word = _WORD.match(text, at)
    if word is None:
        raise _ended(text) if at >= len(text) else ValueError(f"no value at {at}")
    return _WORDS[word[0]] if word[0] in _WORDS else JSON.decode(word[0]), word.end()


def _several(text: str, at: int, quote: str) -> tuple[Any, int]:
    """A list or an object, as `literal_at`."""
    closing = "]" if text[at] == "[" else "}"
    items, named = list[Any](), dict[str, Any]()
    at = _blank(text, at + 1)
    while text[at : at + 1] != closing:
        if closing == "]":
            value, at = literal_at(text, at, quote)
            items.append(value)
        else:
            quoted = text[at : at + 1] in ("'", '"') or bool(quote and text.startswith(quote, at))
            behind = text.find(":", at)
            key, at = literal_at(text, at, quote) if quoted else (text[at:behind].strip(), behind)
            at = _blank(text, at)
            if text[at : at + 1] != ":":
                raise ValueError(f"no colon at {at}") if at < len(text) and behind >= 0 else _ended(text)
            named[str(key)], at = literal_at(text, at + 1, quote)
        at = _blank(text, at)
        if text[at : at + 1] == ",":
            at = _blank(text, at + 1)
        elif text[at : at + 1] != closing:
            raise ValueError(f"no comma at {at}") if at < len(text) else _ended(text)
    return (items if closing == "]" else named), at + 1


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _ended(text: str) -> json.JSONDecodeError:
    return json.JSONDecodeError("the text ends here", text, len(text))
