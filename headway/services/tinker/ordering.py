"""Rules of order and of once: pure, `now` is an argument.

A *stream* is the requests that one client numbers: a model's (from 0, its create), or those of one clone of a sampler
(a block of 10^9 numbers, `stream_start`). A model's run in the order of their numbers, a sampler's as they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

_CLONE_BLOCK = 1_000_000_000  # of sequence numbers: the SDK gives each copy of a sampling client one
RETAINED_S = 600.0  # a reply is kept at least this long after it was first fetched


class RequestAdmission(Enum):
    """A request's relation to those that its stream has."""

    NEW = "new"
    REPEATED = "repeated"  # the same future as the first time
    CONFLICTING = "conflicting"  # the sequence is another request's
    RELEASED = "released"  # its reply was fetched and is no longer kept


class SequenceGap(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence number that has not arrived, though later ones have."""

    sequence: int
    age_s: float  # since the first of the later ones arrived
    waiting: int  # requests behind it


class ReplyMark(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a stream that has its reply, and when that was first fetched (None: not yet)."""

    sequence: int
    fetched_s: float | None


def stream_start(sequence: int) -> int:
    """Return the first number of the sampler's stream that ``sequence`` belongs to."""
    return sequence - sequence % _CLONE_BLOCK


def admit(sequence: int, digest: bytes, logged_digest: bytes | None, released_below: int) -> RequestAdmission:
    """Decide what a request is. ``digest``: of its kind and content; ``logged_digest``: of the request that the log has
    under its number, None: none; numbers below ``released_below`` are of requests whose replies were released."""
    if logged_digest is not None:
        return RequestAdmission.REPEATED if logged_digest == digest else RequestAdmission.CONFLICTING
    return RequestAdmission.RELEASED if sequence < released_below else RequestAdmission.NEW


def releasable(replies: Iterable[ReplyMark], now_s: float) -> list[int]:
    """Return the numbers of a stream's replies that need no longer be kept: fetched `RETAINED_S` ago or earlier, and a
    later one of the stream was fetched too. ``now_s`` in the clock of the marks; one that jumped back releases none."""
    fetched = [(mark.sequence, mark.fetched_s) for mark in replies if mark.fetched_s is not None]
    newest = max((sequence for sequence, _ in fetched), default=-1)
    return [sequence for sequence, fetched_s in fetched if sequence < newest and now_s - fetched_s >= RETAINED_S]


def released_prefix(released_below: int, released: Iterable[int]) -> int:
    """Return the number below which all of a stream's replies are released, from its last value and the numbers of
    released replies that are still listed."""
    listed = set(released)
    while released_below in listed:
        released_below += 1
    return released_below


class ModelOrder:
    """The requests of a model that are committed and have no reply, in the order of their numbers.

    Every number runs once, none is skipped: a request waits until all before it have replies. Invariant:
    ``next_sequence`` is the lowest number without a reply. Example: after ``add(1)`` and ``add(3)`` of a new model
    (next 0), nothing is ready until 0 arrives; after 0 and 1 the gap is 2.
    """

    def __init__(self, next_sequence: int) -> None:
        self.next_sequence = next_sequence
        self._arrived_s: dict[int, float] = {}
        self._ended: set[int] = set()  # have their replies before their turn

    def __len__(self) -> int:
        return len(self._arrived_s)

    def add(self, sequence: int, now_s: float) -> None:
        """Add a committed request."""
        if sequence >= self.next_sequence and sequence not in self._arrived_s and sequence not in self._ended:
            self._arrived_s[sequence] = now_s

    def ready(self) -> int | None:
        """Return the number of the request whose turn it is; None if it hasn't arrived."""
        return self.next_sequence if self.next_sequence in self._arrived_s else None

    def resolve(self, sequence: int) -> None:
        """Note that a request has its reply: the one whose turn it is, or one that ended before its turn (refused when
        it came, or with its session)."""
        self._arrived_s.pop(sequence, None)
        self._ended.add(sequence)
        while self.next_sequence in self._ended:
            self._ended.remove(self.next_sequence)
            self.next_sequence += 1

    def gap(self, now_s: float) -> SequenceGap | None:
        """Return the first missing number, if requests wait for it."""
        sequence = self.next_sequence
        while sequence in self._arrived_s or sequence in self._ended:
            sequence += 1
        behind = [arrived_s for number, arrived_s in self._arrived_s.items() if number > sequence]
        if not behind:
            return None
        return SequenceGap(sequence=sequence, age_s=now_s - min(behind), waiting=len(behind))

    def behind_gap(self) -> list[int]:
        """Return the numbers that wait for one that hasn't arrived: they end with their session."""
        gap = self.gap(0.0)
        return [] if gap is None else sorted(number for number in self._arrived_s if number > gap.sequence)
