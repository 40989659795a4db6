"""`[sandbox]`: where untrusted code runs, how much of it at once, what one sandbox may use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.config.section import NonNegative, Positive, Seconds, Section
from headway.records.errors import ConfigurationError
from headway.records.network import allow_list
from headway.records.sandbox import LEAST_MEMORY_BYTES, MIB, ResourceLimits, SandboxSpec

BackendName = Literal["local", "bubblewrap", "docker", "modal", "e2b", "prime"]


class SandboxLimits(Section):
    memory_bytes: Annotated[int, Field(ge=LEAST_MEMORY_BYTES)] = 512 * MIB  # processes and files together
    disk_bytes: Annotated[int, Field(ge=MIB)] = 128 * MIB  # of files, which lie in memory: at most 3/4 of memory_bytes
    inodes: Annotated[int, Field(ge=100)] = 20_000  # files, directories and links
    processes: Annotated[int, Field(ge=4)] = 128  # threads count
    cpus: Annotated[float, Field(ge=0.01, le=4096)] = 1.0  # cores' worth of time
    open_files: Annotated[int, Field(ge=32)] = 1024  # of one process


class SandboxConfig(Section):
    """Where untrusted code runs: docs/sandboxes.md. An environment that needs none makes none."""

    backend: BackendName = "local"  # local, bubblewrap: no root, no daemon; the last three: an account
    image: str = ""  # a directory, tar, OCI archive or layout (FILE#NAME), or a name the backend knows; "": the host's
    network: tuple[str, ...] = ()  # hosts that sandboxes may reach: NAME, *.NAME or NAME:PORT; (): none
    variables: dict[str, str] = {}  # environment variables of every command; nothing of the host's is there
    limits: SandboxLimits = SandboxLimits()  # of one sandbox
    ttl_s: Seconds = 3600.0  # from readiness until one ends by itself; it starts again while it is in use
    exec_timeout_s: Seconds = 60.0  # of a command, where its environment doesn't say
    live: Positive = 64  # at once, those being made among them; environment.workers or more
    starts: Positive = 8  # being made at once; one for each worker at least
    retries: NonNegative = 2  # of a start, after a failure of the infrastructure that may pass
    start_timeout_s: Seconds | None = None  # of one; then it is tried again; unset: 30, of a daemon or provider 300
    hedge_share: Annotated[float, Field(ge=0, le=1)] = 0.05  # of starts may be made twice where one takes far longer
    reap_every_s: Seconds = 60.0  # what dead owners on this machine left is removed so often, while a run goes on
    inject_faults: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of calls that fail on purpose: drills
    allow_unbounded: bool = False  # run untrusted code where total memory can't be limited: one can take the machine
    store: str = ""  # folder of unpacked images; "": this user's, in ~/.cache/headway or, of root, /var/cache/headway
    store_bytes: Positive = 20 << 30  # of it; the images longest unused go first
    snapshot_bytes: Positive = 10 << 30  # of parked sandboxes; one that doesn't fit any more isn't kept
    settings: dict[str, Any] = {}  # further ones of the backend: docs/sandboxes.md

    @model_validator(mode="after")
    def _possible(self) -> SandboxConfig:
        try:
            self.spec.limits.check()
            allow_list(self.network)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def start_limit_s(self) -> float:
        """Of one start, in seconds. One that hangs holds one of ``starts`` places: no longer than is worth waiting."""
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return 30.0 if self.backend in ("local", "bubblewrap") else 300.0

    @property
    def spec(self) -> SandboxSpec:
        """What one is made of; its root is the image's, once that is unpacked."""
        return SandboxSpec(
            limits=ResourceLimits(**self.limits.model_dump()),
            network=self.network,
            environment=self.variables,
            ttl_s=self.ttl_s,
        )
