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
_MAX_FIRST_TEXTS = 4096


@dataclass(kw_only=True, eq=False)
class GameSimulator:
    """A game's simulator, in a thread of its own."""

    key: str  # its arguments
    executor: SingleThreadExecutor
    env: Any = None
    is_used: bool = False  # it had a game before
    is_healthy: bool = False  # no call of it is under way, and none has failed

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function of the simulator in its thread."""
        self.is_healthy = False
        returned = await self.executor.run(function)
        self.is_healthy = True
        return returned


class SimulatorPool:
    """The simulators of an environment, by their arguments.

    Lifecycle of a simulator: *running* a game, built in it by its first ``reset`` -> *idle* -> running the next one ...
    -> closed: if a call failed or hasn't returned by its game's end, if its reset shows the game before, or if it is
    the longest idle one and another is needed.

    Invariant: there are never more simulators, idle and running, than have run at once, and one more.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        """``make``: builds a simulator from its arguments."""
        self._make = make
        self._running: set[GameSimulator] = set()
        self._idle: list[GameSimulator] = []  # the longest idle first
        self._peak = 0  # most that have run at once
        self._count = 0  # of all simulators so far
        self._first_texts: dict[tuple[str, str], str] = {}  # (arguments, start) -> first observation of a new one
        self._verified: set[str] = set()  # arguments of which a used simulator began like a new one
        self._unpooled: set[str] = set()  # arguments of which one didn't
        self._closing: set[asyncio.Task[None]] = set()

    def acquire(self, arguments: Mapping[str, Any]) -> GameSimulator:
        """Return a simulator for a game with these arguments; `release` it in any case."""
        key = json.dumps(arguments, sort_keys=True, default=repr)
        simulator = next((idle for idle in reversed(self._idle) if idle.key == key), None)
        if simulator is not None:
            self._idle.remove(simulator)
        else:
            self._count += 1
            simulator = GameSimulator(key=key, executor=SingleThreadExecutor(f"gym-{self._count}"))
        self._running.add(simulator)
        self._peak = max(self._peak, len(self._running))
        while self._idle and len(self._running) + len(self._idle) > self._peak:
            self._close(self._idle.pop(0))
        return simulator

    def release(self, simulator: GameSimulator) -> None:
        """Take back a simulator whose game has ended, or was abandoned."""
        self._running.discard(simulator)
        if simulator.is_healthy and simulator.key not in self._unpooled:
            simulator.is_used = True
            self._idle.append(simulator)
        else:
            self._close(simulator)

    async def begin(
        self, simulator: GameSimulator, arguments: Mapping[str, Any], start: str, reset: Callable[[Any], str]
    ) -> str | None:
        """Begin a game by ``reset(env)``; returns the first observation, or None where a used simulator shows that its
        reset isn't new: then the game needs another one. ``start``: seed and options."""

        def build_and_reset() -> str:
            if simulator.env is None:
                simulator.env = self._make(**arguments)
            return reset(simulator.env)

        text = await simulator.run(build_and_reset)
        case = (simulator.key, start)
        if not simulator.is_used:
            self._first_texts[case] = text
            if len(self._first_texts) > _MAX_FIRST_TEXTS:
                del self._first_texts[next(iter(self._first_texts))]
            return text
        expected_text = self._first_texts.get(case)
        if text == expected_text or (expected_text is None and simulator.key in self._verified):
            self._verified.add(simulator.key)
            return text
        if expected_text is None:
            expected_text = await self._first_text_of_new(simulator.key, arguments, reset)
        if text != expected_text == await self._first_text_of_new(simulator.key, arguments, reset):
            self._unpooled.add(simulator.key)
            for idle in [idle for idle in self._idle if idle.key == simulator.key]:
                self._idle.remove(idle)
                self._close(idle)
            _log.warning(
                "a used game with the arguments %s doesn't begin like a new one (%s), since its reset() keeps something of "
                "the game before: a simulator is built for each rollout",
                simulator.key,
                start,
            )
            return None
        self._verified.add(simulator.key)
        return text

    async def stop(self) -> None:
        """Close all idle simulators."""
        while self._idle:
            self._close(self._idle.pop())
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)

    async def _first_text_of_new(self, key: str, arguments: Mapping[str, Any], reset: Callable[[Any], str]) -> str:
        """Return the first observation of a simulator that is built for that."""
        simulator = GameSimulator(key=key, executor=SingleThreadExecutor("gym-comparison"))
        try:
            simulator.env = await simulator.run(lambda: self._make(**arguments))
            return await simulator.run(lambda: reset(simulator.env))
        finally:
            self._close(simulator)

    def _close(self, simulator: GameSimulator) -> None:
        """Close a simulator in its thread, without waiting: it may hang."""
        task = asyncio.get_running_loop().create_task(simulator.executor.run(lambda: close_game(simulator.env)))
        self._closing.add(task)
        task.add_done_callback(self._on_closed)
        task.add_done_callback(lambda _: simulator.executor.end())

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a game can't be closed: %s: %s", type(error).__name__, error)


def close_game(env: Any) -> None:
    """Close a game that can be closed."""
    getattr(env, "close", lambda: None)()
