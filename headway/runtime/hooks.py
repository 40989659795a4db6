"""Hooks: users' functions, called by their contract; errors and violations are reported with the hook's key."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

from headway.records.errors import ConfigurationError, HookFailed
from headway.runtime.imports import import_function
from headway.runtime.stalls.stacks import shortened

_LONGEST = 80  # characters of a value in an error


@dataclass(frozen=True)
class Hook:
    """A function, with its key and name in the experiment file."""

    key: str  # say hooks.filter_item
    name: str  # what the file says
    function: Callable[..., Any]

    def __call__(self, *arguments: object) -> Any:
        """Call the function and return its result. Raises HookFailed with the error it raised, and where."""
        try:
            return self.function(*arguments)
        except Exception as error:  # the boundary to a user's function
            raise self.raised(error) from error

    def failed(self, what: str) -> HookFailed:
        """Make the error for a broken contract: ``what`` continues the message after key and name."""
        return HookFailed(self.key, self.name, what)

    def raised(self, error: Exception) -> HookFailed:
        """Make the error for a function that raised ``error``, with the line that did."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{PurePath(last.filename).name}, line {last.lineno}"
        return self.failed(f"raised {type(error).__name__}: {error} ({where})")


def load_hook(
    key: str,
    name: str,
    known: Mapping[str, Callable[..., Any]],
    arguments: Sequence[str],
    *,
    asynchronous: bool = False,
) -> Hook:
    """Load the hook ``name``: one of ``known``, or the user's ``module:function``, which takes ``arguments`` by
    position. ``asynchronous``: it may be an async function. Raises ConfigurationError."""
    function = known.get(name)
    if function is None:
        function = import_function(name, key, known, asynchronous=asynchronous)
        _require_arguments(key, name, function, arguments)
    return Hook(key=key, name=name, function=function)


def _require_arguments(key: str, name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in without a signature: the first call will show
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = f"{name.rpartition(':')[2]}({', '.join(arguments)})"
        raise ConfigurationError(f"{key} = {name!r} is called as {called}, and takes {signature}: {error}") from None


def place_of(error: BaseException) -> str:
    """Where a user's code raised ``error``: its innermost frame outside of headway and of what is installed, say
    "coins.py:31 in reply"; "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not shortened(frame.filename).startswith(("headway/", "<")):
            return f"{PurePath(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""


def finite_number(value: object) -> float | None:
    """Convert a value to a finite number, NumPy's and 0-d tensors included; None for anything else."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(cast("Any", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several, a huge integer
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
