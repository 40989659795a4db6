"""Runs sandboxes at a provider; common to Modal, E2B and Prime.

An adapter (`provider.py`) is thin: it makes, lists and ends sandboxes, copies files in and out, and runs a line of
shell. All other work is done by `hosted_runner.py`, which is copied into each sandbox and run once for each request; it
needs `python3` there. **Untested against the live services**: the adapters of E2B and Prime were tested on local
servers that speak their SDKs' protocols, Modal's on substitutes for its SDK's classes.

A sandbox carries labels from its creation on: run, rollout and owner. Sandboxes of a killed run are found by these
labels and ended at the next start on the same machine (`reap`); otherwise they end at their time to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.network import allow_list
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    as_start_failure,
    environment_failure,
    infrastructure_failure,
)
from headway.records.sandbox_statistics import Reaped
from headway.runtime.clock import Clock, RealClock
from headway.runtime.retries import backoff_s
from headway.runtime.supervision import cancel_all, run_to_completion, spawn
from headway.sandbox import leftovers, snapshot_store
from headway.sandbox.hosted.provider import OWNER, RUN, Provider, call_provider, is_dead, plain_labels, this_owner
from headway.sandbox.hosted.sandbox import HostedSandbox
from headway.sandbox.rate_limiter import SharedRateLimit

log = logging.getLogger(__name__)
T = TypeVar("T")
END_RETRY_S = 2.0  # before the second try to end a sandbox that was never handed out; doubled before the third
END_TRIES = 3  # to end a sandbox that was never handed out; `reap` and `close` try again later
ENDING_S = 60.0  # longest wait, after a start is given up or at `close`, until nothing of it is left
DELETING_S = 5.0  # longest time that deleting dropped snapshots delays `close`; the rest is left to the next `reap`
UNTESTED = "untested against the live service: docs/sandboxes.md says what it was tried on"


class HostedBackend:
    """A `Backend` whose sandboxes run at a provider. Started by its first call that needs it, or by `start`."""

    def __init__(
        self,
        provider: Provider[Any],
        *,
        run: str = "",
        state: str | Path | None = None,
        snapshots: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``snapshots``: the folder with notes of snapshots at the provider, which are deleted there when dropped
        (`snapshot_store.py`); None: they stay there."""
        self._provider = provider
        self._snapshots = snapshots
        self._run = run
        self._clock = clock or RealClock()
        state = Path(state) if state is not None else leftovers.default_state()
        account = hashlib.sha256(provider.account.encode()).hexdigest()[:16]
        settings = provider.settings
        rates_file = state / "rates" / f"{provider.name}-{account}"
        self._rate_limit = SharedRateLimit(rates_file, settings.creates_per_s, settings.creates_at_once, self._clock)
        self._sandboxes: dict[str, HostedSandbox] = {}
        self._making: set[asyncio.Task[HostedSandbox]] = set()
        self._orphans: dict[str, HostedSandbox] = {}  # never handed out, and couldn't be ended
        self._endings: set[asyncio.Task[None]] = set()  # of sandboxes whose caller was cancelled
        self._starting = asyncio.Lock()
        self._started = self._closed = False

    async def start(self) -> None:
        """End the sandboxes of dead owners of this machine; no-op if started."""
        async with self._starting:
            if self._closed:
                raise SandboxError(infrastructure_failure("the backend is closed", retry=False))
            if not self._started:
                log.warning("sandboxes by %s: %s", self._provider.name, UNTESTED)
                for reaped in await self._end_leftovers():
                    log.info("%s", reaped)
                self._started = True

    async def reap(self) -> list[Reaped]:
        """End the sandboxes of dead owners of this machine, and this process's sandboxes that were never handed out;
        return a record of each. Also deletes dropped snapshots."""
        reaped = await self._end_leftovers()
        await self._delete_dropped()  # not in `start`, which would time out over thousands of them
        return reaped

    async def _end_leftovers(self) -> list[Reaped]:
        reaped: list[Reaped] = []
        for sandbox in list(self._orphans.values()):
            await self._end_once(sandbox)
            description = f"{self._provider.name} {sandbox.id} of this run"
            reaped.append(Reaped(owner=description, sandboxes=1, stuck=sandbox.id in self._orphans))
        for info in await self._call("list sandboxes", self._provider.list({})):
            if is_dead(info.labels.get(OWNER, "")):
                await self._call(f"end {info.id}", self._provider.terminate(info.id))
                description = f"{self._provider.name} {info.id} of run {info.labels.get(RUN) or '-'}"
                reaped.append(Reaped(owner=description, sandboxes=1))
        return reaped

    async def _delete_dropped(self) -> None:
        """Delete dropped snapshots at the provider. Failures are retried at the next `reap`."""
        for name, mark_file in [] if self._snapshots is None else snapshot_store.dropped_snapshots(self._snapshots):
            provider_name, _, snapshot_id = name.partition(":")
            if provider_name != self._provider.name:
                continue
            try:
                await self._call(f"delete snapshot {snapshot_id}", self._provider.delete_snapshot(snapshot_id))
            except SandboxError as error:
                log.info("%s", error)
                if "hold_s" in error.failure.evidence:
                    return
            else:
                mark_file.unlink(missing_ok=True)

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> HostedSandbox:
        """See :meth:`Backend.create`."""
        spec.limits.check()
        allow_list(spec.network)
        self._provider.check(spec)
        return await spawn(self._making, self._create(spec, dict(labels or {}), snapshot))

    async def _create(self, spec: SandboxSpec, labels: dict[str, str], snapshot: Snapshot | None) -> HostedSandbox:
        await self.start()
        await self._rate_limit.wait()
        provider_labels = plain_labels({**labels, OWNER: this_owner(), RUN: self._run})
        snapshot_id = None if snapshot is None else self._snapshot_id(snapshot)
        # Shielded: a sandbox made by a cancelled call would be unknown here.
        making = asyncio.create_task(self._provider.create(spec, provider_labels, secrets.token_hex(16), snapshot_id))
        try:
            sandbox_id = await self._call("make a sandbox", asyncio.shield(making))
        except asyncio.CancelledError:
            await self._end_in_background(self._end_unwanted(making, spec, provider_labels))
            raise
        except SandboxError as error:
            self._rate_limit.hold(float(error.failure.evidence.get("hold_s", 0.0)))
            raise SandboxError(as_start_failure(error.failure)) from error
        sandbox = self._register(sandbox_id, spec, provider_labels)
        try:
            await sandbox.open()
        except BaseException as error:
            await self._end_in_background(self._end(sandbox))
            if isinstance(error, SandboxError):
                raise SandboxError(as_start_failure(error.failure)) from error
            raise
        return sandbox

    def _register(self, name: str, spec: SandboxSpec, labels: dict[str, str]) -> HostedSandbox:
        info = SandboxInfo(id=name, labels=labels, state="running", owner_pid=os.getpid(), created_s=time.time())
        sandbox = HostedSandbox(info, spec, self._provider, self._on_gone, self._snapshots)
        self._sandboxes[name] = sandbox
        return sandbox

    def _snapshot_id(self, snapshot: Snapshot) -> str:
        provider_name, _, snapshot_id = snapshot.path.partition(":")
        if provider_name != self._provider.name:
            raise SandboxError(environment_failure(f"{snapshot.path} is no snapshot of {self._provider.name}"))
        return snapshot_id

    # Sandboxes whose caller was cancelled.

    async def _end_in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run ``ending`` as a task, and wait for it up to `ENDING_S`, so that the caller keeps its slot meanwhile."""
        end_task = spawn(self._endings, ending, f"ending a sandbox at {self._provider.name}")
        await run_to_completion(asyncio.wait({end_task}, timeout=ENDING_S))

    async def _end_unwanted(self, making: asyncio.Task[str], spec: SandboxSpec, labels: dict[str, str]) -> None:
        await asyncio.wait({making})
        if not making.cancelled() and making.exception() is None:
            await self._end(self._register(making.result(), spec, labels))

    async def _end(self, box: HostedSandbox) -> None:
        self._orphans[box.id] = box
        for attempt in range(END_TRIES):
            await self._clock.sleep(backoff_s(attempt, END_RETRY_S))
            await self._end_once(box)
            if box.id not in self._orphans:
                return
        log.warning("%s %s couldn't be ended: it is tried again", self._provider.name, box.id)

    async def _end_once(self, box: HostedSandbox) -> None:
        with contextlib.suppress(SandboxError):
            await box.terminate()

    def _on_gone(self, name: str) -> None:
        self._sandboxes.pop(name, None)
        self._orphans.pop(name, None)

    async def _call(self, action: str, call: Awaitable[T]) -> T:
        return await call_provider(self._provider, action, call)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """List this owner's sandboxes with all of ``labels``, as the provider knows them."""
        required_labels = plain_labels({**(labels or {}), OWNER: this_owner()})
        sandboxes = await self._call("list sandboxes", self._provider.list(required_labels))
        return [info for info in sandboxes if required_labels.items() <= info.labels.items()]

    async def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self._provider.capabilities(), missing=(*self._provider.missing, UNTESTED))

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        """See :meth:`Backend.preflight`; also checks ``live`` more sandboxes against the account's limit."""
        limit = self._provider.settings.account_limit
        try:
            await self.start()
            if limit and (alive := await self._call("count sandboxes", self._provider.count())) + live > limit:
                return [
                    f"{live} sandboxes are needed and {alive} live at {self._provider.name}, more than its account's"
                    f" {limit}: lower sandbox.live to {max(0, limit - alive)}, end those (`headway sandboxes reap"
                    f" --backend {self._provider.name}`), or have the limit raised"
                ]
        except (SandboxError, ConfigurationError) as error:
            return [f"a sandbox can't be made at {self._provider.name}: {error}"]
        return []

    async def close(self) -> None:
        self._closed = True
        await cancel_all(*self._making)
        if self._endings:
            await asyncio.wait(self._endings, timeout=ENDING_S)
        await asyncio.gather(*(box.terminate() for box in list(self._sandboxes.values())), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELETING_S):
                await self._delete_dropped()
        await self._provider.close()

    async def __aenter__(self) -> HostedBackend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
