"""Adapter to E2B, by its SDK (`pip install 'headway[e2b]'`). **Untested against the live service.**

Its API is HTTP and JSON; commands and files go through `envd`, connect-rpc over HTTP. Limits are those of the template,
which is built at E2B and not by a spec. E2B itself provides time to live, pause (memory and files) and snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.records.sandbox import SandboxInfo, SandboxSpec
from headway.sandbox.hosted.provider import ErrorMeaning, HostedSettings, Provider, ShellResult

ALL = "0.0.0.0/0"


class E2BSettings(HostedSettings, frozen=True, kw_only=True):
    key_variable: str = "E2B_API_KEY"
    template: str = "base"
    sandbox_address: str = ""  # of envd; "": by the sandbox's own domain


class E2BProvider(Provider[E2BSettings]):
    """The adapter to E2B; see `Provider`."""

    kind = E2BSettings
    name = package = "e2b"
    life_s = None  # renewed at E2B, any number of times
    pauses = True
    missing = ("limits of memory, disk, processes and cores are the template's, not the spec's",)
    failures: Mapping[ErrorMeaning, tuple[str, ...]] = {
        "gone": ("SandboxNotFoundException", "SandboxNotRunningException"),
        "model": ("NotEnoughSpaceException",),
        "environment": ("InvalidArgumentException", "NotFoundException", "TemplateException"),
        401: ("AuthenticationException",),
    }

    def __init__(self, settings: E2BSettings) -> None:
        super().__init__(settings)
        self._options: dict[str, Any] = {"api_key": self.account, "request_timeout": settings.request_timeout_s}
        if settings.address:
            self._options |= {"api_url": settings.address, "http_version": "1.1"}
        if settings.sandbox_address:
            self._options["sandbox_url"] = settings.sandbox_address

    async def create(self, spec: SandboxSpec, labels: dict[str, str], key: str, snapshot: str | None) -> str:
        network = {"allow_out": list(spec.network), "deny_out": [ALL]} if spec.network else None
        sdk_sandbox = await self._sdk.AsyncSandbox.create(
            template=snapshot or spec.root or self.settings.template,
            timeout=math.ceil(spec.ttl_s),
            metadata=labels,
            allow_internet_access=None if network else False,
            network=network,
            lifecycle={"on_timeout": "kill"},
            idempotency_key=key,
            retries=0,  # the shared rate limit handles "too many requests"
            **self._options,
        )
        self._boxes[sdk_sandbox.sandbox_id] = sdk_sandbox
        return sdk_sandbox.sandbox_id

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        query = self._sdk.SandboxQuery(metadata=dict(labels)) if labels else None
        pages = self._sdk.AsyncSandbox.list(query=query, **self._options)
        sandboxes: list[SandboxInfo] = []
        while pages.has_next:
            sandboxes += [
                SandboxInfo(
                    id=info.sandbox_id,
                    labels={str(name): str(value) for name, value in (info.metadata or {}).items()},
                    state="paused" if info.state.value == "paused" else "running",
                    created_s=info.started_at.timestamp(),
                )
                for info in await pages.next_items()
            ]
        return sandboxes

    async def count(self) -> int:
        return sum(sandbox.state == "running" for sandbox in await self.list({}))

    async def terminate(self, sandbox: str) -> None:
        self._boxes.pop(sandbox, None)
        await self._sdk.AsyncSandbox.kill(sandbox, **self._options)

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult:
        sdk_sandbox = self._boxes[sandbox]
        try:
            execution = await sdk_sandbox.commands.run(line, timeout=timeout_s)
        except self._sdk.CommandExitException as exit_error:
            execution = exit_error
        return ShellResult(exit_code=execution.exit_code, stdout=execution.stdout or "")

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
        created = await self._sdk.AsyncSandbox.create_snapshot(sandbox, mode="filesystem", **self._options)
        return str(created.snapshot_id)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._sdk.AsyncSandbox.delete_snapshot(snapshot, **self._options)

    def status_of(self, error: Exception) -> int | None:
        status = getattr(error, "status_code", None)
        return status if isinstance(status, int) else None
