"""State that the four loops share. One event loop accesses it, so it needs no locks, only a signal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.control.accounting import Accounting
from headway.control.staleness import OpenGroup, OpenGroups
from headway.records.control import Knobs
from headway.records.environment import PartialRollout
from headway.records.errors import WorkerDied
from headway.records.plan import ExecutedMove, PlannedMove
from headway.records.rollout import FinishedGroup, Group, Rollout
from headway.runtime.clock import Clock


class Signal:
    """Wakes every waiter when the shared state changes.

    ``wait`` returns at the first ``notify`` after the caller read the state: take ``mark = signal.count`` *before*
    reading it, so that a change between the reading and the wait is not missed. A waiter with a condition (``ready``)
    is woken only when that holds.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[tuple[asyncio.Future[None], Callable[[], bool]]] = []

    def notify(self) -> None:
        self.count += 1
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter, is_ready in waiters:
                if waiter.done():  # it was cancelled
                    continue
                if is_ready():
                    waiter.set_result(None)
                else:
                    self._waiters.append((waiter, is_ready))

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
    oldest_version: int = 0  # after a resume: lower bound of its tokens' versions, like the version of its admission
    parked: int = 0  # members waiting to be resumed: they hold no slot
    # member -> its rollout as a former process parked it
    partials: dict[int, PartialRollout] = field(default_factory=dict)
    # response tokens of the members that are generated, and whether generation came to its own end
    lengths: dict[int, tuple[int, bool]] = field(default_factory=dict)
    generated: dict[int, Rollout] = field(default_factory=dict)  # members that wait for their siblings or the verifier
    runner: asyncio.Task[None] | None = None


@dataclass
class RunState:
    """Open groups, versions and the stop request. Mutated by the loops, announced through ``changed``.

    Groups enter and leave by methods, which maintain the counts: reading a count never iterates over the groups.
    """

    clock: Clock
    knobs: Knobs
    selectable: OpenGroups  # every open group, as batch selection sees it
    accounting: Accounting = field(default_factory=Accounting)
    changed: Signal = field(default_factory=Signal)
    running: dict[int, RunningGroup] = field(default_factory=dict)
    finished: dict[int, FinishedGroup] = field(default_factory=dict)  # buffered: verified, committed, not trained
    finished_at_s: dict[int, float] = field(default_factory=dict)  # oldest first
    running_rollouts: int = 0  # that hold a slot or wait for one; the concurrency limits them
    parked_groups: int = 0
    version: int = 0  # completed training steps
    published_version: int = 0  # the newest that was passed to the generator
    admitted: int = 0  # admission index of the next group
    training: bool = False  # a batch is formed and its step not completed
    draining: bool = False  # admission is closed: the run is ending
    update: asyncio.Task[None] | None = None  # the weight update under way
    checkpoint: asyncio.Task[None] | None = None  # that is written beside the steps
    checkpoint_s: float = 0.0  # the longest time from a checkpoint's begin until it was durable
    trainer_death: WorkerDied | None = None  # noticed beside the steps: it is replaced before its next call
    applying: bool = False  # a version of the weights is being applied
    untrained_groups: int = 0  # ended untrained since a group was last accepted
    # of these, groups whose attempts all got one reward: (reward, solved) -> count
    untrained_rewards: Counter[tuple[float, bool]] = field(default_factory=Counter[tuple[float, bool]])
    reported_untrained_batches: int = 0  # batches of untrained groups at the last no_progress event
    skipped_steps: int = 0  # in a row
    parkings: int = 0  # members parked since the last step
    pending_move: PlannedMove | None = None  # to be made at the next boundary of two steps
    moved: ExecutedMove | None = None  # the last one that this process tried
    interrupted: bool = False  # the user asked to stop: finish running groups, checkpoint, end
    suspending: bool = False  # an interrupted run parks what it can't finish in time: nothing resumes in this process
    suspended: bool = False  # all rollouts that can be parked are: the run ends without waiting for the others
    resume_gate: asyncio.Event = field(default_factory=asyncio.Event)  # set: parked rollouts may resume

    async def finish_update(self) -> None:
        """Wait for the update under way: its slot in shared memory must not be overwritten while it is read."""
        if self.update is not None:
            await self.update
            self.update = None

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is written beside the steps is durable, or its trainer dead."""
        if self.checkpoint is not None:
            await self.checkpoint
            self.checkpoint = None

    def take_parkings(self) -> int:
        """Return the number of members parked since the last call, and reset it."""
        parking_count, self.parkings = self.parkings, 0
        return parking_count

    @property
    def open_groups(self) -> int:
        """Running, parked and buffered: what N counts beside the groups already trained."""
        return len(self.running) + len(self.finished)

    def open_group(self, entry: RunningGroup) -> None:
        """Add a group that starts to generate."""
        index = entry.group.index
        self.running[index] = entry
        self.running_rollouts += entry.unfinished
        first_version = max(entry.group.admitted_version, entry.oldest_version)
        self.selectable.add(OpenGroup(index=index, first_version=first_version, state="running"))

    def member_done(self, entry: RunningGroup) -> None:
        """Count a member that has left the generator."""
        entry.unfinished -= 1
        self._count(entry, -1, entry.parked)

    def member_parked(self, entry: RunningGroup, change: int) -> None:
        """Count a member that gives up its slot (``change`` 1) or takes one again (-1)."""
        previous_count, entry.parked = entry.parked, entry.parked + change
        self._count(entry, -change, previous_count)

    def _count(self, entry: RunningGroup, rollouts: int, parked_before: int) -> None:
        if self.running.get(entry.group.index) is entry:  # else it was subtracted from the counts already
            self.running_rollouts += rollouts
            self.parked_groups += bool(entry.parked) - bool(parked_before)

    def finish_group(self, finished: FinishedGroup, now_s: float) -> None:
        """Record a committed group as finished, to be trained."""
        index = finished.group.index
        self._stop_running(index)
        self.finished[index], self.finished_at_s[index] = finished, now_s
        newest_version = max((rollout.last_version for rollout in finished.valid), default=finished.first_version)
        self.selectable.add(
            OpenGroup(index=index, first_version=finished.first_version, state="finished", last_version=newest_version)
        )

    def batch_group(self, index: int) -> None:
        """Exclude a finished group from selection: it is in a committed part of a batch, and only that step ends it."""
        self.selectable.remove(index)

    def close_group(self, index: int) -> RunningGroup | FinishedGroup:
        """Remove a group that has ended, and return its entry."""
        self.selectable.remove(index)
        if index in self.finished:
            del self.finished_at_s[index]
            return self.finished.pop(index)
        running_group = self._stop_running(index)
        assert running_group is not None
        return running_group

    def _stop_running(self, index: int) -> RunningGroup | None:
        running_group = self.running.pop(index, None)
        if running_group is not None:
            self.running_rollouts -= running_group.unfinished - running_group.parked
            self.parked_groups -= bool(running_group.parked)
        return running_group

    def oldest_age_s(self) -> float:
        """Seconds for which the longest-buffered group has waited for the trainer."""
        return self.clock.now() - next(iter(self.finished_at_s.values())) if self.finished_at_s else 0.0
