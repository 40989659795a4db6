"""Isolation of a sandbox's first process by itself, before it serves: mounts, names and rights.

Standard library alone. The process was cloned into namespaces of its own by an ordinary user. The root file system is
an overlay: below the *skeleton* (`skeleton.py`) and, where there is one, an image; on top a memory file system with a
limit on bytes and on inodes, which takes whatever is written. Without an image the programs of the host are bound in,
read-only. In the end the process has no capabilities, can't gain any, and is bound by the filter of system calls.

The current directory is the owner's: paths are relative to it, so nothing above it need be readable.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any

from headway.sandbox.linux import kernel, seccomp

STAGE = "stage"  # where the memory file system is mounted, in the sandbox's own view
SKELETON = "skeleton"
BY_NAME = "/sys"  # where that is reached by a whole path: everybody may look there, and needs nothing of what it covers
INSIDE_ID = 1000  # user and group in the sandbox
PROXY_PORT = 3128  # on its loopback, where it may reach some hosts
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HOST_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# What the kernel counts by user over all sandboxes: inotify descriptors, and files and folders that they watch.
SHARED = {"max_inotify_instances": 16, "max_inotify_watches": 8192}
READ_ONLY = kernel.ATTRIBUTE_RDONLY | kernel.ATTRIBUTE_NOSUID | kernel.ATTRIBUTE_NODEV


class SetupFailed(Exception):
    """A step of making the sandbox failed; ``code`` is the system's error."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error.strerror or error}")
        self.step = step
        self.code = error.errno or 0


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Names what is being done in the block, for the SetupFailed that its OSError becomes."""
    try:
        yield
    except OSError as error:
        raise SetupFailed(name, error) from error


def enter(zygote: int, uid: int, gid: int) -> None:
    """Do the steps that need no specification, ahead of need. ``zygote``: a descriptor of that process."""
    with step("die with the zygote"):
        die_with(zygote)
    with step("user namespace"):
        _map(uid, gid)
    with step("mount namespace"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("host name"):
        kernel.set_host_name("sandbox")
    with step("loopback"):
        kernel.bring_up_loopback()


def die_with(zygote: int) -> None:
    """Be killed when the zygote ends, or end now if it already has."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(zygote, select.POLLIN)
    if poll.poll(0):
        os._exit(0)


def _map(uid: int, gid: int) -> None:
    kernel.put("/proc/self/setgroups", "deny")
    kernel.put("/proc/self/uid_map", f"{INSIDE_ID} {uid} 1")
    kernel.put("/proc/self/gid_map", f"{INSIDE_ID} {gid} 1")


def listen_for_proxy(place: socket.socket) -> None:
    """Listen on the loopback and send the socket over ``place``: it stays in this network, so a proxy that accepts from
    it is reachable here. Nothing else can bind the port first: no command runs yet."""
    with step("network"), place, socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128) as listener:
        socket.send_fds(place, [b"\0"], [listener.fileno()])


def build_root(wanted: dict[str, Any]) -> tuple[int, int]:
    """Build the root file system and move into it. Returns descriptors of the overlay's upper directory and of a
    writable /proc."""
    upper, root = _disk(wanted)
    if wanted["root"] is None:
        with step("host programs"):
            _bind_host_programs(root)
    with step("preloaded modules"):
        for folder in wanted.get("packages", ()):
            _bind_read_only(folder, f"{root}{folder}")
    with step("devices"):
        for name in DEVICES:
            kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", "", kernel.MS_BIND)
        _mount_terminals(root)
    with step("/proc"):
        proc = _mount_proc(f"{root}/proc")
    with step("pivot_root"):
        os.chdir(root)
        kernel.pivot_root(".", ".")
        kernel.unmount(".")
        os.chdir("/")
    with step("limits"):
        # No namespaces within, whatever the filter says.
        kernel.put(f"/proc/self/fd/{proc}/sys/user/max_user_namespaces", "0")
    with step("workdir"):
        os.makedirs(wanted["workdir"], exist_ok=True)
    return upper, proc


def build_disk(wanted: dict[str, Any]) -> tuple[int, int]:
    """Build the part of the root that bubblewrap can't: the disk, at ``BY_NAME``, and a writable /proc. Returns
    descriptors as `build_root` does."""
    upper, root = _disk(wanted)
    with step("devices"):
        _mount_terminals(root)
    with step("/proc"):
        proc = _mount_proc(f"{root}/proc")
        kernel.unmount(f"{root}/proc")
    with step("root file system"):
        kernel.mount(root, BY_NAME, "", kernel.MS_BIND | kernel.MS_REC)
    return upper, proc


def _disk(wanted: dict[str, Any]) -> tuple[int, str]:
    limits = wanted["limits"]
    with step("disk"):
        # Its own three directories and the root of the overlay's take inodes too.
        sizes = f"size={limits['disk_bytes']},nr_inodes={limits['inodes'] + 8},mode=0755"
        kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, sizes)
        for name in ("upper", "work", "root"):
            os.mkdir(f"{STAGE}/{name}", 0o755)
        upper = os.open(f"{STAGE}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    root = f"{STAGE}/root"
    with step("root file system"):
        below = SKELETON
        if wanted["root"] is not None:  # by a descriptor: its name may hold what mount options can't
            image = os.open(wanted["root"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            below = f"{SKELETON}-image:/proc/self/fd/{image}"
        layers = f"lowerdir={below},upperdir={STAGE}/upper,workdir={STAGE}/work,userxattr"
        kernel.mount("overlay", root, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, layers)
    return upper, root


def _mount_terminals(root: str) -> None:
    options = "newinstance,ptmxmode=0666,mode=620"
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)


def host_programs() -> list[str]:
    """Directories of the host's top that hold them; links, as on Debian, are in the skeleton."""
    return [name for name in HOST_PROGRAMS if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]


def _bind_host_programs(root: str) -> None:
    for name in host_programs():
        _bind_read_only(f"/{name}", f"{root}/{name}")


def _bind_read_only(folder: str, target: str) -> None:
    if os.path.isdir(target) and os.path.samefile(folder, target):
        return  # in a folder that was bound before
    os.makedirs(target, exist_ok=True)
    kernel.mount(folder, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mount(target, READ_ONLY)


def _mount_proc(target: str) -> int:
    """Read-only for everybody, so that none hides from the kernel's choice of whom to kill; but for the descriptor that
    is returned."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", target, "proc", flags)
    writable = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name, most in SHARED.items():
        kernel.put(f"{target}/sys/user/{name}", str(most))
    kernel.unmount(target)
    kernel.mount("proc", target, "proc", flags | kernel.MS_RDONLY)
    return writable


def lock(zygote: int) -> None:
    """Give up all rights, for good."""
    with step("capabilities"):
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # what runs here later can't look into this process
        die_with(zygote)  # losing rights has cleared it
    with step("system call filter"):
        seccomp.install(seccomp.program())


def restrict_command(limits: dict[str, Any], memory_limited: bool) -> None:
    """Set the limits of a command's own process before it becomes the command."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NPROC: limits["processes"] + 1,  # counted within the user namespace: init too
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_MSGQUEUE: 1 << 20,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if not memory_limited:
        bounds[resource.RLIMIT_AS] = limits["memory_bytes"]
    for name, value in bounds.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
