"""JSON schemas as llguidance reads them: what says nothing taken out, what it lacks expressed by what it has.

The result allows the same values as the schema, or fewer; but for sets of many, see `_unique`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_EMPTY: tuple[Any, ...] = (True, {}, None)
_VACUOUS: Mapping[str, tuple[Any, ...]] = {  # values that allow everything
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems"), (*_EMPTY, {"type": "string"})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), (*_EMPTY,)),
    "uniqueItems": (False, None),
    "minContains": (0,),
    "not": (False,),
}
_LOOK = re.compile(r"\^?\(\?(=|!)")
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?", re.DOTALL)  # in a pattern: a bracket there closes no group
_SET_ITEMS = 6  # values of a set's items whose subsets are listed


def readable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, not those inside it."""
    found = {key: value for key, value in schema.items() if not is_one_of(value, _VACUOUS.get(key, ()))}
    if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
        del found["format"]
    if "contains" not in found:
        found.pop("maxContains", None)
        found.pop("minContains", None)
    if "if" not in found:
        found.pop("then", None)
        found.pop("else", None)
    elif "then" not in found and "else" not in found:
        del found["if"]
    if isinstance(names := found.get("propertyNames"), Mapping):
        found = _named(found, names)
    if found.get("uniqueItems") is True:
        found = _unique(found)
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := found.get(key), list) and any(not _has_lookaround(way) for way in ways):
            found[key] = [way for way in ways if not _has_lookaround(way)]
    if isinstance(pattern := found.get("pattern"), str) and "(?" in pattern:
        patterns = _without_lookaheads(pattern)
        found["pattern"] = patterns[-1]
        if patterns[:-1]:
            more = [{"pattern": one} for one in patterns[:-1]]
            found["allOf"] = [*(found["allOf"] if isinstance(found.get("allOf"), list) else ()), *more]
    return found


def is_one_of(value: Any, valid: Sequence[Any]) -> bool:
    """Whether ``value`` equals one of these; a truth value is no number."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in valid)


def _named(schema: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """The names of an object's properties as a list of properties, or as a pattern of them."""
    others = schema.get("additionalProperties", True)
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if set(names) - {"type", "enum", "const", "pattern"} or names.get("type", "string") != "string":
        return schema
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and "pattern" not in names and "patternProperties" not in schema:
        own = schema.get("properties") or {}
        found = {name: own.get(name, others) for name in listed if isinstance(name, str)}
        return {**rest, "properties": found, "additionalProperties": False}
    if (
        listed is None
        and isinstance(names.get("pattern"), str)
        and not {"properties", "patternProperties"} & set(schema)
    ):
        return {**rest, "patternProperties": {names["pattern"]: others}, "additionalProperties": False}
    return schema


def _unique(schema: dict[str, Any]) -> dict[str, Any]:
    """A list without repetitions: as its items' subsets where these are few. Of others no grammar knows what was
    written before, so they may repeat an item, which a client's set takes once."""
    items, least, most = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems", _SET_ITEMS)
    if items is None or not isinstance(least, int) or not isinstance(most, int) or "prefixItems" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("uniqueItems", "items", "minItems", "maxItems")}
    values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(items, Mapping) and items.get("type") == "boolean" and values is None:
        values = [False, True]
    if isinstance(values, list) and len(values) <= _SET_ITEMS:
        sizes = range(least, min(most, len(values)) + 1)
        subsets = [list(subset) for size in sizes for subset in itertools.combinations(values, size)]
        return {**{key: value for key, value in rest.items() if key != "type"}, "enum": subsets} if subsets else schema
    return {key: value for key, value in schema.items() if key != "uniqueItems"}


def _has_lookaround(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and re.search(r"\(\?<?[=!]", _without_lookaheads(pattern)[-1]) is not None


def _without_lookaheads(pattern: str) -> list[str]:
    """Patterns that together allow what ``pattern`` does, as far as its lookaheads stand at its beginning and are of
    simple forms; the last is what remains."""
    found, rest = list[str](), pattern
    while look := _LOOK.match(rest):
        end = _closing(rest, look.end())
        inside = rest[look.end() : end].removeprefix("^")
        positive = look[1] == "="
        other = f"^(?:{inside})" if positive else _complement(inside)
        if end < 0 or other is None:
            break
        found.append(other)
        rest = ("^" if rest.startswith("^") else "") + rest[end + 1 :]
    return [*found, rest] if rest.startswith("^") else [pattern]


def _complement(inside: str) -> str | None:
    """A pattern of the texts that don't begin with ``inside``; None: no simple one."""
    letter = r"(\\[^\w]|[^\\\[\](){}.*+?^$|])"
    if one := re.fullmatch(letter, inside):
        return f"^([^{one[1]}]|$)"
    if two := re.fullmatch(rf"\.\*{letter}\1", inside):
        return f"^{two[1]}?([^{two[1]}]+{two[1]}?)*$"
    if one := re.fullmatch(rf"\.\*{letter}", inside):
        return f"^[^{one[1]}]*$"
    if chars := re.fullmatch(r"\[([^\]\\^][^\]\\]*)\]\*\$", inside):
        return f"[^{chars[1]}]"
    return None


def _closing(pattern: str, at: int) -> int:
    """The place of the bracket that closes a group whose inside begins ``at``; -1: none does."""
    steps = ((letter == "(") - (letter == ")") for letter in _LITERAL.sub(lambda one: "." * len(one[0]), pattern)[at:])
    return next((at + place for place, depth in enumerate(itertools.accumulate(steps)) if depth < 0), -1)
