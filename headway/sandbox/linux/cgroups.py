"""Limits over all processes of a sandbox together, by the kernel's control groups, version 1 or 2.

Standard library alone.

`find_parents` (the owner's side) finds, per controller, a directory where groups may be made, and makes one for the
owner's sandboxes in it. Each sandbox's first process then makes its own below and moves itself in: moving waits for
the kernel for some 10 ms, so it happens ahead of need, and never in the process that serves all sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from headway.sandbox.linux import kernel

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
KEPT_PROCESSES = 5  # reserved for init and its children beyond the commands' limit (RLIMIT_NPROC)
SHARED = "headway-sandboxes"  # below it a group per owner, below those a group per sandbox
MAKER = "zygote"  # the group of the process that makes sandboxes
OF_SWAP = ("memory.memsw.limit_in_bytes", "memory.swap.max")  # absent where the kernel counts no swap
V2 = "v2"  # stands for the one hierarchy that has all controllers
KILLS = {"memory": "memory.oom_control", V2: "memory.events"}  # the file with the number of kills for memory

Parents = dict[str, str]  # controller, or V2 -> directory of the owner's groups


def mounted() -> dict[str, Path]:
    """Controller (or V2) -> this process's own group in its hierarchy."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        own.update({name: path for name in names.split(",")} if number != "0" else {V2: path})
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split()[3:5]
        if kind == "cgroup2" and V2 in own:
            found.setdefault(V2, _below(point, root, own[V2]))
        elif kind == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS) & own.keys():
                found.setdefault(name, _below(point, root, own[name]))
    return found


def _below(point: str, root: str, own: str) -> Path:
    """Path of a group in the mounted hierarchy: a container may mount only its own part of it."""
    inside = own[len(root) :] if root != "/" and own.startswith(root) else own
    return Path(point + "/" + inside.strip("/"))


def find_parents(owner: str, uid: int, *, places: dict[str, Path] | None = None) -> tuple[Parents, tuple[str, ...]]:
    """Make the owner's groups where that is allowed, such that ``uid`` may make others in them. Returns them, and a
    line with the remedy for each missing controller."""
    places = mounted() if places is None else places
    parents: Parents = {}
    missing: list[str] = []
    if V2 in places and set(CONTROLLERS) <= set(_words(places[V2] / "cgroup.controllers")):
        try:
            return {V2: str(_make(places[V2], owner, uid, v2=True))}, ()
        except OSError as error:
            why = f"{places[V2]}: {error.strerror}; delegate the group (systemd: Delegate=yes)"
            return {}, tuple(f"no limit of {name}: {why}" for name in CONTROLLERS)
    for name in CONTROLLERS:
        if name not in places:
            missing.append(f"no limit of {name}: its controller isn't mounted; mount it, or run where it is")
            continue
        try:
            parents[name] = str(_make(places[name], owner, uid, v2=False))
        except OSError as error:
            remedy = f"once, as root: mkdir {places[name] / SHARED} && chown {uid} {places[name] / SHARED}"
            missing.append(f"no limit of {name}: {places[name]}: {error.strerror}; {remedy}")
    return parents, tuple(missing)


def _make(place: Path, owner: str, uid: int, *, v2: bool) -> Path:
    """Make the owner's group. Version 2 gives controllers only to children of a group without processes."""
    shared, made = place / SHARED, place / SHARED / owner
    if v2:
        _enable(place)
    with contextlib.suppress(FileExistsError):
        shared.mkdir()
        os.chown(shared, uid, -1)
    if v2:
        _enable(shared)
    made.mkdir()
    os.chown(made, uid, -1)
    if v2:
        _enable(made)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            os.chown(made / name, uid, -1)
    return made


def _enable(group: Path) -> None:
    if not set(CONTROLLERS) <= set(_words(group / "cgroup.subtree_control")):
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text().split()
    return []


def admit_maker(parents: Parents) -> tuple[Parents, str]:
    """Move this process into the owner's groups: version 2 lets a user move processes only within groups of his own.
    Returns the usable groups, and the reason if that fails."""
    if V2 not in parents:
        return parents, ""
    try:
        join(parents, MAKER)
    except OSError as error:
        return {}, f"{error.strerror}; delegate the group that this runs in (systemd: Delegate=yes)"
    return parents, ""


def join(parents: Parents, slot: str) -> None:
    """Make the groups of a sandbox, and move this process into them."""
    for parent in parents.values():
        os.mkdir(f"{parent}/{slot}")
        kernel.put(f"{parent}/{slot}/cgroup.procs", "0")


def limit(parents: Parents, slot: str, *, memory_bytes: int, processes: int, cpus: float) -> None:
    """Set the limits of a sandbox's groups."""
    quota, most = max(1000, round(cpus * PERIOD_US)), processes + KEPT_PROCESSES
    files = {
        "memory": {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": most},
        "cpu": {"cpu.cfs_quota_us": quota},
        V2: {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": most, "cpu.max": f"{quota} {PERIOD_US}"},
    }
    for controller, parent in parents.items():
        for name, value in files[controller].items():
            file = f"{parent}/{slot}/{name}"
            if name not in OF_SWAP or os.path.exists(file):
                kernel.put(file, str(value))


def open_kill_count(parents: Parents, slot: str) -> int:
    """A descriptor of the file with the number of kills for memory; -1: memory isn't limited."""
    for controller, name in KILLS.items():
        if controller in parents:
            return os.open(f"{parents[controller]}/{slot}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def read_kill_count(descriptor: int) -> int:
    """Processes killed for memory so far."""
    if descriptor < 0:
        return 0
    for line in os.pread(descriptor, 4096, 0).decode().splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def kill_count(parents: Parents, slot: str) -> int:
    try:
        descriptor = open_kill_count(parents, slot)
    except OSError:
        return 0
    try:
        return read_kill_count(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def remove(parents: Parents, slot: str) -> bool:
    """Remove a sandbox's groups. False: a process in them still runs."""
    gone = True
    for parent in parents.values():
        try:
            os.rmdir(f"{parent}/{slot}")
        except FileNotFoundError:
            continue
        except OSError:
            gone = False
    return gone


def clear(owner_group: Path, *, patience_s: float = 5.0) -> bool:
    """Kill all processes below an owner's group, and remove it. False: that took longer than ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        for file in owner_group.glob("**/cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):
                for pid in file.read_text().split():
                    if int(pid) > 0:  # 0: a process that can't be named here; to kill(2) it is one's own group
                        os.kill(int(pid), signal.SIGKILL)
        for folder in sorted((f for f in owner_group.glob("**") if f.is_dir()), key=lambda f: -len(f.parts)):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not owner_group.exists():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
