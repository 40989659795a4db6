"""What an adapter to a provider of sandboxes does (`Provider`), what its errors mean, and whose a sandbox is."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
)
from headway.sandbox import leftovers

T = TypeVar("T")
OWNER, RUN = "headway-owner", "headway-run"  # labels of every sandbox
LABEL_CHARACTERS = 50  # the most of a label that every provider takes
HOLD_S = 10.0  # when too many were made at once, and the provider doesn't say for how long


class HostedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all providers have. An adapter's own add to these."""

    address: str = ""  # of its service; "": the SDK's own
    key_variable: str = ""  # environment variable with the key; "": the SDK's usual one
    template: str = ""  # template or image of sandboxes whose spec names none
    creates_per_s: float = 2.0  # made by all processes of this machine with this account
    creates_at_once: int = 4  # ... before that rate counts
    account_limit: int = 0  # sandboxes that the account may have at once; 0: not known, and not checked
    request_timeout_s: float = 60.0  # of a call that isn't a command

    def __post_init__(self) -> None:
        for name in ("creates_per_s", "creates_at_once", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be more than 0")


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a line of shell ended."""

    exit_code: int
    stdout: str


class Provider(Protocol):
    """What an adapter does. Its calls raise the SDK's errors; `failure_of` says what each means."""

    @property
    def settings(self) -> HostedSettings: ...

    @property
    def name(self) -> str: ...

    @property
    def account(self) -> str:
        """What tells accounts apart, which the rate of creations is counted by."""
        ...

    @property
    def life_s(self) -> float | None:
        """How long a sandbox lives whatever is asked later; None: it is renewed at the provider."""
        ...

    def can(self) -> Capabilities: ...

    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigurationError for what it can't have."""
        ...

    async def create(
        self, spec: SandboxSpec, labels: dict[str, str], ttl_s: float, key: str, snapshot: str | None
    ) -> str: ...

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]: ...

    async def count(self) -> int:
        """Live sandboxes of the account, whoever's."""
        ...

    async def terminate(self, sandbox: str) -> None:
        """Nothing to do where there is none."""
        ...

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult: ...

    async def put(self, sandbox: str, path: str, data: bytes) -> None: ...

    async def get(self, sandbox: str, path: str) -> bytes: ...

    async def renew(self, sandbox: str, ttl_s: float) -> None: ...

    async def pause(self, sandbox: str) -> None: ...

    async def resume(self, sandbox: str, ttl_s: float) -> None: ...

    async def snapshot(self, sandbox: str, name: str) -> str:
        """What it is created again from, by the provider."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Nothing to do where there is none."""
        ...

    def failure_of(self, error: Exception, what: str) -> SandboxFailure: ...

    async def close(self) -> None: ...


async def asked(provider: Provider, what: str, call: Awaitable[T]) -> T:
    """Of the provider; what its SDK raises, as what it means."""
    try:
        return await call
    except (SandboxError, ConfigurationError):
        raise
    except Exception as error:  # the one place where whatever an SDK raises is taken in
        raise SandboxError(provider.failure_of(error, f"{provider.name}: {what}")) from error


def failure_of_status(status: int, what: str) -> SandboxFailure:
    """What an HTTP status of a provider means: too many requests and its own troubles pass, a wrong key doesn't."""
    evidence: dict[str, str | int | float | bool] = {"status": status}
    if status == 429:
        evidence["hold_s"] = HOLD_S
    if status in (408, 409, 425, 429) or status >= 500:
        return infrastructure_failure(what, evidence=evidence)
    if status in (401, 403):
        what = f"{what}: give a key that may do this"
    elif status == 402:
        what = f"{what}: the account has no credit"
    return environment_failure(what, **evidence)


def plain_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """As every provider takes them."""
    return {_plain(name): _plain(value) for name, value in labels.items()}


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:LABEL_CHARACTERS] or "-"


# Whose a sandbox is. A process is told by its number, its start and the process namespace that both count in.


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def this_owner() -> str:
    return f"{_machine()}.{os.getpid()}.{leftovers.started(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Whether that owner was a process of this machine and is no more. Of another machine's nothing is known."""
    machine_process, _, started = owner.rpartition(".")
    machine, _, process = machine_process.rpartition(".")
    if machine != _machine() or not process.isdigit() or not started.isdigit():
        return False
    return leftovers.started(int(process)) != int(started)
