"""This machine's limits against what all sandboxes of a run need together."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.records.sandbox import MIB, SandboxFinding, SandboxSpec
from headway.sandbox.linux import cgroups

LEAST_BYTES = 6 * MIB  # of one that runs a small command
LEAST_PROCESSES = 4  # its first one, a shell and what that runs; the zygote's spares go along
SPARE = 32  # of anything that is counted: for the zygote and everybody else
NAMESPACES = ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup")


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's limits for all sandboxes together; None: not known."""

    memory_bytes: int | None = None  # available now
    processes: int | None = None
    processes_by: str = ""  # the limit that binds, as the way to raise it
    namespaces: int | None = None  # of the kind there are fewest of
    namespaces_by: str = ""


def look(proc: Path = Path("/proc")) -> MachineLimits:
    """Read this machine's limits, as they apply to this user."""
    counts = _process_limits(proc)
    processes_by = min(counts, key=lambda name: counts[name], default="")
    allowed = {f"user.max_{kind}_namespaces": _number(proc / f"sys/user/max_{kind}_namespaces") for kind in NAMESPACES}
    known = {name: number for name, number in allowed.items() if number is not None}
    fewest = min(known, key=lambda name: known[name], default="")
    return MachineLimits(
        memory_bytes=_available_bytes(proc),
        processes=counts.get(processes_by),
        processes_by=processes_by,
        namespaces=known.get(fewest),
        namespaces_by=fewest,
    )


def _process_limits(proc: Path) -> dict[str, int]:
    """Every limit on processes that applies to sandboxes, keyed by the way to raise it."""
    found: dict[str, int | None] = {
        "sysctl -w kernel.pid_max": _number(proc / "sys/kernel/pid_max"),
        "sysctl -w kernel.threads-max": _number(proc / "sys/kernel/threads-max"),
    }
    if os.geteuid() != 0:  # the zygote takes this limit away where it may
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        found["ulimit -u"] = None if hard == resource.RLIM_INFINITY else hard
    for name, place in cgroups.mounted().items():
        if name in ("pids", cgroups.V2):
            found[f"the control group {place} (pids.max)"] = _number(place / "pids.max")
    return {name: number for name, number in found.items() if number is not None}


def pids_in_use(proc: Path = Path("/proc")) -> str:
    """ "pids 512 of 512, the control group /sys/fs/cgroup/pids/x": the limit of processes that is nearest to being
    reached, with what is in use of it; "" where none is known."""
    tasks = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    found: list[tuple[int, int, str]] = []
    for name in ("pid_max", "threads-max"):
        if limit := _number(proc / f"sys/kernel/{name}"):
            found.append((tasks, limit, f"sysctl kernel.{name}"))
    for name, place in cgroups.mounted().items():
        for group in (place, *place.parents) if name in ("pids", cgroups.V2) else ():
            used, limit = _number(group / "pids.current"), _number(group / "pids.max")
            if used is not None and limit is not None:
                found.append((used, limit, f"the control group {group}"))
    used, limit, by = max(found, key=lambda one: one[0] / max(1, one[1]), default=(0, 0, ""))
    return f"pids {used} of {limit}, {by}" if by else ""


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _available_bytes(proc: Path) -> int | None:
    """Available memory, bytes: of the machine, or of this process's control group where that has less."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for name, most, used in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (cgroups.V2, "memory.max", "memory.current"),
    ):
        place = cgroups.mounted().get(name)
        limit = _number(place / most) if place is not None else None
        if place is not None and limit is not None:
            found.append(max(0, limit - (_number(place / used) or 0)))
    return min(found, default=None)


def machine_findings(limits: MachineLimits, spec: SandboxSpec, needed: int) -> Iterator[SandboxFinding]:
    """Findings on limits too small for ``needed`` sandboxes at once. Fatal: too small even for idle ones."""
    fewer = "a smaller sandbox.live (or queue.max_concurrent_rollouts)"
    memory, processes, namespaces = limits.memory_bytes, limits.processes, limits.namespaces
    own = spec.limits
    if memory is not None and needed * LEAST_BYTES > memory:
        what = f"{needed} sandboxes need {needed * LEAST_BYTES // MIB} MiB at least, and {memory // MIB} MiB are left"
        yield SandboxFinding(what=what, fix=fewer)
    elif memory is not None and needed * own.memory_bytes > memory:
        what = f"{needed} sandboxes may take {needed * own.memory_bytes // MIB} MiB together, and {memory // MIB} MiB"
        what += " are left: if they all did, the kernel would kill processes of the run"
        yield SandboxFinding(what=what, fix=f"a smaller sandbox.limits.memory_bytes, or {fewer}", fatal=False)
    least = needed * LEAST_PROCESSES + SPARE
    if processes is not None and least > processes:
        what = f"{needed} sandboxes need {least} processes at least; the limit is {processes}"
        yield SandboxFinding(what=what, fix=f"raise it: {limits.processes_by}; or {fewer}")
    elif processes is not None and needed * own.processes + SPARE > processes:
        what = f"{needed} sandboxes may have {needed * own.processes} processes together, and the limit is {processes}"
        what += ": if they did, nobody could start another"
        fix = f"a smaller sandbox.limits.processes, or raise it: {limits.processes_by}"
        yield SandboxFinding(what=what, fix=fix, fatal=False)
    if namespaces is not None and needed + SPARE > namespaces:
        key = limits.namespaces_by
        what = f"{needed} sandboxes need {needed + SPARE} namespaces of each kind; {key} = {namespaces}"
        yield SandboxFinding(what=what, fix=f"as root: sysctl -w {key}={2 * needed + 1000}; or {fewer}")


def no_room(folder: Path, least_bytes: int) -> str:
    """Describe why ``folder`` can't be written to; "": it can. Tries a write, since quotas don't show in free space."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < least_bytes:
        return (
            f"{folder}: {free_bytes // MIB} MiB are free, and {-(-least_bytes // MIB)} MiB are needed: make room there,"
            " or name a folder on another disk"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".preflight.") as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return f"{folder} can't be written to: {error.strerror}: make room there (or inodes), or name another folder"
    return ""
