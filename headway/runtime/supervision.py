"""Supervises named loops that run and end together.

A run is a handful of loops, none of which outlives the others: the first to fail ends all, with its own
error; a loop that returns although it should not is an error too, with its name.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from headway.records.errors import HeadwayError

Loop = Callable[[], Coroutine[Any, Any, Any]]
T = TypeVar("T")
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class LoopReturned(HeadwayError):
    """A loop returned that should run as long as the others."""

    def __init__(self, loop: str) -> None:
        super().__init__(f"loop {loop!r} returned unexpectedly")
        self.loop = loop


class _Finished(Exception):
    """Ends the task group when the loop named by ``until`` has returned."""


@contextmanager
def handled_signals(on_signal: Callable[[], object], numbers: Sequence[int] = INTERRUPTS) -> Iterator[None]:
    """Call ``on_signal`` in the running loop at each signal of ``numbers`` that arrives during the block."""
    loop = asyncio.get_running_loop()
    for signal_number in numbers:
        loop.add_signal_handler(signal_number, on_signal)
    try:
        yield
    finally:
        for signal_number in numbers:
            loop.remove_signal_handler(signal_number)


@asynccontextmanager
async def until_interrupted(grace_s: float = math.inf) -> AsyncIterator[asyncio.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one, or the end of ``grace_s`` after the first, cancels
    the block."""
    stopped, task = asyncio.Event(), asyncio.current_task()
    assert task is not None
    expiry: asyncio.TimerHandle | None = None

    def on_signal() -> None:
        nonlocal expiry
        if expiry is not None:
            task.cancel()
        else:
            expiry = task.get_loop().call_later(grace_s, task.cancel)
        stopped.set()

    try:
        with handled_signals(on_signal):
            yield stopped
    except asyncio.CancelledError:
        if expiry is None:
            raise
    finally:
        if expiry is not None:
            expiry.cancel()


async def supervise(loops: Mapping[str, Loop], until: str | None = None) -> Any:
    """Run all ``loops`` until one ends, then cancel the others and wait for them.

    ``loops``: name -> function that makes the loop's coroutine. ``until``: name of the loop whose return
    is the regular end; its result is returned. Any other return raises :class:`LoopReturned`. The first
    error in time is raised itself, also out of a task group inside a loop, so that callers can match its
    type, with a note naming the loop; errors of other loops while they were being cancelled are added as
    notes. Being cancelled cancels all loops.
    """
    if until is not None and until not in loops:
        raise ValueError(f"until={until!r} is none of the loops {sorted(loops)}")
    errors: list[Exception] = []
    until_results: list[Any] = []

    async def guard(name: str, loop: Loop) -> None:
        try:
            returned = await loop()
            if name == until:
                until_results.append(returned)
                raise _Finished
            raise LoopReturned(name)
        except _Finished:
            raise
        except Exception as raised:  # the one capture point of a loop; re-raised below
            error = _first(raised)
            error.add_note(f"in loop {name!r}")
            errors.append(error)
            raise error from error.__cause__

    try:
        async with asyncio.TaskGroup() as task_group:
            for name, loop in loops.items():
                task_group.create_task(guard(name, loop), name=name)
    except BaseExceptionGroup:  # `errors` and `until_results` have what `guard` raised; anything else is re-raised
        if not errors and not until_results:
            raise
    if errors:
        earliest, *later_errors = errors
        for other in later_errors:
            earliest.add_note(f"then: {type(other).__name__}: {other} ({'; '.join(getattr(other, '__notes__', []))})")
        raise earliest
    return until_results[0] if until_results else None


def _first(error: Exception) -> Exception:
    """Return the first error in time of a task group inside a loop; the others become its notes."""
    while isinstance(error, ExceptionGroup):
        earliest, *later_errors = error.exceptions
        for other in later_errors:
            earliest.add_note(f"then: {type(other).__name__}: {other}")
        error = earliest
    return error


def spawn(tasks: set[asyncio.Task[T]], coroutine: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
    """Run a coroutine as a task, kept in ``tasks`` until it has ended: the event loop has only a weak reference."""
    task = asyncio.get_running_loop().create_task(coroutine, name=name or None)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_all(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel these tasks and wait until they have ended, ignoring what they raise. For clean-up."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def end_group(process: asyncio.subprocess.Process, signals: Sequence[int], wait_s: float) -> None:
    """End a process that leads a group: send the group these signals (0: none yet), one after the other, until the
    process has ended within ``wait_s``."""
    for signal_number in signals:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal_number)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.wait()
                return


async def run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end even if the caller is cancelled meanwhile; then raise the cancellation. For
    clean-up."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # being cancelled comes first
        raise cancelled
    return task.result()
