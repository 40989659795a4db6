"""The protocol of a sandbox's socket: frames of a JSON head and a body of bytes. Standard library alone.

A frame is two big-endian 32-bit lengths, the head, the body. A reader of a sandbox's frames bounds both lengths first,
since the sandbox isn't trusted.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterator
from typing import Any, Protocol

LENGTHS = struct.Struct(">II")
HEAD_BYTES = 1 << 20  # limit of a head: arguments and environment of a command
BODY_BYTES = 8 << 20  # limit of a body: the output of a command, both streams
CHUNK_BYTES = 1 << 18  # of a file that is sent
MESSAGE_BYTES = 1 << 16  # limit of a request to the zygote, which comes as one packet

REQUEST_ERRORS = (OSError, ValueError, MemoryError)  # raised by invalid requests too, such as impossible file names
EXIT_CLOSED, EXIT_TTL, EXIT_SETUP = 0, 3, 4  # init's exit codes


class Malformed(Exception):
    """Bytes that are no frame, or a frame beyond the limits."""


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    encoded_head = json.dumps(head, separators=(",", ":")).encode()
    return LENGTHS.pack(len(encoded_head), len(body)) + encoded_head + body


def lengths(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of a frame's head and body in bytes. Raises Malformed beyond the limits."""
    head_bytes, body_bytes = LENGTHS.unpack(prefix)
    if head_bytes > HEAD_BYTES or body_bytes > BODY_BYTES:
        raise Malformed(f"a frame of {head_bytes} + {body_bytes} bytes")
    return head_bytes, body_bytes


def head_from(encoded: bytes) -> dict[str, Any]:
    try:
        head = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a head that is no JSON: {error}") from None
    if not isinstance(head, dict):
        raise Malformed("a head that is no object")
    return head


def error_of(error: Exception) -> dict[str, Any]:
    """Make the answer to a request that raised ``error``."""
    if isinstance(error, OSError):
        return {"error": error.errno or errno.EIO, "what": f"{error.strerror or error}"[:500]}
    code = errno.ENOMEM if isinstance(error, MemoryError) else errno.EINVAL
    return {"error": code, "what": f"{error}"[:500]}


class FrameAssembler:
    """Assembles frames from bytes as they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._bytes += data
        while len(self._bytes) >= LENGTHS.size:
            head_bytes, body_bytes = lengths(bytes(self._bytes[: LENGTHS.size]))
            frame_end = LENGTHS.size + head_bytes + body_bytes
            if len(self._bytes) < frame_end:
                return
            payload = bytes(self._bytes[LENGTHS.size : frame_end])
            del self._bytes[:frame_end]
            yield head_from(payload[:head_bytes]), payload[head_bytes:]


class FrameWriter(Protocol):
    """A connection to a sandbox to which frames can be written."""

    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...
