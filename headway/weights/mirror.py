"""A node's mirror of published versions: fetches each once, serves it to other nodes while it arrives. Torch-free.

The mirror is a worker: one runs on every machine that has a replica, and one where the trainer is. A version arrives as
the bytes of its file, in chunks over several connections, into a slot of the same layout as the publisher's, so
that replicas read it as they would read that. Chunks are asked for in order, and handed on as soon as they are
there: in a chain of nodes each carries the version once, and the last has it soon after the first. A version of which
several nodes have a part each comes from all of them at once.

A mirror that has a version from which deltas lead to the new one fetches these in its place, writes them over a copy of
that version, and hands them on. Whatever keeps the copy from being the announced version, bit for bit, is logged, and
the whole version is fetched, from the same sources.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from headway.records.errors import ConfigurationError, WeightsCorrupt
from headway.records.generation import PublishedDelta, PublishedWeights
from headway.runtime.nodes.dial import dial, outlast
from headway.runtime.nodes.handshake import HANDSHAKE_S, Admission, ConnectionRefused, Hello, NotAdmitted, admit
from headway.runtime.nodes.listener import listen_on_first
from headway.weights.deltas import DeltaContent, apply_deltas, chain_to, require_version
from headway.weights.division import Range
from headway.weights.slot_file import HEADER, UNWRITTEN, default_folders, new_slot, table_start, version_in
from headway.weights.slots import SlotLock, slot_stem
from headway.weights.stores import StoreTransfer, StoreWriter, delta_name, open_store, problem_with, whole_name
from headway.weights.transfers import ANSWER, CONNECTIONS, PATIENCE_S, REQUEST, MirrorTransfer, receive_exactly

if TYPE_CHECKING:
    from headway.runtime.child import WorkerContext

SLOTS = 3  # versions that are kept, as at the publisher
_READERS_S = 5.0  # for those that read a slot where it is, before the next version takes other memory


@dataclass
class _IncomingVersion:
    """A version in a slot, and the part of it that has arrived without a gap."""

    version: int
    checksum: str
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
        store: str = "",
    ) -> None:
        """``host``: address of this machine for others; it listens on the first of ``ports`` that is free.
        ``certificate``: with its key, of encrypted connections; empty: they aren't. ``store``: address of the one that
        versions go through; empty: none. Raises ConfigurationError when no port is free, or no such store is there."""
        self._log = context.log
        self._stem = f"{slot_stem(run_id)}-{node or 'head'}"
        self._store_stem, self._store_address = slot_stem(run_id), store
        try:
            self._store = open_store(store) if store else None
        except OSError as error:
            raise ConfigurationError(f"weights.exchange: {error}") from None
        self._writer: StoreWriter | None = None
        self._key, self._epoch, self._orphan_s = key, epoch, orphan_s
        self._slots: dict[int, tuple[Path, mmap.mmap, SlotLock]] = {}  # by slot number
        self._next = 0
        self._arriving: dict[int, _IncomingVersion] = {}  # by version
        self._newest_overwritten = -1  # the newest version whose slot was taken by another
        self._changed = threading.Condition()
        # On this machine, by the trainer: the file, and which ranges it has (() for all), by version.
        self._published: dict[int, tuple[Path, Sequence[Range]]] = {}
        self._held: dict[int, tuple[SlotLock, set[socket.socket]]] = {}  # of these, with who fetches it, by version
        self._deltas: dict[int, tuple[PublishedDelta, mmap.mmap | None]] = {}  # by version; with what holds its file
        self._certificate = certificate
        self.served_bytes = self.versions_by_deltas = self.versions_whole = 0
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
            self._drop_deltas(published)
            for delta in published.deltas:
                self._deltas.setdefault(delta.version, (delta, None))
            # The first, not the lowest version: the best one is published again at the end.
            unheld_versions = [version for version in self._published if version not in self._held]
            if len(unheld_versions) > SLOTS:
                oldest_version = unheld_versions[0]
                del self._published[oldest_version]
                self._newest_overwritten = max(self._newest_overwritten, oldest_version)
            self._changed.notify_all()

    def store_published(self, published: PublishedWeights) -> PublishedWeights:
        """Put a version that was published on this machine into the store: see `StoreWriter.store`."""
        assert self._store is not None, "called where there is one"
        self._writer = self._writer or StoreWriter(self._store, self._store_stem)
        return self._writer.store(published)

    def problem_with(self, source: str) -> str:
        """Explain why nothing can be fetched from the mirror at ``source``, or from the store; "" where it can."""
        if self._store_address and (why := problem_with(self._store_address, self._stem, default_folders())):
            return f"weights.exchange: {why}"
        hello = Hello(purpose="mirror", subject="check", epoch=self._epoch)
        try:
            dial_coroutine = dial(source, self._key, hello, self._orphan_s, encrypted=bool(self._certificate))
            asyncio.run(dial_coroutine)[0].close()
        except ConnectionRefused as error:
            return str(error)
        return ""

    def statistics(self) -> dict[str, int]:
        """Bytes sent to other mirrors, and versions fetched by deltas and whole, so far."""
        return {
            "served_bytes": self.served_bytes,
            "versions_by_deltas": self.versions_by_deltas,
            "versions_whole": self.versions_whole,
        }

    def fetch(
        self,
        published: PublishedWeights,
        sources: Sequence[tuple[str, Sequence[Range]]],
        stored: PublishedWeights | None = None,
    ) -> PublishedWeights:
        """Fetch a version from mirrors, by deltas where they lead from one that is here; returns its location here.
        ``sources``: addresses, and the ranges of the file that come from each; of the only one they may be (), all. The
        first has the deltas. Without sources it comes from the store, where ``stored`` is the whole version. Raises
        WeightsCorrupt when the transfer breaks or the version is gone there: nothing of it can be read then."""
        delta_source = sources[0][0] if sources else ""
        try:
            incoming = self._fetch_deltas(published, delta_source)
        except (WeightsCorrupt, OSError) as error:
            self._log.warning("version %d is fetched whole: %s", published.version, error)
            incoming = None
        if incoming is None:
            incoming = self._fetch_whole(stored or published, sources)
            self.versions_whole += 1
            if stored is not None and stored.checksum != published.checksum:
                incoming.lock.release()
                with self._changed:
                    incoming.complete = True
                incoming = self._fetch_deltas(published, delta_source)
                if incoming is None:
                    raise WeightsCorrupt(f"no deltas lead to version {published.version} from {stored.version}")
        else:
            self.versions_by_deltas += 1
        incoming.lock.release()
        with self._changed:
            incoming.complete = True
            self._drop_deltas(published)
            deltas = tuple(self._deltas[version][0] for version in sorted(self._deltas))
            self._changed.notify_all()
        return msgspec.structs.replace(published, path=str(incoming.path), parts=(), deltas=deltas)

    def _fetch_whole(
        self, published: PublishedWeights, sources: Sequence[tuple[str, Sequence[Range]]]
    ) -> _IncomingVersion:
        with ExitStack() as stack:
            connect = self._connector(published.version, CONNECTIONS)
            opened = (MirrorTransfer(source, published.version, connect, ranges) for source, ranges in sources)
            transfers: list[MirrorTransfer | StoreTransfer] = [stack.enter_context(transfer) for transfer in opened]
            if self._store is not None and not sources:
                name = whole_name(self._store_stem, published)
                transfers = [StoreTransfer(self._store, name, published.version)]
            incoming = self._begin(published, transfers[0].size)

            def receive(transfer: MirrorTransfer | StoreTransfer) -> None:
                try:
                    transfer.receive_into(incoming.content, partial(self._arrived, incoming))
                except BaseException:
                    self._fail(incoming)
                    raise

            with ThreadPoolExecutor(len(transfers)) as pool:
                list(pool.map(receive, transfers))
        incoming.content[: HEADER.size] = transfers[0].header  # last: until now the slot is no version's
        return incoming

    def _connector(self, version: int, connections: int) -> Callable[[str], Coroutine[Any, Any, list[socket.socket]]]:
        hello = Hello(purpose="mirror", subject=str(version), epoch=self._epoch)

        async def connect(source: str) -> list[socket.socket]:
            dial_coroutines = (
                dial(source, self._key, hello, self._orphan_s, encrypted=bool(self._certificate))
                for _ in range(connections)
            )
            return [sock for sock, _ in await asyncio.gather(*dial_coroutines)]

        return connect

    def _fetch_deltas(self, published: PublishedWeights, source: str) -> _IncomingVersion | None:
        """Make the version of the newest one here from which deltas lead to it; None if there is none. Raises
        WeightsCorrupt, and OSError where there is no space for them."""
        present = sorted(self._arriving.values(), key=lambda incoming: incoming.version, reverse=True)
        chains = ((base, chain_to(published, base.version, base.checksum)) for base in present if base.complete)
        base, chain = next((pair for pair in chains if pair[1]), (None, []))
        if base is None:
            return None
        contents = [self._fetch_delta(delta, source, base.path.parent) for delta in chain]
        magic, _, _, *sizes = HEADER.unpack_from(base.content)
        incoming = self._begin(published, len(base.content))
        try:
            if incoming.content.obj is not base.content.obj:  # else it is the oldest one here, and is overwritten
                incoming.content[HEADER.size :] = base.content[HEADER.size :]
            manifest_size, table_size, payload_size = sizes
            payload = np.frombuffer(incoming.content, np.uint8, offset=len(incoming.content) - payload_size)
            for _ in apply_deltas(payload, contents):
                pass
            manifest, table = bytes(incoming.content[HEADER.size : HEADER.size + manifest_size]), contents[-1].table
            require_version(published, manifest, table, payload)
            table_offset = table_start(manifest_size)
            incoming.content[table_offset : table_offset + table_size] = table.tobytes()
            HEADER.pack_into(incoming.content, 0, magic, published.version, published.version, *sizes)
        except BaseException:
            self._fail(incoming)
            raise
        self._arrived(incoming, 0, len(incoming.content))
        return incoming

    def _fetch_delta(self, delta: PublishedDelta, source: str, folder: Path) -> DeltaContent:
        """A delta, fetched and verified unless it is here; from now on others may fetch it from here."""
        present, file_map = self._deltas.get(delta.version, (None, None))
        if present is not None and present.digest == delta.digest:
            return DeltaContent(present, Path(present.path).read_bytes())
        with ExitStack() as stack:
            if self._store is not None and not source:
                name = delta_name(self._store_stem, delta)
                transfer = StoreTransfer(self._store, name, delta.version, is_delta=True)
            else:
                connect = self._connector(delta.version, 1)
                transfer = stack.enter_context(MirrorTransfer(source, delta.version, connect, is_delta=True))
            if transfer.size != delta.size_bytes:
                raise WeightsCorrupt(f"the delta of version {delta.version} at {source} has {transfer.size} bytes")
            transfer.receive_into(memoryview(content := bytearray(transfer.size)), lambda first, last: True)
        path = folder / f"{self._stem}-{delta.version}-delta.weights"
        local_delta = msgspec.structs.replace(delta, path=str(path))
        verified_content = DeltaContent(local_delta, memoryview(content))
        file_map = new_slot(path, len(content))
        file_map.write(content)
        with self._changed:
            self._deltas[delta.version] = local_delta, file_map
            self._changed.notify_all()
        return verified_content

    def _drop_deltas(self, published: PublishedWeights) -> None:
        """Remove the deltas that don't belong to the chain of ``published``."""
        digests = {delta.version: delta.digest for delta in published.deltas}
        for version, (delta, file_map) in list(self._deltas.items()):
            if digests.get(version) != delta.digest:
                del self._deltas[version]
                if file_map is not None:
                    Path(delta.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Stop listening and remove the files; replicas that still map one keep what they have."""
        asyncio.run_coroutine_threadsafe(self._listener.close(), self._loop).result(HANDSHAKE_S)
        if self._writer is not None:
            self._writer.close()
        for path, _, lock in self._slots.values():
            path.unlink(missing_ok=True)
            lock.close()
        for delta, file_map in self._deltas.values():
            if file_map is not None:
                Path(delta.path).unlink(missing_ok=True)

    # --- this machine's slots -------------------------------------------------------------------------------

    def _begin(self, published: PublishedWeights, size: int) -> _IncomingVersion:
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
        version = published.version
        incoming = _IncomingVersion(version, published.checksum, memoryview(slot_map), path, lock)
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
            try:
                while request := receive_exactly(sock, REQUEST.size):
                    self._answer(sock, *REQUEST.unpack(request))
            finally:
                self._release(sock)

    def _answer(self, sock: socket.socket, is_delta: bool, version: int, offset: int, count: int) -> None:
        try:
            with self._opened(sock, is_delta, version, offset, count) as file:
                file_bytes = os.fstat(file.fileno()).st_size
                if offset + count > file_bytes:
                    raise FileNotFoundError
                sock.sendall(ANSWER.pack(True, count or file_bytes), socket.MSG_MORE if count else 0)
                end_offset = offset + count
                while offset < end_offset:
                    # From the file's pages to the socket: nothing is copied here.
                    sent_bytes = os.sendfile(sock.fileno(), file.fileno(), offset, end_offset - offset)
                    if not sent_bytes:
                        raise OSError("the file is truncated")
                    offset += sent_bytes
                    self.served_bytes += sent_bytes
        except FileNotFoundError:
            sock.sendall(ANSWER.pack(False, 0))

    def _opened(self, sock: socket.socket, is_delta: bool, version: int, offset: int, count: int) -> IO[bytes]:
        """Open what a connection asks for. The publisher's file is locked until that ends: it is not overwritten, so
        that a slow reader has a version in the end. Raises FileNotFoundError where it isn't there."""
        if is_delta:
            return self._delta_path(version).open("rb")
        path = self._file(version, offset, count)
        with self._changed:
            if version not in self._published or path != self._published[version][0]:
                return path.open("rb")
            if version not in self._held:
                lock = SlotLock(path)
                self._held[version] = lock, set()
                if not lock.acquire(exclusive=False) or version_in(lock.read(0, HEADER.size)) != version:
                    self._let_go(version)
                    raise FileNotFoundError
            lock, readers = self._held[version]
            readers.add(sock)
            return lock.open()

    def _release(self, sock: socket.socket) -> None:
        """Note that a connection has ended."""
        with self._changed:
            for version, (_, readers) in list(self._held.items()):
                readers.discard(sock)
                if not readers:
                    self._let_go(version)

    def _let_go(self, version: int) -> None:
        lock, _ = self._held.pop(version)
        lock.release()
        lock.close()

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
            if not self._changed.wait_for(ready, PATIENCE_S):
                raise FileNotFoundError
            # First, or nodes that fetch one another's parts would wait for one another.
            if (published_file := self._published_file(version, offset, count)) is not None:
                return published_file
            incoming = self._arriving.get(version)
            if incoming is None or incoming.failed:
                raise FileNotFoundError
            return incoming.path

    def _delta_path(self, version: int) -> Path:
        """The file of a version's delta. Raises FileNotFoundError where the version comes, or came, without one."""

        def ready() -> bool:
            is_known = version in self._published or version in self._arriving
            return version in self._deltas or is_known or version <= self._newest_overwritten

        with self._changed:
            if not self._changed.wait_for(ready, PATIENCE_S) or version not in self._deltas:
                raise FileNotFoundError
            return Path(self._deltas[version][0].path)

    def _published_file(self, version: int, offset: int, count: int) -> Path | None:
        """The file that the trainer has published here, if these bytes are in it, or are its header."""
        path, ranges = self._published.get(version, (None, ()))
        is_there = offset + count <= HEADER.size or not ranges
        return path if is_there or any(first <= offset and offset + count <= last for first, last in ranges) else None
