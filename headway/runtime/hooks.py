"""Hooks: users' functions, called by their contract; errors and violations are reported with the hook's key.

`is_infrastructure` alone decides whether an exception of a user's code is an infrastructure failure.
"""

from __future__ import annotations

import errno
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, cast

from headway.records.errors import ConfigurationError, HookFailed, InfrastructureError
from headway.records.sandbox import SandboxError
from headway.runtime.imports import import_function
from headway.runtime.stalls.stacks import short_path

_LONGEST = 80  # characters of a value in an error
# Errors of connections, as PACKAGE.CLASS: the packages aren't imported here.
_TRANSPORT = re.compile(
    r"socket\.(gaierror|herror)|ssl\.SSLError|http\.(IncompleteRead|BadStatusLine)|urllib\.ContentTooShortError"
    r"|httpx2?\.TransportError|httpcore\.(NetworkError|TimeoutException|ProxyError|RemoteProtocolError)"
    r"|requests\.(ConnectionError|Timeout|ChunkedEncodingError)"
    r"|urllib3\.(ProtocolError|TimeoutError|NewConnectionError|SSLError|ProxyError)"
    r"|aiohttp\.(ClientConnectionError|ClientPayloadError)|websockets\.ConnectionClosed"
    r"|(openai|anthropic)\.APIConnectionError"
)
_NOT_SENT = re.compile(r"httpx2?\.(UnsupportedProtocol|LocalProtocolError)")  # among those: a request that can't be
# Of an OSError; others are of what was asked for: a name, a permission, a size.
_MACHINE = re.compile(
    "EIO|ENOSPC|EDQUOT|EMFILE|ENFILE|ENOMEM|EAGAIN|ENOBUFS|ESTALE|ENOLCK|EREMOTEIO|ENETDOWN|ENETUNREACH|ENETRESET"
    "|EHOSTDOWN|EHOSTUNREACH|EADDRNOTAVAIL|ENOTCONN"
)


@dataclass(frozen=True)
class Hook:
    """A user's function, with its key and name in the experiment file."""

    key: str  # say hooks.filter_item
    name: str  # its value in the file
    function: Callable[..., Any]

    def __call__(self, *arguments: object) -> Any:
        """Call the function and return its result. Raises HookFailed with the error it raised, and where."""
        try:
            return self.function(*arguments)
        except Exception as error:  # the boundary to a user's function
            raise self.raised(error) from error

    def failed(self, problem: str) -> HookFailed:
        """Make the error for a broken contract: ``problem`` continues the message after key and name."""
        return HookFailed(self.key, self.name, problem)

    def raised(self, error: Exception) -> HookFailed:
        """Make the error for a function that raised ``error``, with the line that did."""
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{PurePath(last_frame.filename).name}, line {last_frame.lineno}"
        return self.failed(f"raised {error_text(error)} ({location})")


def is_infrastructure(error: BaseException) -> bool:
    """Whether ``error``, raised by a user's code, is a failure of a machine or a service, which is retried and never
    rewarded. Any other error is the policy's or the code's own and isn't retried.

    True for an error that declares it (`InfrastructureError`, a sandbox's), a connection error, a time limit of the
    code's own client (TimeoutError), and an OSError with an errno of the machine; for a group, if all are."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_infrastructure(member) for member in cast("BaseExceptionGroup[BaseException]", error).exceptions)
    if isinstance(error, SandboxError):
        return error.failure.cause == "infrastructure"
    if isinstance(error, (InfrastructureError, ConnectionError, TimeoutError)):
        return True
    class_names = [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__]
    if any(map(_TRANSPORT.fullmatch, class_names)):
        return not any(map(_NOT_SENT.fullmatch, class_names))
    reason = vars(error).get("reason")  # urllib's, urllib3's
    if isinstance(reason, BaseException) and reason is not error:
        return is_infrastructure(reason)
    error_number = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else 0
    return _MACHINE.fullmatch(errno.errorcode.get(error_number, "")) is not None


def error_text(error: BaseException) -> str:
    """Format an exception of a user's code as its type and text; making the text may raise as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as str_error:  # the boundary to a user's __str__
        return f"{type(error).__name__}, whose text raises {type(str_error).__name__}"


def storable(text: str) -> str:
    """``text`` with U+FFFD in the place of each half of a surrogate pair, which has no UTF-8 form: undecodable bytes of
    a file's name, say."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
        call_text = f"{name.rpartition(':')[2]}({', '.join(arguments)})"
        raise ConfigurationError(f"{key} = {name!r} is called as {call_text}, and takes {signature}: {error}") from None


def source_location(error: BaseException) -> str:
    """The location in a user's code that raised ``error``: its innermost frame outside of headway and of installed
    packages, say "coins.py:31 in reply"; "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not short_path(frame.filename).startswith(("headway/", "<")):
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


def quoted(value: object) -> str:
    """Format a value for an error message: its repr, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
