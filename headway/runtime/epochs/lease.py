"""Epochs of a run: which orchestrator may commit, decided without a clock that two machines would share.

A run has one register that all its orchestrators reach, changed by compare-and-swap alone. It names the epoch, its
holder and the number of its renewals. A holder may commit for ``orphan_s`` after the *start* of its last swap that
succeeded, by its own clock. A claimant of the next epoch watches the register for longer than that without seeing it
change, and then swaps it: any renewal in between makes that swap fail. So, if no clock runs more than ``DRIFT`` faster
than another, no two orchestrators ever commit at the same time, even if the network between them and the register
fails (the argument of leases: Gray and Cheriton, 1989).
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
    succeeds proves that no other took it, and it is held again) -> *lost* when a swap fails because another's record
    is there.
    """

    record: EpochRecord  # as its holder last wrote it
    orphan_s: float
    held_from_s: float  # the holder's clock when its last successful swap started
    lost: bool = False

    @property
    def renew_every_s(self) -> float:
        return self.orphan_s / RENEWALS_PER_LEASE

    def may_commit(self, now_s: float) -> bool:
        """Return whether no other can hold a later epoch at ``now_s``, the holder's clock."""
        return not self.lost and now_s < self.held_from_s + self.orphan_s

    def renewal(self) -> EpochRecord:
        """Return the record to swap in for the current one."""
        return replace(self.record, renewals=self.record.renewals + 1)

    def renewed(self, swapped: bool, record: EpochRecord, started_s: float) -> None:
        """Enter the outcome of a swap for ``record`` that started at ``started_s``; repeat one of unknown outcome."""
        if swapped:
            self.record, self.held_from_s = record, started_s
        else:
            self.lost = True


class EpochClaim:
    """A claim on the next epoch.

    Lifecycle: ``decide`` for each reading of the register: *wait* -> *take* (swap the record seen for ``successor``;
    when that fails, another was faster) or *refused* (the holder has renewed it: it is alive).
    """

    def __init__(self, orphan_s: float) -> None:
        """Claim the epoch of a holder with this ``orphan_s``."""
        self.wait_s = orphan_s * (1 + DRIFT)
        self._seen: tuple[EpochRecord, float] | None = None

    def decide(self, record: EpochRecord, observed_s: float) -> Literal["wait", "take", "refused"]:
        """Decide the next action from the register's value, whose reading *ended* at ``observed_s``."""
        if record.released:
            return "take"
        if self._seen is None:
            self._seen = (record, observed_s)
        if record != self._seen[0]:
            return "refused"
        return "take" if observed_s - self._seen[1] > self.wait_s else "wait"


def successor(record: EpochRecord, holder: str) -> EpochRecord:
    """Return the record by which ``holder`` takes the epoch after ``record``."""
    return EpochRecord(epoch=record.epoch + 1, holder=holder, released=False)
