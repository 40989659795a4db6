"""Shares answers between concurrent viewers, and streams changes as server-sent events."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

FRESH_S = 0.9  # an answer younger than this is returned without a check of the files
HEARTBEAT_S = 15.0
_MAX_BYTES = 32 << 20  # of cached answers
_THREADS = 6
encode = msgspec.json.Encoder(enc_hook=lambda array: array.tolist()).encode  # NaN becomes null


class _Answer(NamedTuple):
    made_s: float
    stamp: Any
    body: bytes


class SharedAnswers:
    """Makes answers in a few threads. An answer that is being made, is fresh, or whose files haven't changed is shared
    by all requests for it. Belongs to a single event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="watch")
        self._making: dict[Hashable, asyncio.Future[_Answer]] = {}
        self._kept: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._kept_bytes = 0

    async def get(self, key: Hashable, make: Callable[[], Any], stamp: Callable[[], Any] | None = None) -> bytes:
        """Return ``make()`` as JSON. ``stamp()``: changes with the files that ``make`` reads; without a stamp, a stale
        answer is always made again. Raises the errors of ``make``."""
        loop = asyncio.get_running_loop()
        cached = self._kept.get(key)
        if cached is not None and loop.time() - cached.made_s < FRESH_S:
            return cached.body
        if key not in self._making:

            def run() -> _Answer:
                current_stamp = stamp() if stamp is not None else None
                if cached is not None and current_stamp is not None and current_stamp == cached.stamp:
                    return cached
                return _Answer(0.0, current_stamp, encode(make()))

            self._making[key] = future = asyncio.ensure_future(loop.run_in_executor(self._threads, run))
            future.add_done_callback(lambda done: self._store(key, done))
        return (await asyncio.shield(self._making[key])).body

    def _store(self, key: Hashable, done: asyncio.Future[_Answer]) -> None:
        self._making.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        if (replaced := self._kept.pop(key, None)) is not None:
            self._kept_bytes -= len(replaced.body)
        answer = self._kept[key] = done.result()._replace(made_s=done.get_loop().time())
        self._kept_bytes += len(answer.body)
        while self._kept_bytes > _MAX_BYTES:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1].body)

    def close(self) -> None:
        """End the threads without waiting for unfinished answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def changes(
    event: str, get: Callable[[], Awaitable[bytes]], stopped: asyncio.Event, every_s: float = 1.0
) -> AsyncIterator[bytes]:
    """Yield ``get()`` as server-sent events, at once and then whenever it has changed, until ``stopped``; comments are
    sent while nothing changes."""
    sent_body, silent_s = b"", 0.0
    while not stopped.is_set():
        body = await get()
        if body != sent_body:
            sent_body, silent_s = body, 0.0
            yield b"event: %s\ndata: %s\n\n" % (event.encode(), body)
        elif silent_s >= HEARTBEAT_S:
            silent_s = 0.0
            yield b": nothing new\n\n"
        try:
            await asyncio.wait_for(stopped.wait(), every_s)
        except TimeoutError:
            silent_s += every_s
