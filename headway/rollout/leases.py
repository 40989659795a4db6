"""The lease book: which members wait for outside workers, who has which, and until when. Pure: no clock, no tasks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal

LeaseState = Literal["offered", "leased", "finished", "over"]
LeaseCode = Literal["lease_unknown", "lease_ended", "finished_otherwise", "session_not_recorded", "attempt_failed"]
LeaseKey = tuple[str, int]  # name of the group, member
_KEPT = 32768  # newest members without a worker's concern, whose late calls are still told what happened


class LeaseRefused(Exception):
    """A call about a lease is refused; the message says what happened to the attempt."""

    def __init__(self, code: LeaseCode, message: str) -> None:
        super().__init__(message)
        self.code: LeaseCode = code


@dataclass(frozen=True, kw_only=True)
class Lease:
    """An attempt at a member that a worker has until ``until_s`` (clock seconds)."""

    key: LeaseKey
    attempt: int
    until_s: float


@dataclass(kw_only=True)
class _Entry:
    state: LeaseState
    attempt: int  # the newest
    order: tuple[int, int]
    until_s: float = 0.0  # leased, without an open model call: it expires then
    calls: int = 0  # model calls that are open: a sign of life for as long
    said: str = ""  # what finished it
    endings: dict[int, str] = field(default_factory=dict[int, str])  # attempt -> what happened to it


class LeaseBook:
    """Leases of members by (group, member, attempt).

    Lifecycle of a member: *offered* -> *leased* -> *finished*; or its attempt is *over*: failed by its worker, expired,
    or withdrawn by the run, and the member may be *offered* again, as a later attempt.

    Invariants: an attempt is leased at most once and finished at most once; only the newest attempt of a member can be
    renewed, finished or failed; attempts of a member ascend. A call about any other attempt is refused with what
    happened to it, but for a repetition of what finished it, which is accepted again.

    Example::

        book.offer(("3", 0), order=(3, 0))   # attempt 1
        lease = book.lease(now_s=10.0)       # until 70.0 with lease_s=60
        book.finish(lease.key, 1, "reward = 1.0")
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.counts: Counter[str] = Counter()  # leased, finished, repeated, failed, expired, refused
        self._entries: dict[LeaseKey, _Entry] = {}
        self._offers: dict[LeaseKey, tuple[int, int]] = {}  # key -> order
        self._leased: set[LeaseKey] = set()
        self._ended: OrderedDict[LeaseKey, None] = OrderedDict()  # finished or over, the oldest first

    @property
    def offered(self) -> int:
        """Members that wait for a worker."""
        return len(self._offers)

    @property
    def leased(self) -> int:
        """Members that workers have."""
        return len(self._leased)

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether the member was ever offered here."""
        return key in self._entries

    def offer(self, key: LeaseKey, order: tuple[int, int], after: int = 0) -> int:
        """Offer a member's next attempt; returns its number. ``order``: the least is leased first. ``after``: the
        attempts that former processes have given. Raises ValueError for a member that is offered or leased."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(state="over", attempt=after, order=order)
        elif entry.state in ("offered", "leased"):
            raise ValueError(f"{key} is {entry.state}")
        entry.attempt = max(entry.attempt, after) + 1
        entry.state, entry.order, entry.said = "offered", order, ""
        self._ended.pop(key, None)
        self._offers[key] = order
        return entry.attempt

    def lease(self, now_s: float) -> Lease | None:
        """Lease the offered member that is first in order; None: none is offered."""
        if not self._offers:
            return None
        key = min(self._offers, key=self._offers.__getitem__)
        del self._offers[key]
        entry = self._entries[key]
        entry.state, entry.calls, entry.until_s = "leased", 0, now_s + self.lease_s
        self._leased.add(key)
        self.counts["leased"] += 1
        return Lease(key=key, attempt=entry.attempt, until_s=entry.until_s)

    def renew(self, key: LeaseKey, attempt: int, now_s: float) -> float:
        """Renew a lease; returns when it expires. Raises LeaseRefused."""
        entry = self._held(key, attempt)
        entry.until_s = now_s + self.lease_s
        return entry.until_s

    def count_call(self, key: LeaseKey, change: int, now_s: float) -> None:
        """Count a model call of a leased member that begins (1) or ends (-1): it renews the lease."""
        entry = self._entries[key]
        if entry.state == "leased":
            entry.calls = max(0, entry.calls + change)
            entry.until_s = now_s + self.lease_s

    def left_s(self, key: LeaseKey, now_s: float) -> float | None:
        """Seconds until a leased member's lease expires; None while a model call of it is open."""
        entry = self._entries[key]
        return None if entry.calls else max(0.0, entry.until_s - now_s)

    def require(self, key: LeaseKey, attempt: int, said: str) -> bool:
        """Return whether ``said`` may finish the attempt: False where just that has finished it before. Raises
        LeaseRefused."""
        entry = self._entries.get(key)
        if entry is not None and entry.state == "finished" and entry.attempt == attempt:
            if said == entry.said:
                self.counts["repeated"] += 1
                return False
            raise self._refused("finished_otherwise", f"attempt {attempt} was finished before, with {entry.said}")
        self._held(key, attempt)
        return True

    def finish(self, key: LeaseKey, attempt: int, said: str) -> None:
        """Finish a leased attempt. Raises LeaseRefused."""
        entry = self._held(key, attempt)
        self._end(key, entry, "finished", "finished", "finished")
        entry.said = said

    def restore(self, key: LeaseKey, attempt: int, said: str) -> None:
        """Note an attempt that was finished in a former process."""
        entry = _Entry(state="finished", attempt=attempt, order=(0, 0), said=said)
        self._entries[key] = entry
        self._end(key, entry, "finished", "", "finished")

    def fail(self, key: LeaseKey, attempt: int, cause: str) -> None:
        """End a leased attempt that its worker gave up. Raises LeaseRefused."""
        self._end(key, self._held(key, attempt), "over", "failed", f"failed by its worker: {cause}")

    def expire(self, key: LeaseKey, now_s: float) -> bool:
        """End a leased attempt if its time is over; returns whether it was."""
        entry = self._entries[key]
        if entry.state != "leased" or entry.calls or entry.until_s > now_s:
            return False
        self._end(key, entry, "over", "expired", f"the lease expired, {self.lease_s:g} s after the last sign of life")
        return True

    def withdraw(self, key: LeaseKey, why: str) -> None:
        """End an attempt from inside the run; no-op for one that has ended."""
        entry = self._entries[key]
        if entry.state in ("offered", "leased"):
            self._end(key, entry, "over", "withdrawn", why)

    def _end(self, key: LeaseKey, entry: _Entry, state: LeaseState, counted: str, ending: str) -> None:
        entry.state, entry.calls = state, 0
        entry.endings[entry.attempt] = ending
        self._offers.pop(key, None)
        self._leased.discard(key)
        if counted:
            self.counts[counted] += 1
        self._ended[key] = None
        while len(self._ended) > _KEPT:
            del self._entries[self._ended.popitem(last=False)[0]]

    def _held(self, key: LeaseKey, attempt: int) -> _Entry:
        """The entry of a member whose attempt ``attempt`` is leased. Raises LeaseRefused."""
        entry = self._entries.get(key)
        if entry is None or not 1 <= attempt <= entry.attempt:
            raise self._refused("lease_unknown", f"there is no lease of group {key[0]}, member {key[1]}, {attempt=}")
        if attempt < entry.attempt or entry.state not in ("offered", "leased"):
            ending = entry.endings.get(attempt, "the process of the run that gave it has ended")
            now = f"; attempt {entry.attempt} is {entry.state}" if attempt < entry.attempt else ""
            raise self._refused("lease_ended", f"attempt {attempt} has ended: {ending}{now}")
        if entry.state == "offered":
            raise self._refused("lease_unknown", f"attempt {attempt} is offered, and nobody has leased it")
        return entry

    def _refused(self, code: LeaseCode, message: str) -> LeaseRefused:
        self.counts["refused"] += 1
        return LeaseRefused(code, message)
