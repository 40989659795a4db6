"""`WorkerGroup`: the workers of a stage, called together, one by one, or with an argument sharded among them."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from itertools import pairwise
from typing import Any

from headway.flow.host import CallReport
from headway.records.errors import ConfigurationError, HeadwayError, RemoteError, WorkerDied
from headway.runtime.transport.packing import Arguments, pack
from headway.runtime.worker_slots import WorkerSlot, typed_cause


class GroupCall:
    """A call of a group under way. To ``await`` it (or `wait`) is the only barrier.

    Its result is the list of the workers' results by rank; for a call of one worker, that worker's result; for a
    sharded call, one list of all results if each worker returned a list. A call that fails while it isn't awaited ends
    the workflow.
    """

    def __init__(
        self,
        calls: Sequence[asyncio.Task[CallReport]],
        finish: Callable[[list[Any]], Any],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._calls = list(calls)
        self._waiters = 0
        self._fail = fail
        self._all = asyncio.ensure_future(self._gather(finish))
        self._all.add_done_callback(self._on_done)

    @property
    def durations(self) -> list[float]:
        """Seconds of each worker's call, by rank; nan for one that is running or has failed."""
        return [call.result().seconds if _ended(call) else float("nan") for call in self._calls]

    def done(self) -> bool:
        return self._all.done()

    async def wait(self) -> Any:
        """Wait for the results. Raises RemoteError with a worker's traceback, or WorkerDied."""
        self._waiters += 1
        try:
            return await asyncio.shield(self._all)
        finally:
            self._waiters -= 1

    def __await__(self) -> Generator[Any, None, Any]:
        return self.wait().__await__()

    def cancel(self) -> None:
        """Stop waiting; the methods still run to their end."""
        self._all.cancel()

    async def _gather(self, finish: Callable[[list[Any]], Any]) -> Any:
        try:
            return finish([report.value for report in await asyncio.gather(*self._calls)])
        finally:
            for call in self._calls:
                call.cancel()

    def _on_done(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not self._waiters:
            self._fail(error)


class WorkerGroup:
    """The workers of a stage, one for each of its devices.

    A public method of their class is called as a method of the group, in all workers at once; `on` selects one worker,
    `sharded` splits an argument. Calls of one worker run one at a time, in their order::

        scoring = judge.score(answers, scores)            # in all, with the same arguments
        total = await judge.on(0).count()                 # in one
        scores = await judge.sharded("texts").rate(texts=texts)   # in all, each with a share of ``texts``
    """

    def __init__(
        self,
        stage: str,
        kind: type[Any],
        died: Callable[[str], Awaitable[None]],
        fail: Callable[[BaseException], None],
        acknowledge: Callable[[str], None],
    ) -> None:
        """``died(name)``: waits until a worker's death has been handled. ``acknowledge(name)``: its call has ended."""
        self._acknowledge = acknowledge
        self.stage = stage
        self.slots: list[WorkerSlot] = []
        self.busy: Counter[str] = Counter()  # calls of each worker that has one
        self.ended = 0  # calls
        self.abandoned: set[str] = set()  # workers whose cancelled call still runs
        self._kind = kind
        self._died = died
        self._fail = fail
        self._ranks: tuple[int] | None = None  # rank of the worker selected by `on`
        self._shard: tuple[str, int, str | None] | None = None
        self._base = self

    def __len__(self) -> int:
        return len(self._base.slots)

    @property
    def names(self) -> list[str]:
        """Names of the workers by rank, as accepted by `Worker.send` and a channel's ``consumers``."""
        return [slot.name for slot in self._base.slots]

    def on(self, rank: int) -> WorkerGroup:
        """Return a view of the worker of this rank alone, whose results come without a list."""
        if not 0 <= rank < len(self):
            raise ConfigurationError(f"stage {self.stage}: there is no rank {rank}; it has {len(self)} worker(s)")
        view = self._view()
        view._ranks = (rank,)
        return view

    def sharded(self, argument: str, axis: int = 0, key: str | None = None) -> WorkerGroup:
        """Return a view of the group whose calls split the keyword ``argument`` in order and as evenly as possible: a
        list, or an array along ``axis``. Results that are lists are concatenated; with ``key``, an attribute or key of
        items and results, they must be in the items' order."""
        view = self._view()
        view._shard = (argument, axis, key)
        return view

    def __getattr__(self, method: str) -> Callable[..., GroupCall]:
        if method.startswith("_") or not callable(getattr(self._kind, method, None)):
            valid = ", ".join(name for name, _ in inspect.getmembers(self._kind, callable) if not name.startswith("_"))
            raise AttributeError(f"stage {self.stage}: {self._kind.__name__} has no method {method!r}; valid: {valid}")
        return lambda *positional, **named: self._start_call(method, positional, named)

    def _view(self) -> WorkerGroup:
        view = WorkerGroup(self.stage, self._kind, self._died, self._fail, self._acknowledge)
        view._ranks, view._shard, view._base = self._ranks, self._shard, self._base
        return view

    def _start_call(self, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> GroupCall:
        ranks = self._ranks if self._ranks is not None else tuple(range(len(self)))
        call_name = f"stage {self.stage}, {self._kind.__name__}.{method}"
        kwargs_by_rank = [named] * len(ranks)
        if self._shard is not None:
            argument, axis, _ = self._shard
            if argument not in named:
                raise ConfigurationError(f"{call_name}: the sharded argument {argument!r} must be given by name")
            kwargs_by_rank = [named | {argument: share} for share in _split(named[argument], axis, len(ranks))]
        calls = [
            asyncio.create_task(
                self._base._call(rank, method, positional, kwargs), name=f"{self.stage}-{rank}.{method}"
            )
            for rank, kwargs in zip(ranks, kwargs_by_rank, strict=True)
        ]

        def finish(values: list[Any]) -> Any:
            if self._shard is None:
                return values if self._ranks is None else values[0]
            return self._merge_results(call_name, method, values, [kwargs[self._shard[0]] for kwargs in kwargs_by_rank])

        return GroupCall(calls, finish, self._fail)

    async def _call(self, rank: int, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> CallReport:
        """Call one worker, and repeat the call in its successor while the stage may restart it."""
        slot = self.slots[rank]
        self.busy[slot.name] += 1
        try:
            while True:
                if (worker := slot.live) is None and (worker := await self.restarted_worker(slot)) is None:
                    continue
                try:
                    call_report = await worker.call("call", method, positional, named)
                    self._acknowledge(slot.name)
                    slot.reset_failures()
                    self.abandoned.discard(slot.name)  # calls run in their order
                    return call_report
                except RemoteError:
                    self._acknowledge(slot.name)
                    raise
                except WorkerDied:
                    await self._died(slot.name)
                except (AttributeError, TypeError, pickle.PicklingError):
                    pack(Arguments(positional, named), f"call of {slot.name}.{method}")  # says what can't be pickled
                    raise
                except asyncio.CancelledError:
                    self.abandoned.add(slot.name)
                    raise
        finally:
            self.ended += 1
            self.busy -= Counter([slot.name])

    async def restarted_worker(self, slot: WorkerSlot) -> Any:
        """Return the successor of a dead worker; None: try again. Raises WorkerDied, or the error of its start, when no
        restart is left."""
        if slot.exhausted:
            assert slot.fault is not None
            if isinstance(slot.fault, WorkerDied):
                slot.fault.add_note(f"flow.workers({self.stage!r}, ..., restarts=N) would restart it")
                raise slot.fault
            raise typed_cause(slot.fault) if isinstance(slot.fault, HeadwayError) else slot.fault
        return await slot.restart()

    def _merge_results(self, call_name: str, method: str, values: list[Any], shares: list[Any]) -> Any:
        """Merge the results of a sharded call. Raises ConfigurationError for items that are missing, or in another
        order."""
        if not all(isinstance(rank_results, list) for rank_results in values):
            return values
        assert self._shard is not None
        key = self._shard[2]
        line = f"{inspect.getsourcefile(self._kind)}:{getattr(self._kind, method).__code__.co_firstlineno}"
        for rank, (rank_results, items) in enumerate(zip(values, shares, strict=True)):
            if len(rank_results) != len(items):
                raise ConfigurationError(
                    f"{call_name} ({line}): rank {rank} returned {len(rank_results)} results for {len(items)} items"
                )
            for index, (result, item) in enumerate(zip(rank_results, items, strict=True) if key is not None else ()):
                if _key(result, key) != _key(item, key):
                    raise ConfigurationError(
                        f"{call_name} ({line}): rank {rank} returned another order of samples: result {index} has "
                        f"{key} {_key(result, key)!r}, its item {_key(item, key)!r}"
                    )
        return [result for rank_results in values for result in rank_results]


def _ended(call: asyncio.Task[CallReport]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _split(sequence: Any, axis: int, count: int) -> list[Any]:
    """Split ``sequence`` into ``count`` parts, in order, whose lengths differ by at most one."""
    length = sequence.shape[axis] if hasattr(sequence, "shape") else len(sequence)
    ends = [length * part_index // count for part_index in range(count + 1)]
    leading_slices = (slice(None),) * axis
    if hasattr(sequence, "shape"):
        return [sequence[(*leading_slices, slice(start, end))] for start, end in pairwise(ends)]
    return [sequence[start:end] for start, end in pairwise(ends)]


def _key(item: Any, key: Any) -> Any:
    return item.get(key) if isinstance(item, dict) else getattr(item, key, None)
