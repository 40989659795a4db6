"""The device lock, which grants devices to the participants of a workflow and recalls them.

A participant asks once its input is ready, receives all of its devices at once or none, and releases them when it is
recalled. So no participant holds a device while it waits for data, capacity or another device: there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.records.execution import LockChanges, LockGrant, LockStatistics, Participant

OVERTAKES = 2  # later asks that may be granted before an ask


class _Request:
    def __init__(self, participant: Participant, number: int) -> None:
        self.participant, self.number = participant, number
        self.overtaken = 0  # by later asks for a device of this one


class _Hold:
    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.recalled_at_s: float | None = None


class DeviceLock:
    """Grants devices to participants.

    Lifecycle of a participant: *added* -> (`ask` -> *granted* -> `release`)*, and after its process has ended
    `mark_dead` -> `memory_free`, from which it may ask again.

    Order: of the asks for a device the one furthest downstream comes first, then the oldest. A free device is reserved
    for the first of its asks, even while that ask still waits for another device. An ask that was overtaken
    ``overtakes`` times on its devices precedes every later ask: so it waits for older asks and for that many later
    ones, never longer.

    A participant that has released stays *loaded* until another is granted one of its devices; if it asks again
    before, nothing is loaded.

    Example: a replica and a trainer of one device::

        lock.ask("generator-0", 0.0)   # granted: onload
        lock.ask("trainer", 5.0)       # recalls: generator-0
        lock.release("generator-0", 5.1)  # trainer granted: offload generator-0, onload
    """

    def __init__(self, now: float = 0.0, overtakes: int = OVERTAKES) -> None:
        self.participants: dict[str, Participant] = {}
        self._overtakes = overtakes
        self._asks: dict[str, _Request] = {}
        self._held: dict[str, _Hold] = {}
        self._loaded: set[str] = set()
        self._dead: set[str] = set()
        self._asked = self._grants = self._switches = 0
        self._idle_wanted_s, self._advanced_s = 0.0, now

    def add(self, participant: Participant, *, loaded: bool = False) -> None:
        """Add a participant. ``loaded``: it is on its devices already.

        Raises ValueError for a name that is taken, and for a participant without devices."""
        if participant.name in self.participants:
            raise ValueError(f"the device lock already has a participant {participant.name!r}")
        if not participant.devices:
            raise ValueError(f"participant {participant.name!r} of the device lock has no devices")
        self.participants[participant.name] = participant
        if loaded:
            self._loaded.add(participant.name)

    def remove(self, name: str, now: float) -> LockChanges:
        """Remove a participant that has left its devices. Unknown names: no-op."""
        self._advance(now)
        for by_name in (self._asks, self._held, self.participants):
            by_name.pop(name, None)
        self._loaded.discard(name)
        self._dead.discard(name)
        return self._settle(now)

    def ask(self, name: str, now: float) -> LockChanges:
        """Ask for a participant's devices once its input is ready. Raises ValueError if it asks or holds already."""
        participant = self.participants[name]
        if name in self._asks or name in self._held:
            raise ValueError(f"participant {name!r} {'holds its devices' if name in self._held else 'waits'} already")
        self._advance(now)
        self._asked += 1
        self._asks[name] = _Request(participant, self._asked)
        return self._settle(now)

    def withdraw(self, name: str, now: float) -> LockChanges:
        """Withdraw a participant's ask; no-op without one."""
        self._advance(now)
        self._asks.pop(name, None)
        return self._settle(now)

    def release(self, name: str, now: float) -> LockChanges:
        """Release a participant's devices; it stays loaded. No-op for one that doesn't hold.

        The devices of a dead one stay taken."""
        self._advance(now)
        self._held.pop(name, None)
        return self._settle(now)

    def loaded(self, name: str) -> bool:
        """Return whether a participant is on its devices, computing or not."""
        return name in self._loaded

    def mark_loaded(self, name: str) -> None:
        """Note that a participant could not be offloaded: it is still loaded."""
        self._loaded.add(name)

    def mark_dead(self, name: str, now: float) -> LockChanges:
        """Note that a participant's process has ended. Its devices stay taken until `memory_free`."""
        self._advance(now)
        self._asks.pop(name, None)
        if name in self._held or name in self._loaded:
            self._dead.add(name)
        return self._settle(now)

    def memory_free(self, name: str, now: float) -> LockChanges:
        """Free the devices of a dead participant, whose memory is known to be free. No-op for one that isn't dead."""
        self._advance(now)
        if name in self._dead:
            self._dead.discard(name)
            self._loaded.discard(name)
            self._held.pop(name, None)
        return self._settle(now)

    def holds(self, name: str) -> bool:
        """Return whether a participant holds its devices and is alive."""
        return name in self._held and name not in self._dead

    def recalled(self, name: str) -> bool:
        """Return whether a participant holds its devices and is recalled."""
        return name in self._held and self._held[name].recalled_at_s is not None

    def blockers(self, name: str, now: float) -> dict[str, str]:
        """Return the holders of a participant's devices, the longest first, each with a sentence: which, since when."""
        devices, obstacles = self.participants[name].devices, list[tuple[float, str, str]]()
        for holder in self._taking(without=name):
            participant, hold = self.participants[holder], self._held.get(holder)
            if shared := participant.devices & devices:
                held_s = 0.0 if hold is None else now - hold.since_s
                description = f"{holder} (stage {participant.stage}) has {', '.join(sorted(shared))} for {held_s:.1f} s"
                if holder in self._dead:
                    description += ", dead; its memory may still be in use"
                if hold is not None and hold.recalled_at_s is not None:
                    description += f", recalled {now - hold.recalled_at_s:.1f} s ago"
                obstacles.append((-held_s, holder, description))
        return {holder: description for _, holder, description in sorted(obstacles)}

    def statistics(self, now: float) -> LockStatistics:
        """Return the counts up to ``now``."""
        self._advance(now)
        return LockStatistics(grants=self._grants, switches=self._switches, idle_wanted_s=self._idle_wanted_s)

    # --- inside ---------------------------------------------------------------------------------------------

    def _taking(self, without: str = "") -> Iterable[str]:
        """Return participants whose devices can't be granted: holders, and the dead whose memory may not be free."""
        return [name for name in {**self._held, **dict.fromkeys(sorted(self._dead))} if name != without]

    def _advance(self, now: float) -> None:
        """Add the time since the last call to the statistics."""
        if self._asks and now > self._advanced_s:
            requested_devices = frozenset[str]().union(*(query.participant.devices for query in self._asks.values()))
            taken_devices = frozenset[str]().union(*(self.participants[name].devices for name in self._taking()))
            self._idle_wanted_s += len(requested_devices - taken_devices) * (now - self._advanced_s)
        self._advanced_s = max(self._advanced_s, now)

    def _rank(self, asked: _Request) -> tuple[int, int, int]:
        if asked.overtaken >= self._overtakes:
            return 0, 0, asked.number
        return 1, -asked.participant.order, asked.number

    def _settle(self, now: float) -> LockChanges:
        """Grant every ask that can be granted, and recall the holders that block others."""
        grants = list[LockGrant]()
        while (query := self._next()) is not None:  # each grant may change the order
            grants.append(self._grant(query, now))
        recalls = list[str]()
        for name, hold in self._held.items():
            devices = self.participants[name].devices
            if hold.recalled_at_s is None and any(query.participant.devices & devices for query in self._asks.values()):
                hold.recalled_at_s = now
                if name not in self._dead:
                    recalls.append(name)
        return LockChanges(grants=tuple(grants), recalls=tuple(recalls))

    def _next(self) -> _Request | None:
        """Return the first ask whose devices are free and not reserved for an earlier one."""
        taken_devices = set[str]().union(*(self.participants[name].devices for name in self._taking()))
        for request in sorted(self._asks.values(), key=self._rank):
            if not request.participant.devices & taken_devices:
                return request
            taken_devices |= request.participant.devices
        return None

    def _grant(self, asked: _Request, now: float) -> LockGrant:
        grantee = asked.participant
        del self._asks[grantee.name]
        for waiter in self._asks.values():
            waiter.overtaken += waiter.number < asked.number and bool(waiter.participant.devices & grantee.devices)
        evicted_names = sorted(
            name for name in self._loaded - {grantee.name} if self.participants[name].devices & grantee.devices
        )
        needs_onload = grantee.name not in self._loaded
        self._loaded -= set(evicted_names)
        self._loaded.add(grantee.name)
        self._held[grantee.name] = _Hold(now)
        self._grants += 1
        self._switches += bool(evicted_names)
        return LockGrant(participant=grantee.name, offload=tuple(evicted_names), onload=needs_onload)
