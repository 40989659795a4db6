"""Adapter to Prime Intellect, by its SDK (`pip install 'headway[prime]'`). **Untested against the live service.**

Its API is HTTP and JSON; commands go by connect-rpc through a gateway, files by calls of their own. A sandbox is a
virtual machine of an image that the service can pull. Its lifetime is fixed when it is made (`life_s`); its owner
enforces the time to live, and after the owner's death the next start's `reap` does. An empty list of hosts is assumed
to mean that none may be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.records.errors import ConfigurationError
from headway.records.network import authority_of, is_address
from headway.records.sandbox import SandboxInfo, SandboxSpec
from headway.sandbox.hosted.provider import ErrorMeaning, HostedSettings, Provider, ShellResult

GIB = 1 << 30
STATUS = re.compile(r"HTTP (\d{3})\b")
STATES = {"RUNNING": "running", "PAUSED": "paused", "PENDING": "starting", "PROVISIONING": "starting"}


class PrimeSettings(HostedSettings, frozen=True, kw_only=True):
    key_variable: str = "PRIME_API_KEY"
    template: str = "python:3.12-slim"
    life_s: float = 4 * 3600.0  # of a sandbox, even if its owner dies
    start_timeout_s: float = 300.0


class PrimeProvider(Provider[PrimeSettings]):
    """The adapter to Prime Intellect; see `Provider`."""

    kind = PrimeSettings
    name = "prime"
    package = "prime_sandboxes"
    missing = (
        "no pause",
        "limits are rounded up to whole cores and GiB; processes and inodes have none but the machine's",
    )
    failures: Mapping[ErrorMeaning, tuple[str, ...]] = {
        "gone": ("SandboxNotRunningError",),
        "out of memory": ("SandboxOOMError",),
        "environment": ("SandboxImagePullError", "ValidationError"),
        401: ("UnauthorizedError",),
        402: ("PaymentRequiredError",),
    }

    def __init__(self, settings: PrimeSettings) -> None:
        super().__init__(settings)
        self.life_s = settings.life_s
        self._client = self._sdk.AsyncSandboxClient(api_key=self.account)
        if settings.address:
            self._client.client.base_url = settings.address.rstrip("/").removesuffix("/api/v1")

    def check(self, spec: SandboxSpec) -> None:
        for entry in spec.network:
            host, port = authority_of(entry.removeprefix("*."))
            if host is not None and port not in (None, 80, 443) and not is_address(host):
                raise ConfigurationError(f"sandbox network {entry!r}: Prime takes names on ports 80 and 443 alone")

    async def create(self, spec: SandboxSpec, labels: dict[str, str], key: str, snapshot: str | None) -> str:
        limits = spec.limits
        request = self._sdk.CreateSandboxRequest(
            name=f"headway-{key[:24]}",
            docker_image=None if snapshot else spec.root or self.settings.template,
            checkpoint_id=snapshot,
            cpu_cores=math.ceil(limits.cpus),
            memory_gb=math.ceil(limits.memory_bytes / GIB),
            disk_size_gb=None if snapshot else math.ceil(limits.disk_bytes / GIB),
            network_allowlist=list(spec.network),
            timeout_minutes=math.ceil(max(spec.ttl_s, self.settings.life_s) / 60),
            labels=[f"{name}={value}" for name, value in labels.items()],
            idempotency_key=key,
        )
        sandbox = await self._client.create(request)
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                await self._client.wait_for_creation(sandbox.id)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                await self._client.delete(sandbox.id)
            raise
        return str(sandbox.id)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        label_filter = [f"{name}={value}" for name, value in labels.items()] or None
        sandboxes: list[SandboxInfo] = []
        page, has_more = 1, True
        while has_more:
            answer = await self._client.list(labels=label_filter, page=page, exclude_terminated=True)
            sandboxes += [
                SandboxInfo(
                    id=info.id,
                    labels={name: value for name, _, value in (label.partition("=") for label in info.labels)},
                    state=STATES.get(info.status, "ended"),  # pyright: ignore[reportArgumentType]
                    created_s=info.created_at.timestamp(),
                )
                for info in answer.sandboxes
            ]
            page, has_more = page + 1, answer.has_next
        return [info for info in sandboxes if info.state != "ended"]

    async def count(self) -> int:
        return int((await self._client.list(page=1, per_page=1, exclude_terminated=True)).total)

    async def terminate(self, sandbox: str) -> None:
        with self._ignore_not_found():
            await self._client.delete(sandbox)

    async def run(self, sandbox: str, line: str, timeout_s: float) -> ShellResult:
        execution = await self._client.execute_command(sandbox, line, timeout=math.ceil(timeout_s))
        return ShellResult(exit_code=execution.exit_code, stdout=execution.stdout)

    async def put(self, sandbox: str, path: str, data: bytes) -> None:
        timeout_s = math.ceil(self.settings.request_timeout_s)
        await self._client.upload_bytes(sandbox, path, data, Path(path).name, timeout=timeout_s)

    async def get(self, sandbox: str, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            local_file = Path(folder, "taken")
            timeout_s = math.ceil(self.settings.request_timeout_s)
            await self._client.download_file(sandbox, path, str(local_file), timeout=timeout_s)
            return await asyncio.to_thread(local_file.read_bytes)

    async def snapshot(self, sandbox: str, name: str) -> str:
        checkpoint = await self._client.checkpoint(sandbox)
        await self._client.wait_for_checkpoint(checkpoint.id)
        return str(checkpoint.id)

    async def delete_snapshot(self, snapshot: str) -> None:
        """Delete a checkpoint, no-op if it is unknown. Its data stays at the provider as long as later ones need it."""
        with self._ignore_not_found():
            await self._client.delete_checkpoint(snapshot)

    @contextlib.contextmanager
    def _ignore_not_found(self) -> Iterator[None]:
        try:
            yield
        except self._sdk.APIError as error:
            if self.status_of(error) != 404:
                raise

    def status_of(self, error: Exception) -> int | None:
        """Return the HTTP status, which Prime's errors have in their text."""
        match = STATUS.search(str(error))
        return int(match[1]) if match else None

    async def close(self) -> None:
        await self._client.aclose()
