"""JSON schemas at random, of the keywords that grammars know."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ["^[a-c]{1,3}$", "^x?[0-9]+$", "^(yes|no)$"]
_FORMATS = ["date", "uuid", "ipv4"]  # not those on which validators disagree: leap seconds, the length of an address


def random_schema(chance: random.Random) -> dict[str, Any]:
    """An object's schema, sometimes with definitions that refer to themselves."""
    node = {
        "type": "object",
        "properties": {"value": _schema(chance, 1), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    schema = _object(chance, 3)
    if chance.random() < 0.3:
        schema["properties"]["node"] = {"$ref": "#/$defs/node"}
        schema["$defs"] = {"node": node}
    return schema


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _enum] + [_object, _array, _any] * (depth > 0)
    return chance.choice(kinds)(chance, depth - 1)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": chance.choice(_FORMATS)}
    least = chance.randrange(3)
    return (
        {"type": "string", "minLength": least, "maxLength": least + chance.randrange(6)}
        if kind == 2
        else {"type": "string"}
    )


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-200, 200)
    bounds = {"minimum": low, "exclusiveMaximum": low + chance.randrange(2, 300)}
    return {"type": "integer", **(bounds if chance.random() < 0.6 else {"multipleOf": chance.choice([2, 5, 10])})}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randrange(-20, 20) / 4
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + chance.randrange(1, 40) / 8}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values = chance.sample(["a", 'é"\n', 1, 2.5, True, None, [1, "x"], {"k": 0}], chance.randrange(1, 5))
    return {"enum": values} if chance.random() < 0.7 else {"const": values[0]}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "b c", "name", "größe", "x/y", '"q"'], chance.randrange(1, 5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(chance, depth - 1) for name in names}}
    schema["required"] = [name for name in names if chance.random() < 0.6]
    further = chance.choice([False, False, True, {"type": "integer"}])
    return {**schema, "additionalProperties": further}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    schema = {
        "type": "array",
        "items": _schema(chance, depth - 1),
        "minItems": least,
        "maxItems": least + chance.randrange(4),
    }
    if chance.random() < 0.3:
        schema["prefixItems"] = [_schema(chance, depth - 1)]
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(chance.randrange(2, 4))]}
