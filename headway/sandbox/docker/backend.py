"""Sandboxes in containers of a Docker daemon. Needs the package aiodocker (`pip install 'headway[docker]'`).

A container's command is our own first process (`guest/entry.py`), which brings its Python along: an image needs none.
The owner exchanges frames with it over the container's input and output, as with a local sandbox. When the owner has
died the daemon closes that input, the first process ends, and the daemon removes the container.

Docker makes the namespaces, the limits and the read-only root; the first process adds our filter of system calls and
ends commands. Only `guest.entry.WRITABLE_FOLDERS` can be written to, each a memory file system with a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiodocker
import msgspec

from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxSpec,
    Snapshot,
    environment_failure,
    infrastructure_failure,
)
from headway.records.sandbox_statistics import Reaped
from headway.runtime.supervision import run_to_completion
from headway.sandbox import leftovers, snapshot_store
from headway.sandbox.docker.daemon import DAEMON_ERRORS, ENDS, LABEL, PYTHON_MOUNT, DockerDaemon
from headway.sandbox.guest import portable_python, wire
from headway.sandbox.guest.entry import WRITABLE_FOLDERS
from headway.sandbox.linux.cgroups import KEPT_PROCESSES
from headway.sandbox.local.machine_backend import MachineBackend
from headway.sandbox.local.sandbox import LocalSandbox

# Paths by which the kernel shows the machine in a container; the first are Docker's own defaults.
MASKED = """
/proc/asound /proc/acpi /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list /proc/timer_stats /proc/sched_debug
/proc/scsi /sys/firmware /sys/devices/virtual/powercap /sys/kernel /sys/block /sys/bus /sys/class /sys/dev /sys/module
/sys/power /sys/hypervisor
""".split()  # noqa: SIM905
FIRST_FREE_UID = 1_000_000_000  # of the user ids that no user has
FREE_UID_RANGE = 2_000, 60_000  # the same where the daemon runs in a user namespace, which has fewer ids
ERROR_BYTES = 2000


class DockerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the backend: its image, its daemon, its timeouts."""

    image: str = ""  # of specs that name no root
    url: str = ""  # of the daemon; "": DOCKER_HOST, or where its socket usually is
    runtime: str = ""  # of its containers, as the daemon calls it: runsc, kata, ...; "": the daemon's default
    python: str = sys.executable  # interpreter of the first process; only its standard library is used
    start_timeout_s: float = 60.0  # until a sandbox is ready
    answer_grace_s: float = 10.0  # beyond a command's own time, until its sandbox counts as dead


class DockerBackend(MachineBackend[DockerDaemon]):
    """Makes sandboxes in a Docker daemon. When the daemon goes away its sandboxes count as dead, and the next `create`
    connects again."""

    name = "docker"

    def __init__(
        self,
        *,
        run: str = "",
        snapshots: str | Path | None = None,
        snapshot_bytes: int | None = None,
        settings: DockerSettings | None = None,
    ) -> None:
        super().__init__(run, snapshots, snapshot_bytes)
        self._settings = settings or DockerSettings()
        self._was_reached = False

    async def _new_maker(self) -> DockerDaemon:
        try:
            daemon = await DockerDaemon.reach(self._settings.url, self._run, self._settings.python, self._on_ended)
        except SandboxError as error:
            if self._was_reached:  # the daemon has stopped, and may be restarted
                raise
            remedy = "start it, add this user to its group, or name it by sandbox.settings.url or DOCKER_HOST"
            raise ConfigurationError(f"sandbox.backend = 'docker': {error.failure.message}; {remedy}") from error
        self._was_reached = True
        return daemon

    def _check(self, spec: SandboxSpec) -> None:
        if not (spec.root or self._settings.image):
            raise ConfigurationError("sandbox image: Docker needs one: a name that the daemon knows, or a tar's path")
        if spec.network:
            raise ConfigurationError("sandbox network: the docker backend has no allow-list; leave it empty")

    async def _create(
        self, maker: DockerDaemon, record: leftovers.SandboxRecord, spec: SandboxSpec, snapshot: Snapshot | None
    ) -> LocalSandbox:
        with _daemon_errors(), contextlib.ExitStack() as stack:
            image, variables = await maker.image(spec.root or self._settings.image)
            volume = await maker.python_volume(image)
            config = self._config(maker, spec, image, volume)
            labels = {f"{LABEL}{key}": value for key, value in record.labels.items()}
            config["Labels"] = {**maker.labels, **labels, ENDS: str(time.time() + record.ttl_s)}
            container = _Container(maker, record.id)
            container_spec = msgspec.structs.replace(spec, environment={**variables, **spec.environment})
            sandbox = LocalSandbox(record, container_spec, container, self._snapshots, self._settings.answer_grace_s)
            limit_s = self._settings.start_timeout_s
            try:
                async with self._terminate_on_error(sandbox), asyncio.timeout(limit_s):
                    snapshot_fd = await snapshot_store.open_snapshot(snapshot, stack) if snapshot is not None else None
                    reader, writer = await container.start(config)
                    serve_task = asyncio.create_task(sandbox.serve(reader, writer, limit_s))
                    setup_request = {"limits": msgspec.to_builtins(spec.limits), "workdir": spec.workdir}
                    setup_request |= {"ttl_s": record.ttl_s, "snapshot": snapshot_fd is not None}
                    with contextlib.suppress(ConnectionError):  # it has ended: its last output has the reason
                        await writer.send(wire.frame(setup_request))
                        while snapshot_fd is not None:
                            chunk = await run_to_completion(asyncio.to_thread(os.read, snapshot_fd, wire.CHUNK_BYTES))
                            await writer.send(wire.frame({}, chunk))
                            if not chunk:
                                break
                    await serve_task
            except TimeoutError:
                raise SandboxError(infrastructure_failure(f"sandbox {record.id} wasn't ready in time")) from None
        return sandbox

    def _config(self, daemon: DockerDaemon, spec: SandboxSpec, image: str, volume: str) -> dict[str, Any]:
        """Return the configuration of a container, in the format of the daemon's API."""
        limits = spec.limits
        security_options = " ".join(daemon.information.get("SecurityOptions") or [])
        if "rootless" in security_options or "userns" in security_options:
            uid = FREE_UID_RANGE[0] + secrets.randbelow(FREE_UID_RANGE[1] - FREE_UID_RANGE[0])
        else:
            # No other process has this id, so that limits per user count this sandbox alone.
            uid = FIRST_FREE_UID + secrets.randbelow(FIRST_FREE_UID)
        disk_text = f"rw,nosuid,nodev,exec,size={limits.disk_bytes},nr_inodes={limits.inodes + 8},uid={uid},gid={uid}"
        modes = {folder: "1777" if folder in ("tmp", "var/tmp", "dev/shm") else "0755" for folder in WRITABLE_FOLDERS}
        mount = {"Type": "volume", "Source": volume, "Target": PYTHON_MOUNT, "ReadOnly": True}
        loader_code = f"{portable_python.LOADER}in_container as main; main()"
        host_config = {
            "AutoRemove": True,
            "ReadonlyRootfs": True,
            "Tmpfs": {f"/{folder}": f"{disk_text},mode={mode}" for folder, mode in modes.items()},
            "Mounts": [mount],
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "PidsLimit": limits.processes + KEPT_PROCESSES,
            "NanoCpus": round(limits.cpus * 1e9),
            "NetworkMode": "none",
            "IpcMode": "none",  # an IPC namespace of its own, without Docker's /dev/shm: ours is among the places
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "MaskedPaths": MASKED,
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "LogConfig": {"Type": "none"},  # its output is our protocol, not a log
            "Init": False,
            **({"Runtime": self._settings.runtime} if self._settings.runtime else {}),
        }
        return {
            "Image": image,
            "Entrypoint": [*portable_python.command(PYTHON_MOUNT), loader_code],
            "Cmd": [f"{PYTHON_MOUNT}/codes"],
            "Env": ["LC_ALL=C.UTF-8", "LD_LIBRARY_PATH=", "LD_PRELOAD="],
            "User": f"{uid}:{uid}",
            "Healthcheck": {"Test": ["NONE"]},  # else the image's, an unwanted command
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "OpenStdin": True,
            "StdinOnce": True,  # and closed for good when the owner is gone
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "HostConfig": host_config,
        }

    async def capabilities(self) -> Capabilities:
        information = (await self.start()).information
        missing_texts = [
            f"no limit of {name}: the daemon doesn't support it ({key} in docker info); mount that control group"
            for name, key in (("memory", "MemoryLimit"), ("processes", "PidsLimit"), ("cpus", "CpuCfsQuota"))
            if not information.get(key)
        ]
        return Capabilities(
            backend=self.name,
            memory_limit=bool(information.get("MemoryLimit")),
            process_limit=bool(information.get("PidsLimit")),
            cpu_limit=bool(information.get("CpuCfsQuota")),
            disk_limit=True,
            pause=True,
            snapshot=self._snapshots is not None,
            images=True,
            own_user=True,
            missing=tuple(missing_texts),
        )

    async def reap(self) -> list[Reaped]:
        daemon = await self.start()
        with _daemon_errors():
            return await daemon.reap()


@contextlib.contextmanager
def _daemon_errors() -> Iterator[None]:
    """Turn errors of the daemon, and of the connection to it, into SandboxErrors."""
    try:
        yield
    except DAEMON_ERRORS as error:
        raise SandboxError(infrastructure_failure(f"the Docker daemon: {error}")) from error


class _Container:
    """Stands in for the zygote of a `LocalSandbox`: accepts the request to end the sandbox."""

    def __init__(self, daemon: DockerDaemon, name: str) -> None:
        self._daemon = daemon
        self._name = name
        self._making: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._daemon.alive

    async def start(self, config: dict[str, Any]) -> tuple[asyncio.StreamReader, _ContainerInput]:
        self._making = asyncio.create_task(self._daemon.make(self._name, config))
        container = await asyncio.shield(self._making)  # a container that is being made couldn't be removed yet
        stream = container.attach(stdin=True, stdout=True, stderr=True)
        await stream._init()
        reader = asyncio.StreamReader(limit=1 << 20)
        writer = _ContainerInput(stream, reader)
        try:
            await container.start()
        except aiodocker.DockerError as error:
            writer.close()
            if error.status == 400:  # the image's fault, not the machine's
                raise SandboxError(environment_failure(f"the image can't be started: {error.message}")) from error
            raise
        return reader, writer

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """End the container, which is the only request ever made."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)
        await self._daemon.remove(self._name)


class _ContainerInput:
    """A writer to the container's input; its output goes to ``reader``."""

    def __init__(self, stream: Any, reader: asyncio.StreamReader) -> None:
        self._stream = stream
        self._pending: deque[bytes] = deque()
        self._sending = asyncio.Lock()
        self._errors = b""
        self._pumping = asyncio.create_task(self._pump(reader))

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == 1:
                    reader.feed_data(message.data)
                else:
                    self._errors = (self._errors + message.data)[-ERROR_BYTES:]
        finally:
            reader.feed_eof()

    def write(self, data: bytes) -> None:
        self._pending.append(data)

    async def drain(self) -> None:
        async with self._sending:
            while self._pending:
                try:
                    await self._stream.write_in(self._pending.popleft())
                except (AssertionError, RuntimeError) as error:  # raised by aiodocker if it is closed
                    raise ConnectionResetError(f"the container's input is closed: {error}") from error

    async def send(self, data: bytes) -> None:
        self.write(data)
        await self.drain()

    def close(self) -> None:
        self._pumping.cancel()
        close_future = asyncio.ensure_future(self._stream.close())
        close_future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be closed already
