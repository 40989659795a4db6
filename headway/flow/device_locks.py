"""Turns on shared devices for the tasks of a process, by the decisions of control/device_lock.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypedDict, Unpack

from headway.control.device_lock import DeviceLock
from headway.records.errors import DeviceBusy, StorageFailed, WorkerDied
from headway.records.execution import LockChanges, LockGrant, LockStatistics, Participant
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback

SwitchCallback = Callable[[], Awaitable[None]]
OnSpan = Callable[[str, str, str, float, float], None]  # device, participant, "onload" or "offload", start, end
WAIT = "a device"  # the kind of wait under which a participant waits for its devices


class _SwitchCallbacks(TypedDict, total=False):
    recall: SwitchCallback
    on_requested: SwitchCallback
    resume: SwitchCallback
    onload: SwitchCallback | None
    offload: SwitchCallback | None


class DeviceLocks:
    """The device lock of a process, with its waits, onloads and offloads.

    A participant takes its turn by `turn`, or by `acquire` and `release`. A *standing* participant computes while no
    other requests its devices (a generator's replica: requests come at any moment): it is recalled when another does,
    and resumes when the devices are free again.

    Example::

        locks.add(Participant(name="generator-0", stage="generate", devices=frozenset({"cpu:0"}), order=0),
                  recall=pause, resume=resume)
        locks.add(Participant(name="trainer", stage="train", devices=frozenset({"cpu:0"}), order=1))
        async with locks.turn("trainer"):  # generator-0 is paused in here
            ...
    """

    def __init__(
        self,
        clock: Clock,
        waits: Waits | None = None,
        *,
        on_event: EventCallback = lambda name, detail, /, **data: None,
        on_span: OnSpan = lambda device, participant, action, start_s, end_s: None,
    ) -> None:
        """``on_event`` is called for a failed offload, ``on_span`` for every onload and offload."""
        self._clock = clock
        self._waits = waits or Waits(clock.now)
        self._on_event, self._on_span = on_event, on_span
        self._lock = DeviceLock(clock.now())
        self._callbacks: dict[str, _SwitchCallbacks] = {}
        self._pending_grants: dict[str, asyncio.Future[LockGrant]] = {}
        self._failed: BaseException | None = None  # error of a recall or a resumption: no turn can be relied on
        self._tasks = dict[asyncio.Task[None], str]()  # recalls and resumptions under way, with the participant
        self._offloads = dict[str, asyncio.Task[None]]()  # offloads under way

    def add(self, participant: Participant, *, loaded: bool = False, **callbacks: Unpack[_SwitchCallbacks]) -> None:
        """Add a participant. One with ``recall`` and ``resume`` is standing, and on its devices unless they are held;
        ``recall`` returns when it has stopped computing. ``on_requested`` is called when another requests its devices,
        which it then gives up by `release`. ``loaded``: it is on its devices. ``onload``, ``offload``: bring its state
        to its devices, and off them. Raises ValueError for a name that is taken."""
        self._lock.add(participant, loaded=loaded or "recall" in callbacks)
        self._callbacks[participant.name] = callbacks
        if (recall := callbacks.get("recall")) is not None:
            now = self._clock.now()
            changes = self._lock.ask(participant.name, now)
            if not self._lock.holds(participant.name):
                self._start_task(participant.name, recall())
            self._apply(LockChanges(recalls=changes.recalls))

    @property
    def participants(self) -> Mapping[str, Participant]:
        return self._lock.participants

    @contextlib.asynccontextmanager
    async def turn(self, name: str, timeout_s: float | None = None, *, load: bool = True) -> AsyncIterator[None]:
        """Hold a participant's devices in the block; at its end, wait until recalled participants have resumed. See
        `acquire`."""
        await self.acquire(name, timeout_s, load=load)
        try:
            yield
        finally:
            await self.end(name)

    async def end(self, name: str) -> None:
        """Release a participant's devices; returns when the participants that got them have resumed."""
        self.release(name)
        await self._wait_until_resumed()

    async def evict(self, name: str) -> None:
        """Offload a participant that was loaded outside a turn, if another one shares its devices."""
        participant_devices = self._lock.participants[name].devices
        clashes = any(other.devices & participant_devices for other in self.participants.values() if other.name != name)
        if clashes and not self._lock.holds(name):
            await asyncio.shield(self._start_offload(name))

    def is_loaded(self, name: str) -> bool:
        """Whether a participant is on its devices; True for an unknown name, which shares no devices."""
        return name not in self._lock.participants or self._lock.loaded(name)

    def holds(self, name: str) -> bool:
        """Whether a participant holds its devices."""
        return self._lock.holds(name)

    async def acquire(self, name: str, timeout_s: float | None = None, *, load: bool = True) -> None:
        """Wait for the devices of a participant whose input is there, and load it; without ``load`` the caller does.
        Raises DeviceBusy, which names the holder, after ``timeout_s``; and any error of its ``onload``."""
        if self._failed is not None:
            raise self._failed
        changes = self._lock.ask(name, self._clock.now())
        grant_future = self._pending_grants[name] = asyncio.get_running_loop().create_future()
        try:
            self._apply(changes)
            if not grant_future.done():
                blockers = self._lock.blockers(name, self._clock.now())
                with self._waits.on(WAIT, next(iter(blockers), name), name):
                    async with asyncio.timeout(timeout_s):
                        await grant_future
            await self._load(grant_future.result(), load=load)
        except TimeoutError:
            if self._lock.holds(name):  # the loading took too long, or timed out itself
                self.release(name)
                raise
            raise DeviceBusy(self.explain_wait(name, timeout_s)) from None
        except BaseException:
            self.release(name)
            raise
        finally:
            del self._pending_grants[name]
            self._apply(self._lock.withdraw(name, self._clock.now()))

    def release(self, name: str) -> None:
        """Release a participant's devices; no-op for one that holds none."""
        self._apply(self._lock.release(name, self._clock.now()))

    def remove(self, name: str) -> None:
        """Remove a participant that has left its devices; no-op for an unknown one."""
        self._apply(self._lock.remove(name, self._clock.now()))
        self._callbacks.pop(name, None)

    def died(self, name: str, *, memory_free: bool = True) -> None:
        """Record the death of a participant's process. Without ``memory_free`` its devices stay taken until a second
        call with it."""
        self._apply(self._lock.mark_dead(name, self._clock.now()))
        if memory_free:
            self._apply(self._lock.memory_free(name, self._clock.now()))

    async def wait_until_idle(self) -> None:
        """Wait until no recall, resumption or offload is under way. Raises the error of one that failed."""
        while running_tasks := {*self._tasks, *self._offloads.values()}:
            await asyncio.wait(running_tasks)
        if self._failed is not None:
            raise self._failed

    def statistics(self) -> LockStatistics:
        """Return the lock's counts so far."""
        return self._lock.statistics(self._clock.now())

    def explain_wait(self, name: str, waited_s: float | None = None) -> str:
        """Return a text that names the participants that block this one, and since when."""
        now, mine = self._clock.now(), self._lock.participants[name]
        after = "" if waited_s is None else f" after {waited_s:g} s"
        cause = "; ".join(self._lock.blockers(name, now).values()) or "they are reserved for an earlier request"
        return f"{name} (stage {mine.stage}) doesn't have its devices {', '.join(sorted(mine.devices))}{after}: {cause}"

    # --- inside ---------------------------------------------------------------------------------------------

    def _apply(self, changes: LockChanges) -> None:
        """Carry out the lock's decisions."""
        for grant in changes.grants:
            for name in grant.offload:
                self._start_offload(name)  # now, since the grantee may be cancelled before it loads
            callbacks = self._callbacks[grant.participant]
            if "recall" in callbacks:
                self._start_task(grant.participant, self._resume(grant, callbacks))
            elif not (future := self._pending_grants[grant.participant]).done():
                future.set_result(grant)
        for name in changes.recalls:
            callbacks = self._callbacks[name]
            if "recall" in callbacks:
                self._start_task(name, self._recall(name, callbacks["recall"]))
            elif "on_requested" in callbacks:
                self._start_task(name, callbacks["on_requested"]())

    def _start_task(self, name: str, work: Awaitable[None]) -> None:
        previous_tasks = [task for task, participant_name in self._tasks.items() if participant_name == name]

        async def run() -> None:
            await asyncio.gather(*previous_tasks, return_exceptions=True)  # keep the order of a participant's callbacks
            await work

        task = asyncio.create_task(run(), name=f"devices of {name}")
        self._tasks[task] = name
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = error
            for future in self._pending_grants.values():  # otherwise they would wait for ever
                if not future.done():
                    future.set_exception(error)

    async def _recall(self, name: str, recall: SwitchCallback) -> None:
        await recall()
        now = self._clock.now()
        self._apply(self._lock.release(name, now))
        self._apply(self._lock.ask(name, now))

    async def _resume(self, grant: LockGrant, callbacks: _SwitchCallbacks) -> None:
        await self._load(grant)
        if "resume" in callbacks:
            await callbacks["resume"]()

    async def _load(self, grant: LockGrant, *, load: bool = True) -> None:
        """Load the participant once all offloads of those that share its devices, its own included, have ended."""
        mine = self._lock.participants[grant.participant].devices
        pending = [name for name in self._offloads if (sharer := self.participants.get(name)) and sharer.devices & mine]
        await asyncio.gather(*(asyncio.shield(self._offloads[name]) for name in pending))
        if load and grant.onload and (onload := self._callbacks[grant.participant].get("onload")) is not None:
            await self._run_callback(grant.participant, "onload", onload)

    def _start_offload(self, name: str) -> asyncio.Task[None]:
        """Offload a participant in a separate task, which continues when its waiter is cancelled."""
        previous_task = self._offloads.get(name)

        async def offload_in_turn() -> None:
            if previous_task is not None:
                await asyncio.wait([previous_task])
            await self._offload(name)

        def on_offloaded(done: asyncio.Task[None]) -> None:
            if self._offloads.get(name) is done:
                del self._offloads[name]
            if not done.cancelled() and (error := done.exception()) is not None:
                self._failed = error

        offload_task = self._offloads[name] = asyncio.create_task(offload_in_turn(), name=f"offload of {name}")
        offload_task.add_done_callback(on_offloaded)
        return offload_task

    async def _offload(self, name: str) -> None:
        if (offload := self._callbacks.get(name, {}).get("offload")) is None:
            return
        try:
            await self._run_callback(name, "offload", offload)
        except WorkerDied:
            return  # the memory was freed with the process
        except StorageFailed as error:
            self._lock.mark_loaded(name)
            self._on_event("offload_failed", f"{name} stays on its devices: {error}", worker=name)

    async def _run_callback(self, name: str, action: str, callback: SwitchCallback) -> None:
        start_s = self._clock.now()
        await callback()
        participant = self.participants.get(name)  # None: it was removed meanwhile
        for device in sorted(participant.devices) if participant else ():
            self._on_span(device, name, action, start_s, self._clock.now())

    async def _wait_until_resumed(self) -> None:
        """Wait until the participants being resumed compute again. Raises the error of one that failed."""
        granted = [name for name in self._tasks.values() if self._lock.holds(name) and not self._lock.recalled(name)]
        await asyncio.gather(*(task for task, name in self._tasks.items() if name in granted))
