"""Sandboxes as the rest of the system knows them: what one is made of, how a command ended, what a failure means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError

MIB = 1 << 20
LEAST_MEMORY_BYTES = 16 * MIB  # its own init needs about two

FailureCause = Literal["model_code", "environment", "infrastructure"]


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use, all its processes and files together."""

    memory_bytes: int = 512 * MIB  # processes and files: its files lie in memory too
    disk_bytes: int = 128 * MIB  # of files; less than memory_bytes, or filling the disk would be out of memory
    inodes: int = 20_000  # files, directories and links
    processes: int = 128  # threads count, as the kernel counts them
    cpus: float = 1.0  # cores' worth of time
    open_files: int = 1024  # of one process

    def check(self) -> None:
        """Raise ConfigurationError unless these limits can hold together."""
        least = {"memory_bytes": LEAST_MEMORY_BYTES, "disk_bytes": MIB, "inodes": 100, "processes": 4, "open_files": 32}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigurationError(f"sandbox limit {name} = {getattr(self, name)}: at least {value}")
        if not 0.01 <= self.cpus <= 4096:
            raise ConfigurationError(f"sandbox limit cpus = {self.cpus}: between 0.01 and 4096")
        if self.disk_bytes > self.memory_bytes * 3 // 4:
            raise ConfigurationError(
                f"sandbox limit disk_bytes = {self.disk_bytes}: at most three quarters of memory_bytes"
                f" ({self.memory_bytes * 3 // 4}), for its files lie in memory"
            )


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is made of. Equal specs make equal sandboxes."""

    root: str | None = None  # directory with its root file system, or what its backend names so; None: the host's
    limits: ResourceLimits = ResourceLimits()
    network: tuple[str, ...] = ()  # hosts it may reach; none: a loopback of its own and nothing else
    environment: dict[str, str] = {}  # of every command, over PATH, HOME, LANG and TMPDIR; nothing of the host's
    workdir: str = "/work"  # where commands run unless told otherwise; made when it isn't there
    ttl_s: float = 3600.0  # from readiness until it ends by itself; `renew` starts it again


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended. ``failure`` is None where it ran to its own end, whatever its exit code."""

    exit_code: int | None  # None: a signal ended it
    signal: int | None = None
    timed_out: bool = False
    oom: bool = False  # the kernel killed something in the sandbox for memory meanwhile
    truncated: bool = False  # output beyond the limit was thrown away
    stdout: bytes = b""  # any bytes: not always text
    stderr: bytes = b""
    duration_s: float = 0.0
    failure: SandboxFailure | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class SandboxFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why something in or about a sandbox failed, and what may be concluded from it.

    What the model's own code brought upon itself (its memory, its time) is an outcome like any other, and its reward
    is valid. What the sandbox or the machine did is not: it is tried again, and never becomes a reward of 0.
    """

    cause: FailureCause
    what: str  # one line a person can act on
    retry: bool  # whether another attempt may end otherwise
    reward_valid: bool  # whether a reward may be computed from what happened
    evidence: dict[str, str | int | float | bool] = {}  # exit code, signal, out of memory, step, errno, ...


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do where it runs. ``missing`` says what can't be enforced and how that is mended."""

    backend: str
    memory_limit: bool = False  # of a sandbox as a whole, not of one process
    process_limit: bool = False
    cpu_limit: bool = False
    disk_limit: bool = False
    network_allow_list: bool = False
    pause: bool = False
    snapshot: bool = False
    images: bool = False  # root file systems other than the host's
    own_user: bool = False  # sandboxes run as a user that owns nothing else
    writable_root: bool = False  # all of the root may be changed; else work, home and temporary directories alone
    missing: tuple[str, ...] = ()

    @property
    def fit_for_untrusted(self) -> bool:
        """Whether one sandbox can't take the machine from the others."""
        return self.memory_limit and self.process_limit and self.disk_limit


class SandboxFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What preflight found. A fatal one would stop a run or spoil it; others are worth knowing."""

    what: str
    fix: str = ""  # "": `what` says it, or there is nothing to do
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}" if self.fix else self.what


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as `list` tells of it."""

    id: str
    labels: dict[str, str] = {}
    state: Literal["starting", "running", "paused", "ended"]
    owner_pid: int = 0
    created_s: float = 0.0  # seconds since the epoch


class HostUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox asked of one host."""

    host: str
    port: int
    refused: str = ""  # why; "": it was reached
    requests: int
    bytes: int  # in both directions


class NetworkUse(msgspec.Struct, frozen=True, kw_only=True):
    """What went through a sandbox's proxy."""

    used: int  # connections now
    capacity: int
    peak: int
    bytes: int  # in both directions
    hosts: tuple[HostUse, ...] = ()  # the first few hundred it asked for


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a directory in a sandbox."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size_bytes: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox's files were: enough, with its spec, to make another with the same."""

    path: str  # a tar of what differs from its root, read by nothing but another sandbox
    bytes: int
    sha256: str


class SandboxError(HeadwayError):
    """A call of a sandbox that failed. ``failure`` says whose doing it was."""

    def __init__(self, failure: SandboxFailure) -> None:
        super().__init__(f"{failure.what} ({failure.cause.replace('_', ' ')})")
        self.failure = failure


def model_failure(what: str, **evidence: str | int | float | bool) -> SandboxFailure:
    """What the model's code did to itself: not tried again, and the reward is valid."""
    return SandboxFailure(cause="model_code", what=what, retry=False, reward_valid=True, evidence=evidence)


def environment_failure(what: str, **evidence: str | int | float | bool) -> SandboxFailure:
    """What whoever wrote the environment has to mend: another attempt ends the same."""
    return SandboxFailure(cause="environment", what=what, retry=False, reward_valid=False, evidence=evidence)


def infrastructure_failure(
    what: str, *, retry: bool = True, evidence: Mapping[str, str | int | float | bool] | None = None
) -> SandboxFailure:
    """What the sandbox, its backend or the machine did."""
    return SandboxFailure(
        cause="infrastructure", what=what, retry=retry, reward_valid=False, evidence=dict(evidence or {})
    )


def of_a_start(failure: SandboxFailure) -> SandboxFailure:
    """The same of a sandbox that wasn't ready yet: no model's code has run in it that could have done it."""
    if failure.cause != "model_code":
        return failure
    return infrastructure_failure(failure.what, evidence=failure.evidence)
