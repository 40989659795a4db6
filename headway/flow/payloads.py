"""Payloads that this process holds for others until they are released."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.flow.packing import Packed, Tensors, load, pack, split
from headway.flow.paths import INLINE_BYTES, PayloadPath, PayloadRef, PeerAddress
from headway.flow.segments import PayloadReleased, SegmentReader, Segments

_BLOCKING_BYTES = 1 << 20  # larger payloads are copied in a thread
_TENSORS: dict[PayloadPath, Tensors] = {"cuda ipc": "ipc", "nccl": "cuda", "gloo": "cpu"}


@dataclass(frozen=True)
class _Held:
    reader: str  # incarnation of the only process that may fetch it; empty: any
    segment: str = ""
    packed: Packed | None = None
    message: Any = None  # where neither of these has it


class Payloads:
    """The payloads of a process, by number: in shared memory, as views of the message's own memory, or by reference."""

    def __init__(self, address: PeerAddress, folder: Path) -> None:
        self._address = address
        self._segments = Segments(folder, address.incarnation)
        self._reader = SegmentReader()
        self._held: dict[int, _Held] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, message: Any, label: str, path: PayloadPath, reader: str = "") -> PayloadRef:
        """Hold a message for the readers of a path. Raises ConfigurationError for what can't be pickled."""
        packed = pack(message, label, _TENSORS.get(path, "copy"))
        self._numbers += 1
        number, size_bytes, inline, segment = self._numbers, packed.size_bytes, b"", ""
        if path == "reference":
            self._held[number] = _Held(reader, message=message)
        elif size_bytes <= INLINE_BYTES:
            if packed.aside:
                packed = pack(message, label)
            flat = bytearray(packed.flat_bytes)
            packed.write(memoryview(flat))
            inline = bytes(flat)
        else:
            segment = await self._shared(number, packed) if path == "shared memory" else ""
            self._held[number] = _Held(reader, segment, None if segment else packed)
        return PayloadRef(
            owner=self._address.name,
            incarnation=self._address.incarnation,
            machine=self._address.machine,
            id=number,
            reader=reader,
            size_bytes=size_bytes,
            segment=segment,
            inline=inline,
        )

    async def _shared(self, number: int, packed: Packed) -> str:
        """Copy into shared memory; empty where there is no room: then it is fetched over the link."""
        try:
            if packed.size_bytes < _BLOCKING_BYTES:
                return self._segments.write(number, packed)
            return await asyncio.to_thread(self._segments.write, number, packed)
        except OSError:
            return ""

    def release(self, number: int) -> None:
        """Forget a payload; no-op for one that isn't held. Who has fetched it keeps it."""
        if self._held.pop(number, None) is not None:
            self._segments.release(number)

    def release_of(self, reader: str) -> None:
        """Forget what was for a process that is dead."""
        for number in [number for number, held in self._held.items() if held.reader == reader]:
            self.release(number)

    def read(self, ref: PayloadRef) -> tuple[Any] | None:
        """The message of a payload that is in ``ref``, held here, or in shared memory; None where its owner has to be
        asked. Raises PayloadReleased."""
        if ref.inline:
            return (load(*split(memoryview(bytearray(ref.inline)))),)
        if ref.segment and ref.machine == self._address.machine:
            return (load(*self._reader.read(ref.segment, ref.id, alone=bool(ref.reader))),)
        if ref.incarnation != self._address.incarnation:
            return None
        held = self._find(ref.id)
        return (load(*self.parts(ref.id)[:2]) if held.packed is not None else held.message,)

    def parts(self, number: int) -> tuple[Any, list[Any], list[Any]]:
        """Header and parts, as they can be put in a frame, and the tensors that travel by themselves. Raises
        PayloadReleased."""
        held = self._find(number)
        if held.segment:
            header, memory = self._reader.read(held.segment, number, alone=False)
            return pickle.PickleBuffer(header), list(map(pickle.PickleBuffer, memory)), []
        packed = held.packed or pack(held.message)
        aside = packed.tensors if packed.aside else []
        return packed.header, list(map(pickle.PickleBuffer, packed.memory())), aside

    def close(self) -> None:
        """Forget all."""
        self._held.clear()
        self._segments.close()

    def _find(self, number: int) -> _Held:
        if number not in self._held:
            raise PayloadReleased(f"payload {number} of {self._address.name} was released before it was fetched")
        return self._held[number]
