"""The injected clock: real time for a run, virtual time for tests and the planner.

Under :func:`run_virtual` an asyncio program runs on an event loop whose time stands still while any
task can run and jumps to the next timer when none can. ``asyncio.sleep`` and ``asyncio.timeout`` are
virtual too, so hours of waiting take milliseconds and every schedule is reproducible.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """The source of time for logic."""

    def now(self) -> float:
        """Monotonic seconds from an arbitrary start."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; 0 lets the other tasks run once."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """The time of the virtual loop it is used in; every instance in one loop shows the same time.

    Outside a virtual loop it shows the last time it read (0.0 before the first).
    """

    def __init__(self) -> None:
        self._seen_s = 0.0

    def now(self) -> float:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._seen_s
        if isinstance(loop, _VirtualLoop):
            self._seen_s = loop.time()
        return self._seen_s

    async def sleep(self, seconds: float) -> None:
        if not isinstance(asyncio.get_running_loop(), _VirtualLoop):
            raise RuntimeError("a VirtualClock can only sleep inside run_virtual")
        await asyncio.sleep(seconds)


class Deadlock(RuntimeError):
    """No task can run, no timer is set, and the main coroutine has not ended. Lists the waiting tasks."""


class OutOfTime(RuntimeError):
    """Virtual time passed the limit given to :func:`run_virtual`. Lists the waiting tasks."""


def run_virtual(
    main: Coroutine[Any, Any, T] | Callable[[Clock], Coroutine[Any, Any, T]], limit_s: float | None = None
) -> T:
    """Run ``main`` to its end in virtual time and return its result.

    ``main``: a coroutine, or a function that makes one from the clock. ``limit_s``: virtual seconds after
    which the program counts as stuck (periodic timers hide a deadlock). Raises :class:`Deadlock` or
    :class:`OutOfTime`, each naming every waiting task and the line it waits at; otherwise what ``main``
    raises. ``asyncio.to_thread`` runs its function at once, in place; sockets and other threads are not
    served.
    """
    with asyncio.Runner(loop_factory=lambda: _VirtualLoop(limit_s)) as runner:
        coroutine = main(VirtualClock()) if callable(main) else main
        return runner.run(coroutine)


class _JumpingSelector(selectors.SelectSelector):
    """A selector that reports no I/O; instead of waiting it moves the time forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.on_idle: Callable[[], None] = lambda: None
        self.limit_s: float | None = None
        self.on_limit: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self.on_idle()
        elif timeout > 0:
            self.now_s += timeout
            if self.limit_s is not None and self.now_s > self.limit_s:
                self.on_limit()
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose selector jumps over time instead of waiting through it."""

    def __init__(self, limit_s: float | None) -> None:
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)
        self._jumps.on_idle = self._raise_deadlock
        self._jumps.on_limit = self._raise_out_of_time
        self._jumps.limit_s = limit_s

    def time(self) -> float:
        return self._jumps.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run ``func`` in place: a thread would make the order of events depend on real time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # the boundary of an executor: its failure belongs to the awaiter
            future.set_exception(error)
        return future

    def _raise_deadlock(self) -> None:
        raise Deadlock(f"deadlock at {self.time():.3f} s: nothing is scheduled; waiting:\n{describe_tasks(self)}")

    def _raise_out_of_time(self) -> None:
        limit_s, self._jumps.limit_s = self._jumps.limit_s, None  # once: the clean-up may still need timers
        raise OutOfTime(f"not done after {limit_s} virtual seconds; waiting:\n{describe_tasks(self)}")


def describe_tasks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """List the tasks that are not done, a line each: its name, and the innermost line it waits at."""
    lines = [f"  {task.get_name()}: {_waiting_at(task.get_coro())}" for task in asyncio.all_tasks(loop)]
    return "\n".join(sorted(lines)) or "  (no task)"


def _waiting_at(coroutine: Any) -> str:
    """Describe where a coroutine waits: the last frame with Python source in its chain of awaits."""
    location = getattr(coroutine, "__qualname__", repr(coroutine))
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            location = f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return location
