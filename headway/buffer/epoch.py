"""The epoch of a run, taken and kept in ``RUN/epoch``: the file system's renames are the register's swaps.

The register is the name of one file: EPOCH-RENEWALS-HOLDER, with "-released" at its end when its holder has ended.
Renaming it is atomic on local and on network file systems, and fails when another name was there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from headway.control.epoch import EpochClaim, EpochLease, EpochRecord, successor
from headway.records.errors import ConfigurationError, EpochLost, RunLocked
from headway.runtime.clock import Clock

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOOKS = 20  # at a folder that shows no register, for it is being renamed


def _in_thread(renew: Callable[[], None]) -> None:
    """Renew where it keeps neither the loop waiting nor the process from ending: a network file system may hang."""
    threading.Thread(target=renew, name="epoch", daemon=True).start()


class EpochHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds an epoch: ``RUN/epoch/HOLDER.json``."""

    host: str
    pid: int
    boot: str  # id of its machine's last start
    place: int  # inode of the register's folder as it sees it: in a copied folder it is another
    orphan_s: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class EpochRegister:
    """The register that the orchestrators of a run share."""

    def __init__(self, run: Path) -> None:
        """Open the register of the run in folder ``run``, made if there is none. Raises ConfigurationError."""
        self.folder = run / "epoch"
        if self.folder.is_dir():
            return
        fresh = run / f".epoch.{secrets.token_hex(4)}.tmp"
        try:
            fresh.mkdir()
            (fresh / _name(EpochRecord())).touch()
            with contextlib.suppress(OSError):  # another was faster
                fresh.rename(self.folder)
        except OSError as error:
            raise ConfigurationError(f"run.directory: {run} can't be written: {error.strerror}") from None
        if fresh.exists():
            (fresh / _name(EpochRecord())).unlink()
            fresh.rmdir()

    def look(self) -> EpochRecord:
        """The present record. Raises OSError."""
        for _ in range(_LOOKS):
            found = [record for entry in os.listdir(self.folder) if (record := _record(entry)) is not None]
            if found:
                return max(found, key=lambda record: (record.epoch, record.renewals, record.released))
        raise FileNotFoundError(f"{self.folder} holds no register")

    def swap(self, expected: EpochRecord, wanted: EpochRecord) -> bool:
        """Replace ``expected`` by ``wanted``; False when the record is another by now. Raises OSError when that isn't
        known."""
        try:
            os.rename(self.folder / _name(expected), self.folder / _name(wanted))
        except FileNotFoundError:
            os.stat(self.folder)  # else the folder can't be reached
            return (self.folder / _name(wanted)).exists()  # a repeated request of a network file system
        return True

    def holder(self, name: str) -> EpochHolder | None:
        try:
            return msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=EpochHolder)
        except (OSError, msgspec.DecodeError):
            return None

    def register(self, name: str, orphan_s: float) -> None:
        """Write who ``name`` is, before it holds anything. Raises OSError."""
        place = os.stat(self.folder).st_ino
        this = EpochHolder(host=socket.gethostname(), pid=os.getpid(), boot=_boot(), place=place, orphan_s=orphan_s)
        (self.folder / f"{name}.json").write_bytes(msgspec.json.encode(this))


class HeldEpoch:
    """The epoch that this process holds."""

    def __init__(self, register: EpochRegister, lease: EpochLease, clock: Clock) -> None:
        self._register, self._lease, self._clock = register, lease, clock
        self._swapping = threading.Lock()

    @property
    def number(self) -> int:
        return self._lease.record.epoch

    def require(self) -> None:
        """Raise EpochLost unless this process may commit now."""
        if not self._lease.may_commit(self._clock.now()) and self._swapping.acquire(blocking=False):
            self._swapping.release()
            self.renew()  # this process may have been stopped for a while: then nobody else need have taken it
        if not self._lease.may_commit(self._clock.now()):
            raise EpochLost(self._cause())

    def renew(self) -> None:
        """Renew the lease if that is possible now."""
        with self._swapping, contextlib.suppress(OSError):
            started_s, record = self._clock.now(), self._lease.renewal()
            self._lease.renewed(self._register.swap(self._lease.record, record), record, started_s)

    def release(self) -> None:
        """End the epoch: the next one may be taken at once."""
        with self._swapping, contextlib.suppress(OSError):
            self._register.swap(self._lease.record, replace(self._lease.record, released=True))

    async def keep(self, start: Callable[[Callable[[], None]], None] = _in_thread) -> None:
        """Renew the lease again and again, each time by ``start(renew)``. Raises EpochLost."""
        while True:
            await self._clock.sleep(self._lease.renew_every_s)
            if not self._swapping.locked():
                start(self.renew)
                await self._clock.sleep(min(1.0, self._lease.renew_every_s / 2))
            if self._lease.lost or not self._lease.may_commit(self._clock.now()):
                raise EpochLost(self._cause())

    def _cause(self) -> str:
        what = f"epoch {self.number} of this run"
        if self._lease.lost:
            with contextlib.suppress(OSError):
                record = self._register.look()
                by = self._register.holder(record.holder) or "another process"
                return f"{what} has ended: {by} has taken epoch {record.epoch}; this process commits nothing more"
        return (
            f"{what} wasn't renewed in {self._register.folder} for {self._lease.orphan_s:g} s "
            "(cluster.disconnect_timeout_s): another process may have taken the next one, so nothing more is "
            "committed; continue with --resume"
        )


async def take_epoch(
    run: Path,
    orphan_s: float,
    clock: Clock,
    *,
    take_over: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> HeldEpoch:
    """Take the next epoch of the run in folder ``run``, whose lock this process holds: at once when the former holder
    released it or was a process of this machine (which the lock has outlived), else when it has not renewed it for its
    ``orphan_s``. ``take_over``: a person says that the former holder has ended. ``say`` receives why this waits.

    Raises RunLocked when the epoch is held, ConfigurationError when this folder is a copy, so that nobody can see here
    whether it is."""
    register, name = EpochRegister(run), secrets.token_hex(8)
    try:
        record = register.look()
        former = register.holder(record.holder)
        ended = take_over or (former is not None and former.boot == _boot() != "")  # "": any machine might be meant
        waited, claim = False, EpochClaim(former.orphan_s if former is not None else orphan_s)
        if not (ended or record.released) and former is not None and former.place != os.stat(register.folder).st_ino:
            raise ConfigurationError(
                f"{run} is a copy of a run that {former} held, and nothing here shows whether it still does: make sure "
                "that it has ended, then say --take-over"
            )
        while not ended and (decision := claim.decide(record, clock.now())) != "take":
            if decision == "refused":
                holder = register.holder(record.holder) or former or "another process"
                raise RunLocked(f"{run} is in use: {holder} renews epoch {record.epoch}")
            if not waited:
                holder = former or record.holder
                say(f"epoch {record.epoch} was held by {holder}: waiting {claim.wait_s:.0f} s for its end")
            waited = True
            await clock.sleep(min(1.0, claim.wait_s / 10))
            record = register.look()
        register.register(name, orphan_s)
        started_s, wanted = clock.now(), successor(record, name)
        if not register.swap(record, wanted):
            (register.folder / f"{name}.json").unlink()
            raise RunLocked(f"{run}: another process has taken epoch {register.look().epoch} meanwhile")
        for other in register.folder.glob("*.json"):
            if other.stem not in (name, register.look().holder):
                other.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"run.directory: {register.folder}: {error.strerror or error}") from None
    return HeldEpoch(register, EpochLease(record=wanted, orphan_s=orphan_s, held_from_s=started_s), clock)


@asynccontextmanager
async def keeping(epoch: HeldEpoch) -> AsyncIterator[HeldEpoch]:
    """Keep ``epoch`` during the block, and release it then. Raises EpochLost out of the block when it is lost."""
    inside = asyncio.current_task()
    assert inside is not None
    lost: list[EpochLost] = []

    async def keep() -> None:
        try:
            await epoch.keep()
        except EpochLost as error:
            lost.append(error)
            inside.cancel()

    task = asyncio.create_task(keep(), name="epoch")
    try:
        yield epoch
    except asyncio.CancelledError:
        if lost:
            raise lost[0] from None
        raise
    finally:
        task.cancel()
        epoch.release()


def _name(record: EpochRecord) -> str:
    return f"{record.epoch}-{record.renewals}-{record.holder}" + ("-released" if record.released else "")


def _record(name: str) -> EpochRecord | None:
    parts = name.split("-")
    if len(parts) not in (3, 4) or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return EpochRecord(epoch=int(parts[0]), renewals=int(parts[1]), holder=parts[2], released=len(parts) == 4)


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
