"""Compares this machine's limits with the needs of all sandboxes of a run."""

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

LEAST_BYTES = 6 * MIB  # memory of a sandbox that runs a small command
LEAST_PROCESSES = 4  # of a sandbox: the first process, a shell and its command, and a share of the zygote's spares
SPARE = 32  # processes and namespaces left for the zygote and for other users
NAMESPACES = ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup")


class MachineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of this machine for all sandboxes together; None: not known."""

    memory_bytes: int | None = None  # available now
    processes: int | None = None
    processes_by: str = ""  # the binding limit, as the way to raise it
    namespaces: int | None = None  # of the kind with the lowest limit
    namespaces_by: str = ""


def read_limits(proc: Path = Path("/proc")) -> MachineLimits:
    """Read this machine's limits, as they apply to this user."""
    limit_by_remedy = _process_limits(proc)
    processes_by = min(limit_by_remedy, key=lambda name: limit_by_remedy[name], default="")
    limits = {f"user.max_{kind}_namespaces": _number(proc / f"sys/user/max_{kind}_namespaces") for kind in NAMESPACES}
    known_limits = {name: limit for name, limit in limits.items() if limit is not None}
    lowest_key = min(known_limits, key=lambda name: known_limits[name], default="")
    return MachineLimits(
        memory_bytes=_available_bytes(proc),
        processes=limit_by_remedy.get(processes_by),
        processes_by=processes_by,
        namespaces=known_limits.get(lowest_key),
        namespaces_by=lowest_key,
    )


def _process_limits(proc: Path) -> dict[str, int]:
    """Return all limits on processes that apply to sandboxes: the way to raise it -> limit."""
    limits: dict[str, int | None] = {
        "sysctl -w kernel.pid_max": _number(proc / "sys/kernel/pid_max"),
        "sysctl -w kernel.threads-max": _number(proc / "sys/kernel/threads-max"),
    }
    if os.geteuid() != 0:  # under root the zygote removes this limit
        hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        limits["ulimit -u"] = None if hard_limit == resource.RLIM_INFINITY else hard_limit
    for name, group in cgroups.mounted().items():
        if name in ("pids", cgroups.V2):
            limits[f"the control group {group} (pids.max)"] = _number(group / "pids.max")
    return {name: limit for name, limit in limits.items() if limit is not None}


def pids_in_use(proc: Path = Path("/proc")) -> str:
    """Describe the limit of processes that is nearest to being reached, with the number in use: "pids 512 of 512, the
    control group /sys/fs/cgroup/pids/x"; "" if none is known."""
    tasks = int((proc / "loadavg").read_text().split()[3].partition("/")[2])
    usages: list[tuple[int, int, str]] = []
    for name in ("pid_max", "threads-max"):
        if limit := _number(proc / f"sys/kernel/{name}"):
            usages.append((tasks, limit, f"sysctl kernel.{name}"))
    for name, innermost_group in cgroups.mounted().items():
        for group in (innermost_group, *innermost_group.parents) if name in ("pids", cgroups.V2) else ():
            used, limit = _number(group / "pids.current"), _number(group / "pids.max")
            if used is not None and limit is not None:
                usages.append((used, limit, f"the control group {group}"))
    used, limit, limit_name = max(usages, key=lambda usage: usage[0] / max(1, usage[1]), default=(0, 0, ""))
    return f"pids {used} of {limit}, {limit_name}" if limit_name else ""


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _available_bytes(proc: Path) -> int | None:
    """Return the available memory in bytes: the machine's, or this process's control group's if that is less."""
    byte_limits: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                byte_limits.append(int(line.split()[1]) * 1024)
    for name, limit_file, usage_file in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (cgroups.V2, "memory.max", "memory.current"),
    ):
        group = cgroups.mounted().get(name)
        limit = _number(group / limit_file) if group is not None else None
        if group is not None and limit is not None:
            byte_limits.append(max(0, limit - (_number(group / usage_file) or 0)))
    return min(byte_limits, default=None)


def machine_findings(machine: MachineLimits, spec: SandboxSpec, needed: int) -> Iterator[SandboxFinding]:
    """Yield findings on limits too small for ``needed`` sandboxes at once. Fatal: too small even for idle sandboxes."""
    fewer_text = "a smaller sandbox.live (or queue.max_concurrent_rollouts)"
    memory, max_processes, max_namespaces = machine.memory_bytes, machine.processes, machine.namespaces
    limits = spec.limits
    if memory is not None and needed * LEAST_BYTES > memory:
        text = f"{needed} sandboxes need {needed * LEAST_BYTES // MIB} MiB at least, and {memory // MIB} MiB are left"
        yield SandboxFinding(message=text, fix=fewer_text)
    elif memory is not None and needed * limits.memory_bytes > memory:
        text = f"{needed} sandboxes may take {needed * limits.memory_bytes // MIB} MiB together, and {memory // MIB}"
        text += " MiB are left: if they all did, the kernel would kill processes of the run"
        yield SandboxFinding(message=text, fix=f"a smaller sandbox.limits.memory_bytes, or {fewer_text}", fatal=False)
    needed_processes = needed * LEAST_PROCESSES + SPARE
    if max_processes is not None and needed_processes > max_processes:
        text = f"{needed} sandboxes need {needed_processes} processes at least; the limit is {max_processes}"
        yield SandboxFinding(message=text, fix=f"raise it: {machine.processes_by}; or {fewer_text}")
    elif max_processes is not None and needed * limits.processes + SPARE > max_processes:
        text = f"{needed} sandboxes may have {needed * limits.processes} processes together, and the limit is"
        text += f" {max_processes}: if they did, no one could start another"
        fix = f"a smaller sandbox.limits.processes, or raise it: {machine.processes_by}"
        yield SandboxFinding(message=text, fix=fix, fatal=False)
    if max_namespaces is not None and needed + SPARE > max_namespaces:
        key = machine.namespaces_by
        text = f"{needed} sandboxes need {needed + SPARE} namespaces of each kind; {key} = {max_namespaces}"
        yield SandboxFinding(message=text, fix=f"as root: sysctl -w {key}={2 * needed + 1000}; or {fewer_text}")


def no_space(folder: Path, least_bytes: int) -> str:
    """Return the reason why ``folder`` can't be written to; "": it can. Tries a write, since free space doesn't show
    quotas."""
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing_folder).free
    if free_bytes < least_bytes:
        return (
            f"{folder}: {free_bytes // MIB} MiB are free, and {-(-least_bytes // MIB)} MiB are needed: free some,"
            " or name a folder on another disk"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=existing_folder, prefix=".preflight.") as probe_file:
            probe_file.write(bytes(4096))
            probe_file.flush()
    except OSError as error:
        return f"{folder} can't be written to: {error.strerror}: free space there (or inodes), or name another folder"
    return ""
