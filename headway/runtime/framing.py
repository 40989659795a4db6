"""The wire format between a worker and its parent: pickled messages with large buffers out of band.

A frame is a header (kind, number of buffers, call number, payload size), the buffers' sizes, the pickled
payload (protocol 5), and the buffers, padded so that each is aligned. Arrays are sent from their own memory and
received into their final memory, without copies: one block for all those of a frame, which is freed with the last of
them. Unpickling runs what the sender wants: both ends are processes of one user, either children of this one or peers
that have proved the run's key (runtime/nodes/handshake.py) before their first frame is read.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import pickle
import socket
import struct
import traceback
from collections import deque
from itertools import accumulate, islice
from typing import Any, NamedTuple

from headway.records.errors import HeadwayError

HEADER = struct.Struct("<BxxxIQQ")  # kind, buffers, call number, payload bytes
SIZE = struct.Struct("<Q")
OUT_OF_BAND_BYTES = 16 * 1024  # smaller buffers are cheaper inside the payload
SCRATCH_BYTES = 256 * 1024
SOCKET_BUFFER_BYTES = 1024 * 1024
MAPPED_BYTES = 4 << 20  # larger blocks get pages of their own: not zeroed twice, and huge where the kernel has them
BUFFERS_AT_ONCE = 256  # in one system call
ALIGNMENT = 64  # bytes, of each buffer in its block: enough for any dtype

LARGEST_FRAME_BYTES = 8 << 30
MOST_BUFFERS = 1 << 20

Chunk = bytes | memoryview


class FrameTooLarge(ValueError):
    """A header announces more than any of Headway's frames has, so the bytes received aren't a frame."""


class Kind(enum.IntEnum):
    """The kind of a frame."""

    # parent to child
    SETUP = 1  # name, factory, import path: needed before the arguments can be read
    ARGUMENTS = 2  # the constructor's arguments
    CALL = 3  # (method, positional, named)
    PING = 4
    STOP = 5
    INSPECT = 12  # asks what the worker is doing: its second thread answers, as with a call's result
    # child to parent
    READY = 6  # constructed
    RESULT = 7  # a call's result
    ERROR = 8  # a call's, or the constructor's, exception: (one line, traceback, exception or None)
    EVENT = 9
    PONG = 10
    FATAL = 11  # traceback of the error that ends the process


class Frame(NamedTuple):
    """A received message, still pickled."""

    kind: int
    call: int  # number of the call it belongs to; 0 for none
    payload: memoryview
    buffers: list[memoryview]

    def load(self) -> Any:
        return pickle.loads(self.payload, buffers=self.buffers)


def encode(kind: Kind, call: int, message: Any) -> list[Chunk]:
    """Pickle ``message`` into the chunks of one frame. Raises the errors of pickling."""
    buffer_chunks: list[Chunk] = []
    buffer_sizes: list[int] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffer_sizes.append(view.nbytes)
        buffer_chunks.append(view)
        if padding_bytes := -view.nbytes % ALIGNMENT:
            buffer_chunks.append(bytes(padding_bytes))
        return False

    payload = pickle.dumps(message, protocol=5, buffer_callback=in_band)
    head = HEADER.pack(kind, len(buffer_sizes), call, len(payload)) + b"".join(map(SIZE.pack, buffer_sizes))
    if len(payload) < SCRATCH_BYTES:
        return [head + payload, *buffer_chunks]
    return [head, payload, *buffer_chunks]


def encode_error(call: int, error: Exception) -> list[Chunk]:
    """Encode a failed call: (one line, traceback, the exception where it is one of ours and survives pickling)."""
    error_line = "".join(traceback.format_exception_only(error)).strip()
    traceback_text = "".join(traceback.format_exception(error))
    if isinstance(error, HeadwayError):
        with contextlib.suppress(Exception):  # an exception with its own constructor may not be picklable
            return _encode_pickled(call, error_line, traceback_text, error)
    return encode(Kind.ERROR, call, (error_line, traceback_text, None))


def _encode_pickled(call: int, line: str, trace: str, error: HeadwayError) -> list[Chunk]:
    restored = pickle.loads(pickle.dumps(error))
    if type(restored) is not type(error) or str(restored) != str(error):
        raise ValueError("changed by pickling")
    return encode(Kind.ERROR, call, (line, trace, error))


class FrameReader:
    """Splits a byte stream into frames.

    Usage: receive into ``target()``, then ``received(count)`` returns the frames that became complete. Raises
    FrameTooLarge before it takes memory for a frame that can't be. Small frames pass through a scratch buffer, many at
    a time; a large payload and a large block of buffers are received into their final memory.
    """

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._direct = False  # the last target was the part itself
        self._begin()

    def target(self) -> memoryview:
        """The buffer into which to receive the next bytes."""
        self._direct = len(self._part) - self._filled >= SCRATCH_BYTES
        return self._part[self._filled :] if self._direct else self._scratch

    def received(self, count: int) -> list[Frame]:
        """Process ``count`` bytes that were written to the last target; return the frames that became complete."""
        frames: list[Frame] = []
        if self._direct:
            self._filled += count
            self._advance(frames)
            return frames
        offset = 0
        while offset < count:
            if self._stage == "header" and not self._filled and (frame := self._small_frame(offset, count)) is not None:
                frames.append(frame)
                offset += HEADER.size + len(frame.payload)
                continue
            copied_bytes = min(count - offset, len(self._part) - self._filled)
            self._part[self._filled : self._filled + copied_bytes] = self._scratch[offset : offset + copied_bytes]
            self._filled += copied_bytes
            offset += copied_bytes
            self._advance(frames)
        return frames

    def _small_frame(self, offset: int, end: int) -> Frame | None:
        """A frame without buffers that is complete in the scratch buffer at ``offset``, as most events; else None."""
        payload_start = offset + HEADER.size
        if payload_start > end:
            return None
        kind, buffer_count, call, payload_bytes = HEADER.unpack_from(self._scratch, offset)
        if buffer_count or payload_start + payload_bytes > end:
            return None
        return Frame(kind, call, memoryview(bytes(self._scratch[payload_start : payload_start + payload_bytes])), [])

    def _begin(self) -> None:
        """Start a frame: expect a header next."""
        self._expect("header", bytearray(HEADER.size))

    def _advance(self, frames: list[Frame]) -> None:
        """Move to the next part while the present one is full (empty parts are full at once)."""
        while self._filled == len(self._part):
            if self._stage == "header":
                self._kind, self._count, self._call, payload_bytes = HEADER.unpack(self._part)
                _require_sane(self._count, payload_bytes)
                self._expect("body", bytearray(SIZE.size * self._count + payload_bytes))
            elif self._stage == "body":
                packed_sizes = self._part[: SIZE.size * self._count]
                self._payload = self._part[len(packed_sizes) :]
                self._sizes = [size for (size,) in SIZE.iter_unpack(packed_sizes)]
                self._firsts = [0, *accumulate(size + -size % ALIGNMENT for size in self._sizes)]
                _require_sane(self._count, len(self._payload) + self._firsts[-1])
                self._expect("block", _allocate(self._firsts[-1]))
            else:
                extents = zip(self._firsts, self._sizes, strict=False)
                buffers = [self._part[start : start + size] for start, size in extents]
                frames.append(Frame(self._kind, self._call, self._payload, buffers))
                self._begin()
                return

    def _expect(self, stage: str, part: bytearray | mmap.mmap) -> None:
        self._stage = stage
        self._part = memoryview(part)
        self._filled = 0


def _allocate(size: int) -> bytearray | mmap.mmap:
    """Memory of ``size`` bytes."""
    if size < MAPPED_BYTES:
        return bytearray(size)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def send_some(sock: socket.socket, outgoing: deque[memoryview]) -> None:
    """Send the first bytes of ``outgoing``, several buffers at once, and remove them from it. Raises the errors of
    ``send``."""
    is_single = len(outgoing) == 1
    sent_count = sock.send(outgoing[0]) if is_single else sock.sendmsg(islice(outgoing, BUFFERS_AT_ONCE))
    while outgoing and sent_count >= len(outgoing[0]):
        sent_count -= len(outgoing.popleft())
    if sent_count:
        outgoing[0] = outgoing[0][sent_count:]


def _require_sane(buffers: int, total_bytes: int) -> None:
    if buffers > MOST_BUFFERS or total_bytes > LARGEST_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {buffers} buffers and {total_bytes} bytes")


def tune(connection: socket.socket) -> None:
    """Set up a connection for frames: between processes of one machine larger buffers, so that a burst of events needs
    no waiting (the kernel may grant less); between machines no delay of small frames (their buffers grow by need)."""
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
