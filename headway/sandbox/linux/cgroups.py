"""Limits all processes of a sandbox together, by the kernel's control groups, version 1 or 2.

Standard library alone.

`find_parents` runs in the owner: it finds, per controller, a directory where groups may be made, and makes a group for
the owner's sandboxes in it. Each sandbox's first process then makes a group below that and moves itself in. The move
waits about 10 ms for the kernel, so spares do it before there is a request, and the zygote never does.
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
SHARED = "headway-sandboxes"  # parent of a group per owner, which is the parent of a group per sandbox
ZYGOTE_GROUP = "zygote"  # the group of the process that makes sandboxes
SWAP_FILES = ("memory.memsw.limit_in_bytes", "memory.swap.max")  # absent where the kernel counts no swap
V2 = "v2"  # the key of version 2's single hierarchy, which has all controllers
KILLS = {"memory": "memory.oom_control", V2: "memory.events"}  # the file with the number of kills for memory

Parents = dict[str, str]  # controller, or V2 -> directory of the owner's groups


def mounted() -> dict[str, Path]:
    """Return controller (or V2) -> this process's group in that hierarchy."""
    path_by_controller: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy_number, names, path = line.split(":", 2)
        path_by_controller.update({name: path for name in names.split(",")} if hierarchy_number != "0" else {V2: path})
    group_by_controller: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount_fields, _, filesystem_text = line.partition(" - ")
        filesystem_type, _, options = filesystem_text.split(" ", 2)
        root, mount_point = mount_fields.split()[3:5]
        if filesystem_type == "cgroup2" and V2 in path_by_controller:
            group_by_controller.setdefault(V2, _below(mount_point, root, path_by_controller[V2]))
        elif filesystem_type == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS) & path_by_controller.keys():
                group_by_controller.setdefault(name, _below(mount_point, root, path_by_controller[name]))
    return group_by_controller


def _below(point: str, root: str, group: str) -> Path:
    """Return the path of a group in the mounted hierarchy, of which a container may mount only its own part."""
    inner_path = group[len(root) :] if root != "/" and group.startswith(root) else group
    return Path(point + "/" + inner_path.strip("/"))


def find_parents(owner: str, uid: int, *, groups: dict[str, Path] | None = None) -> tuple[Parents, tuple[str, ...]]:
    """Make the owner's groups where that is allowed, such that ``uid`` may make groups in them. Returns these, and a
    line with the remedy for each missing controller."""
    groups = mounted() if groups is None else groups
    parents: Parents = {}
    missing_texts: list[str] = []
    if V2 in groups and set(CONTROLLERS) <= set(_words(groups[V2] / "cgroup.controllers")):
        try:
            return {V2: str(_make(groups[V2], owner, uid, v2=True))}, ()
        except OSError as error:
            reason = f"{groups[V2]}: {error.strerror}; delegate the group (systemd: Delegate=yes)"
            return {}, tuple(f"no limit of {name}: {reason}" for name in CONTROLLERS)
    for name in CONTROLLERS:
        if name not in groups:
            missing_texts.append(f"no limit of {name}: its controller isn't mounted; mount it, or run where it is")
            continue
        try:
            parents[name] = str(_make(groups[name], owner, uid, v2=False))
        except OSError as error:
            remedy = f"once, as root: mkdir {groups[name] / SHARED} && chown {uid} {groups[name] / SHARED}"
            missing_texts.append(f"no limit of {name}: {groups[name]}: {error.strerror}; {remedy}")
    return parents, tuple(missing_texts)


def _make(parent: Path, owner: str, uid: int, *, v2: bool) -> Path:
    """Make the owner's group. Version 2 enables controllers only for children of a group without processes."""
    shared_group, group = parent / SHARED, parent / SHARED / owner
    if v2:
        _enable(parent)
    with contextlib.suppress(FileExistsError):
        shared_group.mkdir()
        os.chown(shared_group, uid, -1)
    if v2:
        _enable(shared_group)
    group.mkdir()
    os.chown(group, uid, -1)
    if v2:
        _enable(group)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            os.chown(group / name, uid, -1)
    return group


def _enable(group: Path) -> None:
    if not set(CONTROLLERS) <= set(_words(group / "cgroup.subtree_control")):
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text().split()
    return []


def join_zygote_group(parents: Parents) -> tuple[Parents, str]:
    """Move this process (the zygote) into the owner's groups, since version 2 lets a user move processes only within
    its own groups. Returns the usable groups, and the reason if that fails."""
    if V2 not in parents:
        return parents, ""
    try:
        join(parents, ZYGOTE_GROUP)
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
    quota, process_limit = max(1000, round(cpus * PERIOD_US)), processes + KEPT_PROCESSES
    settings_by_controller = {
        "memory": {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
        "pids": {"pids.max": process_limit},
        "cpu": {"cpu.cfs_quota_us": quota},
        V2: {
            "memory.max": memory_bytes,
            "memory.swap.max": 0,
            "pids.max": process_limit,
            "cpu.max": f"{quota} {PERIOD_US}",
        },
    }
    for controller, parent in parents.items():
        for name, value in settings_by_controller[controller].items():
            path = f"{parent}/{slot}/{name}"
            if name not in SWAP_FILES or os.path.exists(path):
                kernel.put(path, str(value))


def open_kill_count(parents: Parents, slot: str) -> int:
    """Open the file with the number of kills for memory; -1: memory isn't limited."""
    for controller, name in KILLS.items():
        if controller in parents:
            return os.open(f"{parents[controller]}/{slot}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def read_kill_count(descriptor: int) -> int:
    """Return the number of processes killed for memory so far."""
    if descriptor < 0:
        return 0
    for line in os.pread(descriptor, 4096, 0).decode().splitlines():
        event_name, _, count_text = line.partition(" ")
        if event_name == "oom_kill":
            return int(count_text)
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
    all_removed = True
    for parent in parents.values():
        try:
            os.rmdir(f"{parent}/{slot}")
        except FileNotFoundError:
            continue
        except OSError:
            all_removed = False
    return all_removed


def clear(owner_group: Path, *, patience_s: float = 5.0) -> bool:
    """Kill all processes below an owner's group, and remove it. False: that took longer than ``patience_s``."""
    deadline_s = time.monotonic() + patience_s
    while True:
        for procs_file in owner_group.glob("**/cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):
                for pid in procs_file.read_text().split():
                    if int(pid) > 0:  # 0: a process of another PID namespace; kill(2) would take it for our own group
                        os.kill(int(pid), signal.SIGKILL)
        for folder in sorted((f for f in owner_group.glob("**") if f.is_dir()), key=lambda f: -len(f.parts)):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not owner_group.exists():
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
