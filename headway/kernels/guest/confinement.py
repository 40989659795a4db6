"""A further system call filter for a candidate's process: it may start threads, but no processes or programs."""

from __future__ import annotations

import errno
import platform
import struct

from headway.sandbox.linux import kernel, seccomp
from headway.sandbox.linux.system_calls import numbers

_STARTING = "fork=57 vfork=58 execve=59/221 execveat=322/281"
_CLONE = "clone=56/220"
_THREAD = 0x10000  # CLONE_THREAD


def forbid_processes() -> None:
    """Install a filter that refuses new processes and programs to this process. Raises OSError."""
    architecture = platform.machine()
    refusal = (seccomp.RETURN, 0, 0, seccomp.ERRNO | errno.EPERM)
    program: list[seccomp.Instruction] = [(seccomp.LOAD, 0, 0, seccomp.NUMBER_AT)]
    for call_number in numbers(_STARTING, architecture).values():
        program += [(seccomp.JUMP_EQUAL, 0, 1, call_number), refusal]
    program += [(seccomp.JUMP_EQUAL, 1, 0, numbers(_CLONE, architecture)["clone"]), seccomp.PASS]
    program += [(seccomp.LOAD, 0, 0, seccomp.ARGUMENTS_AT), (seccomp.JUMP_SET, 1, 0, _THREAD), refusal, seccomp.PASS]
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
