"""Log-probabilities of given tokens, computed by whichever replica is free."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from headway.generator.routing.replica import Replica
from headway.records.errors import WorkerDied
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.runtime.clock import Clock

_AT_ONCE = 2  # prompts at a replica: one that computes, and the next
_PAUSE_S = 0.1  # between two looks for a replica, if no prompt ends meanwhile


class PromptCalls:
    """Sends each prompt to the live replica with the newest weights that has the fewest prompts and requests; others
    wait, at most one for each open rollout of a run, or connection of an endpoint. One whose replica dies is sent to
    another."""

    def __init__(self, replicas: Sequence[Replica], clock: Clock, require_running: Callable[[], None]) -> None:
        """``require_running`` raises when no replica will be live."""
        self._replicas, self._clock, self._require_running = replicas, clock, require_running
        self._counts = Counter[int]()  # prompts by replica
        self._waiting = deque[asyncio.Future[None]]()  # prompts without a replica, the oldest first

    async def logprobs(
        self, ids: TokenIds, top: int = 0, adapter: str = "", targets: np.ndarray | None = None
    ) -> PromptLogprobs:
        """Return the log-probabilities of ``ids`` by the newest weights, and the ``top`` likeliest tokens in each one's
        place; with ``targets`` [L, T], also of these ids there. ``adapter``: its name; "": the run's, or none. Raises
        ConfigurationError for a prompt that no engine can compute, and WorkerDied when all replicas are lost."""
        while True:
            replica = await self._acquire()
            scoring = asyncio.ensure_future(replica.prompt_logprobs(ids, top, adapter, targets))
            scoring.add_done_callback(partial(self._release, replica.index))
            try:
                return await asyncio.shield(scoring)  # the replica computes it even if the caller leaves
            except WorkerDied:
                await self._clock.sleep(_PAUSE_S)

    def _release(self, replica: int, _: object) -> None:
        self._counts[replica] -= 1
        if waiter := next((waiting for waiting in self._waiting if not waiting.done()), None):
            waiter.set_result(None)

    async def _acquire(self) -> Replica:
        while True:
            self._require_running()
            live_replicas = [
                replica
                for replica in self._replicas
                if replica.live and not (replica.draining or replica.yielded or replica.silent)
            ]
            newest_update = max((replica.update for replica in live_replicas), default=0)
            free_replicas = [
                replica
                for replica in live_replicas
                if replica.update == newest_update and self._counts[replica.index] < _AT_ONCE
            ]
            if free_replicas:
                replica = min(free_replicas, key=lambda free: (self._counts[free.index], len(free.calls)))
                self._counts[replica.index] += 1
                return replica
            self._waiting.append(waiter := asyncio.get_running_loop().create_future())
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waiter, _PAUSE_S)
            finally:
                self._waiting.remove(waiter)
