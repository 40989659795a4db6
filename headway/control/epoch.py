"""Epochs of a run: which orchestrator may commit, decided without a clock that two machines would share.

A run has one register that all its orchestrators reach, changed by compare-and-swap alone. It names the epoch, its
holder and the number of its renewals. A holder may commit for ``orphan_s`` after the *start* of its last swap that
succeeded, by its own clock. A claimant of the next epoch watches the register for longer than that without seeing it
change, and swaps it then: any renewal in between makes that swap fail. So, if no clock runs more than ``DRIFT`` faster
than another, no two orchestrators ever commit at the same time, whatever becomes of the network between them and the
register (the argument of leases: Gray and Cheriton, 1989).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DRIFT = 0.1  # ratio by which two machines' clocks may differ in rate
RENEWALS_PER_LEASE = 5  # attempts before a lease expires


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """The register's value. Example: ``EpochRecord(epoch=2, renewals=31, holder="8f0c")``."""

    epoch: int = 0  # 0: none was ever taken
    renewals: int = 0  # by its holder
    holder: str = ""  # of the epoch, unique for each process
    released: bool = True  # its holder has ended it: the next may be taken at once


@dataclass
class EpochLease:
    """A held epoch.

    Lifecycle: *held* -> *expired* when ``orphan_s`` has passed since the last renewal started (a later renewal that
    succeeds proves that nobody took it, and it is held again) -> *lost* when a swap fails for another's record.
    """

    record: EpochRecord  # as its holder last wrote it
    orphan_s: float
    held_from_s: float  # the holder's clock when its last successful swap started
    lost: bool = False

    @property
    def renew_every_s(self) -> float:
        return self.orphan_s / RENEWALS_PER_LEASE

    def may_commit(self, now_s: float) -> bool:
        """Whether nobody else can hold a later epoch at ``now_s``, the holder's clock."""
        return not self.lost and now_s < self.held_from_s + self.orphan_s

    def renewal(self) -> EpochRecord:
        """The record to swap in for the present one."""
        return replace(self.record, renewals=self.record.renewals + 1)

    def renewed(self, swapped: bool, record: EpochRecord, started_s: float) -> None:
        """Enter the outcome of a swap for ``record`` that started at ``started_s``; one without is to be repeated."""
        if swapped:
            self.record, self.held_from_s = record, started_s
        else:
            self.lost = True


class EpochClaim:
    """A wish for the next epoch.

    Lifecycle: ``decide`` for each look at the register: *wait* -> *take* (swap the record seen for ``successor``; when
    that fails, another was faster) or *refused* (the holder has renewed it: it lives).
    """

    def __init__(self, orphan_s: float) -> None:
        """``orphan_s``: of the holder."""
        self.wait_s = orphan_s * (1 + DRIFT)
        self._seen: tuple[EpochRecord, float] | None = None

    def decide(self, record: EpochRecord, looked_s: float) -> Literal["wait", "take", "refused"]:
        """The next act, given the register's value as a look found it that *ended* at ``looked_s``."""
        if record.released:
            return "take"
        if self._seen is None:
            self._seen = (record, looked_s)
        if record != self._seen[0]:
            return "refused"
        return "take" if looked_s - self._seen[1] > self.wait_s else "wait"


def successor(record: EpochRecord, holder: str) -> EpochRecord:
    """The record by which ``holder`` takes the epoch after ``record``."""
    return EpochRecord(epoch=record.epoch + 1, holder=holder, released=False)
