"""Payloads that this process holds for others until they are released."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from headway.flow.packing import Packed, Tensors, load, pack, split
from headway.flow.paths import PayloadPath, PayloadRef, PeerAddress
from headway.flow.segments import PayloadReleased, Segment, SegmentReader

INLINE_BYTES = 64 << 10  # smaller messages always go in a frame of the link
_SPARE = 8  # released segments that are kept for the next payloads
_TENSORS: dict[PayloadPath, Tensors] = {"cuda ipc": "ipc", "nccl": "cuda", "gloo": "cpu"}


class _Held(NamedTuple):
    reader: str  # incarnation of the only process that may fetch it; empty: any
    content: Segment | Packed | bytearray  # a bytearray as `Packed.write` fills it


class Payloads:
    """The payloads of a process, by number: in shared memory, or as views of the message's own memory."""

    def __init__(self, address: PeerAddress, folder: Path) -> None:
        self._address, self._folder = address, folder
        self._held: dict[int, _Held] = {}
        self._spare: deque[Segment] = deque()  # released; a reader may still have a message of it
        self._storing: set[asyncio.Task[str]] = set()
        self._reader = SegmentReader()
        self._numbers = 0

    async def hold(self, message: Any, label: str, path: PayloadPath, reader: str = "") -> PayloadRef:
        """Hold a message for the readers of a path. Raises ConfigurationError for what can't be pickled."""
        packed = pack(message, label, _TENSORS.get(path, "copy"))
        self._numbers += 1
        number, inline, segment = self._numbers, b"", ""
        if packed.flat_bytes <= INLINE_BYTES:
            inline = bytes(_flat(pack(message, label) if packed.aside else packed))
        elif path != "shared memory":
            self._held[number] = _Held(reader, packed)
        else:
            storing = asyncio.ensure_future(self._store(number, packed, reader))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
            try:
                segment = await asyncio.shield(storing)
            except asyncio.CancelledError:  # the copy can't be interrupted
                storing.add_done_callback(lambda _: self.release(number))
                raise
            path = path if segment else "link"
        return PayloadRef(
            owner=self._address.name,
            incarnation=self._address.incarnation,
            machine=self._address.machine,
            id=number,
            path=path,
            reader=reader,
            size_bytes=packed.flat_bytes,
            segment=segment,
            inline=inline,
        )

    async def _store(self, number: int, packed: Packed, reader: str) -> str:
        """Copy into shared memory, and return the segment's path; empty where there is no room: then it is copied into
        this process's memory, and fetched over the link."""
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
            self._held[number] = _Held(reader, await asyncio.to_thread(_flat, packed))
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

    def read(self, ref: PayloadRef) -> tuple[Any] | None:
        """The message of a payload that is in ``ref``, in shared memory or held here; None where its owner has to be
        asked. Raises PayloadReleased."""
        if ref.inline:
            return (load(*split(memoryview(bytearray(ref.inline)))),)
        if ref.segment and ref.machine == self._address.machine:
            return (load(*self._reader.read(ref.segment, ref.id, alone=bool(ref.reader))),)
        if ref.incarnation != self._address.incarnation:
            return None
        header, block, _ = self.parts(ref.id)  # there was no room in shared memory
        return (load(header, memoryview(bytearray(block))),)

    def parts(self, number: int) -> tuple[Any, Any, list[Any]]:
        """Header and content (see `load`) as they can be put in a frame, and the tensors that travel by themselves.
        Raises PayloadReleased."""
        held = self._held.get(number)
        if held is None:
            raise PayloadReleased(f"payload {number} of {self._address.name} was released before it was fetched")
        content = held.content
        if isinstance(content, Packed):
            aside = content.tensors if content.aside else []
            return content.header, list(map(pickle.PickleBuffer, content.memory())), aside
        if isinstance(content, Segment):
            header, block = self._reader.read(str(content.path), number, alone=False)
        else:
            header, block = split(memoryview(content))
        return pickle.PickleBuffer(header), pickle.PickleBuffer(block), []

    async def close(self) -> None:
        """Forget all."""
        await asyncio.gather(*self._storing, return_exceptions=True)
        for number in list(self._held):
            self.release(number)
        while self._spare:
            self._spare.pop().remove()


def _flat(packed: Packed) -> bytearray:
    flat = bytearray(packed.flat_bytes)
    packed.write(memoryview(flat))
    return flat
