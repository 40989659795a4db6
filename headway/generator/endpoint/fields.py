"""Fields of a request's body: a parser and a JSON schema for each, so that the documentation matches the parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headway.records.conversations import RequestRefused
from headway.records.generation import LOWEST_TEMPERATURE
from headway.tokens.grammar_schemas import is_one_of

_MOST_STOPS = 64
_LONGEST_STOP = 1024  # characters
_SEED = (-(1 << 63), (1 << 63) - 1)
MOST_TOKENS = 1 << 31  # limit of max_tokens: no context is larger
_MOST_LEVELS = 200  # of lists and objects in each other
_CONVERSATION = ("messages", "input", "prompt")  # large, and flat
_LARGEST_REWARD = 1e30  # of either sign: the squares and sums of larger ones may overflow, which would end a run

Schema = Mapping[str, Any]
Values = Mapping[str, Any]  # parsed values of a request's fields, by name


@dataclass(frozen=True, slots=True)
class Field:
    """Parser of one field: ``read(name, value)`` raises RequestRefused for a value that ``schema`` excludes."""

    read: Callable[[str, Any], Any]
    schema: Schema
    default: Any = None  # for an absent or null value
    required: bool = False


def read(body: Mapping[str, Any], fields: Mapping[str, Field], within: str = "") -> dict[str, Any]:
    """Parse a body's values of ``fields``, in their order. ``within``: prefix of names in errors. Raises
    RequestRefused."""
    values: dict[str, Any] = {}
    for name, field in fields.items():
        value = body.get(name)
        if value is None and field.required:
            raise RequestRefused(f"{within}{name}: field required", param=within + name)
        values[name] = field.default if value is None else field.read(within + name, value)
    return values


@contextmanager
def nesting_named(body: Mapping[str, Any]) -> Iterator[None]:
    """Raise RequestRefused for a schema that is nested too deeply, and with the deepest field of ``body`` where the
    block meets Python's limit of nesting."""
    try:
        for name in (one for one in body if one not in _CONVERSATION):
            if _levels(body[name]) > _MOST_LEVELS:
                raise RecursionError
        yield
    except RecursionError:
        levels, name = max((_levels(value), name) for name, value in body.items())
        what = f"{name}: nested {levels} levels deep; valid are {_MOST_LEVELS}, and fewer where a template reads them"
        raise RequestRefused(what, param=name) from None


@contextmanager
def renamed(paths: Mapping[str, str]) -> Iterator[None]:
    """Raise a RequestRefused of the block under the client's own name of its field. ``paths``: that name by ours, or by
    the beginning of ours."""
    try:
        yield
    except RequestRefused as error:
        ours, text = error.param or "", str(error)
        known = [path for path in paths if ours == path or ours.startswith((f"{path}.", f"{path}["))]
        if not known:
            raise
        longest = max(known, key=len)
        name = paths[longest] + ours[len(longest) :]
        text = name + text[len(ours) :] if text.startswith(ours) else text
        raise RequestRefused(text, param=name, code=error.code) from None


def _levels(value: Any) -> int:
    levels, layer = 0, [value]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        levels += 1
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return levels


def schema_of(fields: Mapping[str, Field]) -> dict[str, Any]:
    """JSON schema of an object with these fields; further ones are ignored."""
    required = [name for name, field in fields.items() if field.required]
    properties = {
        name: field.schema if field.required or not field.schema else {"anyOf": [field.schema, {"type": "null"}]}
        for name, field in fields.items()
    }
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def raw(schema: Schema, most: int | None = None, *, required: bool = False) -> Field:
    """Field whose value is passed on unparsed; a list has at most ``most`` entries."""

    def checked(name: str, value: Any) -> Any:
        if most is not None and isinstance(value, list) and len(value) > most:
            raise RequestRefused(f"{name}: {len(value)} entries, at most {most} are valid", param=name)
        return value

    limit = {} if most is None else {"maxItems": most}
    return Field(checked, {**schema, **limit}, required=required)


def number(low: float, high: float, smallest: float = 0.0, *, required: bool = False) -> Field:
    """Field of a number in [low, high]; a value above 0 must be at least ``smallest``."""

    def checked(name: str, value: Any) -> float:
        valid = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
        if not valid or 0 < value < smallest:
            above = f" (above 0: from {smallest:g} on)" if smallest else ""
            raise refused(name, value, f"a number from {low:g} to {high:g}{above}")
        return float(value)

    if smallest:
        return Field(checked, {"anyOf": [{"const": 0}, {"type": "number", "minimum": smallest, "maximum": high}]})
    return Field(checked, {"type": "number", "minimum": low, "maximum": high}, required=required)


def reward(*, required: bool = False) -> Field:
    return number(-_LARGEST_REWARD, _LARGEST_REWARD, required=required)


def integer(low: int, high: int, *, required: bool = False) -> Field:
    def checked(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refused(name, value, f"an integer from {low} to {high}")
        return value

    return Field(checked, {"type": "integer", "minimum": low, "maximum": high}, required=required)


def flag(default: bool | None = False) -> Field:
    def checked(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refused(name, value, "true or false")
        return value

    return Field(checked, {"type": "boolean"}, default)


def stop() -> Field:
    """Field of stop strings: one string, or a list."""

    def checked(name: str, value: Any) -> tuple[str, ...]:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in given):
            raise refused(name, value, f"a text, or a list of texts, of 1 to {_LONGEST_STOP} characters")
        if len(given) > _MOST_STOPS:
            raise RequestRefused(f"{name}: {len(given)} texts, at most {_MOST_STOPS} are valid", param=name)
        return tuple(given)

    text = {"type": "string", "minLength": 1, "maxLength": _LONGEST_STOP}
    return Field(checked, {"anyOf": [text, {"type": "array", "items": text, "maxItems": _MOST_STOPS}]}, default=())


def structure(**fields: Field) -> Field:
    """Field of an object whose listed fields are parsed; its others are kept."""

    def checked(name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise refused(name, value, "an object")
        return {**value, **read(value, fields, f"{name}.")}

    return Field(checked, schema_of(fields), default={})


def only(*valid: Any, why: str) -> Field:
    """Field that allows just these values, or none; ``why`` ends the error."""

    def checked(name: str, value: Any) -> Any:
        if not is_one_of(value, valid):
            raise RequestRefused(f"{name} = {shown(value)}: {why}", param=name)
        return value

    return Field(checked, {"enum": list(valid)} if valid else {"type": "null"})


def shown(value: Any) -> str:
    """Format a value for an error, in at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def refused(name: str, value: Any, valid: str) -> RequestRefused:
    """Make the error of a field's value."""
    return RequestRefused(f"{name} = {shown(value)}: valid is {valid}", param=name)


def sampling() -> dict[str, Field]:
    """Sampling fields that all APIs share."""
    return {
        **{f"{kind}_penalty": number(-2, 2) for kind in ("frequency", "presence", "repetition")},
        "logit_bias": structure(),
        "temperature": number(0, 2, LOWEST_TEMPERATURE),
        "top_p": number(0, 1),
        "top_k": integer(-1, 1 << 31),
        "seed": integer(*_SEED),
    }
