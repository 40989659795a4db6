"""A pool of games' simulators: one whose game has ended is reset for the next rollout, instead of being built again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.rollout.single_thread_executor import SingleThreadExecutor

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CLOSE_S = 5.0  # time for simulators to close when the pool does; those that hang are abandoned


@dataclass(kw_only=True, eq=False)
class GameSimulator:
    """A game's simulator, in a thread of its own."""

    arguments: Mapping[str, Any]
    executor: SingleThreadExecutor
    env: Any = None
    is_used: bool = False  # it had a game before
    is_healthy: bool = False  # no call of it is under way, and the last one hasn't failed

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function in the simulator's thread."""
        self.is_healthy = False
        returned = await self.executor.run(function)
        self.is_healthy = True
        return returned


class SimulatorPool:
    """The simulators of an environment, by their arguments.

    Lifecycle of a simulator: *running* a game -> *idle* -> running the next one ... -> closed: if a call has failed or
    not returned by its game's end, if resets don't forget the game before, or as the longest idle one of too many.

    Invariant: no more simulators are running and idle than have run at once; two more are built once, to compare the
    first used one with them.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        """``make``: builds a simulator from its arguments."""
        self._make = make
        self._running = self._peak = 0  # and the most that have run at once
        self._idle: list[GameSimulator] = []  # the longest idle first
        self._is_stale: bool | None = None  # used simulators begin otherwise than new ones; None: not known yet
        self._comparing = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    def acquire(self, arguments: Mapping[str, Any]) -> GameSimulator:
        """Return a simulator for a game with these arguments; `release` it in any case."""
        simulator = next((idle for idle in reversed(self._idle) if idle.arguments == arguments), None)
        if simulator is None:
            simulator = GameSimulator(arguments=arguments, executor=SingleThreadExecutor("gym"))
        else:
            self._idle.remove(simulator)
        self._running += 1
        self._peak = max(self._peak, self._running)
        while self._running + len(self._idle) > self._peak:
            self._close(self._idle.pop(0))
        return simulator

    def release(self, simulator: GameSimulator) -> None:
        """Take back a simulator whose game has ended, or was abandoned."""
        self._running -= 1
        if simulator.is_healthy and not self._is_stale:
            simulator.is_used = True
            self._idle.append(simulator)
        else:
            self._close(simulator)

    async def begin(self, simulator: GameSimulator, reset: Callable[[Any], str]) -> str | None:
        """Begin a game by ``reset(env)``, and return the first observation; None: used simulators don't begin like new
        ones, and another must be acquired."""
        text = await self._first_text(simulator, reset)
        if not simulator.is_used:
            return text
        async with self._comparing:
            if self._is_stale is None:
                self._is_stale = await self._begins_otherwise(text, simulator.arguments, reset)
        return None if self._is_stale else text

    async def stop(self) -> None:
        """Close all idle simulators."""
        self._close_idle()
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)

    def _close_idle(self) -> None:
        while self._idle:
            self._close(self._idle.pop())

    async def _first_text(self, simulator: GameSimulator, reset: Callable[[Any], str]) -> str:
        def build_and_reset() -> str:
            if simulator.env is None:
                simulator.env = self._make(**simulator.arguments)
            return reset(simulator.env)

        return await simulator.run(build_and_reset)

    async def _begins_otherwise(self, text: str, arguments: Mapping[str, Any], reset: Callable[[Any], str]) -> bool:
        """Whether the ``text`` of a used simulator isn't that of a new one, while two new ones have the same."""
        new_texts: list[str] = []
        for _ in range(2):
            simulator = GameSimulator(arguments=arguments, executor=SingleThreadExecutor("gym"))
            try:
                new_texts.append(await self._first_text(simulator, reset))
            finally:
                self._close(simulator)
            if new_texts[-1] == text or new_texts[-1] != new_texts[0]:
                return False
        self._close_idle()
        _log.warning(
            "a used game doesn't begin like a new one (%s): its reset() forgets less than all, so a simulator is built "
            "for each rollout",
            json.dumps(arguments, default=repr),
        )
        return True

    def _close(self, simulator: GameSimulator) -> None:
        """Close a simulator in its thread, without waiting: it may hang."""
        task = asyncio.get_running_loop().create_task(simulator.executor.run(close_game, simulator.env))
        self._closing.add(task)
        task.add_done_callback(lambda _: simulator.executor.end())
        task.add_done_callback(self._closing.discard)  # asyncio logs an error of a game that can't be closed


def close_game(env: Any) -> None:
    """Close a game that can be closed."""
    getattr(env, "close", lambda: None)()
