"""Passes of several tenants that wait at the same time, gathered to be computed together. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.records.tenants.protocols import PassOutcome, TrainingPass

ComputeTogether = Callable[[list[tuple[str, TrainingPass]]], Awaitable[Sequence[PassOutcome | Exception]]]


class SharedPasses:
    """Gathers passes while the trainer is busy.

    Example: a's pass is computed; meanwhile b, c and d ask for theirs: one call computes these three.
    """

    def __init__(self, compute: ComputeTogether, busy: asyncio.Lock) -> None:
        """``compute``: calls the worker's ``forward_backward_together``. ``busy``: held during the worker's other
        calls, and here during ``compute``."""
        self._compute, self._busy = compute, busy
        self._waiting: list[tuple[str, TrainingPass, asyncio.Future[PassOutcome]]] = []
        self._task: asyncio.Task[None] | None = None

    async def forward_backward(self, model_id: str, training_pass: TrainingPass) -> PassOutcome:
        """Compute a pass, with others that wait. A model has one at a time. Raises what the trainer raises."""
        outcome: asyncio.Future[PassOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((model_id, training_pass, outcome))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await outcome

    async def _run(self) -> None:
        """Consumes the waiting passes; waits for the trainer; ends when no pass waits."""
        while self._waiting:
            async with self._busy:
                passes, self._waiting = self._waiting, []
                try:
                    outcomes = await self._compute([(model_id, computed) for model_id, computed, _ in passes])
                except Exception as error:  # the boundary to the worker: each caller gets its failure
                    outcomes = [error] * len(passes)
            for (_, _, waiter), outcome in zip(passes, outcomes, strict=True):
                if waiter.done():  # its caller was cancelled
                    continue
                if isinstance(outcome, Exception):
                    waiter.set_exception(outcome)
                else:
                    waiter.set_result(outcome)
