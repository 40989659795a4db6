"""The one rule of whose failure an exception of a user's code is."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import subprocess
import urllib.error
from typing import Any

import pytest

from headway.api import InfrastructureError
from headway.records.sandbox import SandboxError, environment_failure, infrastructure_failure, model_failure
from headway.runtime.hooks import is_infrastructure, storable


class Refused(ConnectionRefusedError):
    """A user's own kind."""


MACHINES: list[BaseException] = [
    InfrastructureError("no search"),
    ConnectionError("gone"),
    Refused(),
    BrokenPipeError(),
    TimeoutError(),
    TimeoutError("later"),
    socket.gaierror(-2, "Name or service not known"),
    ssl.SSLCertVerificationError(1, "certificate verify failed"),
    ssl.SSLError(1, "bad record"),
    urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")),
    urllib.error.URLError(socket.gaierror(-2, "unknown")),
    urllib.error.ContentTooShortError("short", b""),  # type: ignore[arg-type]
    http.client.IncompleteRead(b""),
    http.client.RemoteDisconnected(),
    SandboxError(infrastructure_failure("gone")),
    ExceptionGroup("both", [ConnectionError(), OSError(errno.EIO, "I/O error")]),
    *(
        OSError(getattr(errno, name), name)
        for name in ("EIO", "ENOSPC", "EMFILE", "ENFILE", "ENOMEM", "EDQUOT", "EAGAIN", "ENETUNREACH", "ETIMEDOUT")
    ),
]
POLICYS: list[BaseException] = [
    ValueError("no"),
    KeyError("x"),
    MemoryError(),
    OSError("broken"),
    FileNotFoundError(2, "No such file"),
    PermissionError(13, "Permission denied"),
    IsADirectoryError(21, "Is a directory"),
    OSError(errno.ENAMETOOLONG, "File name too long"),
    OSError(errno.EROFS, "Read-only file system"),
    subprocess.TimeoutExpired("sleep", 5),
    urllib.error.URLError("unknown url type: x"),
    urllib.error.URLError(FileNotFoundError(2, "No such file")),
    urllib.error.HTTPError("http://x", 404, "Not Found", {}, None),  # type: ignore[arg-type]
    http.client.InvalidURL("nonnumeric port"),
    SandboxError(model_failure("out of memory")),
    SandboxError(environment_failure("no python")),
    ExceptionGroup("both", [ConnectionError(), ValueError()]),
]


@pytest.mark.parametrize("error", MACHINES, ids=repr)
def test_a_machines_failures(error: BaseException) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize("error", POLICYS, ids=repr)
def test_the_policys_or_the_codes_own(error: BaseException) -> None:
    assert not is_infrastructure(error)


@pytest.mark.parametrize(
    ("package", "machines", "others"),
    [
        ("httpx", "ConnectError ReadTimeout PoolTimeout RemoteProtocolError", "UnsupportedProtocol InvalidURL"),
        ("httpcore", "ConnectError ReadError ConnectTimeout", "UnsupportedProtocol"),
        ("requests.exceptions", "ConnectionError SSLError ReadTimeout ChunkedEncodingError", "HTTPError InvalidURL"),
        ("requests.exceptions", "ProxyError ConnectTimeout", "MissingSchema TooManyRedirects JSONDecodeError"),
        ("aiohttp", "ClientConnectionError ServerDisconnectedError ClientPayloadError", "InvalidURL ClientError"),
        ("aiohttp", "ServerTimeoutError ClientConnectorDNSError", "ClientResponseError"),
        ("urllib3.exceptions", "ProtocolError NewConnectionError ReadTimeoutError", "LocationParseError"),
        ("openai", "APIConnectionError APITimeoutError", "BadRequestError RateLimitError"),
        ("websockets.exceptions", "ConnectionClosedError ConnectionClosedOK", "InvalidURI"),
    ],
)
def test_errors_of_clients(package: str, machines: str, others: str) -> None:
    module: Any = pytest.importorskip(package)

    def made(name: str) -> BaseException:
        kind = getattr(module, name)
        own: Any = type("Mine", (kind,), {"__init__": lambda self: None, "__str__": lambda self: "x"})
        return own()  # a user's kind of it, whatever it is made of

    assert [name for name in machines.split() if not is_infrastructure(made(name))] == []
    assert [name for name in others.split() if is_infrastructure(made(name))] == []


def test_a_client_that_gives_up_says_why() -> None:
    urllib3 = pytest.importorskip("urllib3.exceptions")
    assert is_infrastructure(urllib3.MaxRetryError(None, "/", urllib3.ProtocolError("aborted")))
    assert not is_infrastructure(urllib3.MaxRetryError(None, "/", urllib3.ResponseError("too many 500")))


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("plain", "plain"),
        ("na\udcffme", "na\ufffdme"),
        ("\ud800", "\ufffd"),
        ("\ud800b", "\ufffdb"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("ä\U0001f600", "ä\U0001f600"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_texts_that_can_be_stored(text: str, stored: str) -> None:
    assert storable(text) == stored
