"""The lease book: which members wait for outside workers, who has which, and until when. Pure: no clock, no tasks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal

LeaseCode = Literal["lease_unknown", "lease_ended", "finished_otherwise", "session_not_recorded", "attempt_failed"]
LeaseKey = tuple[str, int]  # name of the group, member
_KEPT = 32768  # newest members without a worker's concern, whose late calls are still told what happened


class LeaseRefused(Exception):
    """A call about a lease is refused; the message says what happened to the attempt."""

    def __init__(self, code: LeaseCode, message: str) -> None:
        super().__init__(message)
        self.code: LeaseCode = code


@dataclass(frozen=True)
class LeaseEnding:
    """An attempt's end. Two that are equal are one call of a worker's and its repetition."""

    how: Literal["finished", "failed", "expired", "withdrawn"]
    what: str


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
    withdrawn by the run; but for the first the member may be *offered* again, as a later attempt.

    Invariants: an attempt is leased at most once and ended at most once; only the newest attempt of a member can be
    renewed, finished or failed; attempts of a member ascend. A call about any other attempt is refused with what
    happened to it, but for a repetition of what ended it, which is accepted again.

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
        """Members that wait for a worker."""
        return len(self._offered)

    @property
    def leased(self) -> int:
        """Members that workers have."""
        return len(self._leased)

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether the book knows the member."""
        return key in self._offered or key in self._leased or key in self._over

    def offer(self, key: LeaseKey, order: tuple[int, int]) -> int:
        """Offer a member's next attempt; returns its number. ``order``: the least is leased first. Raises ValueError
        for a member that is offered or leased."""
        if key in self._offered or key in self._leased:
            raise ValueError(f"{key} is {self._state(key)}")
        entry = self._offered[key] = self._over.pop(key, None) or _Entry()
        entry.attempt, entry.order = entry.attempt + 1, order
        return entry.attempt

    def lease(self, now_s: float) -> LeaseKey | None:
        """Lease the offered member that is first in order; None: none is offered."""
        if not self._offered:
            return None
        key = min(self._offered, key=lambda one: self._offered[one].order)
        self._leased[key] = self._offered.pop(key)
        self.counts["leased"] += 1
        self.renew(key, self._leased[key].attempt, now_s)
        return key

    def renew(self, key: LeaseKey, attempt: int, now_s: float) -> None:
        """Renew a lease. Raises LeaseRefused."""
        self.require(key, attempt)
        self._leased[key].until_s = now_s + self.lease_s

    def left_s(self, key: LeaseKey, now_s: float) -> float | None:
        """Seconds until a member's lease expires; None: it isn't leased."""
        entry = self._leased.get(key)
        return None if entry is None else max(0.0, entry.until_s - now_s)

    def require(self, key: LeaseKey, attempt: int, ending: LeaseEnding | None = None) -> bool:
        """Return whether an attempt is leased, so that ``ending`` may end it: False where just that has ended it
        before. Raises LeaseRefused."""
        entry = self._leased.get(key) or self._offered.get(key) or self._over.get(key)
        newest = 0 if entry is None else entry.attempt
        if entry is None or not 1 <= attempt <= newest or (attempt == newest and key in self._offered):
            raise LeaseRefused("lease_unknown", f"there is no lease of group {key[0]}, member {key[1]}, {attempt=}")
        if attempt == newest and key in self._leased:
            return True
        before = entry.endings.get(attempt, _FORMER)
        if before == ending:
            self.counts["repeated"] += 1
            return False
        if ending is not None and ending.how == before.how == "finished":
            raise LeaseRefused("finished_otherwise", f"attempt {attempt} was finished before, with {before.what}")
        now = f"; attempt {newest} is {self._state(key)}" if attempt < newest else ""
        raise LeaseRefused("lease_ended", f"attempt {attempt} has ended: {before.how}, {before.what}{now}")

    def end(self, key: LeaseKey, ending: LeaseEnding) -> None:
        """End the newest attempt of a member; no-op for one that has ended."""
        entry = self._offered.pop(key, None) or self._leased.pop(key, None)
        if entry is not None:
            entry.endings[entry.attempt] = ending
            self.counts[ending.how] += 1
            self._put_over(key, entry)

    def expire(self, key: LeaseKey, now_s: float) -> bool:
        """End a leased attempt if its time is over; returns whether it was."""
        over = self.left_s(key, now_s) == 0
        if over:
            self.end(key, LeaseEnding("expired", f"{self.lease_s:g} s after the last sign of life of its worker"))
        return over

    def restore(self, key: LeaseKey, attempt: int, ending: LeaseEnding = _FORMER) -> None:
        """Note a member's newest attempt in a former process; no-op for a member that is known."""
        if key not in self:
            self._put_over(key, _Entry(attempt=attempt, endings={attempt: ending}))

    def _put_over(self, key: LeaseKey, entry: _Entry) -> None:
        self._over[key] = entry
        while len(self._over) > _KEPT:
            self._over.popitem(last=False)

    def _state(self, key: LeaseKey) -> str:
        return "offered" if key in self._offered else "leased" if key in self._leased else "over"
