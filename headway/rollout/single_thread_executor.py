"""An executor for blocking calls: a call that hangs delays neither other work nor the end of the process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class SingleThreadExecutor:
    """Runs calls one after another in a single thread, for code that isn't thread-safe."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run ``function`` in the thread and return its result. It runs to its end even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        answer_future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                returned, error = function(*arguments, **options), None
            except BaseException as raised:  # handed to the caller
                returned, error = None, raised
            loop.call_soon_threadsafe(_settle, answer_future, returned, error)

        self._work.put(work)
        return await answer_future

    def end(self) -> None:
        """Accept no further calls; the thread ends after the queued ones."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except RuntimeError:
                return  # the event loop is closed: no caller waits


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    elif error is not None:  # SystemExit would end the loop that all rollouts share; a StopIteration can't be awaited
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    else:
        answer.set_result(result)
