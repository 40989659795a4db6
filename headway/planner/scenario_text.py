"""Writes a scenario as the text of a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(raw: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """Write ``raw`` (sections of TOML's types) as a TOML file with ``comments`` at its top. Tables nested more than one
    level below a section are written inline."""
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines()]
    for name, section in raw.items():
        lines += _section(name, section)
    return "\n".join(lines) + "\n"


def _section(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    tables = {key: value for key, value in section.items() if isinstance(value, dict) and not _is_quantity(value)}
    plain_values = {key: value for key, value in section.items() if key not in tables and value is not None}
    if plain_values or not tables:
        yield ""
        yield f"[{name}]"
        for key, value in plain_values.items():
            yield f"{_key(key)} = {_value(value)}"
    for key, table in tables.items():
        yield from _section(f"{name}.{_key(key)}", table)


def _is_quantity(table: Any) -> bool:
    return isinstance(table, dict) and "kind" in table


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """``text`` as a TOML basic string: JSON's escapes, but no surrogate pairs, and DEL must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, cast("Sequence[Any]", value))) + "]"
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{ " + ", ".join(f"{_key(key)} = {_value(member)}" for key, member in items) + " }"
    return repr(value)  # int, float: TOML writes 1e-05 as Python does
