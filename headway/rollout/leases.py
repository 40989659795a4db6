"""The lease book: members offered to outside workers, their leases and expiry times. It uses no clock and no tasks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal

LeaseCode = Literal["lease_unknown", "lease_ended", "finished_otherwise", "session_not_recorded", "attempt_failed"]
LeaseKey = tuple[str, int]  # name of the group, member
_MAX_ENDED = 32768  # newest ended members whose late calls still get an answer that says how they ended


class LeaseRefused(Exception):
    """Raised for a refused call about a lease; the message says what happened to the attempt."""

    def __init__(self, code: LeaseCode, message: str) -> None:
        super().__init__(message)
        self.code: LeaseCode = code


@dataclass(frozen=True)
class LeaseEnding:
    """An attempt's end. Equal endings are a worker's call and its repetition."""

    how: Literal["finished", "failed", "expired", "withdrawn"]
    reason: str


_FORMER = LeaseEnding("withdrawn", "the process of the run that gave it has ended")


@dataclass(kw_only=True)
class _Entry:
    attempt: int = 0  # the newest
    order: tuple[int, int] = (0, 0)  # of an offered one
    until_s: float = 0.0  # of a leased one
    endings: dict[int, LeaseEnding] = field(default_factory=dict[int, LeaseEnding])  # by attempt


class LeaseBook:
    """Leases of members by (group, member, attempt).

    Lifecycle of a member: *offered* -> *leased* -> *over*: its attempt was finished, failed by its worker, expired, or
    withdrawn by the run. Unless it was finished, the member may be *offered* again, as a later attempt.

    Invariants: an attempt is leased at most once and ended at most once; only the newest attempt of a member can be
    renewed, finished or failed; a member's attempt numbers ascend. A call about any other attempt is refused with its
    ending as the reason, except for a repetition of the call that ended it, which is accepted again.

    Example::

        book.offer(("3", 0), order=(3, 0))   # attempt 1
        key = book.lease(now_s=10.0)         # until 70.0 with lease_s=60
        ending = LeaseEnding("finished", "reward = 1.0")
        if book.require(key, 1, ending):
            book.end(key, ending)
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.counts: Counter[str] = Counter()  # leased, finished, repeated, failed, expired, withdrawn
        self._offered: dict[LeaseKey, _Entry] = {}
        self._leased: dict[LeaseKey, _Entry] = {}
        self._over: OrderedDict[LeaseKey, _Entry] = OrderedDict()  # the oldest first

    @property
    def offered(self) -> int:
        """The number of members that wait for a worker."""
        return len(self._offered)

    @property
    def leased(self) -> int:
        """The number of members that workers have leased."""
        return len(self._leased)

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether the book knows the member."""
        return key in self._offered or key in self._leased or key in self._over

    def offer(self, key: LeaseKey, order: tuple[int, int]) -> int:
        """Offer a member's next attempt; returns its number. ``order``: the smallest is leased first. Raises ValueError
        for a member that is offered or leased."""
        if key in self._offered or key in self._leased:
            raise ValueError(f"{key} is {self._state(key)}")
        entry = self._offered[key] = self._over.pop(key, None) or _Entry()
        entry.attempt, entry.order = entry.attempt + 1, order
        return entry.attempt

    def lease(self, now_s: float) -> LeaseKey | None:
        """Lease the offered member that is first in order; returns None where none is offered."""
        if not self._offered:
            return None
        key = min(self._offered, key=lambda candidate: self._offered[candidate].order)
        self._leased[key] = self._offered.pop(key)
        self.counts["leased"] += 1
        self.renew(key, self._leased[key].attempt, now_s)
        return key

    def renew(self, key: LeaseKey, attempt: int, now_s: float) -> None:
        """Renew a lease. Raises LeaseRefused."""
        self.require(key, attempt)
        self._leased[key].until_s = now_s + self.lease_s

    def left_s(self, key: LeaseKey, now_s: float) -> float | None:
        """Return the seconds until a member's lease expires; None where it isn't leased."""
        entry = self._leased.get(key)
        return None if entry is None else max(0.0, entry.until_s - now_s)

    def require(self, key: LeaseKey, attempt: int, ending: LeaseEnding | None = None) -> bool:
        """Return whether an attempt is leased, so that ``ending`` may end it; False where this ending has already ended
        it. Raises LeaseRefused."""
        entry = self._leased.get(key) or self._offered.get(key) or self._over.get(key)
        newest_attempt = 0 if entry is None else entry.attempt
        if entry is None or not 1 <= attempt <= newest_attempt or (attempt == newest_attempt and key in self._offered):
            raise LeaseRefused("lease_unknown", f"there is no lease of group {key[0]}, member {key[1]}, {attempt=}")
        if attempt == newest_attempt and key in self._leased:
            return True
        previous = entry.endings.get(attempt, _FORMER)
        if previous == ending:
            self.counts["repeated"] += 1
            return False
        if ending is not None and ending.how == previous.how == "finished":
            raise LeaseRefused("finished_otherwise", f"attempt {attempt} was finished before, with {previous.reason}")
        later_text = f"; attempt {newest_attempt} is {self._state(key)}" if attempt < newest_attempt else ""
        raise LeaseRefused("lease_ended", f"attempt {attempt} has ended: {previous.how}, {previous.reason}{later_text}")

    def end(self, key: LeaseKey, ending: LeaseEnding) -> None:
        """End the newest attempt of a member; a no-op where it has ended already."""
        entry = self._offered.pop(key, None) or self._leased.pop(key, None)
        if entry is not None:
            entry.endings[entry.attempt] = ending
            self.counts[ending.how] += 1
            self._put_over(key, entry)

    def expire(self, key: LeaseKey, now_s: float) -> bool:
        """End a leased attempt whose time is over; returns whether it was."""
        is_over = self.left_s(key, now_s) == 0
        if is_over:
            self.end(key, LeaseEnding("expired", f"{self.lease_s:g} s after the last heartbeat of its worker"))
        return is_over

    def restore(self, key: LeaseKey, attempt: int, ending: LeaseEnding = _FORMER) -> None:
        """Record a member's newest attempt of a former process; a no-op for a known member."""
        if key not in self:
            self._put_over(key, _Entry(attempt=attempt, endings={attempt: ending}))

    def _put_over(self, key: LeaseKey, entry: _Entry) -> None:
        self._over[key] = entry
        while len(self._over) > _MAX_ENDED:
            self._over.popitem(last=False)

    def _state(self, key: LeaseKey) -> str:
        return "offered" if key in self._offered else "leased" if key in self._leased else "over"
