"""The device lock: which party of a workflow computes on which devices, and who must make room first.

Parties ask with their input at hand, get all of their devices at once or none, and give them up when they are recalled.
So nobody holds a device while it waits: for data, for room or for another device; hence there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable

from headway.records.execution import LockChanges, LockGrant, LockStatistics, Party

OVERTAKES = 2  # later asks that an ask lets go first


class _Ask:
    def __init__(self, party: Party, number: int) -> None:
        self.party, self.number = party, number
        self.overtaken = 0  # by later asks, on devices that this one wants


class _Hold:
    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.recalled_at_s: float | None = None


class DeviceLock:
    """Grants devices to parties. A party's life: *added* -> (`ask` -> *granted* -> `release`)*, and after a death
    `dead` -> `memory_free`, from which it may begin anew.

    Order: of those who ask for a device the one furthest downstream comes first, then the oldest ask. A device that is
    free is kept for the first of those who want it, though it still waits for another device. An ask that `overtakes`
    later ones were granted before, on devices that it wants, comes before every later ask: so it waits for older asks
    and for that many later ones, never longer.

    A party that has released stays *loaded* until another is granted one of its devices; if it asks again before,
    nothing is loaded.

    Example: a replica and a trainer of one device::

        lock.ask("generator-0", 0.0)   # granted: onload
        lock.ask("trainer", 5.0)       # recalls: generator-0
        lock.release("generator-0", 5.1)  # trainer granted: offload generator-0, onload
    """

    def __init__(self, now: float = 0.0, overtakes: int = OVERTAKES) -> None:
        self.parties: dict[str, Party] = {}
        self._overtakes = overtakes
        self._asks: dict[str, _Ask] = {}
        self._held: dict[str, _Hold] = {}
        self._loaded: set[str] = set()
        self._dead: set[str] = set()
        self._asked = self._grants = self._switches = 0
        self._idle_wanted_s, self._looked_s = 0.0, now

    def add(self, party: Party, *, loaded: bool = False) -> None:
        """Take in a party. ``loaded``: it is on its devices already. Raises ValueError for a name that is taken, and
        for a party without devices."""
        if party.name in self.parties:
            raise ValueError(f"there is a party {party.name!r} of the device lock already")
        if not party.devices:
            raise ValueError(f"party {party.name!r} of the device lock has no devices")
        self.parties[party.name] = party
        if loaded:
            self._loaded.add(party.name)

    def remove(self, name: str, now: float) -> LockChanges:
        """Forget a party that has left its devices. Unknown names: no-op."""
        self._advance(now)
        for known in (self._asks, self._held, self.parties):
            known.pop(name, None)
        self._loaded.discard(name)
        self._dead.discard(name)
        return self._settle(now)

    def ask(self, name: str, now: float) -> LockChanges:
        """Ask for a party's devices: only with its input at hand. Raises ValueError for a party that asks or holds."""
        party = self.parties[name]
        if name in self._asks or name in self._held:
            raise ValueError(f"party {name!r} {'holds its devices' if name in self._held else 'asks'} already")
        self._advance(now)
        self._asked += 1
        self._asks[name] = _Ask(party, self._asked)
        return self._settle(now)

    def withdraw(self, name: str, now: float) -> LockChanges:
        """End a party's ask ungranted; no-op without one."""
        self._advance(now)
        self._asks.pop(name, None)
        return self._settle(now)

    def release(self, name: str, now: float) -> LockChanges:
        """Give a party's devices up; it stays loaded. No-op for one that doesn't hold. A dead one's stay taken."""
        self._advance(now)
        self._held.pop(name, None)
        return self._settle(now)

    def loaded(self, name: str) -> bool:
        """Whether a party is on its devices, computing or not."""
        return name in self._loaded

    def stays(self, name: str) -> None:
        """Note that a party which was to leave its devices couldn't: it is still loaded."""
        self._loaded.add(name)

    def dead(self, name: str, now: float) -> LockChanges:
        """Note that a party's process has ended. Its devices stay taken until `memory_free`."""
        self._advance(now)
        self._asks.pop(name, None)
        if name in self._held or name in self._loaded:
            self._dead.add(name)
        return self._settle(now)

    def memory_free(self, name: str, now: float) -> LockChanges:
        """Free what a dead party held: its memory is known to be free. No-op for one that isn't dead."""
        self._advance(now)
        if name in self._dead:
            self._dead.discard(name)
            self._loaded.discard(name)
            self._held.pop(name, None)
        return self._settle(now)

    def holds(self, name: str) -> bool:
        """Whether a party holds its devices, and lives."""
        return name in self._held and name not in self._dead

    def wanted(self, name: str) -> bool:
        """Whether a party holds and is recalled."""
        return name in self._held and self._held[name].recalled_at_s is not None

    def in_the_way(self, name: str, now: float) -> dict[str, str]:
        """Return who keeps a party from its devices, the longest holder first, and in words: of which, since when."""
        wanted, found = self.parties[name].devices, list[tuple[float, str, str]]()
        for other in self._taking(without=name):
            party, hold = self.parties[other], self._held.get(other)
            if shared := party.devices & wanted:
                held_s = 0.0 if hold is None else now - hold.since_s
                said = f"{other} (stage {party.stage}) has {', '.join(sorted(shared))} for {held_s:.1f} s"
                if other in self._dead:
                    said += ", dead, its memory not known to be free"
                if hold is not None and hold.recalled_at_s is not None:
                    said += f", recalled {now - hold.recalled_at_s:.1f} s ago"
                found.append((-held_s, other, said))
        return {other: said for _, other, said in sorted(found)}

    def statistics(self, now: float) -> LockStatistics:
        """Return the counts up to ``now``."""
        self._advance(now)
        return LockStatistics(grants=self._grants, switches=self._switches, idle_wanted_s=self._idle_wanted_s)

    # --- inside ---------------------------------------------------------------------------------------------

    def _taking(self, without: str = "") -> Iterable[str]:
        """Parties whose devices nobody else can have: holders, and the dead whose memory may not be free."""
        return [name for name in {**self._held, **dict.fromkeys(sorted(self._dead))} if name != without]

    def _advance(self, now: float) -> None:
        """Count the time since the last call."""
        if self._asks and now > self._looked_s:
            wanted = frozenset[str]().union(*(asked.party.devices for asked in self._asks.values()))
            taken = frozenset[str]().union(*(self.parties[name].devices for name in self._taking()))
            self._idle_wanted_s += len(wanted - taken) * (now - self._looked_s)
        self._looked_s = max(self._looked_s, now)

    def _rank(self, asked: _Ask) -> tuple[int, int, int]:
        if asked.overtaken >= self._overtakes:
            return 0, 0, asked.number
        return 1, -asked.party.order, asked.number

    def _settle(self, now: float) -> LockChanges:
        """Grant what can be granted, and recall the holders that are in somebody's way."""
        grants = list[LockGrant]()
        while (asked := self._next()) is not None:  # each grant may change who comes first
            grants.append(self._grant(asked, now))
        recalls = list[str]()
        for name, hold in self._held.items():
            mine = self.parties[name].devices
            if hold.recalled_at_s is None and any(asked.party.devices & mine for asked in self._asks.values()):
                hold.recalled_at_s = now
                if name not in self._dead:
                    recalls.append(name)
        return LockChanges(grants=tuple(grants), recalls=tuple(recalls))

    def _next(self) -> _Ask | None:
        """The first ask whose devices are free, and not kept for one before it."""
        taken = set[str]().union(*(self.parties[name].devices for name in self._taking()))
        for asked in sorted(self._asks.values(), key=self._rank):
            if not asked.party.devices & taken:
                return asked
            taken |= asked.party.devices
        return None

    def _grant(self, asked: _Ask, now: float) -> LockGrant:
        party = asked.party
        del self._asks[party.name]
        for other in self._asks.values():
            other.overtaken += other.number < asked.number and bool(other.party.devices & party.devices)
        leaving = sorted(name for name in self._loaded - {party.name} if self.parties[name].devices & party.devices)
        onload = party.name not in self._loaded
        self._loaded -= set(leaving)
        self._loaded.add(party.name)
        self._held[party.name] = _Hold(now)
        self._grants += 1
        self._switches += bool(leaving)
        return LockGrant(party=party.name, offload=tuple(leaving), onload=onload)
