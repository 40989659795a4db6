"""Parsing of a game's actions: the position of the action in an answer, and the action that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headway.records.errors import ConfigurationError

Reading = Literal["whole", "last_line", "tag", "tool"]  # an answer's action: all of it, its last line, <action>, a call

_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_AROUND = " \t\r\n.!,;:'\"`*"  # characters around a name in a sentence
_WHERE = {
    "whole": "Answer with the action alone",
    "last_line": "Write the action on the last line of your answer",
    "tag": "Write the action as <action>...</action>",
    "tool": "Call the tool act",
}


def find_action(text: str, reading: Reading) -> str | None:
    """Return the action in an answer's text; None where there is none."""
    if reading == "tag":
        matches = _TAG.findall(text)
        return matches[-1].strip() if matches else None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    return text.strip() if reading == "whole" else lines[-1]


class Actions:
    """Actions that are any text; subclasses: the actions of a gymnasium ``space``."""

    def __init__(self, space: Any = None) -> None:
        self.space = space
        self.schema: dict[str, Any] = {"type": "string"}

    def instructions(self, reading: Reading) -> str:
        """Return instructions for the policy: how to write an action."""
        return f"{_WHERE[reading]}."

    def read(self, written: str) -> Any:
        """Parse an action into JSON types. Raises ValueError for a text that is no action."""
        return written

    def to_native(self, action: Any) -> Any:
        """Convert ``action`` from JSON types to the type that the game takes."""
        return action


@dataclass
class NamedActions(Actions):
    """Actions of a finite list, by name or number."""

    names: Sequence[str]  # (): numbers only
    first: int
    count: int

    def __post_init__(self) -> None:
        self._numbers = {name.casefold(): self.first + index for index, name in enumerate(self.names)}
        self.schema = {"type": "string", "enum": list(self.names)} if self.names else {"type": "integer"}

    @property
    def _valid(self) -> str:
        return ", ".join(self.names) or f"a number from {self.first} to {self.first + self.count - 1}"

    def instructions(self, reading: Reading) -> str:
        return f"{_WHERE[reading]}; valid: {self._valid}."

    def read(self, written: str) -> Any:
        word = written.strip(_AROUND).casefold()
        number = self._numbers.get(word)
        if number is None and word.isascii() and word.removeprefix("-").isdecimal() and len(word) < 20:
            number = int(word)
        if number is None or not self.first <= number < self.first + self.count:
            excerpt = written if len(written) <= 80 else written[:77] + "..."
            raise ValueError(f"{excerpt!r} is no action")
        return number


class TextActions(Actions):
    """Actions that are the texts of a space."""

    def instructions(self, reading: Reading) -> str:
        return f"{_WHERE[reading]}, one of {self.space}."

    def read(self, written: str) -> Any:
        if not self.space.contains(written):
            raise ValueError("that is no action")
        return written


class ArrayActions(Actions):
    """Actions that are arrays of a space, written as JSON."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.schema = {"type": "array", "description": f"{space}"}

    def instructions(self, reading: Reading) -> str:
        return f"{_WHERE[reading]}, as JSON, one of {self.space}."

    def read(self, written: str) -> Any:
        import numpy

        try:
            action = json.loads(written)
            if not numpy.isfinite(self.to_native(action)).all():  # null is no number either
                raise ValueError("not finite")
            msgspec.msgpack.encode(action)  # as it will be stored: no integers beyond 64 bits
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise ValueError("that is no action") from None
        return action

    def to_native(self, action: Any) -> Any:
        import numpy

        array = numpy.asarray(action, dtype=self.space.dtype)
        if not self.space.contains(array):
            raise ValueError("outside its space")
        return array


def actions_of(space: Any, names: Sequence[str]) -> Actions:
    """Return the actions of a gymnasium space; without a space any text is one. Raises ConfigurationError for names
    that don't fit the space, and for a space whose actions can't be written in an answer."""
    space_type = type(space).__name__
    action_count = getattr(space, "n", None) if space_type == "Discrete" else None
    if names and (action_count is None or len(names) != action_count):
        actual = f"{action_count} actions" if action_count is not None else f"no list of actions: {space}"
        raise ConfigurationError(f"environment.parameters.actions has {len(names)} names, and the game has {actual}")
    if action_count is not None:
        return NamedActions(list(names), int(space.start), int(action_count))
    if space is None:
        return Actions()
    if space_type == "Text":
        return TextActions(space)
    if space_type in ("Box", "MultiDiscrete", "MultiBinary"):
        return ArrayActions(space)
    raise ConfigurationError(f"environment.parameters.env: actions of the space {space} can't be written in an answer")
