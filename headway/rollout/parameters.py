"""Checks the parameters of built-in verifiers and environments against their declared types and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import ConfigDict, Field, ValidationError, validate_call

from headway.records.errors import ConfigurationError
from headway.runtime.hooks import quoted

T = TypeVar("T")

NonNegativeNumber = Annotated[float, Field(ge=0)]


def call_checked(function: Callable[..., T], parameters: Mapping[str, Any], key: str) -> T:
    """Return ``function(**parameters)``. Raises ConfigurationError, naming the parameter below ``key``, where one isn't
    of the type that ``function`` declares: nothing is converted but whole numbers to floats."""
    try:
        if not isinstance(function, type):  # a class is a section, which checks itself
            function = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))(function)
        return function(**parameters)
    except ValidationError as error:
        raise ConfigurationError(explained(error, key)) from None


def explained(error: ValidationError, key: str) -> str:
    """Describe the first error below ``key``: its position, the value, and what would be valid."""
    first_error = error.errors()[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first_error["loc"])
    message = first_error["msg"].removeprefix("Value error, ")
    if first_error["type"] == "literal_error":
        message = f"valid: {first_error.get('ctx', {})['expected']}"
    return f"{key}{path} = {quoted(first_error['input'])}: {message}" if path else f"{key}: {message}"


def require_choice(key: str, value: str, choices: Any) -> None:
    """Raise ConfigurationError where ``value`` of the parameter ``key`` is none of ``choices``, a Literal."""
    if value not in get_args(choices):
        raise ConfigurationError(f"{key} = {value!r}: valid: {', '.join(get_args(choices))}")
