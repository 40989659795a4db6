"""A node's mirror of published versions: fetches each once, serves it to other nodes while it arrives. Torch-free.

The mirror is a worker: one runs on every machine that has a replica, and one where the trainer is. A version arrives as
the bytes of its file, in chunks over several connections, into a slot of the same layout as the publisher's, so
that replicas read it as they would read that. Chunks are asked for in order, and handed on as soon as they are
there: in a chain of nodes each carries the version once, and the last has it soon after the first. A version of which
several nodes have a part each comes from all of them at once.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError, WeightsCorrupt
from headway.records.generation import PublishedWeights
from headway.runtime.nodes.dial import TIMEVAL, dial, outlast
from headway.runtime.nodes.handshake import HANDSHAKE_S, Admission, ConnectionRefused, Hello, NotAdmitted, admit
from headway.runtime.nodes.listener import listen_on_first
from headway.weights.division import Range
from headway.weights.slot_file import HEADER, UNWRITTEN, default_folders, new_slot, version_in
from headway.weights.slots import SlotLock, slot_stem

if TYPE_CHECKING:
    from headway.runtime.child import WorkerContext

CHUNK_BYTES = 4 << 20
CONNECTIONS = 4  # of one transfer
SLOTS = 3  # versions that are kept, as at the publisher
_REQUEST = struct.Struct("<qQQ")  # version, offset, count; count 0 asks for the file's size
_ANSWER = struct.Struct("<?Q")  # whether it is there, and the count of bytes that follow, or the file's size
_PATIENCE_S = 30.0  # for a chunk that another mirror is fetching
_READERS_S = 5.0  # for those that read a slot where it is, before the next version takes other memory


@dataclass
class _IncomingVersion:
    """A version in a slot, and the part of it that has arrived without a gap."""

    version: int
    content: memoryview
    path: Path
    lock: SlotLock  # against those that read the slot where it is
    arrived: int = 0  # bytes that are there without a gap
    ahead: dict[int, int] = field(default_factory=dict[int, int])  # later ranges: by the first byte, the one after them
    complete: bool = False  # with its header, which comes last
    failed: bool = False

    def has(self, offset: int, count: int) -> bool:
        """Whether these bytes are there. The header is when everything is."""
        if offset == 0 and count == HEADER.size:
            return self.complete
        return self.arrived >= offset + count

    def add(self, first: int, last: int) -> None:
        """Note that the bytes from ``first`` to before ``last`` have arrived."""
        self.ahead[first] = last
        while self.arrived in self.ahead:
            self.arrived = self.ahead.pop(self.arrived)


class MirrorService:
    """The worker object of a mirror.

    Its main thread fetches; a thread for each connection serves other mirrors, after the handshake with the run's key.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        run_id: str,
        node: str,
        host: str,
        ports: Sequence[int],
        key: str,
        epoch: int,
        orphan_s: float,
        certificate: str = "",
    ) -> None:
        """``host``: address of this machine for others; it listens on the first of ``ports`` that is free.
        ``certificate``: with its key, of encrypted connections; empty: they aren't. Raises ConfigurationError when no
        port is free."""
        self._log = context.log
        self._stem = f"{slot_stem(run_id)}-{node or 'head'}"
        self._key, self._epoch, self._orphan_s = key, epoch, orphan_s
        self._slots: dict[int, tuple[Path, mmap.mmap, SlotLock]] = {}  # by slot number
        self._next = 0
        self._arriving: dict[int, _IncomingVersion] = {}  # by version
        self._newest_overwritten = -1  # the newest version whose slot was taken by another
        self._changed = threading.Condition()
        # On this machine, by the trainer: the file, and which ranges it has (() for all), by version.
        self._published: dict[int, tuple[Path, Sequence[Range]]] = {}
        self._certificate = certificate
        self.served_bytes = 0
        self._loop = asyncio.new_event_loop()  # of the listener alone
        threading.Thread(target=self._loop.run_forever, name="mirror", daemon=True).start()
        listen_coroutine = listen_on_first(host, ports, key, epoch, self._accept, self._log.warning, certificate)
        self._listener = asyncio.run_coroutine_threadsafe(listen_coroutine, self._loop).result()

    def address(self) -> str:
        """The address at which other mirrors reach it."""
        return self._listener.address

    def serve_published(self, published: PublishedWeights, ranges: Sequence[Range] = ()) -> None:
        """Serve a version that was published on this machine, from the publisher's own file. ``ranges``: what the file
        has of it; (): all."""
        with self._changed:
            self._published.pop(published.version, None)
            self._published[published.version] = Path(published.path), ranges
            if len(self._published) > SLOTS:
                # The first, not the lowest version: the best one is published again at the end.
                oldest_version = next(iter(self._published))
                del self._published[oldest_version]
                self._newest_overwritten = max(self._newest_overwritten, oldest_version)
            self._changed.notify_all()

    def problem_with(self, source: str) -> str:
        """Explain why nothing can be fetched from the mirror at ``source``; "" where it can."""
        hello = Hello(purpose="mirror", subject="check", epoch=self._epoch)
        try:
            dial_coroutine = dial(source, self._key, hello, self._orphan_s, encrypted=bool(self._certificate))
            asyncio.run(dial_coroutine)[0].close()
        except ConnectionRefused as error:
            return str(error)
        return ""

    def statistics(self) -> dict[str, int]:
        """Bytes sent to other mirrors so far."""
        return {"served_bytes": self.served_bytes}

    def fetch(self, published: PublishedWeights, sources: Sequence[tuple[str, Sequence[Range]]]) -> PublishedWeights:
        """Fetch a version from mirrors; returns its location here. ``sources``: addresses, and the ranges of the file
        that come from each; of the only one they may be (), all. Raises WeightsCorrupt when the transfer breaks or the
        version is gone there: nothing of it can be read then."""
        hello = Hello(purpose="mirror", subject=str(published.version), epoch=self._epoch)

        async def connect(source: str) -> list[socket.socket]:
            dial_coroutines = (
                dial(source, self._key, hello, self._orphan_s, encrypted=bool(self._certificate))
                for _ in range(CONNECTIONS)
            )
            return [sock for sock, _ in await asyncio.gather(*dial_coroutines)]

        with ExitStack() as stack:
            opened = (_Transfer(source, published.version, connect, ranges) for source, ranges in sources)
            transfers = [stack.enter_context(transfer) for transfer in opened]
            incoming = self._begin(published.version, transfers[0].size)

            def receive(transfer: _Transfer) -> None:
                try:
                    transfer.receive_into(incoming.content, partial(self._arrived, incoming))
                except BaseException:
                    self._fail(incoming)
                    raise

            with ThreadPoolExecutor(len(transfers)) as pool:
                list(pool.map(receive, transfers))
        incoming.content[: HEADER.size] = transfers[0].header  # last: until now the slot is no version's
        incoming.lock.release()
        with self._changed:
            incoming.complete = True
            self._changed.notify_all()
        return msgspec.structs.replace(published, path=str(incoming.path), parts=())

    def close(self) -> None:
        """Stop listening and remove the files; replicas that still map one keep what they have."""
        asyncio.run_coroutine_threadsafe(self._listener.close(), self._loop).result(HANDSHAKE_S)
        for path, _, lock in self._slots.values():
            path.unlink(missing_ok=True)
            lock.close()

    # --- this machine's slots -------------------------------------------------------------------------------

    def _begin(self, version: int, size: int) -> _IncomingVersion:
        """Prepare the next slot for a version of ``size`` bytes."""
        slot_number, self._next = self._next, (self._next + 1) % SLOTS
        slot = self._slots.get(slot_number)
        if slot is None or len(slot[1]) != size or not slot[2].acquire(exclusive=True, patience_s=_READERS_S):
            if slot is not None:
                slot[0].unlink(missing_ok=True)
                slot[2].close()
            slot = self._slots[slot_number] = self._create(slot_number, size)
        path, slot_map, lock = slot
        lock.acquire(exclusive=True)
        HEADER.pack_into(slot_map, 0, b"", UNWRITTEN, UNWRITTEN, 0, 0, 0)
        incoming = _IncomingVersion(version, memoryview(slot_map), path, lock)
        with self._changed:
            for old_version in [v for v, other in self._arriving.items() if other.path == path]:
                del self._arriving[old_version]
                self._newest_overwritten = max(self._newest_overwritten, old_version)
            self._arriving[version] = incoming
            self._changed.notify_all()
        return incoming

    def _create(self, number: int, size: int) -> tuple[Path, mmap.mmap, SlotLock]:
        refusals = []
        for folder in default_folders():
            path = folder / f"{self._stem}-{number}.weights"
            try:
                return path, new_slot(path, size), SlotLock(path)
            except OSError as error:
                refusals.append(f"{folder}: {error.strerror}")
        raise ConfigurationError(f"no space for a mirror of {size / 1e6:.1f} MB x {SLOTS} ({'; '.join(refusals)})")

    def _arrived(self, incoming: _IncomingVersion, first: int, last: int) -> bool:
        """Note a range that has arrived; returns whether the version is still fetched."""
        with self._changed:
            incoming.add(first, last)
            self._changed.notify_all()
            return not incoming.failed

    def _fail(self, incoming: _IncomingVersion) -> None:
        with self._changed:
            incoming.failed = True
            self._arriving.pop(incoming.version, None)
            self._changed.notify_all()

    # --- serving --------------------------------------------------------------------------------------------

    async def _accept(self, sock: socket.socket, hello: Hello, peer: str) -> None:
        """Take another mirror: see `OnClient`."""
        if hello.purpose != "mirror":
            raise NotAdmitted(f"connections of a {hello.purpose} aren't accepted here")
        outlast(sock, self._orphan_s)
        await admit(sock, Admission(epoch=self._epoch, orphan_s=self._orphan_s))
        threading.Thread(target=self._serve, args=(sock,), name=f"to {peer}", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):  # the other mirror has finished, or is gone
            sock.setblocking(True)
            while request := _receive_exactly(sock, _REQUEST.size):
                self._answer(sock, *_REQUEST.unpack(request))

    def _answer(self, sock: socket.socket, version: int, offset: int, count: int) -> None:
        try:
            with self._file(version, offset, count).open("rb") as file:
                file_bytes = os.fstat(file.fileno()).st_size
                if offset + count > file_bytes:
                    raise FileNotFoundError
                sock.sendall(_ANSWER.pack(True, count or file_bytes), socket.MSG_MORE if count else 0)
                end_offset = offset + count
                while offset < end_offset:
                    # From the file's pages to the socket: nothing is copied here.
                    sent_bytes = os.sendfile(sock.fileno(), file.fileno(), offset, end_offset - offset)
                    if not sent_bytes:
                        raise OSError("the file is truncated")
                    offset += sent_bytes
                    self.served_bytes += sent_bytes
        except FileNotFoundError:
            sock.sendall(_ANSWER.pack(False, 0))

    def _file(self, version: int, offset: int, count: int) -> Path:
        """The file of a version, once the bytes asked for are there. Raises FileNotFoundError when they won't be."""

        def ready() -> bool:
            incoming = self._arriving.get(version)
            if self._published_file(version, offset, count) is not None:
                return True
            if incoming is None:
                return version <= self._newest_overwritten
            return incoming.failed or incoming.has(offset, count)

        with self._changed:
            if not self._changed.wait_for(ready, _PATIENCE_S):
                raise FileNotFoundError
            # First, or nodes that fetch one another's parts would wait for one another.
            if (published_file := self._published_file(version, offset, count)) is not None:
                return published_file
            incoming = self._arriving.get(version)
            if incoming is None or incoming.failed:
                raise FileNotFoundError
            return incoming.path

    def _published_file(self, version: int, offset: int, count: int) -> Path | None:
        """The file that the trainer has published here, if these bytes are in it, or are its header."""
        path, ranges = self._published.get(version, (None, ()))
        is_there = offset + count <= HEADER.size or not ranges
        return path if is_there or any(first <= offset and offset + count <= last for first, last in ranges) else None


class _Transfer:
    """The transfer of a version, or some ranges of its file, from another mirror, over several connections."""

    def __init__(
        self,
        source: str,
        version: int,
        connect: Callable[[str], Coroutine[Any, Any, list[socket.socket]]],
        ranges: Sequence[Range] = (),
    ) -> None:
        """``ranges``: (), the file."""
        self.size = 0
        self.header = b""  # as it was after the last chunk
        self._source, self._version = source, version
        self._sockets: list[socket.socket] = []
        self._connect, self._ranges = connect, ranges

    def __enter__(self) -> _Transfer:
        try:
            self._sockets = asyncio.run(self._connect(self._source))
        except HeadwayError as error:
            raise WeightsCorrupt(f"version {self._version} can't be fetched: {error}") from None
        for sock in self._sockets:
            sock.setblocking(True)
            # By the kernel: with Python's time-out each read would return what is there, not all that was asked for.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(int(2 * _PATIENCE_S), 0))
        self.size = self._request(self._sockets[0], 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    def receive_into(self, content: memoryview, on_chunk: Callable[[int, int], bool]) -> None:
        """Fetch everything but the header into ``content``; ``on_chunk(first, last)`` is called after each chunk, and
        returns whether to go on. Raises WeightsCorrupt, also if the version isn't there any more after the last."""
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
                skipped_bytes = HEADER.size if first_byte == 0 else 0
                if skipped_bytes:
                    _receive_into(sock, memoryview(bytearray(skipped_bytes)))
                _receive_into(sock, content[first_byte + skipped_bytes : end_byte])
                goes_on = on_chunk(first_byte, end_byte)

        try:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(fetch, self._sockets))
            self._request(self._sockets[0], 0, HEADER.size)
            header = bytearray(HEADER.size)
            _receive_into(self._sockets[0], memoryview(header))
            self.header = bytes(header)
        except (OSError, EOFError) as error:
            raise WeightsCorrupt(f"version {self._version} from {self._source}: {error}") from None
        if version_in(self.header) != self._version:
            raise WeightsCorrupt(f"version {self._version} was overwritten at {self._source} while it was fetched")

    def _request(self, sock: socket.socket, offset: int, count: int) -> int:
        sock.sendall(_REQUEST.pack(self._version, offset, count))
        is_available, answer_bytes = _ANSWER.unpack(_receive_exactly(sock, _ANSWER.size) or _ANSWER.pack(False, 0))
        if not is_available:
            raise WeightsCorrupt(f"version {self._version} is no longer at {self._source}")
        return answer_bytes


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
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
