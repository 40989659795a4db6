"""Payloads that this process holds for others until they are released."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from headway.flow.packing import Packed, flat, pack
from headway.flow.paths import PayloadRef, PeerAddress
from headway.flow.segments import PayloadReleased, Segment, SegmentReader

INLINE_BYTES = 64 << 10  # smaller messages always go in a frame of the link
_SPARE = 8  # released segments that are kept for the next payloads


class _Held(NamedTuple):
    reader: str  # incarnation of the only process that may fetch it; empty: any
    content: Segment | Packed


class Payloads:
    """The payloads of a process, by number: in shared memory, or in its own where that is full."""

    def __init__(self, address: PeerAddress, folder: Path) -> None:
        self._address, self._folder = address, folder
        self._held: dict[int, _Held] = {}
        self._spare: deque[Segment] = deque()  # released; a reader may still have a message of it
        self._storing: set[asyncio.Task[str]] = set()
        self._reader = SegmentReader()
        self._numbers = 0

    async def hold(self, message: Any, label: str, reader: PeerAddress | None = None) -> PayloadRef:
        """Hold a message for any reader, or for this one alone, whom it reaches in the reference itself where it is
        small, or no memory is shared. Raises ConfigurationError for what can't be pickled."""
        near = reader is None or reader.machine == self._address.machine
        one_gpu = reader is not None and near and reader.gpu == self._address.gpu != ""
        packed = pack(message, label, one_gpu=one_gpu)
        self._numbers += 1
        number, only = self._numbers, "" if reader is None else reader.incarnation
        content, segment = bytes(packed.written()) if packed.size_bytes <= INLINE_BYTES else None, ""
        if content is None and near:
            storing = asyncio.ensure_future(self._store(number, packed, only))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
            try:
                segment = await asyncio.shield(storing)
            except asyncio.CancelledError:  # the copy can't be interrupted
                storing.add_done_callback(lambda _: self.release(number))
                raise
        path = "link" if not (near and (content or segment)) else "cuda ipc" if one_gpu else "shared memory"
        if only and not segment:
            content = content or packed
        return PayloadRef(
            owner=self._address.name,
            incarnation=self._address.incarnation,
            machine=self._address.machine,
            id=number,
            path=path,
            reader=only,
            size_bytes=packed.size_bytes,
            segment=segment,
            content=content,
        )

    async def _store(self, number: int, packed: Packed, reader: str) -> str:
        """Copy into shared memory, and return the segment's path; empty where there is no room: what any reader may
        fetch is then copied into this process's memory."""
        size = Segment.size_for(packed)
        fitting = sorted((one for one in self._spare if size <= one.size <= 2 * size), key=lambda one: one.size)
        spare = next((one for one in fitting if one.claim()), None)
        if spare is not None:
            self._spare.remove(spare)

        def written() -> Segment:
            path = self._folder / f"{self._address.incarnation}-{number}.segment"
            segment = spare or Segment(path, size)
            segment.write(number, packed, outlives=not reader)
            return segment

        try:
            segment = await asyncio.to_thread(written)
        except OSError:
            if not reader:
                self._held[number] = _Held("", flat(memoryview(await asyncio.to_thread(packed.written))))
            return ""
        self._held[number] = _Held(reader, segment)
        return str(segment.path)

    def release(self, number: int) -> None:
        """Forget a payload; no-op for one that isn't held. Who has fetched it keeps it."""
        held = self._held.pop(number, None)
        if held is not None and isinstance(held.content, Segment):
            held.content.release()
            self._spare.append(held.content)
            if len(self._spare) > _SPARE:
                self._spare.popleft().remove()

    def release_of(self, reader: str) -> None:
        """Forget what was for a process that is dead."""
        for number in [number for number, held in self._held.items() if held.reader == reader]:
            self.release(number)

    def read(self, ref: PayloadRef) -> Packed | None:
        """A payload that is in ``ref``, in shared memory or held here, as memory of the reader's own; None where its
        owner has to be asked. Raises PayloadReleased."""
        if isinstance(ref.content, bytes):
            return flat(memoryview(bytearray(ref.content)))
        if ref.content is not None:
            return ref.content
        if ref.segment and ref.machine == self._address.machine:
            return self._reader.read(ref.segment, ref.id, alone=bool(ref.reader))
        own = ref.incarnation == self._address.incarnation
        return flat(memoryview(self.content(ref.id).written())) if own else None

    def content(self, number: int) -> Packed:
        """A payload that is held here. Raises PayloadReleased."""
        held = self._held.get(number)
        if held is None:
            raise PayloadReleased(f"payload {number} of {self._address.name} was released before it was fetched")
        content = held.content
        return content if isinstance(content, Packed) else self._reader.read(str(content.path), number, alone=False)

    async def close(self) -> None:
        """Forget all."""
        await asyncio.gather(*self._storing, return_exceptions=True)
        for number in list(self._held):
            self.release(number)
        while self._spare:
            self._spare.pop().remove()
