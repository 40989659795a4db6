"""`PayloadStore`: the payloads that a process holds for others until they are released."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from headway.flow.paths import PayloadRef, PeerAddress
from headway.flow.segments import PayloadReleased, Segment, SegmentReader
from headway.runtime.transport.packing import Packed, pack, packed_from
from headway.runtime.transport.paths import choose_path

INLINE_BYTES = 64 << 10  # messages up to this size always travel in a frame of the link
_SPARE = 8  # released segments that are kept for the next payloads


class _HeldPayload(NamedTuple):
    reader: str  # incarnation of the only process that may fetch it; empty: any
    content: Segment | Packed


class PayloadStore:
    """The payloads of a process, by number: in shared memory, or in the process's memory when that is full."""

    def __init__(self, address: PeerAddress, folder: Path) -> None:
        self._address, self._folder = address, folder
        self._held: dict[int, _HeldPayload] = {}
        self._spare: deque[Segment] = deque()  # released segments; a reader may still use their messages
        self._storing: set[asyncio.Task[str]] = set()
        self._reader = SegmentReader()
        self._numbers = 0

    async def hold(self, message: Any, label: str, reader: PeerAddress | None = None) -> PayloadRef:
        """Hold a message for any reader, or for ``reader`` alone. The reference itself contains the message if it is
        small, or ``reader`` shares no memory. Raises ConfigurationError for a message that can't be pickled."""
        path = choose_path(self._address.location, None if reader is None else reader.location)
        is_near, packed = path != "link", pack(message, label, one_gpu=path == "cuda ipc")
        self._numbers += 1
        payload_number, only_reader = self._numbers, "" if reader is None else reader.incarnation
        content, segment_path = bytes(packed.written()) if packed.size_bytes <= INLINE_BYTES else None, ""
        if content is None and is_near:
            store_task = asyncio.ensure_future(self._store(payload_number, packed, only_reader))
            self._storing.add(store_task)
            store_task.add_done_callback(self._storing.discard)
            try:
                segment_path = await asyncio.shield(store_task)
            except asyncio.CancelledError:  # the copy can't be interrupted
                store_task.add_done_callback(lambda _: self.release(payload_number))
                raise
        if only_reader and not segment_path:
            content = content or packed
        return PayloadRef(
            owner=self._address.name,
            incarnation=self._address.incarnation,
            machine=self._address.machine,
            id=payload_number,
            path=path if content or segment_path else "link",
            reader=only_reader,
            size_bytes=packed.size_bytes,
            segment=segment_path,
            content=content,
        )

    async def _store(self, number: int, packed: Packed, reader: str) -> str:
        """Copy into shared memory, and return the segment's path; empty when shared memory is full: a message for any
        reader is then copied into this process's memory."""
        size_bytes = Segment.size_for(packed)
        fitting_segments = sorted(
            (candidate for candidate in self._spare if size_bytes <= candidate.size <= 2 * size_bytes),
            key=lambda candidate: candidate.size,
        )
        spare_segment = next((candidate for candidate in fitting_segments if candidate.claim()), None)
        if spare_segment is not None:
            self._spare.remove(spare_segment)

        def write_segment() -> Segment:
            segment_path = self._folder / f"{self._address.incarnation}-{number}.segment"
            segment = spare_segment or Segment(segment_path, size_bytes)
            segment.write(number, packed, outlives=not reader)
            return segment

        try:
            segment = await asyncio.to_thread(write_segment)
        except OSError:
            if not reader:
                self._held[number] = _HeldPayload("", packed_from(memoryview(await asyncio.to_thread(packed.written))))
            return ""
        self._held[number] = _HeldPayload(reader, segment)
        return str(segment.path)

    def release(self, number: int) -> None:
        """Drop a payload; no-op for one that isn't held. Fetched copies stay valid."""
        held_payload = self._held.pop(number, None)
        if held_payload is not None and isinstance(held_payload.content, Segment):
            held_payload.content.release()
            self._spare.append(held_payload.content)
            if len(self._spare) > _SPARE:
                self._spare.popleft().remove()

    def release_for_reader(self, reader: str) -> None:
        """Drop the payloads that only a dead process could have fetched."""
        for number in [number for number, payload in self._held.items() if payload.reader == reader]:
            self.release(number)

    def read(self, ref: PayloadRef) -> Packed | None:
        """Read a payload that is in ``ref``, in shared memory or held here, as memory of the reader; None when only its
        owner can send it. Raises PayloadReleased."""
        if isinstance(ref.content, bytes):
            return packed_from(memoryview(bytearray(ref.content)))
        if ref.content is not None:
            return ref.content
        if ref.segment and ref.machine == self._address.machine:
            return self._reader.read(ref.segment, ref.id, alone=bool(ref.reader))
        is_held_here = ref.incarnation == self._address.incarnation
        return packed_from(memoryview(self.content(ref.id).written())) if is_held_here else None

    def content(self, number: int) -> Packed:
        """Return a payload that is held here. Raises PayloadReleased."""
        held_payload = self._held.get(number)
        if held_payload is None:
            raise PayloadReleased(f"payload {number} of {self._address.name} was released before it was fetched")
        content = held_payload.content
        return content if isinstance(content, Packed) else self._reader.read(str(content.path), number, alone=False)

    async def close(self) -> None:
        """Drop all payloads, and remove their segments."""
        await asyncio.gather(*self._storing, return_exceptions=True)
        for number in list(self._held):
            self.release(number)
        while self._spare:
            self._spare.pop().remove()
