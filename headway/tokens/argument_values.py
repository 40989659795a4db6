"""Values of a call's arguments outside a JSON object: literals, and texts whose type comes from a schema."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from functools import reduce
from typing import Any, NoReturn

_MOST_LEVELS = 8  # levels of references and alternatives that are followed in a schema
_BLANK, _COLON = re.compile(r"\s*"), re.compile(r"\s*:")
_SIGNS = "[]{},:"
_TOKEN = re.compile(r"""(['"])(?:(?!\1)[^\\]|\\.)*\1|[][{},:]|[^][\s,{}()<>'":=]+""", re.DOTALL)
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
    raise ValueError(f"{word} isn't JSON")


def _finite(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refused(digits)


JSON = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)  # no NaN, and no number beyond all floats


def kinds_of(schema: Any, root: Any = None, levels: int = _MOST_LEVELS) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty: any. ``root``: the schema that its references point into."""
    if not isinstance(schema, Mapping) or not levels:
        return frozenset()
    root = schema if root is None else root
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        steps = [step.replace("~1", "/").replace("~0", "~") for step in reference.split("/")[1:]]
        referenced = reduce(lambda part, step: part.get(step) if isinstance(part, Mapping) else None, steps, root)
        return kinds_of(referenced, root, levels - 1)
    if isinstance(type_names := schema.get("type"), str | list):
        return frozenset([type_names] if isinstance(type_names, str) else type_names)
    listed_values = [schema["const"]] if "const" in schema else schema.get("enum")
    sets = [frozenset(_KINDS[type(value)][:1]) for value in listed_values] if isinstance(listed_values, list) else []
    for key in ("anyOf", "oneOf", "allOf"):
        sets += [kinds_of(part, root, levels - 1) for part in schema.get(key) or ()]
    return frozenset[str]().union(*sets) if all(sets) else frozenset()


def typed(text: str, schema: Any, root: Any) -> Any:
    """Convert ``text`` to the value that its schema allows: a text where only that is allowed, else JSON where it
    parses to an allowed type, else the text."""
    type_names = kinds_of(schema, root)
    if type_names == {"string"}:
        return text
    try:
        value = JSON.decode(text.strip())
    except (ValueError, RecursionError):
        try:
            value = literal(text.strip(), "")
        except (ValueError, RecursionError):
            return text
        if not type_names.intersection(_KINDS[type(value)]):  # the schema doesn't exclude a text
            return text
    return text if "string" in type_names and not type_names.intersection(_KINDS[type(value)]) else value


def literal(text: str, quote: str) -> Any:
    """Read a whole text as `literal_at` reads a value. Raises ValueError."""
    value, end = literal_at(text, 0, quote)
    return value if not text[end:].strip() else _refused(text)


def literal_at(text: str, position: int, quote: str) -> tuple[Any, int]:
    """Read the value at ``position``; return it and its end. It is JSON, a Python literal, or has ``quote`` (a mark)
    around texts, and keys that may be bare. Raises ValueError, and JSONDecodeError where the text ends too early."""
    python_pieces, open_brackets = list[str](), 0
    while not python_pieces or open_brackets:
        position = blank_match.end() if (blank_match := _BLANK.match(text, position)) else position
        is_marked = bool(quote) and text.startswith(quote, position)
        end = text.find(quote, position + len(quote)) if is_marked else -1
        token_match = None if is_marked else _TOKEN.match(text, position)
        if position >= len(text) or (is_marked and end < 0) or (token_match is None and text[position] in "'\""):
            raise json.JSONDecodeError("the text ends here", text, len(text))
        if is_marked:
            piece, position = repr(text[position + len(quote) : end]), end + len(quote)
        elif token_match is None:
            raise ValueError(f"no value at {position}")
        else:
            piece, position = token_match[0], token_match.end()
            open_brackets += (piece in ("[", "{")) - (piece in ("]", "}"))
            if piece[0] in "'\"":
                piece = repr(_unquoted(piece))
            elif piece not in _SIGNS:
                is_key = _COLON.match(text, position) is not None
                piece = repr(piece if is_key else _WORDS[piece] if piece in _WORDS else JSON.decode(piece))
        python_pieces.append(piece)
    try:
        value = ast.literal_eval(" ".join(python_pieces))
        json.dumps(value)  # a set isn't a value
        return value, position
    except (SyntaxError, TypeError, MemoryError):
        raise ValueError(f"no value before {position}") from None


def _unquoted(text: str) -> str:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return ast.literal_eval(text.replace("\n", "\\n").replace("\r", "\\r"))
