"""Demonstrations for `headway sft`: prompts with a solution, or whole conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from headway.config.sources import SftSource
from headway.records.errors import ConfigurationError
from headway.tasks.datasets import without_nulls
from headway.tasks.source_rows import Rows, require_messages, short


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt and its solution; a pair in which either is empty isn't trained on."""

    prompt: str
    solution: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation of {role, content} messages, and the tools that the chat template is given."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None


def read_demonstrations(source: SftSource) -> Iterator[tuple[str, Pair | Conversation]]:
    """Yield the rows of ``source``, each with its name for errors; further columns are ignored.

    Raises ConfigurationError: an unreadable source, and a row that is neither a pair nor a conversation (with its
    columns).
    """
    columns = source.columns
    for location, raw in Rows(source):
        if raw.get(columns.messages) is not None:
            messages = require_messages(raw[columns.messages], columns.messages, location)
            tools = _tools_from(raw.get(columns.tools), columns.tools, location)
            yield location, Conversation(messages=messages, tools=tools)
        elif columns.prompt in raw and columns.solution in raw:
            prompt, solution = (_text(raw, key, location) for key in (columns.prompt, columns.solution))
            yield location, Pair(prompt=prompt, solution=solution)
        else:
            raise ConfigurationError(
                f'{location}: it has the columns {", ".join(sorted(raw)) or "(none)"}; needed: "{columns.prompt}" and '
                f'"{columns.solution}", or "{columns.messages}"; sft.data.columns says which column is which'
            )


def _text(raw: Mapping[str, Any], key: str, location: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise ConfigurationError(f"{location}: \"{key}\" = {short(value)}: must be a string; 'convert' can make one")
    return value


def _tools_from(value: Any, key: str, location: str) -> tuple[dict[str, Any], ...] | None:
    if not value:
        return None
    raw_tools = cast("list[Any]", without_nulls(value if isinstance(value, list) else [value]))
    if not all(isinstance(tool, dict) for tool in raw_tools):
        reason = "must be a list of objects; 'convert' can make one"
        raise ConfigurationError(f'{location}: "{key}" = {short(value)}: {reason}')
    return tuple(raw_tools)
