"""Builds and installs the filter of system calls in a sandbox, a program of the kernel's packet filter.

The calls in `system_calls.py` are allowed. Others are allowed depending on their arguments: `clone` without new
namespaces, `socket` and `socketpair` for families that the network namespace or the file system confines (not vsock,
netlink, packet, ...), `ioctl` without terminal input, `personality` with harmless values. `clone3` passes its flags in
memory, which a filter can't read: it is reported as missing, and libraries fall back on `clone`.

The sandbox's first process has the same user as the commands, so the kernel would let them change its limits and its
CPU and I/O scheduling. `prlimit64` may only name the caller (which also protects a command that is being set up), and
scheduling calls may name neither the first process nor all processes of a user.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from headway.sandbox.linux.system_calls import ALLOWED, numbers

LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data; little-endian machines only
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CONDITIONAL = """
clone=56/220 clone3=435/435 socket=41/198 socketpair=53/199 ioctl=16/29 personality=135/92 prlimit64=302/261
sched_setaffinity=203/122 sched_setscheduler=144/119 sched_setparam=142/118 sched_setattr=314/274 setpriority=141/140
ioprio_set=251/30
"""  # calls whose arguments decide
X32_CALLS = 0x40000000  # bit of a second set of numbers that x86_64 kernels may accept
NEWEST_KNOWN = 456  # newer calls are reported as missing, so that programs use older ones
NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
TERMINAL_INPUT = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
SELF, FIRST_PROCESS = 0, 1  # process ids
PRIO_USER, IOPRIO_WHO_USER = 2, 3

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
PASS: Instruction = (RETURN, 0, 0, ALLOW)


def program(machine: str | None = None) -> bytes:
    """Return the filter for ``machine`` (default: this machine's) as an array of struct sock_filter."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}: only {', '.join(ARCHITECTURES)}")
    instructions: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":
        instructions += [(JUMP_AT_LEAST, 0, 1, X32_CALLS), _refuse(errno.ENOSYS)]
    conditional_numbers = numbers(CONDITIONAL, machine)
    for call, checks in _conditional_checks().items():
        instructions += [(JUMP_EQUAL, 0, len(checks), conditional_numbers[call]), *checks]
    for first_call, last_call in _ranges(set(numbers(ALLOWED, machine).values())):
        instructions += [(JUMP_GREATER, 2, 0, last_call), (JUMP_AT_LEAST, 0, 1, first_call), PASS]
    instructions += [(JUMP_GREATER, 0, 1, NEWEST_KNOWN), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _conditional_checks() -> dict[str, list[Instruction]]:
    """Return the instructions that decide on a call by its arguments; each list ends with a return. Only the low halves
    of arguments are compared, since the kernel reads all of these as 32 bits."""
    load_first = (LOAD, 0, 0, ARGUMENTS_AT)
    load_second = (LOAD, 0, 0, ARGUMENTS_AT + 8)
    family_checks = [load_first, *_if_in(FAMILIES, PASS, _refuse(errno.EAFNOSUPPORT))]
    # The number 1 also names the first process's process group, where it has one.
    process_checks = _if_in((FIRST_PROCESS,), _refuse(errno.EPERM), PASS)
    sched_checks = [load_first, *process_checks]
    return {
        "clone3": [_refuse(errno.ENOSYS)],
        "clone": [load_first, (JUMP_SET, 0, 1, NAMESPACES), _refuse(errno.EPERM), PASS],
        "socket": family_checks,
        "socketpair": family_checks,
        "personality": [load_first, *_if_in(PERSONALITIES, PASS, _refuse(errno.EPERM))],
        "ioctl": [load_second, *_if_in(TERMINAL_INPUT, _refuse(errno.EPERM), PASS)],
        "prlimit64": [load_first, *_if_in((SELF,), PASS, _refuse(errno.EPERM))],
        **dict.fromkeys(("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"), sched_checks),
        "setpriority": [load_first, *_unless(PRIO_USER), load_second, *process_checks],
        "ioprio_set": [load_first, *_unless(IOPRIO_WHO_USER), load_second, *process_checks],
    }


def _if_in(values: tuple[int, ...], then: Instruction, otherwise: Instruction) -> list[Instruction]:
    jumps = [(JUMP_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [*jumps, otherwise, then]


def _unless(value: int) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, 1, value), _refuse(errno.EPERM)]


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def _ranges(call_numbers: set[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as (first, last), ascending."""
    runs: list[tuple[int, int]] = []
    for number in sorted(call_numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(filter_program: bytes) -> None:
    """Install the filter for this process and its descendants. Needs no_new_privs. Raises OSError."""
    program_buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    filter_struct = _Program(len(filter_program) // 8, ctypes.cast(program_buffer, ctypes.c_void_p).value)
    if ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(filter_struct), 0, 0):  # PR_SET_SECCOMP, MODE_FILTER
        errno_code = ctypes.get_errno()
        raise OSError(errno_code, f"seccomp filter: {errno.errorcode.get(errno_code, errno_code)}")
