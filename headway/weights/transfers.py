"""The protocol between mirrors, and its client: bytes of a version's file or of its delta's. Torch-free."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headway.records.errors import HeadwayError, WeightsCorrupt
from headway.runtime.nodes.dial import TIMEVAL
from headway.weights.division import Range
from headway.weights.slot_file import HEADER, version_in

CHUNK_BYTES = 4 << 20
CONNECTIONS = 4  # of one transfer
PATIENCE_S = 30.0  # for a chunk that another mirror is fetching
REQUEST = struct.Struct("<?qQQ")  # whether of the delta, version, offset, count; count 0 asks for the file's size
ANSWER = struct.Struct("<?Q")  # whether it is there, and the count of bytes that follow, or the file's size


class MirrorTransfer:
    """The transfer of a version, some ranges of its file, or its delta from another mirror, over some connections."""

    def __init__(
        self,
        source: str,
        version: int,
        connect: Callable[[str], Coroutine[Any, Any, list[socket.socket]]],
        ranges: Sequence[Range] = (),
        *,
        is_delta: bool = False,
    ) -> None:
        """``ranges``: (), the file. ``is_delta``: it is the delta's."""
        self.size = 0
        self._is_delta = is_delta
        self.header = b""  # as it was after the last chunk
        self._source, self._version = source, version
        self._sockets: list[socket.socket] = []
        self._connect, self._ranges = connect, ranges

    def __enter__(self) -> MirrorTransfer:
        try:
            self._sockets = asyncio.run(self._connect(self._source))
        except HeadwayError as error:
            raise WeightsCorrupt(f"version {self._version} can't be fetched: {error}") from None
        for sock in self._sockets:
            sock.setblocking(True)
            # By the kernel: with Python's time-out each read would return what is there, not all that was asked for.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(int(2 * PATIENCE_S), 0))
        self.size = self._request(self._sockets[0], 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    def receive_into(self, content: memoryview, on_chunk: Callable[[int, int], bool]) -> None:
        """Fetch everything but a version's header into ``content``; ``on_chunk(first, last)`` is called after each
        chunk, and returns whether to go on. Raises WeightsCorrupt, also if the version isn't there any more at the
        end."""
        chunks = (
            (first_byte, min(first_byte + CHUNK_BYTES, range_end))
            for range_start, range_end in self._ranges or [(0, self.size)]
            for first_byte in range(range_start, range_end, CHUNK_BYTES)
        )
        taking_lock, goes_on = threading.Lock(), True

        def fetch(sock: socket.socket) -> None:
            nonlocal goes_on
            while goes_on:
                with taking_lock:
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                first_byte, end_byte = chunk
                self._request(sock, first_byte, end_byte - first_byte)
                skipped_bytes = HEADER.size if first_byte == 0 and not self._is_delta else 0
                if skipped_bytes:
                    _receive_into(sock, memoryview(bytearray(skipped_bytes)))
                _receive_into(sock, content[first_byte + skipped_bytes : end_byte])
                goes_on = on_chunk(first_byte, end_byte)

        try:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(fetch, self._sockets))
            if self._is_delta:  # its digest is announced
                return
            self._request(self._sockets[0], 0, HEADER.size)
            header = bytearray(HEADER.size)
            _receive_into(self._sockets[0], memoryview(header))
            self.header = bytes(header)
        except (OSError, EOFError) as error:
            raise WeightsCorrupt(f"version {self._version} from {self._source}: {error}") from None
        if version_in(self.header) != self._version:
            raise WeightsCorrupt(f"version {self._version} was overwritten at {self._source} while it was fetched")

    def _request(self, sock: socket.socket, offset: int, count: int) -> int:
        try:
            sock.sendall(REQUEST.pack(self._is_delta, self._version, offset, count))
            is_available, answer_bytes = ANSWER.unpack(receive_exactly(sock, ANSWER.size) or ANSWER.pack(False, 0))
        except OSError as error:
            raise WeightsCorrupt(f"version {self._version} from {self._source}: {error}") from None
        if not is_available:
            name = f"the delta of version {self._version}" if self._is_delta else f"version {self._version}"
            raise WeightsCorrupt(f"{name} is no longer at {self._source}")
        return answer_bytes


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes; empty when the connection was closed before them."""
    buffer = bytearray(count)
    try:
        _receive_into(sock, memoryview(buffer))
    except EOFError:
        return b""
    return bytes(buffer)


def _receive_into(sock: socket.socket, target: memoryview) -> None:
    while len(target):
        received_bytes = sock.recv_into(target, len(target), socket.MSG_WAITALL)
        if not received_bytes:
            raise EOFError("the connection was closed")
        target = target[received_bytes:]
