"""Log-probabilities of given tokens, computed by whichever replica is free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headway.generator.routing.replica import Replica
from headway.records.errors import WorkerDied
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds
from headway.runtime.clock import Clock

_AT_ONCE = 2  # prompts at a replica: one that computes, and the next
_PAUSE_S = 0.1  # between two looks for a replica


class PromptCalls:
    """Sends each prompt to the live replica with the newest weights that has the fewest prompts and requests; others
    wait. One whose replica dies is sent to another."""

    def __init__(self, replicas: Sequence[Replica], clock: Clock, require_running: Callable[[], None]) -> None:
        """``require_running`` raises when no replica will be live."""
        self._replicas, self._clock, self._require_running = replicas, clock, require_running
        self._counts = Counter[int]()  # prompts by replica

    async def logprobs(self, ids: TokenIds, top: int = 0, adapter: str = "") -> PromptLogprobs:
        """Return the log-probabilities of ``ids`` by the newest weights, and the ``top`` likeliest tokens in each one's
        place. ``adapter``: its name; "": the run's, or none. Raises ConfigurationError for a prompt that no engine
        can compute, and WorkerDied when all replicas are lost."""
        while True:
            replica = await self._acquire()
            try:
                return await replica.prompt_logprobs(ids, top, adapter)
            except WorkerDied:
                await self._clock.sleep(_PAUSE_S)
            finally:
                self._counts[replica.index] -= 1

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
            await self._clock.sleep(_PAUSE_S)
