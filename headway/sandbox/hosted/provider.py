"""Defines the base of adapters to sandbox providers (`Provider`), the meaning of their errors, and owner labels."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.network import authority_of
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.imports import import_extra
from headway.sandbox import leftovers

T = TypeVar("T")
OWNER, RUN = "headway-owner", "headway-run"  # labels of every sandbox
LABEL_CHARACTERS = 50  # length of a label that every provider accepts
# The meaning of an SDK's error: an HTTP status, or a cause.
ErrorMeaning = int | Literal["gone", "out of memory", "model", "environment"]
HOLD_S = 10.0  # wait after "too many requests", which doesn't give a duration


class HostedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings common to all providers; adapters add their own."""

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


S = TypeVar("S", bound=HostedSettings)


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a shell command line."""

    exit_code: int
    stdout: str


class Provider(ABC, Generic[S]):
    """An adapter to a provider's SDK. Its calls raise the SDK's errors; `failure_of` converts each to a failure.

    This base has the behaviour of most providers: an SDK and a key, lists of hosts without ports, a time to live fixed
    at creation, no pause, errors recognised by the names of their classes. Adapters set these names and override the
    differences."""

    kind: type[HostedSettings]  # of its settings
    name: str
    package: str  # the SDK's
    missing: tuple[str, ...]  # see `Capabilities`
    life_s: float | None  # time to live that is fixed when a sandbox is made; None: it can be renewed at the provider
    pauses = False
    failures: Mapping[ErrorMeaning, tuple[str, ...]] = {}  # the SDK's errors, subclasses included

    def __init__(self, settings: S, sdk: Any = None) -> None:
        """``sdk``: a replacement for the package, in tests. Raises ConfigurationError without the package or a key."""
        self.settings = settings
        backend_text = f"sandbox.backend = {self.name!r}"
        self._sdk = sdk or import_extra(self.package, self.name, backend_text)
        variable_names = self.key_variables()
        self._keys = [os.environ.get(variable, "") for variable in variable_names]
        if not all(self._keys):
            raise ConfigurationError(f"{backend_text}: set {' and '.join(variable_names)} to the account's key")
        self.account = self._keys[0]  # by which the rate of creations is counted
        self._boxes: dict[str, Any] = {}  # the SDK's, by id

    def key_variables(self) -> tuple[str, ...]:
        return (self.settings.key_variable,)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            backend=self.name,
            memory_limit=True,
            process_limit=True,
            cpu_limit=True,
            disk_limit=True,
            network_allow_list=True,
            pause=self.pauses,
            snapshot=True,
            images=True,
            own_user=True,
            missing=self.missing,
        )

    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigurationError for a specification that the provider can't serve."""
        for entry in spec.network:
            if authority_of(entry.removeprefix("*."))[1] is not None:
                message = f"sandbox network {entry!r}: {self.name} has no ports in its list; leave :PORT out"
                raise ConfigurationError(message)

    @abstractmethod
    async def create(self, spec: SandboxSpec, labels: dict[str, str], key: str, snapshot: str | None) -> str:
        """Make a sandbox and return its id. ``key``: idempotency key of this attempt, 32 hexadecimal digits."""

    @abstractmethod
    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]: ...

    @abstractmethod
    async def count(self) -> int:
        """Return the number of the account's live sandboxes, of all owners."""

    @abstractmethod
    async def terminate(self, sandbox: str) -> None:
        """End a sandbox; no-op where there is none."""

    @abstractmethod
    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult: ...

    @abstractmethod
    async def put(self, sandbox: str, path: str, data: bytes) -> None: ...

    @abstractmethod
    async def get(self, sandbox: str, path: str) -> bytes: ...

    @abstractmethod
    async def snapshot(self, sandbox: str, name: str) -> str:
        """Take a snapshot; return the provider's id of it, which `create` restores from."""

    @abstractmethod
    async def delete_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot; no-op where there is none."""

    async def renew(self, sandbox: str, ttl_s: float) -> None:
        """No-op: the owner enforces the time to live, within `life_s`."""

    async def pause(self, sandbox: str) -> None:
        raise SandboxError(environment_failure(f"{self.name} has no pauses of this kind"))

    async def resume(self, sandbox: str, ttl_s: float) -> None:
        await self.pause(sandbox)

    def status_of(self, error: Exception) -> int | None:
        """Return the HTTP status that an error of the SDK carries; None: it has none."""
        return None

    def failure_of(self, error: Exception, action: str) -> SandboxFailure:
        meanings = {name: meaning for meaning, names in self.failures.items() for name in names}
        class_names = (name.__name__ for name in type(error).__mro__)  # the most exact one first
        message = f"{action}: {str(error)[:300]}"
        match next((meanings[name] for name in class_names if name in meanings), self.status_of(error)):
            case int() as status:
                return failure_of_status(status, message)
            case "gone":
                return infrastructure_failure(message, evidence={"gone": True})
            case "out of memory":
                return model_failure(f"{message}: out of memory as a whole", oom=True, gone=True)
            case "model":
                return model_failure(message)
            case "environment":
                return environment_failure(message)
            case _:
                return infrastructure_failure(message, evidence={"error": type(error).__name__})

    async def close(self) -> None:
        self._boxes.clear()


async def call_provider(provider: Provider[Any], action: str, call: Awaitable[T]) -> T:
    """Await a provider's call; convert an error of its SDK to a SandboxError."""
    try:
        return await call
    except (SandboxError, ConfigurationError):
        raise
    except Exception as error:  # the capture point of the SDK's errors
        raise SandboxError(provider.failure_of(error, f"{provider.name}: {action}")) from error


def failure_of_status(status: int, message: str) -> SandboxFailure:
    """Make the failure for a provider's HTTP status: rate limits and server errors are retried, a wrong key isn't."""
    evidence: dict[str, str | int | float | bool] = {"status": status}
    if status == 429:
        evidence["hold_s"] = HOLD_S
    if status in (408, 409, 425, 429) or status >= 500:
        return infrastructure_failure(message, evidence=evidence)
    if status in (401, 403):
        message = f"{message}: give a key that may do this"
    elif status == 402:
        message = f"{message}: the account has no credit"
    return environment_failure(message, **evidence)


def plain_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Convert labels to characters and lengths that every provider accepts."""
    return {_plain(name): _plain(value) for name, value in labels.items()}


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:LABEL_CHARACTERS] or "-"


# Owners of sandboxes. A process is identified by its id, its start time and the PID namespace of both.


def _machine() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:8]
    return f"{boot_id}.{os.stat('/proc/self/ns/pid').st_ino}"


def this_owner() -> str:
    return f"{_machine()}.{os.getpid()}.{leftovers.started(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Return whether that owner was a process of this machine and has ended. False for owners on other machines."""
    machine_process, _, start_text = owner.rpartition(".")
    machine, _, pid_text = machine_process.rpartition(".")
    if machine != _machine() or not pid_text.isdigit() or not start_text.isdigit():
        return False
    return leftovers.started(int(pid_text)) != int(start_text)
