"""State that the four loops share. One event loop accesses it, so it needs no locks, only a signal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.control.books import Books
from headway.control.staleness import OpenGroup, OpenGroups
from headway.records.control import Knobs
from headway.records.environment import PartialRollout
from headway.records.plan import ExecutedMove, PlannedMove
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.runtime.clock import Clock


class Signal:
    """Wakes every waiter when the shared state changes.

    ``wait`` returns at the first ``notify`` after the caller last looked: take ``mark = signal.count``
    *before* looking, so that a change between the look and the wait is not missed. A waiter that says when it has
    something to do (``ready``) is left alone until then.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []

    def notify(self) -> None:
        self.count += 1
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter, ready in waiters:
                if waiter.done():  # it was cancelled
                    continue
                if ready():
                    waiter.set_result(None)
                else:
                    self._waiters.append((waiter, ready))

    async def wait(self, mark: int, ready: Callable[[], bool] = lambda: True) -> None:
        if self.count == mark or not ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((waiter, ready))
            await waiter


@dataclass
class RunningGroup:
    """An open group whose members are still generating, verifying or parked."""

    group: Group
    unfinished: int  # members still generating or parked
    oldest_version: int = 0  # reopened by a resume: no token of it is older, as none is older than its admission
    parked: int = 0  # members waiting to be resumed: they hold no slot
    partials: dict[int, PartialRollout] = field(
        default_factory=dict
    )  # what its members had when a former process parked them
    # response tokens of the members that are generated, and whether generation came to its own end
    lengths: dict[int, tuple[int, bool]] = field(default_factory=dict)
    generated: dict[int, Rollout] = field(default_factory=dict)  # members that wait for their siblings or the verifier
    runner: asyncio.Task[None] | None = None


@dataclass
class RunState:
    """Open groups, versions and the stop request. Mutated by the loops, announced through ``changed``.

    Groups enter and leave by methods, which keep the counts: reading one never costs a look at all groups.
    """

    clock: Clock
    knobs: Knobs
    selectable: OpenGroups  # every open group, as batch selection sees it
    books: Books = field(default_factory=Books)
    changed: Signal = field(default_factory=Signal)
    running: dict[int, RunningGroup] = field(default_factory=dict)
    finished: dict[int, FinishedGroup] = field(default_factory=dict)  # buffered: verified, committed, not trained
    finished_at_s: dict[int, float] = field(default_factory=dict)  # oldest first
    running_rollouts: int = 0  # that hold a slot or wait for one: what concurrency counts
    parked_groups: int = 0
    version: int = 0  # completed training steps
    published_version: int = 0  # the newest that the generator was pointed at
    admitted: int = 0  # admission index of the next group
    training: bool = False  # a batch is formed and its step not completed
    draining: bool = False  # admission is closed: the run is ending
    update: asyncio.Task[None] | None = None  # the weight update under way
    applying: bool = False  # a version of the weights is being applied
    fruitless_groups: int = 0  # that ended untrained since a group was last accepted
    fruitless_rewards: Counter[tuple[float, bool]] = field(default_factory=Counter[tuple[float, bool]])  # ... the same
    # reward for all attempts, and whether it is solved
    fruitless_batches_said: int = 0  # the most batches of them that a no_progress event has named
    skipped_steps: int = 0  # in a row
    parkings: int = 0  # members parked since the last step
    wanted_move: PlannedMove | None = None  # to be made at the next boundary of two steps
    moved: ExecutedMove | None = None  # the last one that this process tried
    interrupted: bool = False  # the user asked to stop: finish what runs, checkpoint, leave
    leaving: bool = False  # an interrupted run parks what it can't finish in time: nothing resumes in this process
    left: bool = False  # all that can be parked is: the run ends without waiting for what still runs
    resume_gate: asyncio.Event = field(default_factory=asyncio.Event)  # open: parked rollouts may go on

    async def finish_update(self) -> None:
        """Wait for the update under way: its slot in shared memory must not be overwritten while it is read."""
        if self.update is not None:
            await self.update
            self.update = None

    def take_parkings(self) -> int:
        """Return the number of members parked since the last call, and reset it."""
        taken, self.parkings = self.parkings, 0
        return taken

    @property
    def open_groups(self) -> int:
        """Running, parked and buffered: what N counts beside the groups already trained."""
        return len(self.running) + len(self.finished)

    def open_group(self, entry: RunningGroup) -> None:
        """Add a group that starts to generate."""
        index = entry.group.index
        self.running[index] = entry
        self.running_rollouts += entry.unfinished
        first = max(entry.group.admitted_version, entry.oldest_version)
        self.selectable.add(OpenGroup(index=index, first_version=first, state="running"))

    def member_done(self, entry: RunningGroup) -> None:
        """Count a member that has left the generator."""
        entry.unfinished -= 1
        self._count(entry, -1, entry.parked)

    def member_parked(self, entry: RunningGroup, change: int) -> None:
        """Count a member that gives up its slot (``change`` 1) or takes one again (-1)."""
        before, entry.parked = entry.parked, entry.parked + change
        self._count(entry, -change, before)

    def _count(self, entry: RunningGroup, rollouts: int, parked_before: int) -> None:
        if self.running.get(entry.group.index) is entry:  # else it has left the counts already
            self.running_rollouts += rollouts
            self.parked_groups += bool(entry.parked) - bool(parked_before)

    def finish_group(self, finished: FinishedGroup, now_s: float) -> None:
        """Record a committed group as finished, to be trained."""
        index = finished.group.index
        self._stop_running(index)
        self.finished[index], self.finished_at_s[index] = finished, now_s
        newest = max((r.last_version for r in finished.valid), default=finished.first_version)
        self.selectable.add(
            OpenGroup(index=index, first_version=finished.first_version, state="finished", last_version=newest)
        )

    def batch_group(self, index: int) -> None:
        """Note that a finished group is in a committed part of a batch: nothing but its step ends it any more."""
        self.selectable.remove(index)

    def close_group(self, index: int) -> RunningGroup | FinishedGroup:
        """Remove a group that has ended, and return its entry."""
        self.selectable.remove(index)
        if index in self.finished:
            del self.finished_at_s[index]
            return self.finished.pop(index)
        entry = self._stop_running(index)
        assert entry is not None
        return entry

    def _stop_running(self, index: int) -> RunningGroup | None:
        entry = self.running.pop(index, None)
        if entry is not None:
            self.running_rollouts -= entry.unfinished - entry.parked
            self.parked_groups -= bool(entry.parked)
        return entry

    def oldest_age_s(self) -> float:
        """Seconds the longest-buffered group has waited for the trainer."""
        return self.clock.now() - next(iter(self.finished_at_s.values())) if self.finished_at_s else 0.0
