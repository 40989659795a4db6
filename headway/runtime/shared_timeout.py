"""A time limit shared by many calls that are open at once, with one timer of the event loop for all of them."""

from __future__ import annotations

import asyncio
from types import TracebackType


class SharedTimeout:
    """Limits each of many blocks to ``timeout_s`` seconds (None: no limit), as `asyncio.timeout` does for one.

    All blocks have the same limit, so they expire in the order they began: one timer, for the oldest, is enough, and
    entering or leaving a block costs no operation on the event loop's heap of timers. For one event loop at a time.

    Example::

        limits = SharedTimeout(600.0)
        with limits.block() as block:  # raises TimeoutError at its end when it has expired
            await work()
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._open: dict[_Block, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def block(self) -> _Block:
        """The context manager of one block, which cancels the task that runs it when its time is over."""
        return _Block(self)

    def begin(self, block: _Block) -> None:
        """Count the block's time from now on."""
        if self.timeout_s is None:
            return
        loop = asyncio.get_running_loop()
        block.due_s = loop.time() + self.timeout_s
        self._open[block] = None
        if self._timer is None:
            self._timer = loop.call_at(block.due_s, self._expire)

    def end(self, block: _Block) -> None:
        self._open.pop(block, None)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """Expire the blocks whose time is over, and set the timer for the oldest that is left."""
        loop = asyncio.get_running_loop()
        assert self._timer is not None
        now_s = max(loop.time(), self._timer.when())  # a timer may come a rounding error early
        self._timer = None
        while self._open and (oldest_block := next(iter(self._open))).due_s <= now_s:
            del self._open[oldest_block]
            oldest_block.expire()
        if self._open:
            self._timer = loop.call_at(next(iter(self._open)).due_s, self._expire)


class _Block:
    """A limited block: *open* -> *expired* (its task is cancelled) or left."""

    __slots__ = ("_cancelling", "_limits", "_task", "due_s", "expired")

    def __init__(self, limits: SharedTimeout) -> None:
        self._limits = limits
        self.due_s = 0.0
        self.expired = False

    def __enter__(self) -> _Block:
        task = asyncio.current_task()
        assert task is not None, "a block runs in a task"
        self._task, self._cancelling = task, task.cancelling()
        self._limits.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limits.end(self)
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()
