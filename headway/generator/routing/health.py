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
    """Asks replicas how they are. It is said, and takes requests away, when one doesn't answer or is behind."""

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
        """``ask(replica)`` comes back when it has answered; ``bring_up`` gives it the newest weights, or kills it; both
        raise WorkerDied. ``settle()``: some may take requests that didn't."""
        self._replicas = replicas
        self._router = router
        self._settings = settings
        self._clock = clock
        self._ask = ask
        self._bring_up = bring_up
        self._settle = settle
        self._on_event = on_event

    async def watch(self, replica: Replica) -> None:
        """Runs until the replica is dead, or it is cancelled. One whose answer is overdue takes no requests until it
        comes; one that is behind on versions is brought up."""
        with contextlib.suppress(WorkerDied):
            while True:
                await self._clock.sleep(self._settings.health_interval_s)
                self.note_versions()
                if replica.told_behind:
                    await self._bring_up(replica)
                    self.note_versions()
                if replica.updating_since_s is None:  # else it answers nothing
                    await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        """Ask it, and wait for its answer. Raises WorkerDied."""
        timeout_s = self._settings.health_timeout_s
        asked = asyncio.create_task(self._answer(replica), name=f"{replica.name}-asked")
        try:
            await asyncio.wait({asked}, timeout=timeout_s)
            if not asked.done():
                self._note_silence(replica, f"no answer within {timeout_s:g} s")
            self._note_silence(replica, await asked)
        finally:
            asked.cancel()

    def note_versions(self) -> None:
        """Say who is behind on versions, and who is no longer."""
        standings = self._router.standings(self._clock.now())
        said: list[tuple[str, str]] = []
        for replica, standing in zip(self._replicas, standings, strict=True):
            behind = standing == "behind"
            if not replica.live or behind == replica.told_behind:
                continue
            replica.told_behind = behind
            if behind:
                why = f"still at version {replica.version}, which others have replaced: it takes no requests"
                said.append(("generator_behind", f"{replica.name}: {why}"))
            else:
                said.append(("generator_caught_up", f"{replica.name}: version {replica.version}"))
        for name, detail in said:
            self._on_event(name, detail)

    async def _answer(self, replica: Replica) -> str:
        """Ask a replica how it is; return the fault of its answer, "" for none."""
        try:
            await self._ask(replica)
        except RemoteError as error:
            return str(error)
        return ""

    def _note_silence(self, replica: Replica, why: str) -> None:
        """``why`` it can't be asked; "": it answers."""
        if replica.silent == bool(why):
            return
        replica.silent = bool(why)
        self._settle()
        name = "generator_silent" if why else "generator_answers"
        self._on_event(name, f"{replica.name}: {why or 'takes requests again'}")
