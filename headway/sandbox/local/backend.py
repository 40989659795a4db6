"""Sandboxes on this machine, made of namespaces, for asyncio.

The backend starts a zygote (`guest/zygote.py`), records itself as an owner, and passes requests on. Each sandbox's
socket leads straight to its first process (`guest/init.py`); the zygote only makes them, and reports their ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.network import allow_list
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    infrastructure_failure,
)
from headway.records.sandbox_statistics import Reaped
from headway.runtime.supervision import to_its_end
from headway.sandbox import leftovers, snapshot_store
from headway.sandbox.linux import cgroups
from headway.sandbox.local.proxy import Proxy, ProxyEntrance, Resolve, resolve
from headway.sandbox.local.sandbox import LONGEST_PATH, LocalSandbox
from headway.sandbox.local.zygote_process import LocalSettings, ZygoteProcess
from headway.sandbox.machine import no_room
from headway.sandbox.snapshot_store import SnapshotFolder

RECORD_BYTES = 16 << 10  # on disk for each sandbox, at most: its record, in whole blocks


class LocalBackend:
    """Makes sandboxes on this machine.

    Lifecycle: made -> *started* (by `start`, or the first call that needs it) -> *closed*. When a zygote dies its
    sandboxes die with it; the next `create` starts another. Invariant: a sandbox's record is on disk from before it is
    made until nothing of it is left.
    """

    def __init__(
        self,
        state: str | Path | None = None,
        *,
        run: str = "",
        snapshots: str | Path | None = None,
        snapshot_bytes: int | None = None,
        settings: LocalSettings | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        self._state = Path(state) if state is not None else leftovers.default_state()
        self._run = run
        self._snapshots = SnapshotFolder(Path(snapshots), snapshot_bytes) if snapshots is not None else None
        self._settings = settings or LocalSettings()
        self._name = "bubblewrap" if self._settings.bubblewrap else "local"
        self._resolve = resolve  # names of hosts that sandboxes may reach
        self._zygote: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._closed = False

    async def start(self) -> None:
        """Remove what dead owners have left, and start the zygote; no-op if it runs."""
        async with self._starting:
            if self._closed:
                raise SandboxError(infrastructure_failure("the backend is closed", retry=False))
            if self._zygote is not None and self._zygote.alive:
                return
            if self._zygote is not None:
                await self._zygote.close()
            self._zygote = await ZygoteProcess.start(self._state, self._run, self._settings, self._on_ended)

    async def create(
        self,
        spec: SandboxSpec,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        snapshot: Snapshot | None = None,
    ) -> LocalSandbox:
        """See :meth:`Backend.create`."""
        self._check(spec)
        return await self._create(spec, dict(labels or {}), ttl_s or spec.ttl_s, snapshot)

    def _check(self, spec: SandboxSpec) -> None:
        spec.limits.check()
        if spec.root is not None and not spec.root.startswith("/"):
            raise ConfigurationError(f"sandbox root = {spec.root!r}: give the whole path of a directory")
        for name, path in (("workdir", spec.workdir), ("root", spec.root or "")):
            if len(path.encode(errors="surrogatepass")) >= LONGEST_PATH:
                what = f"sandbox {name} = {path[:60]!r}...: give one of less than {LONGEST_PATH} bytes"
                raise ConfigurationError(what)
        if spec.network and self._settings.bubblewrap:
            raise ConfigurationError("sandbox.network: bubblewrap has no allow-list; valid: sandbox.backend = 'local'")
        allow_list(spec.network)

    async def _create(
        self, spec: SandboxSpec, labels: dict[str, str], ttl_s: float, snapshot: Snapshot | None
    ) -> LocalSandbox:
        await self.start()
        zygote = self._zygote
        assert zygote is not None
        name = f"sb-{secrets.token_hex(6)}"
        record = leftovers.SandboxRecord(
            id=name,
            backend=self._name,
            run=self._run,
            labels=labels,
            owner_pid=os.getpid(),
            owner_started=zygote.record.started,
            ttl_s=ttl_s,
            created_s=time.time(),
        )
        try:
            zygote.write(record)
        except OSError as error:
            what = f"a sandbox can't be recorded in {self._state}: {error.strerror}: make room there"
            raise SandboxError(infrastructure_failure(what)) from error
        sandbox = LocalSandbox(record, spec, zygote, self._snapshots, self._settings.answer_grace_s)
        self._sandboxes[name] = sandbox
        door = ProxyEntrance() if spec.network else None
        try:
            with contextlib.ExitStack() as opened:
                passed = [await snapshot_store.opened(snapshot, opened)] if snapshot is not None else []
                ours, theirs = socket.socketpair()
                opened.callback(theirs.close)
                if door is not None:
                    passed.append(door.theirs.fileno())
                wanted = {
                    "limits": msgspec.to_builtins(spec.limits),
                    "workdir": spec.workdir,
                    "ttl_s": ttl_s,
                    "root": spec.root,
                    "snapshot": snapshot is not None,
                    "door": bool(spec.network),
                }
                zygote.request({"do": "create", "id": name, "wanted": wanted}, [theirs.fileno(), *passed])
            await sandbox.open(ours, self._settings.start_timeout_s)
            if door is not None:
                sandbox.attach_proxy(Proxy(door.received(), spec.network, self._settings.proxy, self._resolve))
        except BaseException:
            with contextlib.suppress(SandboxError):  # it stays recorded; the first error is the one to report
                await to_its_end(sandbox.terminate())
            raise
        finally:
            if door is not None:
                door.close()
        return sandbox

    def _on_ended(self, name: str, code: int | None, oom_kills: int, why: SandboxFailure | None) -> None:
        """Handle the zygote's report of a sandbox's end; code None: the zygote died. ``why``: the cause where known."""
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.has_ended(code, oom_kills, why)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        wanted = dict(labels or {}).items()
        return [box.info for box in self._sandboxes.values() if wanted <= box.info.labels.items()]

    async def capabilities(self) -> Capabilities:
        await self.start()
        assert self._zygote is not None
        parents = self._zygote.record.cgroups
        has = parents.keys() if cgroups.V2 not in parents else set(cgroups.CONTROLLERS)
        return Capabilities(
            backend=self._name,
            memory_limit="memory" in has,
            process_limit=True,  # without the controller by RLIMIT_NPROC, within the user namespace
            cpu_limit="cpu" in has,
            disk_limit=True,
            network_allow_list=True,
            pause=True,
            snapshot=self._snapshots is not None,
            images=True,
            own_user=os.geteuid() == 0,
            writable_root=True,
            missing=self._zygote.missing,
        )

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        """See :meth:`Backend.preflight`."""
        try:
            await self.start()
        except (SandboxError, ConfigurationError, OSError, TimeoutError) as error:
            return [f"sandboxes can't be started here: {error}; their records are kept in {self._state}"]
        problems: list[str] = []
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        reaching = 1 + 2 * self._settings.proxy.connections if spec.network else 0
        need = live * (1 + reaching)
        if room < need + 64:
            problems.append(f"{live} sandboxes need {need} open files, {room} are left: ulimit -n {need + 1024}")
        return problems + [line for folder, least in self._written(spec, live) if (line := no_room(folder, least))]

    def _written(self, spec: SandboxSpec, live: int) -> list[tuple[Path, int]]:
        """Folders on this machine's disks that are written to, and the least free bytes each needs."""
        folders = [(self._state, RECORD_BYTES * live)]
        if self._snapshots is not None:
            folders.append((self._snapshots.path, spec.limits.disk_bytes))
        return folders

    async def reap(self) -> list[Reaped]:
        """See :meth:`Reaping.reap`."""
        return await asyncio.to_thread(leftovers.reap, self._state)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(box.terminate() for box in list(self._sandboxes.values())), return_exceptions=True)
        async with self._starting:
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None

    async def __aenter__(self) -> LocalBackend:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
