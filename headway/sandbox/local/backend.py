"""Makes sandboxes on this machine from namespaces, for asyncio.

The backend starts a zygote (`guest/zygote.py`), records itself as an owner, and sends it requests. Each sandbox's
socket connects to its first process directly (`guest/init.py`); the zygote only makes sandboxes and reports their ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sysconfig
from pathlib import Path

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.network import allow_list
from headway.records.sandbox import Capabilities, SandboxError, SandboxSpec, Snapshot, infrastructure_failure
from headway.records.sandbox_statistics import Reaped
from headway.sandbox import leftovers, snapshot_store
from headway.sandbox.linux import cgroups
from headway.sandbox.local.machine_backend import MachineBackend
from headway.sandbox.local.proxy import Proxy, ProxyEntrance, Resolve, resolve
from headway.sandbox.local.sandbox import MAX_PATH_CHARACTERS, LocalSandbox
from headway.sandbox.local.zygote_process import LocalSettings, ZygoteProcess

RECORD_BYTES = 16 << 10  # limit on disk of a sandbox's record, in whole blocks


class LocalBackend(MachineBackend[ZygoteProcess]):
    """Makes sandboxes on this machine through a zygote. Invariant: a sandbox's record is on disk from before its
    creation until all its resources are removed."""

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
        super().__init__(run, snapshots, snapshot_bytes)
        self._state = Path(state) if state is not None else leftovers.default_state()
        self._start_remark = f"; their records are kept in {self._state}"
        self._settings = settings or LocalSettings()
        self.name = "bubblewrap" if self._settings.bubblewrap else "local"
        preload = self._settings.preload
        self._packages = [*preload.folders, sysconfig.get_path("stdlib")] if preload else []
        self._resolve = resolve  # resolves the names of hosts that sandboxes may reach

    async def _new_maker(self) -> ZygoteProcess:
        return await ZygoteProcess.start(self._state, self._run, self._settings, self._on_ended)

    def _check(self, spec: SandboxSpec) -> None:
        if spec.root is not None and not spec.root.startswith("/"):
            raise ConfigurationError(f"sandbox root = {spec.root!r}: give the whole path of a directory")
        for name, path in (("workdir", spec.workdir), ("root", spec.root or "")):
            if len(path.encode(errors="surrogatepass")) >= MAX_PATH_CHARACTERS:
                message = f"sandbox {name} = {path[:60]!r}...: give one of less than {MAX_PATH_CHARACTERS} bytes"
                raise ConfigurationError(message)
        if spec.network and self._settings.bubblewrap:
            raise ConfigurationError("sandbox.network: bubblewrap has no allow-list; valid: sandbox.backend = 'local'")
        if self._settings.preload and (self._settings.bubblewrap or spec.root is not None):
            raise ConfigurationError("sandbox preload: only for sandboxes of the host's root, without bubblewrap")
        allow_list(spec.network)

    async def _create(
        self, maker: ZygoteProcess, record: leftovers.SandboxRecord, spec: SandboxSpec, snapshot: Snapshot | None
    ) -> LocalSandbox:
        with contextlib.ExitStack() as exit_stack:
            try:
                entrance = ProxyEntrance() if spec.network else None
                if entrance is not None:
                    exit_stack.callback(entrance.close)
                maker.write(record)
            except OSError as error:
                message = f"a sandbox can't be recorded in {self._state}: {error.strerror}: free space there"
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    message = f"a sandbox needs more open files: {error.strerror}: raise ulimit -n"
                raise SandboxError(infrastructure_failure(message)) from error
            channel, inner_channel = socket.socketpair() if self._settings.preload else (None, None)
            sandbox = LocalSandbox(record, spec, maker, self._snapshots, self._settings.answer_grace_s, channel)
            async with self._terminate_on_error(sandbox):
                with contextlib.ExitStack() as sent_stack:
                    fds = [await snapshot_store.open_snapshot(snapshot, sent_stack)] if snapshot is not None else []
                    owner_socket, peer_socket = socket.socketpair()
                    sent_stack.callback(peer_socket.close)
                    if entrance is not None:
                        fds.append(entrance.theirs.fileno())
                    if inner_channel is not None:
                        sent_stack.callback(inner_channel.close)
                        fds.append(inner_channel.fileno())
                    setup = {
                        "limits": msgspec.to_builtins(spec.limits),
                        "workdir": spec.workdir,
                        "ttl_s": record.ttl_s,
                        "root": spec.root,
                        "snapshot": snapshot is not None,
                        "door": bool(spec.network),
                        "channel": inner_channel is not None,
                        "packages": self._packages,
                    }
                    maker.request({"do": "create", "id": record.id, "wanted": setup}, [peer_socket.fileno(), *fds])
                await sandbox.open(owner_socket, self._settings.start_timeout_s)
                if entrance is not None:
                    sandbox.attach_proxy(Proxy(entrance.receive(), spec.network, self._settings.proxy, self._resolve))
        return sandbox

    async def capabilities(self) -> Capabilities:
        zygote = await self.start()
        parents = zygote.record.cgroups
        controllers = parents.keys() if cgroups.V2 not in parents else set(cgroups.CONTROLLERS)
        return Capabilities(
            backend=self.name,
            memory_limit="memory" in controllers,
            process_limit=True,  # without the controller by RLIMIT_NPROC, within the user namespace
            cpu_limit="cpu" in controllers,
            disk_limit=True,
            network_allow_list=True,
            pause=True,
            snapshot=self._snapshots is not None,
            images=True,
            own_user=os.geteuid() == 0,
            writable_root=True,
            missing=zygote.missing,
        )

    def _open_files(self, spec: SandboxSpec) -> int:
        return 2 + 2 * self._settings.proxy.connections if spec.network else 1

    def _disk_needs(self, spec: SandboxSpec, live: int) -> list[tuple[Path, int]]:
        return [(self._state, RECORD_BYTES * live), *super()._disk_needs(spec, live)]

    async def reap(self) -> list[Reaped]:
        return await asyncio.to_thread(leftovers.reap, self._state)
