"""Requests to a Docker daemon: containers and their ends, images, and the removal of dead owners' resources.

Every resource carries labels: its owner (process, start time and machine), the sandbox, and its time to live. Dead
owners' resources are found by these labels alone; there is no other record.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiodocker
import aiohttp

from headway.records.sandbox import SandboxError, SandboxFailure, environment_failure, infrastructure_failure
from headway.records.sandbox_statistics import Reaped
from headway.runtime.supervision import cancel_all
from headway.sandbox import leftovers
from headway.sandbox.guest.entry import WRITABLE_FOLDERS

T = TypeVar("T")
OWNER, RUN, ENDS = "headway.owner", "headway.run", "headway.ends_s"
LABEL = "headway.label."  # prefix of the caller's own labels
PYTHON_MOUNT = "/.headway"  # where the first process's Python is mounted, read-only
DAEMON_ERRORS = (aiodocker.DockerError, aiohttp.ClientError, OSError)
CONNECT_TIMEOUT_S = 5.0  # for a daemon to answer a command that changes nothing
ABANDONED_AFTER_S = 3600.0  # beyond its time to live, until another machine's sandbox counts as abandoned
PACKER = "import sys; sys.path.insert(0, sys.argv[1]); from headway.sandbox.guest.portable_python import main; main()"
LAYER_FILES = {"oci-layout", "index.json", "manifest.json"}  # names in archives of layers, not of a root
Ended = Callable[[str, int | None, int, SandboxFailure | None], None]


class DockerDaemon:
    """The sandboxes of one owner in a daemon. ``ended`` is called for each that is gone, with its exit code and the
    number of processes in it that the kernel killed for memory; code None: the daemon doesn't answer any more."""

    _count = 0

    def __init__(self, client: aiodocker.Docker, run: str, python: str, on_ended: Ended) -> None:
        type(self)._count += 1
        self._client = client
        self._python = python
        self._on_ended = on_ended
        self.owner = leftovers.owner_name(os.getpid(), self._count)
        self.labels = {OWNER: self.owner, RUN: run}
        self.information: dict[str, Any] = {}
        self.alive = False
        self._containers: dict[str, tuple[int | None, int]] = {}  # by name: exit code so far, kills
        self._made: dict[str, asyncio.Task[str]] = {}  # the volume, and images that were imported
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def reach(cls, url: str, run: str, python: str, on_ended: Ended) -> DockerDaemon:
        """Connect to a daemon and reap dead owners' resources there. Raises SandboxError if none answers."""
        client = open_client(url)
        daemon = cls(client, run, python, on_ended)
        try:
            daemon.information = dict(await client.system.info())
            await reap(client)
        except DAEMON_ERRORS as error:
            await client.close()
            raise SandboxError(infrastructure_failure(f"no Docker daemon answers: {error}")) from error
        daemon.alive = True
        daemon._listening = asyncio.create_task(daemon._listen(), name="docker events")
        return daemon

    async def _listen(self) -> None:
        """Follow the daemon's events and report every container that is gone; all of them when the events end."""
        filters = {"label": [f"{OWNER}={self.owner}"], "type": ["container"]}
        events = self._client.events.subscribe(filters=json.dumps(filters), since=str(int(time.time()) - 1))
        try:
            while (event := await events.get()) is not None:
                name = event["Actor"]["Attributes"].get("name", "")
                exit_code, kill_count = self._containers.get(name, (None, 0))
                if name not in self._containers:
                    continue
                if event["Action"] == "oom":
                    self._containers[name] = exit_code, kill_count + 1
                elif event["Action"] == "die":
                    self._containers[name] = int(event["Actor"]["Attributes"]["exitCode"]), kill_count
                elif event["Action"] == "destroy":
                    self.gone(name)
        finally:
            self.alive = False
            for name in list(self._containers):
                self._containers.pop(name)
                self._on_ended(name, None, 0, None)

    def gone(self, name: str) -> None:
        if name in self._containers:
            exit_code, kill_count = self._containers.pop(name)
            self._on_ended(name, -1 if exit_code is None else exit_code, kill_count, None)

    async def reap(self) -> list[Reaped]:
        return await reap(self._client)

    # Containers.

    async def make(self, name: str, config: dict[str, Any]) -> Any:
        """Make a container without starting it."""
        self._containers[name] = None, 0
        return await self._client.containers.create(config, name=name)

    async def remove(self, name: str) -> None:
        with contextlib.suppress(*DAEMON_ERRORS):
            for _ in range(50):
                try:
                    await self._client.containers.container(name).delete(force=True, v=True)
                except aiodocker.DockerError as error:
                    if error.status == 409:  # another process is removing it
                        await asyncio.sleep(0.05)
                        continue
                    if error.status != 404:
                        raise
                self.gone(name)
                return

    # Volumes and images.

    async def python_volume(self, image: str) -> str:
        """Return a volume with the first process's Python, filled once through a container that is never started."""
        return await self._once(PYTHON_MOUNT, lambda: self._fill(image))

    async def _once(self, key: str, make: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Return what ``make`` returns, which runs once for each key, and again where it has failed."""
        make_task = self._made.get(key)
        if make_task is None or (make_task.done() and make_task.exception()):
            make_task = self._made[key] = asyncio.create_task(make())
        return await asyncio.shield(make_task)

    async def _fill(self, image: str) -> str:
        pack_process = await asyncio.create_subprocess_exec(
            self._python, "-I", "-S", "-c", PACKER, str(Path(__file__).parents[3]), stdout=asyncio.subprocess.PIPE
        )
        tar_bytes, _ = await pack_process.communicate()
        if pack_process.returncode:
            raise SandboxError(infrastructure_failure(f"{self._python} can't be packed for a container", retry=False))
        name = f"headway-{self.owner}"
        labels = {**self.labels, ENDS: "inf"}
        await self._client.volumes.create({"Name": name, "Labels": labels})
        mount = {"Type": "volume", "Source": name, "Target": PYTHON_MOUNT, "VolumeOptions": {"NoCopy": True}}
        config = {"Image": image, "Cmd": ["-"], "Labels": labels, "HostConfig": {"Mounts": [mount]}}
        container = await self._client.containers.create(config)
        try:
            await container.put_archive(PYTHON_MOUNT, tar_bytes)
        finally:
            await container.delete(force=True)
        return name

    async def image(self, image: str) -> tuple[str, dict[str, str]]:
        """Return an image's id and environment. ``image``: a name that the daemon knows, or the path of a root file
        system (directory or tar), which is imported for as long as this owner lives."""
        try:
            image_name = await self._once(image, lambda: self._import(image)) if image.startswith("/") else image
            image_info = await self._client.images.inspect(image_name)
        except aiodocker.DockerError as error:
            self._made.pop(image, None)
            if error.status in (400, 404):
                message = f"image {image!r}: {error.message}; docker pull or docker load it, or give a tar's whole path"
                raise SandboxError(environment_failure(message)) from error
            raise
        config = image_info["Config"]
        if volume_paths := _unbounded_volumes(config):
            message = f"image {image!r}: VOLUME {', '.join(volume_paths)} would be the host's disk, without a limit"
            remedy = "docker export a container of it, which leaves that out, and give the tar's whole path"
            raise SandboxError(environment_failure(f"{message}: {remedy}"))
        return image_info["Id"], dict(variable.partition("=")[::2] for variable in config.get("Env") or [])

    async def _import(self, path: str) -> str:
        with tempfile.TemporaryFile() as tar_file:
            try:
                source = await asyncio.to_thread(_open_root, path, tar_file)
            except (OSError, tarfile.TarError) as error:
                raise SandboxError(environment_failure(f"image {path}: {error}")) from error
            label_pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in {**self.labels, ENDS: "inf"}.items())
            image_name = f"headway-{hashlib.sha256(f'{self.owner} {path}'.encode()).hexdigest()[:16]}"
            parameters = {"fromSrc": "-", "repo": image_name, "changes": f"LABEL {label_pairs}"}
            with source:
                async with self._client._query("images/create", "POST", params=parameters, data=source) as answer:
                    answer_text = await answer.text()
            if '"error"' in answer_text:
                raise SandboxError(environment_failure(f"image {path}: {answer_text.strip().splitlines()[-1][:300]}"))
        return image_name

    async def close(self) -> None:
        """Remove everything with this owner's labels, and disconnect."""
        await cancel_all(self._listening)
        self.alive = False
        with contextlib.suppress(*DAEMON_ERRORS):
            await remove_labelled(self._client, f"{OWNER}={self.owner}")
        with contextlib.suppress(*DAEMON_ERRORS):  # the daemon stopped during its event stream
            await self._client.events.stop()
        await self._client.close()


def open_client(url: str) -> aiodocker.Docker:
    try:
        return aiodocker.Docker(url or None)
    except (AssertionError, ValueError) as error:
        reason = "no socket where one usually is, and no DOCKER_HOST" if isinstance(error, AssertionError) else error
        raise SandboxError(infrastructure_failure(f"no Docker daemon: {reason}", retry=False)) from error


def _unbounded_volumes(config: dict[str, Any]) -> list[str]:
    """Return the paths of an image's volumes that none of our mounts covers. The daemon would make these regardless."""
    declared_paths = {os.path.normpath(path) for path in config.get("Volumes") or ()}
    return sorted(declared_paths - {f"/{name}" for name in WRITABLE_FOLDERS})


def _open_root(path: str, packed: Any) -> Any:
    """Open a root file system as a tar: the file itself, or a directory packed into ``packed``. Raises OSError,
    TarError."""
    if os.path.isdir(path):
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(path, ".")
        packed.seek(0)
        return packed
    with tarfile.open(path) as archive:
        names = {name.removeprefix("./") for name in (next(iter(archive)).name, *LAYER_FILES & set(archive.getnames()))}
    if names & LAYER_FILES:
        raise OSError(f"it holds an image's layers: docker load -i {path}, and give the image's name")
    return open(path, "rb")


async def labelled(client: aiodocker.Docker, label: str) -> AsyncIterator[tuple[str, str, dict[str, str]]]:
    """Yield kind, name and labels of every resource with this label: containers first, then volumes and images."""
    filters = json.dumps({"label": [label]})
    for description in await client._query_json("containers/json", params={"all": "1", "filters": filters}):
        yield "containers", description["Id"], description["Labels"]
    for description in (await client._query_json("volumes", params={"filters": filters}))["Volumes"] or []:
        yield "volumes", description["Name"], description["Labels"]
    for description in await client._query_json("images/json", params={"filters": filters}):
        yield "images", description["Id"], description["Labels"]


async def remove_labelled(client: aiodocker.Docker, label: str, dead: bool = False) -> list[tuple[str, str]]:
    """Remove all resources with this label, with ``dead`` only dead owners'; return owner and kind of each."""
    removed: list[tuple[str, str]] = []
    async for kind, name, labels in labelled(client, label):
        if dead and not _ownerless(labels):
            continue
        with contextlib.suppress(aiodocker.DockerError):  # it has been removed meanwhile, or is in use after all
            async with client._query(f"{kind}/{name}", "DELETE", params={"force": "1"}):
                removed.append((labels[OWNER], kind))
    return removed


def _ownerless(labels: dict[str, str]) -> bool:
    is_dead_owner = leftovers.is_dead(labels[OWNER])
    return float(labels.get(ENDS, "inf")) + ABANDONED_AFTER_S < time.time() if is_dead_owner is None else is_dead_owner


async def reap(client: aiodocker.Docker) -> list[Reaped]:
    """Remove dead owners' resources from the daemon."""
    removed = await remove_labelled(client, OWNER, dead=True)
    return [
        Reaped(owner=owner, sandboxes=sum(kind == "containers" for name, kind in removed if name == owner))
        for owner in sorted({owner for owner, _ in removed})
    ]


async def records(client: aiodocker.Docker) -> list[tuple[leftovers.SandboxRecord, bool]]:
    """Return records of all owners' containers, each with whether its owner lives or may live."""
    filters = json.dumps({"label": [OWNER]})
    owned_records: list[tuple[leftovers.SandboxRecord, bool]] = []
    for container in await client._query_json("containers/json", params={"all": "1", "filters": filters}):
        labels: dict[str, str] = container["Labels"]
        owner_match = leftovers.OWNER.fullmatch(labels[OWNER])
        ttl_s = float(labels[ENDS]) - container["Created"]
        if owner_match is not None and math.isfinite(ttl_s):  # else it only fills the volume
            custom_labels = {key.removeprefix(LABEL): value for key, value in labels.items() if key.startswith(LABEL)}
            record = leftovers.SandboxRecord(
                id=container["Names"][0].removeprefix("/"),
                backend="docker",
                run=labels[RUN],
                labels=custom_labels,
                owner_pid=int(owner_match[1]),
                owner_started=int(owner_match[2]),
                ttl_s=ttl_s,
                created_s=container["Created"],
            )
            owned_records.append((record, not _ownerless(labels)))
    return owned_records


def query_default_daemon(query: Callable[[aiodocker.Docker], Awaitable[list[T]]]) -> list[T]:
    """Run ``query`` on this user's default daemon and return its list; [] if no daemon answers."""

    async def run_query() -> list[T]:
        try:
            async with open_client("") as client:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await client.version()
                return await query(client)
        except (SandboxError, *DAEMON_ERRORS):
            return []

    return asyncio.run(run_query())
