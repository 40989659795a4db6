"""Isolates a sandbox's first process, by itself and before it serves: mounts, host name and privileges.

Standard library alone. The process was cloned into namespaces of its own by an ordinary user. Its root file system is
an overlay. The lower layers are the *skeleton* (`skeleton.py`) and, if given, an image; the upper layer is a memory
file system with limits on bytes and inodes, which takes all writes. Without an image the host's programs are bound in,
read-only. In the end the process has no capabilities, can't gain any, and is bound by the filter of system calls.

The current directory is the owner's. Paths are relative to it, so that no directory above it has to be readable.
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
ROOT_MOUNT = "/sys"  # the root's absolute path, for bubblewrap: any user may search it, and it covers nothing needed
INSIDE_ID = 1000  # user and group in the sandbox
PROXY_PORT = 3128  # on its loopback, where it may reach some hosts
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HOST_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Limits that the kernel counts per user over all sandboxes: inotify descriptors, and the files and folders they watch.
USER_LIMITS = {"max_inotify_instances": 16, "max_inotify_watches": 8192}
READ_ONLY = kernel.ATTRIBUTE_RDONLY | kernel.ATTRIBUTE_NOSUID | kernel.ATTRIBUTE_NODEV


class SetupFailed(Exception):
    """A step of the sandbox's setup failed; ``code`` is the errno."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error.strerror or error}")
        self.step = step
        self.code = error.errno or 0


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Convert an OSError of the block to a SetupFailed that names this step."""
    try:
        yield
    except OSError as error:
        raise SetupFailed(name, error) from error


def enter(zygote: int, uid: int, gid: int) -> None:
    """Do the steps that need no specification, before there is a request. ``zygote``: a descriptor of that process."""
    with step("die with the zygote"):
        die_with(zygote)
    with step("user namespace"):
        _map_user(uid, gid)
    with step("mount namespace"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("host name"):
        kernel.set_host_name("sandbox")
    with step("loopback"):
        kernel.bring_up_loopback()


def die_with(zygote: int) -> None:
    """Have the kernel kill this process when the zygote ends; exit now if it has already ended."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(zygote, select.POLLIN)
    if poll.poll(0):
        os._exit(0)


def _map_user(uid: int, gid: int) -> None:
    kernel.put("/proc/self/setgroups", "deny")
    kernel.put("/proc/self/uid_map", f"{INSIDE_ID} {uid} 1")
    kernel.put("/proc/self/gid_map", f"{INSIDE_ID} {gid} 1")


def listen_for_proxy(proxy_socket: socket.socket) -> None:
    """Listen on the loopback and send the listening socket over ``proxy_socket``. It stays in this network namespace,
    so that a proxy that accepts from it is reachable here. No command runs yet that could bind the port first."""
    with step("network"), proxy_socket, socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128) as listener:
        socket.send_fds(proxy_socket, [b"\0"], [listener.fileno()])


def build_root(spec: dict[str, Any]) -> tuple[int, int]:
    """Build the root file system and move into it. Returns descriptors of the overlay's upper directory and of a
    writable /proc."""
    upper_fd, root = _disk(spec)
    if spec["root"] is None:
        with step("host programs"):
            _bind_host_programs(root)
    with step("preloaded modules"):
        for folder in spec.get("packages", ()):
            _bind_read_only(folder, f"{root}{folder}")
    with step("devices"):
        for name in DEVICES:
            kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", "", kernel.MS_BIND)
        _mount_terminals(root)
    with step("/proc"):
        proc_fd = _mount_proc(f"{root}/proc")
    with step("pivot_root"):
        os.chdir(root)
        kernel.pivot_root(".", ".")
        kernel.unmount(".")
        os.chdir("/")
    with step("limits"):
        # Forbids nested namespaces independently of the filter.
        kernel.put(f"/proc/self/fd/{proc_fd}/sys/user/max_user_namespaces", "0")
    with step("workdir"):
        os.makedirs(spec["workdir"], exist_ok=True)
    return upper_fd, proc_fd


def build_disk(spec: dict[str, Any]) -> tuple[int, int]:
    """Build the parts of the root that bubblewrap can't: the disk, at ``ROOT_MOUNT``, and a writable /proc. Returns
    the same descriptors as `build_root`."""
    upper_fd, root = _disk(spec)
    with step("devices"):
        _mount_terminals(root)
    with step("/proc"):
        proc_fd = _mount_proc(f"{root}/proc")
        kernel.unmount(f"{root}/proc")
    with step("root file system"):
        kernel.mount(root, ROOT_MOUNT, "", kernel.MS_BIND | kernel.MS_REC)
    return upper_fd, proc_fd


def _disk(spec: dict[str, Any]) -> tuple[int, str]:
    limits = spec["limits"]
    with step("disk"):
        # The disk's three directories and the overlay's root take inodes too.
        size_options = f"size={limits['disk_bytes']},nr_inodes={limits['inodes'] + 8},mode=0755"
        kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size_options)
        for name in ("upper", "work", "root"):
            os.mkdir(f"{STAGE}/{name}", 0o755)
        upper_fd = os.open(f"{STAGE}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    root = f"{STAGE}/root"
    with step("root file system"):
        lower_layers = SKELETON
        if spec["root"] is not None:  # by a descriptor: its name may hold what mount options can't
            image_fd = os.open(spec["root"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            lower_layers = f"{SKELETON}-image:/proc/self/fd/{image_fd}"
        overlay_options = f"lowerdir={lower_layers},upperdir={STAGE}/upper,workdir={STAGE}/work,userxattr"
        kernel.mount("overlay", root, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, overlay_options)
    return upper_fd, root


def _mount_terminals(root: str) -> None:
    options = "newinstance,ptmxmode=0666,mode=620"
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)


def host_programs() -> list[str]:
    """Return the host's top-level directories that hold programs; those that are links, as on Debian, are in the
    skeleton."""
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
    """Mount /proc read-only, so that no process can exempt itself from the out-of-memory killer. Returns a descriptor
    of a writable mount of it."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", target, "proc", flags)
    writable_fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name, limit in USER_LIMITS.items():
        kernel.put(f"{target}/sys/user/{name}", str(limit))
    kernel.unmount(target)
    kernel.mount("proc", target, "proc", flags | kernel.MS_RDONLY)
    return writable_fd


def drop_privileges(zygote: int) -> None:
    """Drop all privileges permanently, and install the filter of system calls."""
    with step("capabilities"):
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # commands that run here later can't inspect this process
        die_with(zygote)  # dropping capabilities has cleared it
    with step("system call filter"):
        seccomp.install(seccomp.program())


def restrict_command(limits: dict[str, Any], memory_limited: bool) -> None:
    """Set the limits of a command's own process before it executes the command."""
    limit_by_resource = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NPROC: limits["processes"] + 1,  # counted within the user namespace: init too
        resource.RLIMIT_MEMLOCK: 1 << 20,
        resource.RLIMIT_MSGQUEUE: 1 << 20,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if not memory_limited:
        limit_by_resource[resource.RLIMIT_AS] = limits["memory_bytes"]
    for name, soft_limit in limit_by_resource.items():
        _, hard_limit = resource.getrlimit(name)
        soft_limit = soft_limit if hard_limit == resource.RLIM_INFINITY else min(soft_limit, hard_limit)
        resource.setrlimit(name, (soft_limit, soft_limit))
