"""Fields of a request's body: a parser and a JSON schema for each, so that the documentation matches the parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headway.records.conversations import RequestRefused
from headway.records.generation import LOWEST_TEMPERATURE
from headway.tokens.grammar_schemas import is_one_of

_MAX_STOPS = 64
_LONGEST_STOP = 1024  # characters
_SEED = (-(1 << 63), (1 << 63) - 1)
MAX_TOKENS = 1 << 31  # limit of max_tokens: no context is larger
_MAX_LEVELS = 200  # of lists and objects in each other
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
def limited_nesting(body: Mapping[str, Any]) -> Iterator[None]:
    """Raise RequestRefused for a field that is nested too deeply, and for the deepest field of ``body`` if the block
    meets Python's recursion limit."""
    try:
        for name in (key for key in body if key not in _CONVERSATION):
            if _levels(body[name]) > _MAX_LEVELS:
                raise RecursionError
        yield
    except RecursionError:
        levels, name = max((_levels(value), name) for name, value in body.items())
        reason = f"{name}: nested {levels} levels deep; valid: {_MAX_LEVELS}, or fewer if a template reads them"
        raise RequestRefused(reason, param=name) from None


@contextmanager
def client_names(paths: Mapping[str, str]) -> Iterator[None]:
    """Translate the field of a RequestRefused raised in the block to the client's name. ``paths`` maps our path, or
    its beginning, to the client's."""
    try:
        yield
    except RequestRefused as error:
        our_path, reason = error.param or "", str(error)
        matching_paths = [path for path in paths if our_path == path or our_path.startswith((f"{path}.", f"{path}["))]
        if not matching_paths:
            raise
        longest_match = max(matching_paths, key=len)
        client_path = paths[longest_match] + our_path[len(longest_match) :]
        reason = client_path + reason[len(our_path) :] if reason.startswith(our_path) else reason
        raise RequestRefused(reason, param=client_path, code=error.code) from None


def _levels(value: Any) -> int:
    levels, layer_nodes = 0, [value]
    while layer_nodes := [node for node in layer_nodes if isinstance(node, dict | list)]:
        levels += 1
        layer_nodes = [child for node in layer_nodes for child in (node.values() if isinstance(node, dict) else node)]
    return levels


def schema_of(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Make the JSON schema of an object with these fields; further ones are ignored."""
    required = [name for name, field in fields.items() if field.required]
    properties = {
        name: field.schema if field.required or not field.schema else {"anyOf": [field.schema, {"type": "null"}]}
        for name, field in fields.items()
    }
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def raw(schema: Schema, max_entries: int | None = None, *, required: bool = False) -> Field:
    """Make a field whose value is passed on unparsed; a list has at most ``max_entries`` entries."""

    def checked(name: str, value: Any) -> Any:
        if max_entries is not None and isinstance(value, list) and len(value) > max_entries:
            raise RequestRefused(f"{name}: {len(value)} entries, at most {max_entries} are valid", param=name)
        return value

    limit_schema = {} if max_entries is None else {"maxItems": max_entries}
    return Field(checked, {**schema, **limit_schema}, required=required)


def number(low: float, high: float, smallest: float = 0.0, *, required: bool = False) -> Field:
    """Make a field of a number in [low, high]; a value above 0 must be at least ``smallest``."""

    def checked(name: str, value: Any) -> float:
        is_valid = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
        if not is_valid or 0 < value < smallest:
            above_zero_text = f" (above 0: from {smallest:g} on)" if smallest else ""
            raise refused(name, value, f"a number from {low:g} to {high:g}{above_zero_text}")
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
    """Make the field of stop strings: one string, or a list."""

    def checked(name: str, value: Any) -> tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in texts):
            raise refused(name, value, f"a text, or a list of texts, of 1 to {_LONGEST_STOP} characters")
        if len(texts) > _MAX_STOPS:
            raise RequestRefused(f"{name}: {len(texts)} texts, at most {_MAX_STOPS} are valid", param=name)
        return tuple(texts)

    schema = {"type": "string", "minLength": 1, "maxLength": _LONGEST_STOP}
    return Field(checked, {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": _MAX_STOPS}]}, default=())


def structure(**fields: Field) -> Field:
    """Make a field of an object whose listed fields are parsed; its others are kept."""

    def checked(name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise refused(name, value, "an object")
        return {**value, **read(value, fields, f"{name}.")}

    return Field(checked, schema_of(fields), default={})


def only(*valid: Any, why: str) -> Field:
    """Make a field that allows only these values, without any only null; ``why`` ends the error."""

    def checked(name: str, value: Any) -> Any:
        if not is_one_of(value, valid):
            raise RequestRefused(f"{name} = {formatted(value)}: {why}", param=name)
        return value

    return Field(checked, {"enum": list(valid)} if valid else {"type": "null"})


def formatted(value: Any) -> str:
    """Format a value for an error, in at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def refused(name: str, value: Any, valid: str) -> RequestRefused:
    """Make the error of a field's value."""
    return RequestRefused(f"{name} = {formatted(value)}: valid: {valid}", param=name)


def sampling() -> dict[str, Field]:
    """Make the sampling fields that all APIs share."""
    return {
        **{f"{kind}_penalty": number(-2, 2) for kind in ("frequency", "presence", "repetition")},
        "logit_bias": structure(),
        "temperature": number(0, 2, LOWEST_TEMPERATURE),
        "top_p": number(0, 1),
        "top_k": integer(-1, 1 << 31),
        "seed": integer(*_SEED),
    }
