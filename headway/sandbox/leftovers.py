"""Records on disk which process owns which sandbox, and removes dead owners' resources.

`STATE/owner-PID-START-N-MACHINE/` belongs to the process PID that was started at START (in the kernel's ticks since
boot, so that a reused process id isn't mistaken for it). MACHINE names the boot and the PID namespace in which these
numbers are valid, and the machine if it can be identified. Owners of an earlier boot of this machine are dead. Owners
on other machines are unknown and left alone. The folder has `owner.json`, `records/ID.json` for each sandbox, and the
layers of its sandboxes; a sandbox's record is written before the sandbox is made. The owner's control groups have the
folder's name. The owner's zygote removes all of these. If the zygote was killed too, `reap` removes them: every backend
calls it at its start and, during a run, periodically (`reaper.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.records.sandbox_statistics import Reaped
from headway.sandbox.linux import cgroups

OWNER = re.compile(r"owner-(\d+)-(\d+)(?:-\d+)?(?:-([0-9a-f-]{36})-(\d+)(?:-([0-9a-f]{16}))?)?")


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of an owner process, and of the zygote that makes its sandboxes."""

    pid: int
    started: int  # ticks since boot
    run: str = ""
    zygote_pid: int = 0
    zygote_started: int = 0
    cgroups: dict[str, str] = {}


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a sandbox, written before the sandbox is made and removed after its end."""

    id: str
    backend: str = "local"
    run: str
    labels: dict[str, str] = {}  # the rollout's among them
    owner_pid: int
    owner_started: int
    ttl_s: float
    created_s: float  # seconds since the epoch


def default_state() -> Path:
    """Return the folder of this user's owner records."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run/headway-sandboxes")
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_folder and os.access(runtime_folder, os.W_OK):
        return Path(runtime_folder, "headway-sandboxes")
    return Path(tempfile.gettempdir(), f"headway-sandboxes-{os.geteuid()}")


def started(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot; None: it doesn't exist, or has ended."""
    try:
        stat_text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat_text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Return the scope in which a process id is valid: this boot of this machine, and its PID namespace."""
    return f"{boot_id()}-{os.stat('/proc/self/ns/pid').st_ino}"


def machine_id() -> str:
    """Return an id of this machine that is stable across boots; "": it can't be identified. Includes the host name,
    since copies of one disk image may share the system's machine id."""
    try:
        installation_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""
    if not re.fullmatch(r"[0-9a-f]{32}", installation_id):
        return ""  # not set yet
    return hashlib.sha256(f"{installation_id} {os.uname().nodename}".encode()).hexdigest()[:16]


def owner_name(pid: int, count: int) -> str:
    return "-".join(filter(None, (f"owner-{pid}-{started(pid)}-{count}-{machine()}", machine_id())))


def is_dead(name: str) -> bool | None:
    """Return whether the owner of that name is dead; None: not an owner's name, or its machine is unknown."""
    match = OWNER.fullmatch(name)
    if match is None:
        return None
    pid_text, start_text, its_boot, namespace, its_installation = match.groups()
    if its_boot is None or f"{its_boot}-{namespace}" == machine():
        return started(int(pid_text)) != int(start_text)
    return True if its_boot != boot_id() and its_installation and its_installation == machine_id() else None


def write(folder: Path, name: str, record: msgspec.Struct) -> None:
    """Write a record as JSON, atomically, and never through a link that another user may have put there."""
    temporary_path = folder / f".{name}.incoming"
    descriptor = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
        os.rename(temporary_path, folder / name)
    except OSError:
        temporary_path.unlink(missing_ok=True)  # the disk is full
        raise


def owners(state: Path) -> Iterator[tuple[Path, bool]]:
    """Yield all owners' directories, each with whether the owner is or may be alive (known for this machine only)."""
    with contextlib.suppress(FileNotFoundError):
        for folder in sorted(state.iterdir()):
            if OWNER.fullmatch(folder.name):
                yield folder, not is_dead(folder.name)


def records(state: Path) -> Iterator[tuple[SandboxRecord, bool]]:
    """Yield all recorded sandboxes, each with whether its owner is or may be alive."""
    for folder, is_alive in owners(state):
        for record_file in sorted(folder.glob("records/*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                yield msgspec.json.decode(record_file.read_bytes(), type=SandboxRecord), is_alive


def reap(state: Path) -> list[Reaped]:
    """Remove dead owners' processes, control groups and directories."""
    return [clear(folder) for folder, is_alive in owners(state) if not is_alive]


def clear(folder: Path) -> Reaped:
    """Remove all resources of an owner that is dead or is this process. If a process can't be ended, the directory
    stays, so that the next `reap` finds it."""
    sandbox_count = len(list(folder.glob("records/*.json")))
    is_stuck = False
    groups = {group / cgroups.SHARED / folder.name for group in cgroups.mounted().values()}  # may not be recorded yet
    with contextlib.suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode((folder / "owner.json").read_bytes(), type=OwnerRecord)
        owner = OWNER.fullmatch(folder.name)
        is_same_boot = owner is not None and owner[3] in (None, boot_id())  # else its ids may be other processes' now
        if is_same_boot and record.zygote_pid and started(record.zygote_pid) == record.zygote_started:
            with contextlib.suppress(OSError):
                os.kill(record.zygote_pid, signal.SIGKILL)  # the kernel kills its sandboxes with it
        groups |= {Path(group) for group in record.cgroups.values()}
    for group in groups:
        if group.name == folder.name:  # a record may have been altered: only groups named after the owner
            is_stuck |= not cgroups.clear(group)
    if not is_stuck:
        shutil.rmtree(folder, ignore_errors=True)
    return Reaped(owner=folder.name, sandboxes=sandbox_count, stuck=is_stuck or folder.exists())
