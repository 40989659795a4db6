"""Adapter to Modal, by its SDK (`pip install 'headway[modal]'`). **Untested against the live service.**

The SDK speaks gRPC to the service and, for commands and files, to the machine that a sandbox is on, over TLS with
credentials of its own, which no local server could imitate faithfully. The tests replace the SDK's classes instead, and
check every call against the real signatures. A sandbox's lifetime is fixed when it is made (`life_s`); its owner
enforces the time to live, and after the owner's death the next start's `reap` does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from headway.records.errors import ConfigurationError
from headway.records.network import authority_of, is_address
from headway.records.sandbox import MIB, SandboxFailure, SandboxInfo, SandboxSpec, infrastructure_failure
from headway.sandbox.hosted.provider import OWNER, ErrorMeaning, HostedSettings, Provider, ShellResult


class ModalSettings(HostedSettings, frozen=True, kw_only=True):
    key_variable: str = "MODAL_TOKEN_SECRET"
    key_id_variable: str = "MODAL_TOKEN_ID"
    template: str = "python:3.12-slim"
    app: str = "headway-sandboxes"  # the app that sandboxes are listed under
    life_s: float = 4 * 3600.0  # of a sandbox, even if its owner dies; Modal's own limit is a day


class ModalProvider(Provider[ModalSettings]):
    """The adapter to Modal; see `Provider`."""

    kind = ModalSettings
    name = package = "modal"
    missing = ("no pause", "limits of disk, inodes and processes are Modal's, not the spec's")
    failures: Mapping[ErrorMeaning, tuple[str, ...]] = {
        "gone": ("SandboxTerminatedError", "SandboxTimeoutError"),
        "model": ("SandboxFilesystemError",),
        "environment": (
            *("AuthError", "PermissionDeniedError", "InvalidError"),
            *("ImageBuildError", "VersionError", "NotFoundError"),
        ),
        429: ("ResourceExhaustedError",),
    }

    def __init__(self, settings: ModalSettings, sdk: Any = None) -> None:
        super().__init__(settings, sdk)
        self.life_s = settings.life_s
        if settings.address:
            message = "sandbox.settings.address: Modal's is set by MODAL_SERVER_URL, before it is loaded"
            raise ConfigurationError(message)
        self._client: Any = None
        self._app: Any = None

    def key_variables(self) -> tuple[str, ...]:
        return self.settings.key_id_variable, self.settings.key_variable

    async def _connect(self) -> tuple[Any, Any]:
        if self._app is None:
            self._client = await self._sdk.Client.from_credentials.aio(*self._keys)
            self._app = await self._sdk.App.lookup.aio(self.settings.app, client=self._client, create_if_missing=True)
        return self._app, self._client

    async def create(self, spec: SandboxSpec, labels: dict[str, str], key: str, snapshot: str | None) -> str:
        app, client = await self._connect()
        image_class = self._sdk.Image
        if snapshot:
            image = image_class.from_id(snapshot, client=client)
        else:
            image = image_class.from_registry(spec.root or self.settings.template)
        network: dict[str, Any] = {"block_network": not spec.network}
        if spec.network:
            addresses = [entry for entry in spec.network if is_address(authority_of(entry)[0] or "")]
            network["outbound_domain_allowlist"] = [entry for entry in spec.network if entry not in addresses]
            network["outbound_cidr_allowlist"] = [
                f"{entry.strip('[]')}/{128 if entry.startswith('[') else 32}" for entry in addresses
            ]
        sdk_sandbox = await self._sdk.Sandbox.create.aio(
            "sleep",
            "infinity",
            app=app,
            tags=labels,
            image=image,
            timeout=math.ceil(max(spec.ttl_s, self.settings.life_s)),
            cpu=(spec.limits.cpus, spec.limits.cpus),
            memory=(math.ceil(spec.limits.memory_bytes / MIB), math.ceil(spec.limits.memory_bytes / MIB)),
            client=client,
            **network,
        )
        self._boxes[sdk_sandbox.object_id] = sdk_sandbox
        return str(sdk_sandbox.object_id)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        app, client = await self._connect()
        sandboxes: list[SandboxInfo] = []
        async for box in self._sdk.Sandbox.list.aio(app_id=app.app_id, tags=dict(labels) or None, client=client):
            tags = await box.get_tags.aio()
            if OWNER in tags:
                sandboxes.append(SandboxInfo(id=box.object_id, labels=tags, state="running"))
        return sandboxes

    async def count(self) -> int:
        _, client = await self._connect()
        return len([sdk_sandbox async for sdk_sandbox in self._sdk.Sandbox.list.aio(client=client)])

    async def terminate(self, sandbox: str) -> None:
        sdk_sandbox = self._boxes.pop(sandbox, None)
        if sdk_sandbox is None:
            _, client = await self._connect()
            with contextlib.suppress(self._sdk.exception.NotFoundError):
                sdk_sandbox = await self._sdk.Sandbox.from_id.aio(sandbox, client=client)
        if sdk_sandbox is not None:
            await sdk_sandbox.terminate.aio()

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult:
        process = await self._boxes[sandbox].exec.aio("sh", "-c", line, timeout=math.ceil(timeout_s))
        stdout = await process.stdout.read.aio()
        return ShellResult(exit_code=await process.wait.aio(), stdout=stdout)

    async def put(self, sandbox: str, path: str, data: bytes) -> None:
        await self._boxes[sandbox].filesystem.write_bytes.aio(data, path)

    async def get(self, sandbox: str, path: str) -> bytes:
        return bytes(await self._boxes[sandbox].filesystem.read_bytes.aio(path))

    async def snapshot(self, sandbox: str, name: str) -> str:
        return str((await self._boxes[sandbox].snapshot_filesystem.aio()).object_id)

    async def delete_snapshot(self, snapshot: str) -> None:
        """No-op: Modal keeps snapshots for 30 days. Its call that deletes an image is experimental, and its effect on
        images and sandboxes made from that image isn't documented."""

    def failure_of(self, error: Exception, action: str) -> SandboxFailure:
        if isinstance(error, KeyError) and error.args and error.args[0] not in self._boxes:
            return infrastructure_failure(f"{action}: {str(error)[:300]}", evidence={"gone": True})
        return super().failure_of(error, action)
