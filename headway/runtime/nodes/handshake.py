"""The handshake of a connection between machines: both ends prove that they know the run's key.

Before it is done, nothing that arrives is unpickled: messages are short JSON records behind a length of two bytes. The
client, which connected, sends a `Hello`; the server answers with a `Challenge`; the client proves the key; the server's
`Admission` admits it or says why not. Each proof is HMAC-SHA256 by the key over all bytes exchanged so far. These
include both ends' fresh nonces, so that a recorded handshake is useless, and the certificate of an encrypted
connection, so that a man in the middle can't relay it. The handshake keeps out clients that don't know the key; the
traffic that follows is only as secret as the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib.metadata
import os
import platform
import secrets
import socket
import stat
import struct
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError

PROTOCOL = 1  # of this module and of the frames that follow it
KEY_VARIABLE = "HEADWAY_CLUSTER_KEY"
HANDSHAKE_S = 10.0  # limit for all of it
_SHORTEST_KEY = 32  # characters
_LENGTH = struct.Struct("<H")
_LONGEST_MESSAGE_BYTES = 4096

Purpose = Literal["node", "worker", "mirror", "peer"]
T = TypeVar("T", bound=msgspec.Struct)


class ConnectionRefused(HeadwayError):
    """A handshake failed at either end: wrong key, garbage, another version, an ended epoch."""

    exit_code = 3


class EncryptionRequired(ConnectionRefused):
    """The server accepts connections over TLS alone."""


class NotAdmitted(ConnectionRefused):
    """A client that has proved the key isn't admitted. ``later``: it may be, once the obstacle has gone."""

    def __init__(self, why: str, *, later: bool = False) -> None:
        super().__init__(why)
        self.later = later


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The client's first message."""

    protocol: int = PROTOCOL
    purpose: Purpose
    subject: str  # the node's name; the token of the worker that is awaited; the mirror's path; the peer
    epoch: int = 0  # that it belongs to; 0: none yet
    software: dict[str, str] = {}  # versions, of a node
    nonce: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The server's answer: its nonce, and its own proof."""

    nonce: str
    proof: str


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The client's proof of the key."""

    proof: str


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """The server's last message: whether the client is admitted."""

    refused: str = ""  # why; empty: it is admitted
    later: bool = False  # it may be admitted later: the obstacle can go
    epoch: int = 0  # the server's
    encryption: Literal["none", "tls"] = "none"  # that the server requires and the connection lacks
    orphan_s: float = 60.0  # silence of the server after which its clients end themselves


def software() -> dict[str, str]:
    """The versions that must be the same on all machines of a run."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("headway", "torch", "llguidance"):  # the latter reads grammars for engines and for the trainer
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package).split("+")[0]
    return versions


def make_key() -> str:
    """A new random key."""
    return secrets.token_hex(32)


def read_key(path: str | Path | None) -> str:
    """The run's key: from the file at ``path``, else from the environment's HEADWAY_CLUSTER_KEY. Raises
    ConfigurationError when there is none, when others may read the file, or when it is too short to be secret."""
    if path is None:
        source, key = f"the environment's {KEY_VARIABLE}", os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ConfigurationError(f"no key of the run: name a file that holds it, or set {KEY_VARIABLE}")
    else:
        source = f"key file {path}"
        try:
            mode = os.stat(path).st_mode
            key = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{source} can't be read: {error}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigurationError(f"{source}: others may read it (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
    return checked_key(key, source)


def checked_key(key: str, source: str) -> str:
    """Return ``key``. Raises ConfigurationError, naming its ``source``, when it is too short to be secret."""
    if len(key) < _SHORTEST_KEY:
        raise ConfigurationError(f"{source}: a key of {len(key)} characters; at least {_SHORTEST_KEY}, random ones")
    return key


async def authenticate(sock: socket.socket, key: str, epoch: int, binding: bytes = b"") -> Hello:
    """Run the server's part on a non-blocking ``sock``; returns the client's `Hello`, now authenticated. ``binding``:
    the certificate of an encrypted connection. Raises ConnectionRefused."""
    hello_bytes = await _receive(sock)
    hello = _decode(hello_bytes, Hello)
    if hello.protocol != PROTOCOL:
        await _send(sock, Admission(refused=f"protocol {hello.protocol} but this end uses {PROTOCOL}"))
        raise ConnectionRefused(f"speaks protocol {hello.protocol}, not {PROTOCOL}")
    nonce = secrets.token_hex(16)
    transcript = hello_bytes + nonce.encode() + binding
    await _send(sock, Challenge(nonce=nonce, proof=_proof(key, b"server", transcript)))
    proof = _decode(await _receive(sock), Proof).proof
    if not hmac.compare_digest(proof.encode(), _proof(key, b"client", transcript).encode()):
        raise ConnectionRefused("did not prove the run's key")
    if hello.epoch not in (0, epoch):
        await _send(sock, Admission(refused=f"epoch {hello.epoch} has ended, this is {epoch}", epoch=epoch))
        raise ConnectionRefused(f"{hello.purpose} {hello.subject} belongs to epoch {hello.epoch}, this is {epoch}")
    return hello


async def admit(sock: socket.socket, verdict: Admission) -> None:
    """Send the server's verdict on a client that has proved the key."""
    await _send(sock, verdict)


async def require_tls(sock: socket.socket) -> None:
    """Refuse a client that connects without TLS, where the server requires it."""
    await _receive(sock)
    await _send(sock, Admission(refused="this run's connections are encrypted", encryption="tls"))


async def perform_handshake(sock: socket.socket, key: str, hello: Hello, binding: bytes = b"") -> Admission:
    """Run the client's part on a non-blocking ``sock``. Raises ConnectionRefused; NotAdmitted with its reason."""
    hello_bytes = msgspec.json.encode(hello)
    await _send_bytes(sock, hello_bytes)
    answer_bytes = await _receive(sock)
    if b'"refused"' in answer_bytes:
        admission = _decode(answer_bytes, Admission)
        error_class = EncryptionRequired if admission.encryption == "tls" else NotAdmitted
        raise error_class(f"refused: {admission.refused}")
    challenge = _decode(answer_bytes, Challenge)
    transcript = hello_bytes + challenge.nonce.encode() + binding
    if not hmac.compare_digest(challenge.proof.encode(), _proof(key, b"server", transcript).encode()):
        raise ConnectionRefused("the other end has another key: is it this run's, and is the key the same?")
    await _send(sock, Proof(proof=_proof(key, b"client", transcript)))
    admission = _decode(await _receive(sock), Admission)
    if admission.refused:
        raise NotAdmitted(f"refused: {admission.refused}", later=admission.later)
    return admission


def _proof(key: str, side: bytes, seen: bytes) -> str:
    return hmac.new(key.encode(), b"headway " + side + b"\0" + seen, "sha256").hexdigest()


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConnectionRefused(
            f"sent {data[:20]!r}... where a {kind.__name__} is expected: not a node of Headway"
        ) from None


async def _send(sock: socket.socket, message: msgspec.Struct) -> None:
    await _send_bytes(sock, msgspec.json.encode(message))


async def _send_bytes(sock: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise ConnectionRefused(f"the connection broke: {error}") from None


async def _receive(sock: socket.socket) -> bytes:
    (length_bytes,) = _LENGTH.unpack(await _exactly(sock, _LENGTH.size))
    if not 0 < length_bytes <= _LONGEST_MESSAGE_BYTES:
        raise ConnectionRefused(f"announced a message of {length_bytes} bytes: not a node of Headway")
    return await _exactly(sock, length_bytes)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < count:
        try:
            block = await loop.sock_recv(sock, count - len(received))
        except OSError as error:
            raise ConnectionRefused(f"the connection broke: {error}") from None
        if not block:
            raise ConnectionRefused("closed the connection during the handshake")
        received += block
    return received
