"""Rewriting of JSON schemas for llguidance: vacuous keywords go, and unsupported ones become supported ones.

The result allows the same values as the schema, or fewer; sets of many items are an exception
(`_without_unique_items`).
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
_LOOKAHEAD = re.compile(r"\^?\(\?(=|!)")
_LITERAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?", re.DOTALL)  # in a pattern: a bracket there closes no group
_SET_ITEMS = 6  # most values of a set's items for which all subsets are listed


def supported_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite the schema for llguidance; schemas nested in it stay as they are."""
    rewritten = {key: value for key, value in schema.items() if not is_one_of(value, _VACUOUS.get(key, ()))}
    if isinstance(rewritten.get("format"), str) and rewritten["format"] not in _FORMATS:
        del rewritten["format"]
    if "contains" not in rewritten:
        rewritten.pop("maxContains", None)
        rewritten.pop("minContains", None)
    if "if" not in rewritten:
        rewritten.pop("then", None)
        rewritten.pop("else", None)
    elif "then" not in rewritten and "else" not in rewritten:
        del rewritten["if"]
    if isinstance(name_schema := rewritten.get("propertyNames"), Mapping):
        rewritten = _without_property_names(rewritten, name_schema)
    if rewritten.get("uniqueItems") is True:
        rewritten = _without_unique_items(rewritten)
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := rewritten.get(key), list) and any(not _has_lookaround(choice) for choice in choices):
            rewritten[key] = [choice for choice in choices if not _has_lookaround(choice)]
    if isinstance(pattern := rewritten.get("pattern"), str) and "(?" in pattern:
        patterns = _without_lookaheads(pattern)
        rewritten["pattern"] = patterns[-1]
        if patterns[:-1]:
            conjuncts = [{"pattern": lookahead} for lookahead in patterns[:-1]]
            rewritten["allOf"] = [*(rewritten["allOf"] if isinstance(rewritten.get("allOf"), list) else ()), *conjuncts]
    return rewritten


def is_one_of(value: Any, valid: Sequence[Any]) -> bool:
    """Whether ``value`` equals one of ``valid``; a boolean equals no number."""
    return any(value == candidate and isinstance(value, bool) is isinstance(candidate, bool) for candidate in valid)


def _without_property_names(schema: dict[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Express propertyNames by a list of properties, or by patternProperties."""
    other_schema = schema.get("additionalProperties", True)
    other_keywords = {key: value for key, value in schema.items() if key != "propertyNames"}
    if set(names) - {"type", "enum", "const", "pattern"} or names.get("type", "string") != "string":
        return schema
    listed_names = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed_names, list) and "pattern" not in names and "patternProperties" not in schema:
        defined_schemas = schema.get("properties") or {}
        properties = {name: defined_schemas.get(name, other_schema) for name in listed_names if isinstance(name, str)}
        return {**other_keywords, "properties": properties, "additionalProperties": False}
    if (
        listed_names is None
        and isinstance(names.get("pattern"), str)
        and not {"properties", "patternProperties"} & set(schema)
    ):
        return {**other_keywords, "patternProperties": {names["pattern"]: other_schema}, "additionalProperties": False}
    return schema


def _without_unique_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Express uniqueItems by an enumeration of the items' subsets where these are few. Other lists may repeat an item,
    which a client's set takes once: no grammar knows the items written before."""
    items, min_items, max_items = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems", _SET_ITEMS)
    if items is None or not isinstance(min_items, int) or not isinstance(max_items, int) or "prefixItems" in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("uniqueItems", "items", "minItems", "maxItems")}
    item_values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(items, Mapping) and items.get("type") == "boolean" and item_values is None:
        item_values = [False, True]
    if isinstance(item_values, list) and len(item_values) <= _SET_ITEMS:
        sizes = range(min_items, min(max_items, len(item_values)) + 1)
        subsets = [list(subset) for size in sizes for subset in itertools.combinations(item_values, size)]
        return {**{key: value for key, value in rest.items() if key != "type"}, "enum": subsets} if subsets else schema
    return {key: value for key, value in schema.items() if key != "uniqueItems"}


def _has_lookaround(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and re.search(r"\(\?<?[=!]", _without_lookaheads(pattern)[-1]) is not None


def _without_lookaheads(pattern: str) -> list[str]:
    """Split ``pattern`` into patterns whose conjunction equals it, as far as its lookaheads are at its beginning and of
    simple forms; the last pattern is the rest."""
    lookaheads, rest_pattern = list[str](), pattern
    while lookahead := _LOOKAHEAD.match(rest_pattern):
        end = _closing_position(rest_pattern, lookahead.end())
        inside = rest_pattern[lookahead.end() : end].removeprefix("^")
        is_positive = lookahead[1] == "="
        condition = f"^(?:{inside})" if is_positive else _complement(inside)
        if end < 0 or condition is None:
            break
        lookaheads.append(condition)
        rest_pattern = ("^" if rest_pattern.startswith("^") else "") + rest_pattern[end + 1 :]
    return [*lookaheads, rest_pattern] if rest_pattern.startswith("^") else [pattern]


def _complement(inside: str) -> str | None:
    """Return a pattern of the texts that don't begin with ``inside``; None where there is no simple one."""
    letter_pattern = r"(\\[^\w]|[^\\\[\](){}.*+?^$|])"
    if match := re.fullmatch(letter_pattern, inside):
        return f"^([^{match[1]}]|$)"
    if pair_match := re.fullmatch(rf"\.\*{letter_pattern}\1", inside):
        return f"^{pair_match[1]}?([^{pair_match[1]}]+{pair_match[1]}?)*$"
    if match := re.fullmatch(rf"\.\*{letter_pattern}", inside):
        return f"^[^{match[1]}]*$"
    if class_match := re.fullmatch(r"\[([^\]\\^][^\]\\]*)\]\*\$", inside):
        return f"[^{class_match[1]}]"
    return None


def _closing_position(pattern: str, start: int) -> int:
    """Return the position of the bracket that closes the group whose inside begins at ``start``; -1: none does."""
    steps = ((letter == "(") - (letter == ")") for letter in _LITERAL.sub(lambda m: "." * len(m[0]), pattern)[start:])
    return next((start + offset for offset, depth in enumerate(itertools.accumulate(steps)) if depth < 0), -1)
