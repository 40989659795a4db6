"""Turns on devices for the tasks of a process: the decisions of control/device_lock.py, carried out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypedDict, Unpack

from headway.control.device_lock import DeviceLock
from headway.records.errors import DeviceBusy, StorageFailed, WorkerDied
from headway.records.execution import LockChanges, LockGrant, LockStatistics, Party
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback

Move = Callable[[], Awaitable[None]]
OnSpan = Callable[[str, str, str, float, float], None]  # device, party, "onload" or "offload", start and end of it
WAIT = "a device"  # the kind of wait under which a party waits for its devices


class _Moves(TypedDict, total=False):
    recall: Move
    wanted: Move
    resume: Move
    onload: Move | None
    offload: Move | None


class DeviceLocks:
    """The device lock of a process, with its waits and moves.

    A party takes its turn by `turn`, or by `acquire` and `release`. A *standing* party computes whenever nobody else
    wants its devices (a generator's replica: requests come at any moment): it is recalled when somebody does, and
    resumes when they are free again.

    Example::

        locks.add(Party(name="generator-0", stage="generate", devices=frozenset({"cpu:0"}), order=0),
                  recall=pause, resume=resume)
        locks.add(Party(name="trainer", stage="train", devices=frozenset({"cpu:0"}), order=1))
        async with locks.turn("trainer"):  # generator-0 is paused in here
            ...
    """

    def __init__(
        self,
        clock: Clock,
        waits: Waits | None = None,
        *,
        on_event: EventCallback = lambda name, detail, /, **data: None,
        on_span: OnSpan = lambda device, party, what, start_s, end_s: None,
    ) -> None:
        """``on_event`` is told what couldn't be offloaded; ``on_span`` of every move."""
        self._clock = clock
        self._waits = waits or Waits(clock.now)
        self._on_event, self._on_span = on_event, on_span
        self._lock = DeviceLock(clock.now())
        self._moves: dict[str, _Moves] = {}
        self._asking: dict[str, asyncio.Future[LockGrant]] = {}
        self._failed: BaseException | None = None  # what stopped a recall or a resumption: no turn can be relied on
        self._tasks = dict[asyncio.Task[None], str]()  # recalls and resumptions under way, by party
        self._leaving = dict[str, asyncio.Task[None]]()  # offloads under way

    def add(self, party: Party, *, loaded: bool = False, **moves: Unpack[_Moves]) -> None:
        """Take in a party. ``recall`` and ``resume``: it is a standing one, already on its devices unless they are
        held; ``recall`` returns when it computes no more. ``wanted``: told that somebody wants what it holds, which it
        gives up by `release` when it can. ``loaded``: it is on its devices. ``onload``, ``offload``: bring its state to
        its devices, and away. Raises ValueError for a name that is taken."""
        self._lock.add(party, loaded=loaded or "recall" in moves)
        self._moves[party.name] = moves
        if (recall := moves.get("recall")) is not None:
            now = self._clock.now()
            changes = self._lock.ask(party.name, now)
            if not self._lock.holds(party.name):
                self._start(party.name, recall())
            self._follow(LockChanges(recalls=changes.recalls))

    @property
    def parties(self) -> Mapping[str, Party]:
        return self._lock.parties

    @contextlib.asynccontextmanager
    async def turn(self, name: str, timeout_s: float | None = None, *, load: bool = True) -> AsyncIterator[None]:
        """Hold a party's devices in the block; after it, those who got them compute again. See `acquire`."""
        await self.acquire(name, timeout_s, load=load)
        try:
            yield
        finally:
            await self.end(name)

    async def end(self, name: str) -> None:
        """Give a party's devices up; returns when those who got them compute again."""
        self.release(name)
        await self._settled()

    async def vacate(self, name: str) -> None:
        """Offload a party that was loaded outside a turn, for those who share its devices; no-op where none does."""
        mine = self._lock.parties[name].devices
        if not self._lock.holds(name) and any(one.devices & mine for one in self.parties.values() if one.name != name):
            await asyncio.shield(self._leave(name))

    def loaded(self, name: str) -> bool:
        """Whether a party is on its devices; one that isn't known takes turns with nobody."""
        return name not in self._lock.parties or self._lock.loaded(name)

    def holds(self, name: str) -> bool:
        """Whether a party holds its devices."""
        return self._lock.holds(name)

    async def acquire(self, name: str, timeout_s: float | None = None, *, load: bool = True) -> None:
        """Wait for a party's devices, with its input at hand, and load it; without ``load`` the caller does that.
        Raises DeviceBusy, which names the holder, after ``timeout_s``; and what its own ``onload`` raises."""
        if self._failed is not None:
            raise self._failed
        changes = self._lock.ask(name, self._clock.now())
        granted = self._asking[name] = asyncio.get_running_loop().create_future()
        try:
            self._follow(changes)
            if not granted.done():
                holders = self._lock.in_the_way(name, self._clock.now())
                with self._waits.on(WAIT, next(iter(holders), name), name):
                    async with asyncio.timeout(timeout_s):
                        await granted
            await self._load(granted.result(), load=load)
        except TimeoutError:
            if self._lock.holds(name):  # it was loading that took too long, or timed out itself
                self.release(name)
                raise
            raise DeviceBusy(self.why(name, timeout_s)) from None
        except BaseException:
            self.release(name)
            raise
        finally:
            del self._asking[name]
            self._follow(self._lock.withdraw(name, self._clock.now()))

    def release(self, name: str) -> None:
        """Give a party's devices up; no-op for one that holds none."""
        self._follow(self._lock.release(name, self._clock.now()))

    def remove(self, name: str) -> None:
        """Forget a party that has left its devices; no-op for an unknown one."""
        self._follow(self._lock.remove(name, self._clock.now()))
        self._moves.pop(name, None)

    def died(self, name: str, *, memory_free: bool = True) -> None:
        """Note the death of a party's process. Without ``memory_free`` its devices stay taken: call again with it."""
        self._follow(self._lock.dead(name, self._clock.now()))
        if memory_free:
            self._follow(self._lock.memory_free(name, self._clock.now()))

    async def quiet(self) -> None:
        """Wait until no recall, resumption or offload is under way. Raises what stopped one of them."""
        while under_way := {*self._tasks, *self._leaving.values()}:
            await asyncio.wait(under_way)
        if self._failed is not None:
            raise self._failed

    def statistics(self) -> LockStatistics:
        """Return the lock's counts so far."""
        return self._lock.statistics(self._clock.now())

    def why(self, name: str, waited_s: float | None = None) -> str:
        """Say who keeps a party from its devices, and since when."""
        now, mine = self._clock.now(), self._lock.parties[name]
        after = "" if waited_s is None else f" after {waited_s:g} s"
        cause = "; ".join(self._lock.in_the_way(name, now).values()) or "they are kept for another that asked before"
        return f"{name} (stage {mine.stage}) doesn't have its devices {', '.join(sorted(mine.devices))}{after}: {cause}"

    # --- inside ---------------------------------------------------------------------------------------------

    def _follow(self, changes: LockChanges) -> None:
        """Carry out what the lock has decided."""
        for grant in changes.grants:
            for name in grant.offload:
                self._leave(name)  # now: whoever was granted this may be gone before it loads
            moves = self._moves[grant.party]
            if "recall" in moves:
                self._start(grant.party, self._resume(grant, moves))
            elif not (future := self._asking[grant.party]).done():
                future.set_result(grant)
        for name in changes.recalls:
            moves = self._moves[name]
            if "recall" in moves:
                self._start(name, self._recall(name, moves["recall"]))
            elif "wanted" in moves:
                self._start(name, moves["wanted"]())

    def _start(self, name: str, work: Awaitable[None]) -> None:
        before = [task for task, of in self._tasks.items() if of == name]

        async def run() -> None:
            await asyncio.gather(*before, return_exceptions=True)  # a party's moves don't overtake each other
            await work

        task = asyncio.create_task(run(), name=f"devices of {name}")
        self._tasks[task] = name
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = error
            for future in self._asking.values():  # else they would wait for ever
                if not future.done():
                    future.set_exception(error)

    async def _recall(self, name: str, recall: Move) -> None:
        await recall()
        now = self._clock.now()
        self._follow(self._lock.release(name, now))
        self._follow(self._lock.ask(name, now))

    async def _resume(self, grant: LockGrant, moves: _Moves) -> None:
        await self._load(grant)
        if "resume" in moves:
            await moves["resume"]()

    async def _load(self, grant: LockGrant, *, load: bool = True) -> None:
        """Load when there is room: when this party, and all that share its devices, have left them."""
        mine = self._lock.parties[grant.party].devices
        leaving = [name for name in self._leaving if (one := self.parties.get(name)) and one.devices & mine]
        await asyncio.gather(*(asyncio.shield(self._leaving[name]) for name in leaving))
        if load and grant.onload and (onload := self._moves[grant.party].get("onload")) is not None:
            await self._move(grant.party, "onload", onload)

    def _leave(self, name: str) -> asyncio.Task[None]:
        """Offload a party, in a task of its own: it goes on though nobody waits for it any longer."""
        before = self._leaving.get(name)

        async def leave() -> None:
            if before is not None:
                await asyncio.wait([before])
            await self._offload(name)

        def left(done: asyncio.Task[None]) -> None:
            if self._leaving.get(name) is done:
                del self._leaving[name]
            if not done.cancelled() and (error := done.exception()) is not None:
                self._failed = error

        task = self._leaving[name] = asyncio.create_task(leave(), name=f"offload of {name}")
        task.add_done_callback(left)
        return task

    async def _offload(self, name: str) -> None:
        if (offload := self._moves.get(name, {}).get("offload")) is None:
            return
        try:
            await self._move(name, "offload", offload)
        except WorkerDied:
            return  # with its memory
        except StorageFailed as error:
            self._lock.stays(name)
            self._on_event("offload_failed", f"{name} stays on its devices: {error}", worker=name)

    async def _move(self, name: str, what: str, move: Move) -> None:
        start_s = self._clock.now()
        await move()
        party = self.parties.get(name)  # None: it has left meanwhile
        for device in sorted(party.devices) if party else ():
            self._on_span(device, name, what, start_s, self._clock.now())

    async def _settled(self) -> None:
        """Wait until resumed parties compute again; raises what stopped one of them."""
        granted = [name for name in self._tasks.values() if self._lock.holds(name) and not self._lock.wanted(name)]
        await asyncio.gather(*(task for task, name in self._tasks.items() if name in granted))
