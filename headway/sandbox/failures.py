"""Converts commands to requests, answers to results, and failures to the side that caused them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from typing import Any

from headway.records.sandbox import (
    Command,
    ExecResult,
    SandboxFailure,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.sandbox.machine import pids_in_use

Head = dict[str, Any]


def request_of(command: Command, spec: SandboxSpec, environment: Mapping[str, str]) -> Head:
    """Make the request for a command, without its input."""
    return {
        "do": "exec",
        "argv": list(command.argv),
        "environment": {**environment, **command.environment},
        "workdir": command.workdir or spec.workdir,
        "timeout_s": command.timeout_s,
        "max_output_bytes": command.max_output_bytes,
        "exclusive": command.exclusive,
    }


def result_of(answer: Head, stdout: bytes, stderr: bytes, timeout_s: float) -> ExecResult:
    exit_code, signal_number = answer["exit_code"], answer["signal"]
    timed_out, oom = bool(answer["timed_out"]), bool(answer.get("oom"))  # providers don't report it
    failure = None
    if timed_out:
        failure = model_failure(f"not done in {timeout_s:g} s, and killed", timed_out=True, oom=oom)
    elif oom and exit_code != 0:
        failure = model_failure("out of memory", oom=True, exit_code=-1 if exit_code is None else int(exit_code))
    elif signal_number is not None:
        failure = model_failure(f"ended by signal {int(signal_number)}", signal=int(signal_number))
    return ExecResult(
        exit_code=None if exit_code is None else int(exit_code),
        signal=None if signal_number is None else int(signal_number),
        timed_out=timed_out,
        oom=oom,
        truncated=bool(answer["truncated"]),
        stdout=stdout,
        stderr=stderr,
        duration_s=float(answer["duration_s"]),
        failure=failure,
    )


def os_failure(action: str, answer: Head) -> SandboxFailure:
    errno_code = int(answer["error"])
    evidence = {"errno": errno.errorcode.get(errno_code, str(errno_code))}
    return infrastructure_failure(f"{action}: {str(answer['what'])[:200]}", evidence=evidence)


def file_failure(path: str, answer: Head) -> SandboxFailure:
    """Make the failure of a file request: the model's code is to blame, except for EIO and lack of memory or files."""
    errno_code = int(answer["error"])
    if errno_code in (errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return os_failure(path, answer)
    errno_name = errno.errorcode.get(errno_code, str(errno_code))
    return model_failure(f"{path}: {str(answer['what'])[:200]}", errno=errno_name)


NAMESPACES = (
    "user namespaces are refused here; as root: sysctl -w user.max_user_namespaces=100000 (and, where there are these"
    " keys, kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0); in a container, a"
    " seccomp profile that allows clone and unshare"
)


def clone_failure(code: int, message: str) -> SandboxFailure:
    """Make the failure for a refused clone(2). Only lack of processes or memory is retried: without namespaces no retry
    can work."""
    evidence = {"step": "clone", "errno": errno.errorcode.get(code, str(code))}
    busy = code in (errno.EAGAIN, errno.ENOMEM)
    remedy = "fewer sandboxes at once, or a higher limit of processes" if busy else NAMESPACES
    if code == errno.EAGAIN:
        message = f"sandbox host {socket.gethostname()} can't start a process: {pids_in_use()}: {remedy}"
        return infrastructure_failure(message, retry=True, evidence=evidence)
    return infrastructure_failure(f"a sandbox can't be made, {message[:300]}: {remedy}", retry=busy, evidence=evidence)


def ttl_failure(sandbox: str, ttl_s: float) -> SandboxFailure:
    message = f"sandbox {sandbox}: its time to live of {ttl_s:g} s is over; give more, or renew it"
    return environment_failure(message)


def setup_failure(head: Head) -> SandboxFailure:
    """Make the failure for a sandbox whose setup failed. The environment is to blame for its root, workdir or snapshot,
    the infrastructure for all else. Without user namespaces no retry can work."""
    code, step = int(head["error"]), str(head["failed"])
    message = f"a sandbox can't be made, {str(head['what'])[:300]}"
    evidence = {"step": step, "errno": errno.errorcode.get(code, str(code))}
    if step in ("root file system", "workdir", "snapshot"):
        if code == errno.EACCES and step == "root file system":
            message += ": the user that sandboxes run as can't reach it: chmod o+x it and its parents, or move it"
        return environment_failure(message, **evidence)
    if step in ("user namespace", "mount namespace"):
        message += f": {NAMESPACES}"
    return infrastructure_failure(message, retry=code in (errno.EAGAIN, errno.ENOMEM, errno.EBUSY), evidence=evidence)
