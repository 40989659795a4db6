"""Workers and workflows that the tests of `headway.flow` run in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.flow.channel import Channel
from headway.flow.run import Flow
from headway.flow.worker import Worker


class Doubles(Worker):
    """Doubles numbers; told to die at one, it dies once."""

    stateless = True

    def __init__(self, dies_at: int = -1, once: str = "") -> None:
        self.dies_at, self.once = dies_at, once
        self.memory = np.ones(0)

    async def run(self, numbers: Channel, doubled: Channel) -> int:
        seen = 0
        async for chunk in numbers.chunks(2):
            async with self.turn():
                if self.dies_at in chunk and not os.path.exists(self.once):  # noqa: ASYNC240
                    open(self.once, "w").close()  # noqa: ASYNC230
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += len(chunk)
            await doubled.put_all([2 * number for number in chunk])
        return seen

    async def swap(self, other: str, message: Any) -> Any:
        await self.send(message, other)
        return await self.recv(other)

    def rate(self, texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"id": text["id"], "rank": self.rank} for text in texts]

    def reversed_rate(self, texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return texts[::-1]

    def rows(self, matrix: np.ndarray) -> int:
        return len(matrix)

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def fill(self, channel: Channel, count: int) -> None:
        for number in range(count):
            await channel.put(number)

    async def leave(self, channel: Channel, items: list[Any], once: str) -> None:
        """Put ``items``, then die, the first time."""
        if not os.path.exists(once):  # noqa: ASYNC240
            await channel.put_all(items)
            open(once, "w").close()  # noqa: ASYNC230
            os.kill(os.getpid(), signal.SIGKILL)

    async def take(self, channel: Channel, limit: int) -> list[Any]:
        return [await channel.get() for _ in range(limit)]

    async def hold(self, channel: Channel) -> None:
        await channel.get()
        await asyncio.sleep(3600)


async def double_all(flow: Flow, numbers: int, arguments: tuple[Any, ...] = (), restarts: int = 0) -> list[int]:
    doubles = await flow.workers("double", Doubles, *arguments, restarts=restarts)
    source, result = flow.channel("numbers"), flow.channel("doubled", items=3)
    running = doubles.run(source, result)
    await source.put_all(range(numbers))
    source.close()
    collected: list[int] = []

    async def collect() -> None:
        collected.extend([item async for item in result])

    collecting = asyncio.create_task(collect())
    await running
    result.close()
    await collecting
    return collected


class Remembers(Worker):
    """Has a number that grows by calls, and dies when it is told to, once."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, amount: int, once: str = "") -> int:
        self.number += amount
        if once and not os.path.exists(once):
            open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.number

    def state(self) -> int:
        return self.number

    def restore(self, number: int) -> None:
        self.number = number


class Large(Worker):
    """Has an array of a million numbers, and dies when it is told to, once."""

    def __init__(self, count: int) -> None:
        self.numbers = np.zeros(count)

    def add(self, amount: float, once: str = "") -> float:
        self.numbers += amount
        if once and not os.path.exists(once):
            open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(self.numbers.sum())

    def state(self) -> np.ndarray:
        return self.numbers

    def restore(self, numbers: np.ndarray) -> None:
        self.numbers = numbers


class Hangs(Worker):
    """Takes three steps, of which one hangs, once."""

    stateless = True

    async def step(self, once: str) -> int:
        async with self.turn():
            with self.limited(0.5) as watchdog:
                for number in range(3):
                    watchdog.restart()
                    if number == 1 and not os.path.exists(once):  # noqa: ASYNC240
                        open(once, "w").close()  # noqa: ASYNC230
                        self.wait_for_ever()
        return 3

    def wait_for_ever(self) -> None:
        time.sleep(3600)  # the hang

    def slow_but_never_hanging(self) -> int:
        """More than the limit inside one block, in short steps, and outside of blocks."""
        with self.limited(0.4) as watchdog:
            for _ in range(4):
                watchdog.restart()
                time.sleep(0.2)
        time.sleep(0.6)
        return 4


class Keeps(Worker):
    """Has what it was built with."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def read(self) -> Any:
        return self.content


class PingPong(Worker):
    """Sends a message and gets one, several times a call."""

    stateless = True

    async def rounds(self, other: str, count: int, first: bool) -> None:
        for _ in range(count):
            if first:
                await self.send(np.zeros(1000), f"{other}-0")
            await self.recv(f"{other}-0")
            async with self.turn():
                time.sleep(0.01)  # noqa: ASYNC251
            if not first:
                await self.send(np.zeros(1000), f"{other}-0")


class Shared(Worker):
    """Computes for a while in turns, and notes whether its memory was on the device then."""

    stateless = True

    def __init__(self) -> None:
        self.away, self.bad = False, 0

    async def run(self, source: Channel, result: Channel | None = None) -> int:
        async for chunk in source.chunks():
            async with self.turn():
                self.bad += self.away
                await asyncio.sleep(0.02 * len(chunk))
            if result is not None:
                await result.put_all(chunk)
        return self.bad

    def onload(self) -> None:
        self.away = False

    def offload(self) -> None:
        self.away = True

    async def impatient(self, channel: Channel, tries: int) -> list[Any]:
        """Give up on gets after a moment, then wait for the rest; returns all that came."""
        got: list[Any] = []
        for _ in range(tries):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    got.append(await channel.get())
        return got + [item async for item in channel]

    async def in_two_tasks(self) -> list[float]:
        """Two turns at once: how long both took, and how much of it together."""

        async def compute() -> tuple[float, float]:
            async with self.turn():
                began = asyncio.get_running_loop().time()
                await asyncio.sleep(0.1)
                return began, asyncio.get_running_loop().time()

        one, other = await asyncio.gather(compute(), compute())
        return [max(one[0], other[0]) - min(one[1], other[1])]


class Mortal(Worker):
    """Dies while it is built, the first time."""

    stateless = True

    def __init__(self, once: str) -> None:
        if not os.path.exists(once):
            open(once, "w").close()
            os._exit(9)

    def answer(self) -> int:
        return 42


class Publisher(Worker):
    """Has a file that is gone with its process, as a trainer's published weights are."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.path.write_text(str(os.getpid()))

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def state(self) -> str:
        return str(self.path)

    def restore(self, path: str) -> None:
        assert path == str(self.path)


class Subscriber(Worker):
    """Needs a publisher's file when it takes over."""

    def read(self, path: str) -> None:
        self.path, self.found = path, Path(path).read_text()

    def state(self) -> tuple[str, str]:
        return self.path, self.found

    def restore(self, state: tuple[str, str]) -> None:
        self.read(state[0])
        assert self.found == state[1]
