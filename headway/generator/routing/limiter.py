"""Rate limit and back-pressure for foreign callers: clients that aren't rollouts of the run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

from headway.config.router import RouterConfig
from headway.control.routing.rate_limit import RateLimit, RateLimited
from headway.records.errors import Overloaded
from headway.runtime.clock import Clock
from headway.runtime.workers import EventCallback

_EVENT_INTERVAL_S = 60.0  # at most one event about refusals in this time
_ROUNDING_S = 1e-6  # a timer may come this much too early


class Permit:
    """Admission of one request. Its holder sets ``used_tokens`` to the actual use before releasing it."""

    __slots__ = ("used_tokens",)

    def __init__(self, tokens: int) -> None:
        self.used_tokens = tokens  # prompt and response; by default all that was asked for


class Limiter:
    """Admits requests by the rules of ``control.routing.rate_limit``, without regard to the caller's identity.

    Example: ``async with limiter.permit(len(prompt) + max_tokens) as permit: result = await pool.generate(request);
    permit.used_tokens = ...``. Overloaded becomes HTTP 429 with Retry-After at the edge.
    """

    def __init__(
        self, settings: RouterConfig, clock: Clock, capacity_tokens: Callable[[], int], on_event: EventCallback
    ) -> None:
        """``capacity_tokens()``: KV tokens of the replicas that take requests now."""
        self._settings = settings
        self._clock = clock
        self._capacity_tokens = capacity_tokens
        self._on_event = on_event
        self._rules = RateLimit(settings, clock.now())
        self._names = itertools.count()
        self._waiting: dict[str, asyncio.Future[RateLimited | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reported_s = -math.inf

    @property
    def waiting(self) -> int:
        """Count of requests that wait for a permit."""
        return self._rules.waiting

    @property
    def open_tokens(self) -> int:
        """Tokens of the permits in use."""
        return self._rules.open_tokens

    @property
    def refusals(self) -> int:
        """Count of refused requests so far."""
        return self._rules.refusals

    def oldest_age_s(self) -> float:
        """Seconds for which the oldest waiting request has waited; 0.0 when none waits."""
        return self._rules.oldest_age_s(self._clock.now())

    @contextlib.asynccontextmanager
    async def permit(self, tokens: int, priority: int = 0) -> AsyncIterator[Permit]:
        """Acquire a permit for a request of up to ``tokens``, prompt and response. Requests wait in order of priority
        (lower numbers first), then of arrival. Raises Overloaded when no permit will be free soon."""
        request_name = str(next(self._names))
        await self._admission(request_name, tokens, priority)
        permit = Permit(tokens)
        try:
            yield permit
        finally:
            self._rules.finish(request_name, permit.used_tokens, self._clock.now())
            self.admit_waiting()

    async def _admission(self, name: str, tokens: int, priority: int) -> None:
        self._rules.open_limit_tokens = self._settings.overcommit * self._capacity_tokens()
        decision = self._rules.offer(name, tokens, priority, self._clock.now())
        if isinstance(decision, RateLimited):
            self._refuse(decision)
        if decision == "admitted":
            return
        admission_future = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            refusal = await admission_future
        except asyncio.CancelledError:
            if admission_future.done() and not admission_future.cancelled() and admission_future.result() is None:
                self._rules.finish(name, 0, self._clock.now())  # admitted in the same pass of the event loop
            self._rules.withdraw(name)
            self.admit_waiting()
            raise
        finally:
            self._waiting.pop(name, None)
        if refusal is not None:
            self._refuse(refusal)

    def _refuse(self, refusal: RateLimited) -> NoReturn:
        now_s = self._clock.now()
        if now_s >= self._reported_s + _EVENT_INTERVAL_S:
            self._reported_s = now_s
            self._on_event("requests_refused", f"{refusal.reason}; {self._rules.refusals} so far")
        raise Overloaded(refusal.reason, refusal.retry_after_s)

    def admit_waiting(self) -> None:
        """Admit or refuse waiting requests by the present rules; called after every change."""
        if self._rules.waiting:
            self._decide()
        self._wake()

    def _decide(self) -> None:
        now_s = self._clock.now()
        self._rules.open_limit_tokens = self._settings.overcommit * self._capacity_tokens()
        for request_name, refusal in self._rules.decide(now_s):
            if not self._waiting[request_name].done():
                self._waiting[request_name].set_result(refusal)
            elif refusal is None:  # its caller is being cancelled
                self._rules.finish(request_name, 0, now_s)

    def _wake(self) -> None:
        now = self._clock.now()
        due_s = self._rules.next_event_s(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now) + _ROUNDING_S, self.admit_waiting)

    def stop(self) -> None:
        """Refuse all waiting requests."""
        if self._timer is not None:
            self._timer.cancel()
        for request_name, admission_future in self._waiting.items():
            self._rules.withdraw(request_name)
            if not admission_future.done():
                admission_future.set_result(RateLimited(reason="the server stops", retry_after_s=1))
