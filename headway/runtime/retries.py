"""Retries after failures: exponential backoff, and a circuit breaker, through which only single probes reach a failing
replica.

The breaker's states and their names are those of M. Nygard, "Release It!" (2007).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from headway.config.router import RouterConfig

BreakerState = Literal["closed", "open", "half_open"]
_MOST_DOUBLINGS = 64  # a delay of centuries; beyond, 2.0**n would overflow


def backoff_s(retry: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait before the ``retry``-th retry: ``first_s`` before retry 1, doubled for each further one, at most
    ``longest_s``; 0 for ``retry`` < 1. Callers that fail together multiply it with a random factor of their own."""
    if retry < 1:
        return 0.0
    return min(longest_s, first_s * 2.0 ** min(retry - 1, _MOST_DOUBLINGS))


def socket_error_of(error: Exception) -> BaseException:
    """The socket's error that ``error``, an HTTP client's, was raised from; without one, ``error`` itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


class Breaker:
    """Decides whether a replica may be sent requests.

    Lifecycle: *closed* -> *open*, after ``failures_to_open`` failures in a row within ``failure_window_s`` or a
    ``trip`` -> *half-open* once its cool-down is over -> *closed* after ``successes_to_close`` probes in a row, each
    sent after the one before had succeeded. A probe that fails opens it again, for ``cool_down_growth`` times as long
    (at most ``longest_cool_down_s``); closing resets that. Invariant: nothing is sent through an open breaker, and at
    most one probe is under way. Requests sent before it opened that end later change nothing.

    Example (1 failure opens, cool-down 1 s, growth 2, 1 success closes): a failure at t = 0 opens it until t = 1; the
    probe sent then fails at t = 3: open until t = 5; the next succeeds at t = 6: closed.
    """

    def __init__(self, settings: RouterConfig) -> None:
        self._settings = settings
        self._failures: deque[float] = deque(maxlen=settings.failures_to_open)  # in a row, while closed
        self._open_until_s: float | None = None  # None: closed
        self._cool_down_s = settings.cool_down_s  # of the next opening
        self._probing = False
        self._successes = 0  # of probes, in a row

    def state(self, now: float) -> BreakerState:
        if self._open_until_s is None:
            return "closed"
        return "half_open" if now >= self._open_until_s else "open"

    @property
    def closed(self) -> bool:
        return self._open_until_s is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    def opens_s(self) -> float | None:
        """Time at which an open breaker becomes half-open; None: it is closed."""
        return self._open_until_s

    def send(self, now: float) -> bool:
        """Record that a request is sent. True: it is the probe, whose sender reports how it ended. Raises ValueError
        when none is allowed."""
        if not self.allows(now):
            raise ValueError(f"the breaker is {self.state(now)}: no request may be sent")
        self._probing = self.state(now) == "half_open"
        return self._probing

    def succeed(self, now: float, *, probe: bool) -> bool:
        """Record that a request got tokens. True: that closed the breaker."""
        if probe:
            self._probing = False
            if self.state(now) != "half_open":  # it was tripped meanwhile
                return False
            self._successes += 1
            if self._successes < self._settings.successes_to_close:
                return False
            self._close()
            return True
        if self._open_until_s is None:
            self._failures.clear()
        return False

    def fail(self, now: float, *, probe: bool, alone: bool = False) -> bool:
        """Record that a request failed. True: that opened the breaker. ``alone``: no other replica could take its
        requests, which had better fail here than wait: the breaker then closes, or stays closed."""
        if probe:
            self._probing = False
            if self.state(now) != "half_open":
                return False
            if alone:
                self._close()
                return False
            self._open(now)
            return True
        if self._open_until_s is not None:
            return False
        self._failures.append(now)
        reached_limit = len(self._failures) == self._settings.failures_to_open
        if alone or not reached_limit or self._failures[0] < now - self._settings.failure_window_s:
            return False
        self._open(now)
        return True

    def trip(self, now: float) -> bool:
        """Open the breaker at once: the replica is dead. True: it wasn't open before."""
        newly_opened = self.state(now) != "open"
        if newly_opened:
            self._open(now)
        return newly_opened

    def reset(self) -> bool:
        """Close the breaker: the replica was replaced, and its successor has answered. True: it wasn't closed."""
        was_open = self._open_until_s is not None
        self._close()
        return was_open

    def withdraw(self) -> None:
        """Record that the probe ended without a result: cancelled, or moved elsewhere. Another may be sent."""
        self._probing = False

    def _open(self, now: float) -> None:
        self._open_until_s = now + self._cool_down_s
        self._cool_down_s = min(self._settings.longest_cool_down_s, self._cool_down_s * self._settings.cool_down_growth)
        self._failures.clear()
        self._successes = 0
        self._probing = False

    def _close(self) -> None:
        self._open_until_s = None
        self._cool_down_s = self._settings.cool_down_s
        self._failures.clear()
        self._successes = 0
        self._probing = False
