"""The table of a machine's devices: their states (free, leased, lost, set aside) and the faults counted on each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from headway.kernels.backends import DeviceKind
from headway.kernels.device_queries import KernelDevice, core_devices
from headway.records.errors import HeadwayError
from headway.records.kernels import KernelEvaluation

DeviceState = Literal["free", "leased", "set_aside", "lost"]
MEMORY_FAULTS = ("illegal_memory_access", "memory_fault")
_DESCRIBED = ("vendor", "architecture", "memory_bytes", "memory_used_bytes", "busy_ratio")
OnDeviceEvent = Callable[[str, str], object]  # name, detail


class DeviceUnavailable(HeadwayError):
    """No device of a kind can be leased now; the message says which are lost or set aside."""


@dataclass(eq=False)
class _Entry:
    device: KernelDevice
    leased: bool = False
    lost: bool = False
    set_aside: bool = False
    memory_faults: int = 0  # in a row
    evaluations: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])

    @property
    def usable(self) -> bool:
        return not self.lost and not self.set_aside

    @property
    def state(self) -> DeviceState:
        if self.lost:
            return "lost"
        if self.set_aside:
            return "set_aside"
        return "leased" if self.leased else "free"


class DeviceTable:
    """Leases devices, each to one holder at a time.

    A device is *free* -> *leased* -> *free*. A GPU that its driver no longer lists is *lost* until the driver lists it
    again. A GPU is *set aside* until `reset` after ``memory_faults`` evaluations in a row that ended in a memory fault:
    its driver may be in a bad state. Lost devices and those set aside aren't leased. Cores are never set aside, since a
    process's faults end with it.
    """

    def __init__(
        self,
        cores: Sequence[KernelDevice],
        query: Callable[[], Sequence[KernelDevice] | None],
        on_event: OnDeviceEvent,
        memory_faults: int = 5,
    ) -> None:
        """``query``: lists the GPUs, None: no answer (blocking; `query_gpus`). GPUs precede the ``cores`` in the table,
        so that a GPU's position is its index."""
        self._cores = {device.name: _Entry(device) for device in cores}
        self._gpus: dict[str, _Entry] = {}
        self._query = query
        self._on_event = on_event
        self._memory_faults = memory_faults
        self._querying: asyncio.Task[Sequence[KernelDevice] | None] | None = None

    @classmethod
    def of_cores(cls, names: Sequence[str]) -> DeviceTable:
        """A table of sets of cores, without GPUs. Raises ConfigurationError for cores that this machine lacks."""
        return cls(core_devices(names), tuple, lambda name, detail: None)

    @property
    def _entries(self) -> dict[str, _Entry]:
        return {**self._gpus, **self._cores}

    def names(self, kinds: Iterable[DeviceKind] = ("gpu", "cpu")) -> tuple[str, ...]:
        """The devices of these kinds, lost ones too, in the table's order."""
        return tuple(name for name, entry in self._entries.items() if entry.device.kind in tuple(kinds))

    def kind(self, name: str) -> DeviceKind:
        """A device's kind. Raises KeyError."""
        return self._entries[name].device.kind

    def usable(self, kind: DeviceKind) -> int:
        """The number of devices of a kind that are neither lost nor set aside."""
        return sum(entry.usable for entry in self._entries.values() if entry.device.kind == kind)

    def lost(self, name: str) -> bool:
        """Whether the driver doesn't list the device. Raises KeyError."""
        return self._entries[name].lost

    async def refresh(self) -> None:
        """Query the driver for its GPUs; concurrent callers share one query."""
        if self._querying is None:
            self._querying = asyncio.create_task(asyncio.to_thread(self._query), name="devices")
            self._querying.add_done_callback(self._note_listed)
        await asyncio.wait({self._querying})

    def _note_listed(self, querying: asyncio.Task[Sequence[KernelDevice] | None]) -> None:
        self._querying = None
        devices = None if querying.cancelled() else querying.result()
        if devices is None:
            self._on_event("devices_unknown", "the GPUs' driver doesn't answer; they count as before")
            return
        device_by_name = {device.name: device for device in devices}
        for name, device in device_by_name.items():
            entry = self._gpus.setdefault(name, _Entry(device))
            if entry.lost:
                self._on_event("device_returned", name)
            entry.device, entry.lost = device, False
        for name in self._gpus.keys() - device_by_name.keys():
            if not self._gpus[name].lost:
                self._gpus[name].lost = True
                self._on_event("device_lost", f"{name}: its driver lists {', '.join(device_by_name) or 'none'}")

    @contextmanager
    def lease(self, kind: DeviceKind, preferred: str = "") -> Iterator[str]:
        """Lease a free device of a kind for the block, the ``preferred`` one if it is free, and yield its name. Raises
        DeviceUnavailable."""
        free = [name for name, entry in self._entries.items() if entry.device.kind == kind and entry.state == "free"]
        if not free:
            state_texts = [f"{name} is {self._entries[name].state}" for name in self.names((kind,))]
            raise DeviceUnavailable(f"no {kind} device is free: {', '.join(state_texts) or 'there is none'}")
        name = preferred if preferred in free else free[0]
        entry = self._entries[name]
        entry.leased = True
        try:
            yield name
        finally:
            entry.leased = False

    def note(self, name: str, evaluation: KernelEvaluation) -> None:
        """Count an evaluation on a device, and its fault; set the device aside when the limit is reached."""
        entry = self._entries[name]
        entry.evaluations += 1
        if evaluation.fault is not None:
            entry.faults[evaluation.fault] += 1
        is_memory_fault = entry.device.kind == "gpu" and evaluation.fault in MEMORY_FAULTS
        entry.memory_faults = entry.memory_faults + 1 if is_memory_fault else 0
        if entry.memory_faults >= self._memory_faults and not entry.set_aside:
            entry.set_aside = True
            self._on_event("device_set_aside", f"{name}: {entry.memory_faults} memory faults in a row; reset it")

    def reset(self, names: Iterable[str]) -> list[str]:
        """Take devices that were set aside into use again, clear their fault counts, and return all usable devices.
        Evaluations that run on them continue. Raises KeyError."""
        for name in names:
            entry = self._entries[name]
            entry.set_aside, entry.memory_faults = False, 0
            entry.faults.clear()
        return [name for name, entry in self._entries.items() if entry.usable]

    def describe(self) -> list[dict[str, Any]]:
        """The devices and their states, in one schema for cores and for all vendors' GPUs."""
        return [
            {
                "device_id": index,
                "device": name,
                "name": entry.device.model,
                **{key: getattr(entry.device, key) for key in _DESCRIBED},
                "state": entry.state,
                "available": entry.state == "free",
                "evaluations": entry.evaluations,
                "memory_faults_in_a_row": entry.memory_faults,
                "faults": dict(entry.faults),
            }
            for index, (name, entry) in enumerate(self._entries.items())
        ]
