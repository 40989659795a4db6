"""Sandboxes at E2B, by its SDK (`pip install 'headway[e2b]'`). **Untested against the live service.**

Its API is HTTP and JSON; what runs in a sandbox is reached through `envd`, connect-rpc over HTTP. Limits are those of
the template, which is built at E2B and not by a spec. Time to live, pause (memory and files) and snapshots are E2B's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from headway.records.errors import ConfigurationError
from headway.records.network import authority_of
from headway.records.sandbox import (
    Capabilities,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.imports import import_extra
from headway.sandbox.hosted.provider import HostedSettings, ShellResult, failure_of_status

ALL = "0.0.0.0/0"
GONE = ("SandboxNotFoundException", "SandboxNotRunningException")


class E2BSettings(HostedSettings, frozen=True, kw_only=True):
    key_variable: str = "E2B_API_KEY"
    template: str = "base"
    sandbox_address: str = ""  # of envd; "": by the sandbox's own domain


class E2BProvider:
    """See :class:`Provider`."""

    name = "e2b"
    life_s = None  # renewed as often as one likes

    def __init__(self, settings: E2BSettings) -> None:
        self.settings = settings
        self._sdk = import_extra("e2b", "e2b", "sandbox.backend = 'e2b'")
        self.account = os.environ.get(settings.key_variable, "")
        if not self.account:
            raise ConfigurationError(f"sandbox.backend = 'e2b': set {settings.key_variable} to the account's key")
        self._options: dict[str, Any] = {"api_key": self.account, "request_timeout": settings.request_timeout_s}
        if settings.address:
            self._options |= {"api_url": settings.address, "http_version": "1.1"}
        if settings.sandbox_address:
            self._options["sandbox_url"] = settings.sandbox_address
        self._boxes: dict[str, Any] = {}

    def can(self) -> Capabilities:
        missing = "limits of memory, disk, processes and cores are the template's, whatever the spec says"
        return Capabilities(
            backend="e2b",
            memory_limit=True,
            process_limit=True,
            cpu_limit=True,
            disk_limit=True,
            network_allow_list=True,
            pause=True,
            snapshot=True,
            images=True,
            own_user=True,
            missing=(missing,),
        )

    def check(self, spec: SandboxSpec) -> None:
        for entry in spec.network:
            if authority_of(entry.removeprefix("*."))[1] is not None:
                raise ConfigurationError(f"sandbox network {entry!r}: E2B has no ports in its list; leave :PORT out")

    async def create(
        self, spec: SandboxSpec, labels: dict[str, str], ttl_s: float, key: str, snapshot: str | None
    ) -> str:
        network = {"allow_out": list(spec.network), "deny_out": [ALL]} if spec.network else None
        box = await self._sdk.AsyncSandbox.create(
            template=snapshot or spec.root or self.settings.template,
            timeout=math.ceil(ttl_s),
            metadata=labels,
            allow_internet_access=None if network else False,
            network=network,
            lifecycle={"on_timeout": "kill"},
            idempotency_key=_idempotency_key(key),
            retries=0,  # too many at once is for the pace of all to answer
            **self._options,
        )
        self._boxes[box.sandbox_id] = box
        return box.sandbox_id

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        query = self._sdk.SandboxQuery(metadata=dict(labels)) if labels else None
        pages = self._sdk.AsyncSandbox.list(query=query, **self._options)
        found: list[SandboxInfo] = []
        while pages.has_next:
            found += [
                SandboxInfo(
                    id=one.sandbox_id,
                    labels={str(name): str(value) for name, value in (one.metadata or {}).items()},
                    state="paused" if one.state.value == "paused" else "running",
                    created_s=one.started_at.timestamp(),
                )
                for one in await pages.next_items()
            ]
        return found

    async def count(self) -> int:
        return sum(one.state == "running" for one in await self.list({}))

    async def terminate(self, sandbox: str) -> None:
        self._boxes.pop(sandbox, None)
        await self._sdk.AsyncSandbox.kill(sandbox, **self._options)

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult:
        box = self._boxes[sandbox]
        try:
            said = await box.commands.run(line, timeout=timeout_s)
        except self._sdk.CommandExitException as ended:
            said = ended
        return ShellResult(exit_code=said.exit_code, stdout=said.stdout or "")

    async def put(self, sandbox: str, path: str, data: bytes) -> None:
        await self._boxes[sandbox].files.write(path, data)

    async def get(self, sandbox: str, path: str) -> bytes:
        return bytes(await self._boxes[sandbox].files.read(path, format="bytes"))

    async def renew(self, sandbox: str, ttl_s: float) -> None:
        await self._sdk.AsyncSandbox.set_timeout(sandbox, math.ceil(ttl_s), **self._options)

    async def pause(self, sandbox: str) -> None:
        await self._sdk.AsyncSandbox.pause(sandbox, **self._options)

    async def resume(self, sandbox: str, ttl_s: float) -> None:
        self._boxes[sandbox] = await self._sdk.AsyncSandbox.connect(sandbox, timeout=math.ceil(ttl_s), **self._options)

    async def snapshot(self, sandbox: str, name: str) -> str:
        return str(
            (await self._sdk.AsyncSandbox.create_snapshot(sandbox, mode="filesystem", **self._options)).snapshot_id
        )

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._sdk.AsyncSandbox.delete_snapshot(snapshot, **self._options)

    def failure_of(self, error: Exception, what: str) -> SandboxFailure:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        what = f"{what}: {str(error)[:300]}"
        status = getattr(error, "status_code", None)
        if kinds & set(GONE):
            return infrastructure_failure(what, evidence={"gone": True})
        if "NotEnoughSpaceException" in kinds:
            return model_failure(what)
        if "AuthenticationException" in kinds:
            return failure_of_status(401, what)
        if isinstance(status, int):
            return failure_of_status(status, what)
        if kinds & {"InvalidArgumentException", "NotFoundException", "TemplateException"}:
            return environment_failure(what)
        return infrastructure_failure(what, evidence={"error": type(error).__name__})

    async def close(self) -> None:
        self._boxes.clear()


def _idempotency_key(key: str) -> str:
    """E2B takes small letters, digits and hyphens."""
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign == "-") else f"-{ord(sign):x}-" for sign in key)
    return plain.lower()[:255]
