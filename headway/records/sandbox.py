"""Records of sandboxes: specification, commands and their results, capabilities, snapshots, and causes of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from headway.records.errors import ConfigurationError, HeadwayError

MIB = 1 << 20
MIN_MEMORY_BYTES = 16 * MIB  # its own init needs about two
OUTPUT_BYTES = MIB  # of each stream of a command, by default

FailureCause = Literal["model_code", "environment", "infrastructure"]


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a sandbox's memory, disk, files, processes and cores: totals over all its processes, except
    ``open_files``, which is of each. Time limits are a command's."""

    memory_bytes: int = 512 * MIB  # processes and files: its files lie in memory too
    disk_bytes: int = 128 * MIB  # of files; less than memory_bytes, or filling the disk would be out of memory
    inodes: int = 20_000  # files, directories and links
    processes: int = 128  # threads count, as the kernel counts them
    cpus: float = 1.0  # cores' worth of time
    open_files: int = 1024  # of one process

    def check(self) -> None:
        """Raise ConfigurationError for limits that are too small or contradict each other."""
        minima = {"memory_bytes": MIN_MEMORY_BYTES, "disk_bytes": MIB, "inodes": 100, "processes": 4, "open_files": 32}
        for name, least in minima.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"sandbox limit {name} = {getattr(self, name)}: at least {least}")
        if not 0.01 <= self.cpus <= 4096:
            raise ConfigurationError(f"sandbox limit cpus = {self.cpus}: between 0.01 and 4096")
        if self.disk_bytes > self.memory_bytes * 3 // 4:
            raise ConfigurationError(
                f"sandbox limit disk_bytes = {self.disk_bytes}: at most three quarters of memory_bytes"
                f" ({self.memory_bytes * 3 // 4}), for its files lie in memory"
            )


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of a sandbox. Equal specs make equal sandboxes."""

    root: str | None = None  # directory with its root file system, or what its backend names so; None: the host's
    limits: ResourceLimits = ResourceLimits()
    network: tuple[str, ...] = ()  # hosts it may reach; none: a loopback of its own and nothing else
    environment: dict[str, str] = {}  # of every command, over PATH, HOME, LANG and TMPDIR; nothing of the host's
    workdir: str = "/work"  # where commands run by default; made when it doesn't exist
    ttl_s: float = 3600.0  # from readiness until it ends by itself; `renew` restarts it


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command for a sandbox. It runs to its own end, or for ``timeout_s``: then it is killed with everything it has
    started since. Background processes that it left without waiting for them keep running.

    Example: ``Command(argv=["python3", "check.py"], workdir="/work", timeout_s=10.0, exclusive=True)`` gives a verdict
    that nothing an agent left running can change.

    Raises ConfigurationError for an empty ``argv`` and a negative ``max_output_bytes``.
    """

    argv: Sequence[str]  # the program and its arguments; no shell reads them
    environment: Mapping[str, str] = {}  # over the sandbox's
    workdir: str | None = None  # None: the sandbox's
    stdin: bytes | None = None
    timeout_s: float = 60.0
    max_output_bytes: int = OUTPUT_BYTES  # of stdout and of stderr; what is beyond is thrown away
    exclusive: bool = False  # all other processes in the sandbox are killed first

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigurationError("sandbox command argv = []: needs a program")
        if self.max_output_bytes < 0:
            raise ConfigurationError(f"sandbox command max_output_bytes = {self.max_output_bytes}: at least 0")


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command. ``failure`` is None where it ran to its own end, with any exit code."""

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

    A failure that the model's own code caused (its memory, its time) is an outcome like any other, and its reward is
    valid. A failure of the sandbox or the machine is not: it is retried, and never becomes a reward of 0.
    """

    cause: FailureCause
    message: str  # one line a person can act on
    retry: bool  # whether another attempt may end otherwise
    reward_valid: bool  # whether a reward may be computed from what happened
    evidence: dict[str, str | int | float | bool] = {}  # exit code, signal, out of memory, step, errno, ...


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of a backend where it runs. ``missing``: limits that can't be enforced, each with its remedy."""

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
        """Whether no sandbox can exhaust the machine for the others."""
        return self.memory_limit and self.process_limit and self.disk_limit


class SandboxFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of preflight. A fatal one would stop a run or spoil its results; others are worth knowing."""

    message: str
    fix: str = ""  # "": `message` says it, or there is nothing to do
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.message}: {self.fix}" if self.fix else self.message


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as `list` reports it."""

    id: str
    labels: dict[str, str] = {}
    state: Literal["starting", "running", "paused", "ended"]
    owner_pid: int = 0
    created_s: float = 0.0  # seconds since the epoch


class HostUse(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a sandbox to one host."""

    host: str
    port: int
    refused: str = ""  # why; "": it was reached
    requests: int
    bytes: int  # in both directions


class NetworkUse(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic through a sandbox's proxy."""

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
    """A snapshot of a sandbox's files: enough, with its spec, to make another sandbox with the same files."""

    path: str  # a tar of what differs from its root, read by nothing but another sandbox
    bytes: int
    sha256: str


class SandboxError(HeadwayError):
    """A call of a sandbox failed. ``failure`` says which side caused it."""

    def __init__(self, failure: SandboxFailure) -> None:
        super().__init__(f"{failure.message} ({failure.cause.replace('_', ' ')})")
        self.failure = failure


def model_failure(message: str, **evidence: str | int | float | bool) -> SandboxFailure:
    """Make a failure that the model's code caused: not retried, and the reward is valid."""
    return SandboxFailure(cause="model_code", message=message, retry=False, reward_valid=True, evidence=evidence)


def environment_failure(message: str, **evidence: str | int | float | bool) -> SandboxFailure:
    """Make a failure that the environment's author has to fix: a retry would end the same."""
    return SandboxFailure(cause="environment", message=message, retry=False, reward_valid=False, evidence=evidence)


def infrastructure_failure(
    message: str, *, retry: bool = True, evidence: Mapping[str, str | int | float | bool] | None = None
) -> SandboxFailure:
    """Make a failure that the sandbox, its backend or the machine caused; the reward isn't valid."""
    return SandboxFailure(
        cause="infrastructure", message=message, retry=retry, reward_valid=False, evidence=dict(evidence or {})
    )


def as_start_failure(failure: SandboxFailure) -> SandboxFailure:
    """Turn a failure of a start blamed on the model's code into one of the infrastructure: no such code has run yet."""
    if failure.cause != "model_code":
        return failure
    return infrastructure_failure(failure.message, evidence=failure.evidence)
