"""Wraps system calls that Python lacks. Standard library alone, since every sandbox has it in memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct

from headway.sandbox.linux.system_calls import MACHINES, numbers

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTRIBUTE_RDONLY, ATTRIBUTE_NOSUID, ATTRIBUTE_NODEV = 1, 2, 4  # flags of mount_setattr
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 15, 24, 38
CALLS = "clone=56/220 pivot_root=155/41 capset=126/91 mount_setattr=442/442"

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the child of a clone needs it held
_numbers = numbers(CALLS, platform.machine()) if platform.machine() in MACHINES else {}


def clone(flags: int) -> int:
    """Fork into new namespaces; returns 0 in the child. Only for a process with a single thread."""
    return _checked(_libc_with_gil.syscall(_number("clone"), flags | signal.SIGCHLD, 0, 0, 0, 0), "clone")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    return_code = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode() or None)
    _checked(return_code, f"mount {kind or 'bind'} at {target}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    _checked(_libc.umount2(target.encode(), flags), f"unmount {target}")


def restrict_mount(target: str, attributes: int) -> None:
    """Set attributes of the mount at ``target`` and of all mounts below it."""
    buffer = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0))
    at_cwd, recursive = -100, 0x8000
    return_code = _libc.syscall(_number("mount_setattr"), at_cwd, target.encode(), recursive, buffer, len(buffer) - 1)
    _checked(return_code, f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.syscall(_number("pivot_root"), new.encode(), old.encode()), "pivot_root")


def prctl(option: int, value: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def name_process(name: str) -> None:
    _checked(_libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl name")


def drop_capabilities() -> None:
    """Drop all capabilities permanently, with the bounding set, so that no program regains one."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0):
            break  # beyond this kernel's last capability
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    empty_sets = ctypes.create_string_buffer(24)
    _checked(_libc.syscall(_number("capset"), header, empty_sets), "capset")


def set_host_name(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), len(name)), "sethostname")


def sync_file_system(descriptor: int) -> None:
    """Flush the file system that holds this file to disk."""
    _checked(_libc.syncfs(descriptor), "syncfs")


def bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS


def wake_on_child() -> int:
    """Return a descriptor that can be read from when a child has ended, or this process gets another signal."""
    read_fd, write_fd = os.pipe()
    for descriptor in (read_fd, write_fd):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd


def keep_only(*descriptors: int) -> None:
    """Close all descriptors except ``descriptors`` and the standard ones."""
    next_fd = 3
    for descriptor in sorted(set(descriptors)):
        os.closerange(next_fd, descriptor)
        next_fd = descriptor + 1
    os.closerange(next_fd, 1 << 20)


def remove_orphaned_objects(alone: bool) -> None:
    """Remove System V shared memory that no process has attached and whose creator has ended. ``alone``: no process but
    this one is left; then queues and semaphores are removed too."""
    for kind in ("shm", "msg", "sem") if alone else ("shm",):
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as table:
            for fields in (line.split() for line in table.readlines()[1:]):
                if alone or (fields[6] == "0" and not os.path.exists(f"/proc/{fields[4]}")):  # attached; its maker
                    _libc[f"{kind}ctl"](int(fields[1]), 0, 0)  # IPC_RMID


def put(file: str, value: str) -> None:
    """Write to a kernel file (/proc, cgroup) in one call."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    except OSError as error:
        raise OSError(error.errno, f"{file} = {value}: {os.strerror(error.errno or 0)}") from None
    finally:
        os.close(descriptor)


def _number(call: str) -> int:
    if call not in _numbers:
        raise OSError(38, f"{call}: its number on {platform.machine()} isn't known")
    return _numbers[call]


def _checked(result: int, call: str) -> int:
    if result < 0:
        errno_code = ctypes.get_errno()
        raise OSError(errno_code, f"{call}: {os.strerror(errno_code)}")
    return result
