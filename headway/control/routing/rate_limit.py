"""Limits the rate of external callers by token buckets, a bound on open requests and a bounded queue."""

from __future__ import annotations

import heapq
import math
from typing import Literal

import msgspec

from headway.config.router import RouterConfig

LONGEST_RETRY_S = 60  # the longest retry-after that a refused caller gets
_RATE_S = 30.0  # time constant of the measured throughput
_ROUNDING_S = 1e-6  # rounding error of summed times


class RateLimited(msgspec.Struct, frozen=True, kw_only=True):
    """The refusal of a request, with its reason."""

    reason: str
    retry_after_s: int  # 1 .. LONGEST_RETRY_S: when the request will likely be admitted


Decision = Literal["admitted", "waiting"] | RateLimited


class TokenBucket:
    """A token bucket of capacity ``rate_per_s`` x ``burst_s`` that refills at ``rate_per_s``.

    A cost above the capacity is taken from a full bucket, which is then in debt; so over any time t at most
    rate x t + capacity + one such cost is taken.
    """

    def __init__(self, rate_per_s: float, burst_s: float, now: float) -> None:
        self._rate = rate_per_s
        self._size = rate_per_s * burst_s
        self._level = self._size
        self._at_s = now

    def level(self, now: float) -> float:
        """Return the bucket's level at ``now``; below 0: debt."""
        return min(self._size, self._level + self._rate * max(0.0, now - self._at_s))

    def wait_s(self, cost: float, now: float) -> float:
        """Return the seconds until ``cost`` can be taken; 0: now."""
        return self.refill_s(min(cost, self._size), now)

    def refill_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has refilled ``amount``, which may exceed the capacity."""
        return max(0.0, amount - self.level(now)) / self._rate

    def take(self, cost: float, now: float) -> None:
        """Take ``cost`` out, which the caller may do once ``wait_s`` is 0."""
        self._level, self._at_s = self.level(now) - cost, now

    def give_back(self, cost: float, now: float) -> None:
        """Return the unused part of a cost."""
        self._level, self._at_s = min(self._size, self.level(now) + cost), now


class _Waiting(msgspec.Struct, kw_only=True, gc=False):
    name: str
    serial: int
    tokens: int
    since_s: float


class RateLimit:
    """Admits, queues or refuses requests.

    Lifecycle of a request: *admitted* at once, or *waiting*, oldest first, and then admitted or refused; an admitted
    one is open until it is *finished*. A request waits while the buckets of requests/s and tokens/s can't cover its
    cost, while its tokens and those of the open ones exceed ``open_limit_tokens`` (a request that is alone may), or
    while one ahead of it waits: lower priorities first, then by arrival; a large request is never overtaken because of
    its size. Invariant: at most ``queue_requests`` wait, none for longer than ``queue_s``; the tokens of the open ones
    add up to ``open_tokens``.

    Usage: ``offer`` each request; call ``decide`` whenever something changed or ``next_event_s`` has come.
    """

    def __init__(self, settings: RouterConfig, now: float) -> None:
        self._settings = settings
        rate_by_kind = {"requests": settings.requests_per_s, "tokens": settings.tokens_per_s}
        self._buckets = {kind: TokenBucket(rate, settings.burst_s, now) for kind, rate in rate_by_kind.items() if rate}
        self._open: dict[str, int] = {}  # name -> tokens
        self._order: list[tuple[int, int, str]] = []  # (priority, serial, name) of requests that wait or have left
        self._waiting: dict[str, _Waiting] = {}  # in the order they came
        self._serial = 0
        self._began_s = self._done_s = now
        self._done_rate = 0.0  # tokens/s, exponentially smoothed from 0 at the start
        self.open_limit_tokens: float | None = None
        self.open_tokens = 0
        self.waiting_tokens = 0
        self.peak_waiting = 0
        self.refusals = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def oldest_age_s(self, now: float) -> float:
        """Return the seconds that the earliest waiting request has waited; 0.0 when none waits."""
        first_request = next(iter(self._waiting.values()), None)
        return 0.0 if first_request is None else now - first_request.since_s

    def offer(self, name: str, tokens: int, priority: int, now: float) -> Decision:
        """Admit, queue or refuse a request that may use ``tokens`` tokens, prompt and response.

        Raises ValueError for a name that is open or waiting already."""
        if name in self._open or name in self._waiting:
            raise ValueError(f"request {name!r} is already queued")
        if not self._waiting and self._may_go(tokens, now):
            self._admit(name, tokens, now)
            return "admitted"
        if len(self._waiting) >= self._settings.queue_requests:
            full_reason = f"{len(self._waiting)} requests wait already"
            closed_reason = "the router has no capacity left, and no request may wait (router.queue_requests = 0)"
            return self._refused(full_reason if self._waiting else closed_reason, tokens, now)
        heapq.heappush(self._order, (priority, self._serial, name))
        self._waiting[name] = _Waiting(name=name, serial=self._serial, tokens=tokens, since_s=now)
        self._serial += 1
        self.waiting_tokens += tokens
        self.peak_waiting = max(self.peak_waiting, len(self._waiting))
        return "waiting"

    def decide(self, now: float) -> list[tuple[str, RateLimited | None]]:
        """Decide waiting requests; return (name, refusal) of those decided now, in order, None if admitted."""
        decisions: list[tuple[str, RateLimited | None]] = []
        limit_s = self._settings.queue_s
        for request in [request for request in self._waiting.values() if now >= request.since_s + limit_s]:
            self._leave(request.name)
            decisions.append((request.name, self._refused(f"no capacity within {limit_s:g} s", request.tokens, now)))
        while (name := self._first()) is not None and self._may_go(self._waiting[name].tokens, now):
            tokens = self._waiting[name].tokens
            self._leave(name)
            self._admit(name, tokens, now)
            decisions.append((name, None))
        return decisions

    def withdraw(self, name: str) -> None:
        """Remove a waiting request that its caller has cancelled. Unknown names: no-op."""
        if name in self._waiting:
            self._leave(name)

    def finish(self, name: str, used_tokens: int, now: float) -> None:
        """Close an open request and return its unused tokens to the bucket. Raises KeyError for an unknown one."""
        tokens = self._open.pop(name)
        self.open_tokens -= tokens
        charged_tokens = min(tokens, max(0, used_tokens))
        if "tokens" in self._buckets:
            self._buckets["tokens"].give_back(tokens - charged_tokens, now)
        self._done_rate = self._faded(now) + charged_tokens / _RATE_S
        self._done_s = now

    def next_event_s(self, now: float) -> float:
        """Return the time at which to call ``decide`` again if nothing changes before; inf: no request waits."""
        first_name = self._first()
        if first_name is None:
            return math.inf
        oldest_request = next(iter(self._waiting.values()))
        due_s = oldest_request.since_s + self._settings.queue_s
        tokens = self._waiting[first_name].tokens
        return min(due_s, now + self._buckets_wait_s(tokens, now)) if self._fits(tokens) else due_s

    def _may_go(self, tokens: int, now: float) -> bool:
        return self._fits(tokens) and self._buckets_wait_s(tokens, now) <= _ROUNDING_S

    def _fits(self, tokens: int) -> bool:
        limit_tokens = self.open_limit_tokens
        return limit_tokens is None or not self._open or self.open_tokens + tokens <= limit_tokens

    def _buckets_wait_s(self, tokens: int, now: float) -> float:
        cost_by_kind = {"requests": 1.0, "tokens": float(tokens)}
        return max((bucket.wait_s(cost_by_kind[kind], now) for kind, bucket in self._buckets.items()), default=0.0)

    def _admit(self, name: str, tokens: int, now: float) -> None:
        cost_by_kind = {"requests": 1.0, "tokens": float(tokens)}
        for kind, bucket in self._buckets.items():
            bucket.take(cost_by_kind[kind], now)
        self._open[name] = tokens
        self.open_tokens += tokens

    def _first(self) -> str | None:
        """Return the name of the next waiting request and drop entries that have left the queue. None: none waits."""
        while self._order and not self._waits(self._order[0]):
            heapq.heappop(self._order)
        return self._order[0][2] if self._order else None

    def _waits(self, entry: tuple[int, int, str]) -> bool:
        request = self._waiting.get(entry[2])
        return request is not None and request.serial == entry[1]

    def _leave(self, name: str) -> None:
        self.waiting_tokens -= self._waiting.pop(name).tokens
        if len(self._order) > 2 * len(self._waiting) + 16:  # most have left from the middle
            self._order = [queued for queued in self._order if self._waits(queued)]
            heapq.heapify(self._order)

    def _rate(self, now: float) -> float:
        """Return the measured throughput of finished requests, tokens/s."""
        seen_share = 1.0 - math.exp(-(now - self._began_s) / _RATE_S)
        return self._faded(now) / seen_share if seen_share > 0 else 0.0

    def _faded(self, now: float) -> float:
        return self._done_rate * math.exp(-(now - self._done_s) / _RATE_S)

    def _refused(self, why: str, tokens: int, now: float) -> RateLimited:
        self.refusals += 1
        ahead_tokens = self.waiting_tokens + tokens
        tokens_per_s = self._rate(now)
        wait_s = ahead_tokens / tokens_per_s if tokens_per_s > 0 else 0.0
        amount_by_kind = {"requests": len(self._waiting) + 1.0, "tokens": float(ahead_tokens)}
        wait_s = max([wait_s, *(bucket.refill_s(amount_by_kind[kind], now) for kind, bucket in self._buckets.items())])
        return RateLimited(reason=why, retry_after_s=min(LONGEST_RETRY_S, max(1, math.ceil(wait_s))))
