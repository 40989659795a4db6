"""`[sandbox]`: the backend that runs untrusted code, the number of sandboxes, and the limits of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.config.section import Positive, Seconds, Section
from headway.records.errors import ConfigurationError
from headway.records.network import allow_list
from headway.records.sandbox import MIB, MIN_MEMORY_BYTES, ResourceLimits, SandboxSpec

BackendName = Literal["local", "bubblewrap", "docker", "modal", "e2b", "prime"]

_BYTES_PER_INODE = 6_700  # of the disk limit: source trees have smaller files, whose inodes take memory outside it
_LEAST_INODES = 1_000


class SandboxLimits(Section):
    memory_bytes: Annotated[int, Field(ge=MIN_MEMORY_BYTES)] = 512 * MIB  # processes and files together
    disk_bytes: Annotated[int, Field(ge=MIB)] = 128 * MIB  # files, kept in memory: at most 3/4 of memory_bytes
    processes: Annotated[int, Field(ge=4)] = 128  # threads count
    cpus: Annotated[float, Field(ge=0.01, le=4096)] = 1.0  # CPU time, in cores


class SandboxConfig(Section):
    """The sandboxes that run untrusted code: docs/sandboxes.md. They are made only for environments that need them."""

    backend: BackendName = "local"  # local, bubblewrap: no root, no daemon; the last three: an account
    image: str = ""  # a directory, tar, OCI archive or layout (FILE#NAME), or a name the backend knows; "": the host's
    network: tuple[str, ...] = ()  # hosts that sandboxes may reach: NAME, *.NAME or NAME:PORT; (): none
    variables: dict[str, str] = {}  # environment variables of every command; the host's are not passed on
    limits: SandboxLimits = SandboxLimits()  # limits of each sandbox
    exec_timeout_s: Seconds = 60.0  # time limit of a command, unless its environment sets one
    # Tune: raise it while rollouts queue for sandboxes (sandboxes/queue_p99_s) and memory is left
    live: Positive = 64  # sandboxes at once, starting ones included; environment.workers or more
    starts: Positive = 8  # sandboxes starting at once; at least one for each worker
    start_timeout_s: Seconds | None = None  # a longer start is retried; unset: 30, or 300 for a daemon or provider
    allow_unbounded: bool = False  # run untrusted code where total memory can't be limited: it can exhaust the host's
    store: str = ""  # folder of unpacked images; "": this user's, in ~/.cache/headway or, of root, /var/cache/headway
    store_bytes: Positive = 20 << 30  # limit of the store; the images longest unused are removed first
    settings: dict[str, Any] = {}  # settings of the backend: docs/sandboxes.md

    @model_validator(mode="after")
    def _require_possible(self) -> SandboxConfig:
        try:
            self.spec.limits.check()
            allow_list(self.network)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def start_limit_s(self) -> float:
        """Time limit of a start in seconds: a start that hangs blocks one of the ``starts`` slots."""
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return 30.0 if self.backend in ("local", "bubblewrap") else 300.0

    @property
    def spec(self) -> SandboxSpec:
        """The specification of each sandbox; its root is set to the image's once that is unpacked."""
        inodes = self.limits.disk_bytes // _BYTES_PER_INODE
        limits = ResourceLimits(**self.limits.model_dump(), inodes=max(inodes, _LEAST_INODES))
        return SandboxSpec(limits=limits, network=self.network, environment=self.variables)
