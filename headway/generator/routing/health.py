"""Health of replicas: whether they answer, and whether they are behind on versions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from headway.config.router import RouterConfig
from headway.generator.routing.replica import Replica
from headway.generator.routing.router import Router
from headway.records.errors import RemoteError, WorkerDied
from headway.runtime.clock import Clock
from headway.runtime.workers import EventCallback


class Health:
    """Health checks. A replica that doesn't answer, or is behind on versions, is reported and takes no requests."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        settings: RouterConfig,
        clock: Clock,
        *,
        ask: Callable[[Replica], Awaitable[None]],
        bring_up: Callable[[Replica], Awaitable[None]],
        settle: Callable[[], None],
        on_event: EventCallback,
    ) -> None:
        """``ask(replica)`` returns when the replica has answered; ``bring_up(replica)`` applies the newest weights, or
        kills it; both raise WorkerDied. ``settle()`` assigns held requests: a replica may take requests again."""
        self._replicas = replicas
        self._router = router
        self._settings = settings
        self._clock = clock
        self._ask = ask
        self._bring_up = bring_up
        self._settle = settle
        self._on_event = on_event

    async def watch(self, replica: Replica) -> None:
        """Check a replica at every interval until it is dead or the task is cancelled. A replica whose answer is
        overdue takes no requests until it answers; one that is behind on versions is updated."""
        with contextlib.suppress(WorkerDied):
            while True:
                await self._clock.sleep(self._settings.health_interval_s)
                self.note_versions([replica])
                if replica.reported_behind:
                    await self._bring_up(replica)
                    self.note_versions([replica])
                if replica.updating_since_s is None:  # a replica answers no calls during an update
                    await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        """Ask a replica and wait for its answer; marks it silent meanwhile if overdue. Raises WorkerDied."""
        timeout_s = self._settings.health_timeout_s
        answer_task = asyncio.create_task(self._answer_error(replica), name=f"{replica.name}-asked")
        try:
            await asyncio.wait({answer_task}, timeout=timeout_s)
            if not answer_task.done():
                self._note_silence(replica, f"no answer within {timeout_s:g} s")
            self._note_silence(replica, await answer_task)
        finally:
            answer_task.cancel()

    def note_versions(self, replicas: Sequence[Replica] | None = None) -> None:
        """Report which of ``replicas``, by default of all, have fallen behind on versions, or have caught up, since the
        last call."""
        replicas = self._replicas if replicas is None else replicas
        standings = self._router.standings(self._clock.now(), replicas)
        events: list[tuple[str, str]] = []
        for replica, standing in zip(replicas, standings, strict=True):
            is_behind = standing == "behind"
            if not replica.live or is_behind == replica.reported_behind:
                continue
            replica.reported_behind = is_behind
            if is_behind:
                reason = f"still at version {replica.version}, which others have replaced: it takes no requests"
                events.append(("generator_behind", f"{replica.name}: {reason}"))
            else:
                events.append(("generator_caught_up", f"{replica.name}: version {replica.version}"))
        for event_name, detail in events:
            self._on_event(event_name, detail)

    async def _answer_error(self, replica: Replica) -> str:
        """Return the error that a replica answered with, or "" for a good answer."""
        try:
            await self._ask(replica)
        except RemoteError as error:
            return str(error)
        return ""

    def _note_silence(self, replica: Replica, why: str) -> None:
        """Mark a replica silent because of ``why``, or answering again ("")."""
        if replica.silent == bool(why):
            return
        replica.silent = bool(why)
        self._settle()
        event_name = "generator_silent" if why else "generator_answers"
        self._on_event(event_name, f"{replica.name}: {why or 'takes requests again'}")
