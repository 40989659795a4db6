"""Rows of a source: JSONL files, Hugging Face data sets, a user's function, and a user's own conversion of rows."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from headway.config.sources import SftSource, TaskSource
from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_function
from headway.tasks.datasets import read_dataset, without_nulls
from headway.tokens.pictures import require_parts

ROLES = ("system", "developer", "user", "assistant", "tool")


class Rows:
    """An iterable of the rows of ``source``, each with its name for errors: file and line, or data set and row number.

    Iterate once; ``left_out`` then counts the rows for which ``convert`` returned None. Iterating raises
    ConfigurationError for an unreadable source, and a ``convert`` that can't be imported, raises or returns no
    dictionary.
    """

    def __init__(self, source: TaskSource | SftSource) -> None:
        self._source = source
        self.left_out = 0

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        source = self._source
        rows = _rows_from(source)
        if not source.convert:
            yield from rows
            return
        convert = import_function(source.convert, "convert", ())
        for location, raw in rows:
            try:
                converted = convert(raw)
            except (Exception, SystemExit) as error:  # a user's function may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise ConfigurationError(f"{location}: {source.convert} raised {reason}") from error
            if converted is None:
                self.left_out += 1
            elif isinstance(converted, dict):
                yield location, cast("dict[str, Any]", converted)
            else:
                kind = type(converted).__name__
                raise ConfigurationError(f"{location}: {source.convert} returned a {kind}; valid: a dictionary or None")


def _rows_from(source: TaskSource | SftSource) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.source == "jsonl":
        return read_objects(Path(source.path))
    return _yielded(source) if isinstance(source, TaskSource) and source.source == "function" else read_dataset(source)


def _yielded(source: TaskSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a user's function, each with its number. Raises ConfigurationError."""
    make_rows = import_function(source.name, "name", ())
    number = -1
    try:
        inspect.signature(make_rows).bind(**source.parameters)
        for number, raw in enumerate(make_rows(**source.parameters)):
            if not isinstance(raw, Mapping):
                fault = f"yielded a {type(raw).__name__}; valid: dictionaries"
                raise ConfigurationError(f"{source.name}, row {number}: it {fault} of prompt, answer, ...")
            yield f"{source.name}, row {number}", {str(key): value for key, value in raw.items()}
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        reason = f"{type(error).__name__}: {error}"
        call_state = f"after row {number}" if number >= 0 else f"called with {dict(source.parameters)}"
        raise ConfigurationError(f"{source.name} {call_state} raised {reason}") from error


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each with ``file:line`` for errors; blank lines are skipped.

    Raises ConfigurationError: no such file, a folder, a line that is not one JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if content.strip():
                    yield f"{path}:{number}", _parse_object(content, f"{path}:{number}")
    except FileNotFoundError:
        raise ConfigurationError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path} is a folder; source = 'datasets' reads data sets in folders") from None
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from None


def _parse_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{location}: {_lone_surrogate(line) or f'not valid JSON: {error}'}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{location}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _lone_surrogate(line: bytes) -> str:
    """Describe the field of a JSON object that holds half of a surrogate pair; "" where there is none."""
    try:
        raw = json.loads(line)
    except ValueError:
        return ""
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if match := re.search("[\ud800-\udfff]", json.dumps([key, value], ensure_ascii=False)):
            return f'"{short(key)[1:-1]}" holds \\u{ord(match[0]):x}, half of a surrogate pair, which is no character'
    return ""


def number_text(value: float | Decimal) -> str:
    """Write a number in plain digits: integers without a point, no exponents, float32 in its shortest digits."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and not value.is_integer():
        float32_value = np.float32(value)  # a column's type isn't in its rows
        value = Decimal(str(float32_value) if float(float32_value) == value else repr(value))
    return format(Decimal(value).to_integral_value() if value == int(value) else value, "f")


def require_column(raw: Mapping[str, Any], key: str, location: str) -> Any:
    """Return ``raw[key]``, or the value at the path ``key`` (``reward_model.ground_truth``). Raises ConfigurationError
    with the existing columns when it is missing."""
    head_key, dot, rest_key = key.partition(".")
    if key not in raw and dot and isinstance(raw.get(head_key), Mapping):
        return require_column(raw[head_key], rest_key, f'{location}: "{head_key}"')
    if key not in raw:
        nearest = difflib.get_close_matches(key, list(raw), n=1, cutoff=0.6)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigurationError(f'{location}: missing "{key}"; {hint}it has: {", ".join(sorted(raw)) or "nothing"}')
    return raw[key]


def require_text(raw: Mapping[str, Any], key: str, location: str) -> str:
    """Return the non-empty string ``raw[key]``. Raises ConfigurationError naming ``location`` otherwise."""
    value = require_column(raw, key, location)
    if not isinstance(value, str):
        raise ConfigurationError(f'{location}: "{key}" = {short(value)}: must be a string')
    if not value:
        raise ConfigurationError(f'{location}: "{key}" is empty')
    return value


def require_messages(value: Any, key: str, location: str, pictures: Path | None = None) -> tuple[dict[str, Any], ...]:
    """Check a conversation: at least one {role, content}; further keys are kept unless None (data sets add those).

    The content must be a string, or, where ``pictures`` is a folder, parts that may be pictures, with paths relative to
    it; an assistant's may be missing beside ``tool_calls``. Raises ConfigurationError.
    """
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f'{location}: "{key}" = {short(value)}: must be a list of {{"role", "content"}}')
    messages: list[dict[str, Any]] = []
    for number, raw in enumerate(cast("list[Any]", without_nulls(value))):
        field = f'{location}: "{key}"[{number}]'
        if not isinstance(raw, dict):
            raise ConfigurationError(f'{field} = {short(raw)}: must be {{"role", "content"}}')
        message = {str(name): child for name, child in cast("dict[Any, Any]", raw).items() if child is not None}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            present_text = "" if "role" in message else f"; it has: {', '.join(message) or 'nothing'}"
            raise ConfigurationError(f"{field}: role = {role!r}{present_text}; valid: {', '.join(ROLES)}")
        if content is None and role == "assistant" and message.get("tool_calls"):
            message["content"] = ""  # templates test and concatenate it
        elif isinstance(content, list) and pictures is not None:
            message["content"] = require_parts(cast("list[Any]", content), f"{field}.content", pictures)
        elif isinstance(content, list) and "image" in repr(content)[:400]:
            raise ConfigurationError(f"{field}: pictures: headway sft learns from text alone")
        elif not isinstance(content, str):
            raise ConfigurationError(f"{field}: content = {short(content)}: must be a string; 'convert' can make one")
        messages.append(message)
    return tuple(messages)


def short(value: object) -> str:
    """Format a value for error messages, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_texts(paths: Sequence[str]) -> list[str]:
    """Return every string value of every object of the files, nested ones too. Raises ConfigurationError with file and
    line; also when there is no text at all."""
    texts = [text for path in paths for _, raw in read_objects(Path(path)) for text in _strings(raw) if text]
    if not texts:
        raise ConfigurationError(f"no text in {', '.join(paths)}")
    return texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
