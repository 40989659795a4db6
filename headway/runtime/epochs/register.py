"""Takes and renews the epoch of a run in ``RUN/epoch``, where a file's rename is the register's compare-and-swap.

The register is the name of one file: EPOCH-RENEWALS-HOLDER, with "-released" at its end when its holder has ended.
Renaming the file is atomic on local and on network file systems, and fails when its name has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from headway.records.errors import ConfigurationError, EpochLost, RunLocked
from headway.runtime.clock import Clock
from headway.runtime.epochs.lease import EpochClaim, EpochLease, EpochRecord, successor

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_READ_ATTEMPTS = 20  # of a folder in which the register is missing because it is being renamed


def _in_thread(renew: Callable[[], None]) -> None:
    """Renew in a daemon thread: a network file system that hangs then blocks neither the event loop nor the exit."""
    threading.Thread(target=renew, name="epoch", daemon=True).start()


class EpochHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds an epoch, stored as ``RUN/epoch/HOLDER.json``."""

    host: str
    pid: int
    boot: str  # id of its machine's last start
    inode: int  # inode of the register's folder when it was written: a copied folder has another
    orphan_s: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class EpochRegister:
    """The register that the orchestrators of a run share."""

    def __init__(self, run: Path) -> None:
        """Open the register of the run in folder ``run``, or create it. Raises ConfigurationError."""
        self.folder = run / "epoch"
        if self.folder.is_dir():
            return
        new_folder = run / f".epoch.{secrets.token_hex(4)}.tmp"
        try:
            new_folder.mkdir()
            (new_folder / _name(EpochRecord())).touch()
            with contextlib.suppress(OSError):  # another was faster
                new_folder.rename(self.folder)
        except OSError as error:
            raise ConfigurationError(f"run.directory: {run} can't be written: {error.strerror}") from None
        if new_folder.exists():
            (new_folder / _name(EpochRecord())).unlink()
            new_folder.rmdir()

    def read(self) -> EpochRecord:
        """Return the register's current record. Raises OSError."""
        for _ in range(_READ_ATTEMPTS):
            records = [record for file_name in os.listdir(self.folder) if (record := _record(file_name)) is not None]
            if records:
                return max(records, key=lambda record: (record.epoch, record.renewals, record.released))
        raise FileNotFoundError(f"{self.folder} holds no register")

    def swap(self, expected: EpochRecord, replacement: EpochRecord) -> bool:
        """Replace ``expected`` by ``replacement``; return False when the record has changed meanwhile.

        Raises OSError when the outcome is unknown."""
        try:
            os.rename(self.folder / _name(expected), self.folder / _name(replacement))
        except FileNotFoundError:
            os.stat(self.folder)  # else the folder can't be reached
            return (self.folder / _name(replacement)).exists()  # a repeated request of a network file system
        return True

    def holder(self, name: str) -> EpochHolder | None:
        try:
            return msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=EpochHolder)
        except (OSError, msgspec.DecodeError):
            return None

    def register(self, name: str, orphan_s: float) -> None:
        """Write the identity of holder ``name`` before it takes an epoch. Raises OSError."""
        inode = os.stat(self.folder).st_ino
        holder = EpochHolder(host=socket.gethostname(), pid=os.getpid(), boot=_boot(), inode=inode, orphan_s=orphan_s)
        (self.folder / f"{name}.json").write_bytes(msgspec.json.encode(holder))


class HeldEpoch:
    """The epoch that this process holds, and its lease."""

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
            self.renew()  # this process may have been stopped for a while, and no other has taken the epoch meanwhile
        if not self._lease.may_commit(self._clock.now()):
            raise EpochLost(self._cause())

    def renew(self) -> None:
        """Try to renew the lease once."""
        with self._swapping, contextlib.suppress(OSError):
            started_s, record = self._clock.now(), self._lease.renewal()
            self._lease.renewed(self._register.swap(self._lease.record, record), record, started_s)

    def release(self) -> None:
        """End the epoch, so that the next one may be taken at once."""
        with self._swapping, contextlib.suppress(OSError):
            self._register.swap(self._lease.record, replace(self._lease.record, released=True))

    async def keep(self, start: Callable[[Callable[[], None]], None] = _in_thread) -> None:
        """Renew the lease periodically, each time by ``start(renew)``. Raises EpochLost when it is lost or expires."""
        while True:
            await self._clock.sleep(self._lease.renew_every_s)
            if not self._swapping.locked():
                start(self.renew)
                await self._clock.sleep(min(1.0, self._lease.renew_every_s / 2))
            if self._lease.lost or not self._lease.may_commit(self._clock.now()):
                raise EpochLost(self._cause())

    def _cause(self) -> str:
        label = f"epoch {self.number} of this run"
        if self._lease.lost:
            with contextlib.suppress(OSError):
                record = self._register.read()
                holder = self._register.holder(record.holder) or "another process"
                return f"{label} has ended: {holder} has taken epoch {record.epoch}; this process commits nothing more"
        return (
            f"{label} wasn't renewed in {self._register.folder} for {self._lease.orphan_s:g} s "
            "(cluster.disconnect_timeout_s): another process may have taken the next one, so nothing more is "
            "committed; continue with --resume"
        )


async def take_epoch(
    run: Path,
    orphan_s: float,
    clock: Clock,
    *,
    take_over: bool = False,
    report: Callable[[str], object] = partial(print, file=sys.stderr),
) -> HeldEpoch:
    """Take the next epoch of the run in folder ``run``, whose lock this process holds.

    It is taken at once when the former holder released it or was a process of this machine (this process holds the
    lock, so that one has ended), else when the former holder has not renewed it for its ``orphan_s``. ``take_over``:
    the user states that the former holder has ended. ``report`` receives the reason for a wait, by default stderr.

    Raises RunLocked when the epoch is held, ConfigurationError when this folder is a copy, which doesn't show whether
    the epoch is held."""
    register, holder_id = EpochRegister(run), secrets.token_hex(8)
    try:
        record = register.read()
        former = register.holder(record.holder)
        is_ended = take_over or (former is not None and former.boot == _boot() != "")  # "": any machine might be meant
        has_waited, claim = False, EpochClaim(former.orphan_s if former is not None else orphan_s)
        if not (is_ended or record.released) and former is not None and former.inode != os.stat(register.folder).st_ino:
            raise ConfigurationError(
                f"{run} is a copy of a run that {former} held, and nothing here shows whether it still does: make sure "
                "that it has ended, then pass --take-over"
            )
        while not is_ended and (decision := claim.decide(record, clock.now())) != "take":
            if decision == "refused":
                holder = register.holder(record.holder) or former or "another process"
                raise RunLocked(f"{run} is in use: {holder} renews epoch {record.epoch}")
            if not has_waited:
                holder = former or record.holder
                report(f"epoch {record.epoch} was held by {holder}: waiting {claim.wait_s:.0f} s for its end")
            has_waited = True
            await clock.sleep(min(1.0, claim.wait_s / 10))
            record = register.read()
        register.register(holder_id, orphan_s)
        started_s, next_record = clock.now(), successor(record, holder_id)
        if not register.swap(record, next_record):
            (register.folder / f"{holder_id}.json").unlink()
            raise RunLocked(f"{run}: another process has taken epoch {register.read().epoch} since")
        for holder_file in register.folder.glob("*.json"):
            if holder_file.stem not in (holder_id, register.read().holder):
                holder_file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"run.directory: {register.folder}: {error.strerror or error}") from None
    return HeldEpoch(register, EpochLease(record=next_record, orphan_s=orphan_s, held_from_s=started_s), clock)


@asynccontextmanager
async def epoch_renewal(epoch: HeldEpoch) -> AsyncIterator[HeldEpoch]:
    """Renew ``epoch`` during the block and release it at its end. Raises EpochLost from the block when it is lost."""
    block_task = asyncio.current_task()
    assert block_task is not None
    loss_errors: list[EpochLost] = []

    async def keep() -> None:
        try:
            await epoch.keep()
        except EpochLost as error:
            loss_errors.append(error)
            block_task.cancel()

    renewal_task = asyncio.create_task(keep(), name="epoch")
    try:
        yield epoch
    except asyncio.CancelledError:
        if loss_errors:
            raise loss_errors[0] from None
        raise
    finally:
        renewal_task.cancel()
        epoch.release()


def _name(record: EpochRecord) -> str:
    return f"{record.epoch}-{record.renewals}-{record.holder}" + ("-released" if record.released else "")


def _record(name: str) -> EpochRecord | None:
    fields = name.split("-")
    if len(fields) not in (3, 4) or not (fields[0].isdecimal() and fields[1].isdecimal()):
        return None
    return EpochRecord(epoch=int(fields[0]), renewals=int(fields[1]), holder=fields[2], released=len(fields) == 4)


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
