"""What the four loops share. One event loop touches it, so it needs no locks: only a signal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headway.control.books import Books
from headway.control.staleness import OpenGroup
from headway.records.control import Knobs
from headway.records.environment import PartialRollout
from headway.records.rollout import FinishedGroup, Group
from headway.runtime.clock import Clock


class Signal:
    """Wakes every waiter when the shared state changes.

    ``wait`` returns at the first ``notify`` after the caller last looked: take ``mark = signal.count``
    *before* looking, so that a change between the look and the wait is not missed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, mark: int) -> None:
        while self.count == mark:
            await self._event.wait()


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
    runner: asyncio.Task[None] | None = None


@dataclass
class RunState:
    """Open groups, versions and the stop request. Mutated by the loops, announced through ``changed``."""

    clock: Clock
    groups_per_step: int
    knobs: Knobs
    books: Books = field(default_factory=Books)
    changed: Signal = field(default_factory=Signal)
    running: dict[int, RunningGroup] = field(default_factory=dict)
    finished: dict[int, FinishedGroup] = field(default_factory=dict)  # buffered: verified, committed, not trained
    # clock when this process opened a group, or reopened it: a former process's clock says nothing here
    opened_s: dict[int, float] = field(default_factory=dict)
    finished_at_s: dict[int, float] = field(default_factory=dict)
    version: int = 0  # completed training steps
    published_version: int = 0  # the newest that the generator was pointed at
    admitted: int = 0  # admission index of the next group
    training: bool = False  # a batch is formed and its step not completed
    draining: bool = False  # admission is closed: the run is ending
    update: asyncio.Task[None] | None = None  # the weight update under way
    applying: bool = False  # a version of the weights is being applied
    fruitless_groups: int = 0  # that ended untrained since a group was last accepted
    skipped_steps: int = 0  # in a row
    parkings: int = 0  # members parked since the last step
    interrupted: bool = False  # the user asked to stop: finish what runs, checkpoint, leave
    resume_gate: asyncio.Event = field(default_factory=asyncio.Event)  # open: parked rollouts may go on
    _finished_candidates: dict[int, OpenGroup] = field(default_factory=dict)

    async def finish_update(self) -> None:
        """Wait for the update under way: its slot in shared memory must not be overwritten while it is read."""
        if self.update is not None:
            await self.update
            self.update = None

    def take_parkings(self) -> int:
        """Members parked since this was last asked."""
        taken, self.parkings = self.parkings, 0
        return taken

    @property
    def open_groups(self) -> int:
        """Running, parked and buffered: what N counts beside the groups already trained."""
        return len(self.running) + len(self.finished)

    @property
    def running_rollouts(self) -> int:
        """That hold a slot or wait for one: what concurrency counts."""
        return sum(entry.unfinished - entry.parked for entry in self.running.values())

    @property
    def parked_groups(self) -> int:
        return sum(1 for entry in self.running.values() if entry.parked)

    def candidates(self) -> list[OpenGroup]:
        """Every open group, as batch selection sees it."""
        running = [
            OpenGroup(
                index=index,
                first_version=max(entry.group.admitted_version, entry.oldest_version),
                state="parked" if entry.parked else "running",
            )
            for index, entry in self.running.items()
        ]
        known = self._finished_candidates  # a finished group doesn't change any more
        self._finished_candidates = {i: known.get(i) or _candidate(entry) for i, entry in self.finished.items()}
        return [*running, *self._finished_candidates.values()]

    def oldest_age_s(self) -> float:
        """Seconds the longest-buffered group has waited for the trainer."""
        return self.clock.now() - min(self.finished_at_s.values()) if self.finished_at_s else 0.0


def _candidate(entry: FinishedGroup) -> OpenGroup:
    return OpenGroup(
        index=entry.group.index,
        first_version=entry.first_version,
        state="finished",
        last_version=max((r.last_version for r in entry.valid), default=entry.first_version),
    )
