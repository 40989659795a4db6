"""Attacks on the ports for other machines: what clients without the key, eavesdroppers and broken peers may send."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import pickle
import random
import resource
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from headway.runtime import framing
from headway.runtime.addresses import split_address
from headway.runtime.framing import HEADER, SIZE, Kind
from headway.runtime.nodes.dial import dial
from headway.runtime.nodes.handshake import ConnectionRefused, Hello, Purpose

ATTACKERS = 16
MARK = b"headway_fuzz_mark"  # in every attack
EVIL = pickle.dumps(Path(f"/nonexistent/{MARK.decode()}"))


class Attack:
    """Cases against one port, drawn from a seed."""

    def __init__(self, address: str, key: str, purpose: Purpose, seed: int) -> None:
        self._address, self._key = address, key
        self._purpose: Purpose = purpose
        self._host, self._port = split_address(address)
        self._random = random.Random(seed)
        self._recorded = b""  # the client's part of a handshake that was admitted
        self._number = 0

    async def record(self) -> None:
        """Eavesdrop on a handshake with the right key."""
        sent = bytearray()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, to = await asyncio.open_connection(self._host, self._port)

            async def answer() -> None:
                with contextlib.suppress(ConnectionError):
                    while data := await there.read(4096):
                        writer.write(data)
                writer.close()

            answering = asyncio.create_task(answer())
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(4096):
                    sent.extend(data)
                    to.write(data)
            to.close()
            await answering

        async with await asyncio.start_server(carry, "127.0.0.1", 0) as tap:
            with contextlib.suppress(ConnectionRefused):  # an orchestrator knows no such worker, and says so last
                sock, _ = await dial(f"127.0.0.1:{tap.sockets[0].getsockname()[1]}", self._key, self._hello(), 10.0)
                sock.close()
        self._recorded = bytes(sent)
        assert len(sent) > 100

    async def run(self, cases: int) -> None:
        """Run so many cases, several at a time."""
        await self.record()

        async def attack() -> None:
            while self._number < cases:
                self._number += 1
                with contextlib.suppress(OSError, ConnectionRefused, TimeoutError):
                    async with asyncio.timeout(20.0):
                        await self._case(self._number)

        await asyncio.gather(*(attack() for _ in range(ATTACKERS)))

    def _hello(self) -> Hello:
        return Hello(purpose=self._purpose, subject=f"fuzz{self._number}", epoch=1)

    async def _case(self, number: int) -> None:
        kind = number % 8
        if kind == 0:
            await self._send(self._random.randbytes(self._random.randrange(1, 5000)) + EVIL)
        elif kind in (1, 2):  # cut at every byte, in turn
            await self._send(self._recorded[: number // 8 * (1 + kind) % len(self._recorded)])
        elif kind == 3:
            await self._send(self._recorded + frame(1 << 10, len(EVIL)) + EVIL)
        elif kind == 4:
            at = self._random.randrange(len(self._recorded))
            await self._send(
                self._recorded[:at] + bytes([self._recorded[at] ^ 1 << self._random.randrange(8)]) + frame(0, 9) + EVIL
            )
        elif kind == 5:  # frames without a handshake
            await self._send(frame(0, len(EVIL)) + EVIL)
        elif kind == 6:
            await self._after_key(frame(self._random.choice((0, 1 << 31)), 1 << 63) + EVIL)
        else:
            await self._after_key(frame(1, 4 << 30) + SIZE.pack(4 << 30) + EVIL)

    async def _send(self, data: bytes) -> None:
        """Send without the key, in two pieces, and wait for the end."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            cut = self._random.randrange(len(data) + 1)
            writer.write(data[:cut])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(data[cut:])
            writer.write_eof()
            while await reader.read(4096):
                pass
        finally:
            writer.close()

    async def _after_key(self, data: bytes) -> None:
        """Send as somebody who knows the key."""
        sock, _ = await dial(self._address, self._key, self._hello(), 10.0)
        with sock:
            await asyncio.get_running_loop().sock_sendall(sock, data)


def frame(buffers: int, payload_bytes: int) -> bytes:
    """The header of a frame."""
    return HEADER.pack(Kind.RESULT, buffers & 0xFFFFFFFF, 1, payload_bytes)


@contextmanager
def unpickled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Attacks that were unpickled in this process meanwhile."""
    found: list[bytes] = []
    loads = pickle.loads

    def counting(payload: bytes, **more: object) -> object:
        if MARK in bytes(payload):
            found.append(bytes(payload))
        return loads(payload, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(framing.pickle, "loads", counting)
        yield found


@asynccontextmanager
async def goes_on(work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Repeat ``work`` meanwhile; fails when it fails, or was never done."""
    times = 0

    async def repeat() -> None:
        nonlocal times
        while True:
            async with asyncio.timeout(10.0):
                await work()
            times += 1
            await asyncio.sleep(0.01)

    repeating = asyncio.create_task(repeat())
    yield
    repeating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await repeating
    assert times > 1


def resident_bytes() -> int:
    """Memory of this process, without what is free in its heap: that of other tests settles late."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


REQUEST = struct.Struct("<?qQQ")  # of mirrors: whether of the delta, version, offset, count
