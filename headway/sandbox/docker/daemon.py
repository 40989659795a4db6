"""Requests to a Docker daemon: containers and their ends, images, and the removal of what dead owners left there.

Everything that is made carries labels: its owner (process and its start, on which machine), the sandbox, how long it
may live. Leftovers of dead owners are found by these labels: there is no other record.
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
from headway.sandbox.guest.entry import PLACES

T = TypeVar("T")
OWNER, RUN, ENDS = "headway.owner", "headway.run", "headway.ends_s"
LABEL = "headway.label."  # before the caller's own
CARRIED = "/.headway"  # where the first process's Python is mounted, read-only
BROKEN = (aiodocker.DockerError, aiohttp.ClientError, OSError)
REACH_S = 5.0  # for a daemon to answer a command that only looks
AFTER_S = 3600.0  # beyond its time to live, until another machine's sandbox counts as abandoned
PACKER = "import sys; sys.path.insert(0, sys.argv[1]); from headway.sandbox.guest.portable_python import main; main()"
NOT_ROOTS = {"oci-layout", "index.json", "manifest.json"}  # of archives that hold layers
Ended = Callable[[str, int | None, int, SandboxFailure | None], None]


class Daemon:
    """The sandboxes of one owner in a daemon. ``ended`` is called for each that is gone, with its exit code and how
    often the kernel killed something in it for memory; code None: the daemon doesn't answer any more."""

    _count = 0

    def __init__(self, client: aiodocker.Docker, run: str, python: str, ended: Ended) -> None:
        type(self)._count += 1
        self._client = client
        self._python = python
        self._tell_ended = ended
        self.owner = leftovers.owner_name(os.getpid(), self._count)
        self.labels = {OWNER: self.owner, RUN: run}
        self.information: dict[str, Any] = {}
        self.alive = False
        self._containers: dict[str, tuple[int | None, int]] = {}  # by name: exit code so far, kills
        self._made: dict[str, asyncio.Task[str]] = {}  # the volume, and images that were imported
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def reach(cls, url: str, run: str, python: str, ended: Ended) -> Daemon:
        """Connect to a daemon and reap there. Raises SandboxError where none answers."""
        client = open_client(url)
        daemon = cls(client, run, python, ended)
        try:
            daemon.information = dict(await client.system.info())
            await reap(client)
        except BROKEN as error:
            await client.close()
            raise SandboxError(infrastructure_failure(f"no Docker daemon answers: {error}")) from error
        daemon.alive = True
        daemon._listening = asyncio.create_task(daemon._listen(), name="docker events")
        return daemon

    async def _listen(self) -> None:
        """Follow the daemon's events and report every container that is gone; all of them when the events end."""
        wanted = {"label": [f"{OWNER}={self.owner}"], "type": ["container"]}
        events = self._client.events.subscribe(filters=json.dumps(wanted), since=str(int(time.time()) - 1))
        try:
            while (event := await events.get()) is not None:
                name = event["Actor"]["Attributes"].get("name", "")
                code, kills = self._containers.get(name, (None, 0))
                if name not in self._containers:
                    continue
                if event["Action"] == "oom":
                    self._containers[name] = code, kills + 1
                elif event["Action"] == "die":
                    self._containers[name] = int(event["Actor"]["Attributes"]["exitCode"]), kills
                elif event["Action"] == "destroy":
                    self.gone(name)
        finally:
            self.alive = False
            for name in list(self._containers):
                self._containers.pop(name)
                self._tell_ended(name, None, 0, None)

    def gone(self, name: str) -> None:
        if name in self._containers:
            code, kills = self._containers.pop(name)
            self._tell_ended(name, -1 if code is None else code, kills, None)

    async def reap(self) -> list[Reaped]:
        return await reap(self._client)

    # Containers.

    async def make(self, name: str, config: dict[str, Any]) -> Any:
        """Make a container without starting it."""
        self._containers[name] = None, 0
        return await self._client.containers.create(config, name=name)

    async def remove(self, name: str) -> None:
        with contextlib.suppress(*BROKEN):
            for _ in range(50):
                try:
                    await self._client.containers.container(name).delete(force=True, v=True)
                except aiodocker.DockerError as error:
                    if error.status == 409:  # somebody else removes it
                        await asyncio.sleep(0.05)
                        continue
                    if error.status != 404:
                        raise
                self.gone(name)
                return

    # What containers are made of.

    async def carried_volume(self, image: str) -> str:
        """Return a volume with the first process's Python; filled once, through a container that is never started."""
        return await self._once(CARRIED, lambda: self._fill(image))

    async def _once(self, key: str, make: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """Return what ``make`` returns, which runs once for each key, and again where it has failed."""
        making = self._made.get(key)
        if making is None or (making.done() and making.exception()):
            making = self._made[key] = asyncio.create_task(make())
        return await asyncio.shield(making)

    async def _fill(self, image: str) -> str:
        packing = await asyncio.create_subprocess_exec(
            self._python, "-I", "-S", "-c", PACKER, str(Path(__file__).parents[3]), stdout=asyncio.subprocess.PIPE
        )
        packed, _ = await packing.communicate()
        if packing.returncode:
            raise SandboxError(infrastructure_failure(f"{self._python} can't be packed for a container", retry=False))
        name = f"headway-{self.owner}"
        labels = {**self.labels, ENDS: "inf"}
        await self._client.volumes.create({"Name": name, "Labels": labels})
        mount = {"Type": "volume", "Source": name, "Target": CARRIED, "VolumeOptions": {"NoCopy": True}}
        config = {"Image": image, "Cmd": ["-"], "Labels": labels, "HostConfig": {"Mounts": [mount]}}
        filling = await self._client.containers.create(config)
        try:
            await filling.put_archive(CARRIED, packed)
        finally:
            await filling.delete(force=True)
        return name

    async def image(self, wanted: str) -> tuple[str, dict[str, str]]:
        """Return an image's id and environment. ``wanted``: a name that the daemon knows, or the path of a root file
        system, a directory or a tar, which is imported for as long as this owner lives."""
        try:
            name = await self._once(wanted, lambda: self._import(wanted)) if wanted.startswith("/") else wanted
            found = await self._client.images.inspect(name)
        except aiodocker.DockerError as error:
            self._made.pop(wanted, None)
            if error.status in (400, 404):
                what = f"image {wanted!r}: {error.message}; docker pull or docker load it, or give a tar's whole path"
                raise SandboxError(environment_failure(what)) from error
            raise
        config = found["Config"]
        if disks := _disks(config):
            what = f"image {wanted!r}: VOLUME {', '.join(disks)} would be the host's disk, without a limit"
            remedy = "docker export a container of it, which leaves that out, and give the tar's whole path"
            raise SandboxError(environment_failure(f"{what}: {remedy}"))
        return found["Id"], dict(variable.partition("=")[::2] for variable in config.get("Env") or [])

    async def _import(self, path: str) -> str:
        with tempfile.TemporaryFile() as packed:
            try:
                source = await asyncio.to_thread(_open_root, path, packed)
            except (OSError, tarfile.TarError) as error:
                raise SandboxError(environment_failure(f"image {path}: {error}")) from error
            marks = " ".join(f"{key}={json.dumps(value)}" for key, value in {**self.labels, ENDS: "inf"}.items())
            name = f"headway-{hashlib.sha256(f'{self.owner} {path}'.encode()).hexdigest()[:16]}"
            parameters = {"fromSrc": "-", "repo": name, "changes": f"LABEL {marks}"}
            with source:
                async with self._client._query("images/create", "POST", params=parameters, data=source) as answer:
                    said = await answer.text()
            if '"error"' in said:
                raise SandboxError(environment_failure(f"image {path}: {said.strip().splitlines()[-1][:300]}"))
        return name

    async def close(self) -> None:
        """Remove everything with this owner's labels, and disconnect."""
        await cancel_all(self._listening)
        self.alive = False
        with contextlib.suppress(*BROKEN):
            await remove_labelled(self._client, f"{OWNER}={self.owner}")
        with contextlib.suppress(*BROKEN):  # the daemon went away during its event stream
            await self._client.events.stop()
        await self._client.close()


def open_client(url: str) -> aiodocker.Docker:
    try:
        return aiodocker.Docker(url or None)
    except (AssertionError, ValueError) as error:
        why = "no socket where one usually is, and no DOCKER_HOST" if isinstance(error, AssertionError) else error
        raise SandboxError(infrastructure_failure(f"no Docker daemon: {why}", retry=False)) from error


def _disks(config: dict[str, Any]) -> list[str]:
    """Paths where an image declares a volume that none of our mounts covers: the daemon would make one regardless."""
    return sorted({os.path.normpath(path) for path in config.get("Volumes") or ()} - {f"/{one}" for one in PLACES})


def _open_root(path: str, packed: Any) -> Any:
    """Open a root file system as a tar: the file itself, or a directory packed into ``packed``. Raises OSError,
    TarError."""
    if os.path.isdir(path):
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.add(path, ".")
        packed.seek(0)
        return packed
    with tarfile.open(path) as archive:
        names = {name.removeprefix("./") for name in (next(iter(archive)).name, *NOT_ROOTS & set(archive.getnames()))}
    if names & NOT_ROOTS:
        raise OSError(f"it holds an image's layers: docker load -i {path}, and give the image's name")
    return open(path, "rb")


async def labelled(client: aiodocker.Docker, label: str) -> AsyncIterator[tuple[str, str, dict[str, str]]]:
    """Kind, name and labels of everything with such a label: containers first, then volumes and images."""
    wanted = json.dumps({"label": [label]})
    for one in await client._query_json("containers/json", params={"all": "1", "filters": wanted}):
        yield "containers", one["Id"], one["Labels"]
    for one in (await client._query_json("volumes", params={"filters": wanted}))["Volumes"] or []:
        yield "volumes", one["Name"], one["Labels"]
    for one in await client._query_json("images/json", params={"filters": wanted}):
        yield "images", one["Id"], one["Labels"]


async def remove_labelled(client: aiodocker.Docker, label: str, dead: bool = False) -> list[tuple[str, str]]:
    """Remove everything with such a label, with ``dead`` only what dead owners left; return owner and kind of each."""
    removed: list[tuple[str, str]] = []
    async for kind, name, labels in labelled(client, label):
        if dead and not _ownerless(labels):
            continue
        with contextlib.suppress(aiodocker.DockerError):  # it has been removed meanwhile, or is in use after all
            async with client._query(f"{kind}/{name}", "DELETE", params={"force": "1"}):
                removed.append((labels[OWNER], kind))
    return removed


def _ownerless(labels: dict[str, str]) -> bool:
    dead = leftovers.is_dead(labels[OWNER])
    return float(labels.get(ENDS, "inf")) + AFTER_S < time.time() if dead is None else dead


async def reap(client: aiodocker.Docker) -> list[Reaped]:
    """Remove what dead owners left in the daemon."""
    removed = await remove_labelled(client, OWNER, dead=True)
    return [
        Reaped(owner=owner, sandboxes=sum(kind == "containers" for of, kind in removed if of == owner))
        for owner in sorted({owner for owner, _ in removed})
    ]


async def records(client: aiodocker.Docker) -> list[tuple[leftovers.SandboxRecord, bool]]:
    """Records of every owner's containers, and whether that owner lives or may live."""
    wanted = json.dumps({"label": [OWNER]})
    found: list[tuple[leftovers.SandboxRecord, bool]] = []
    for one in await client._query_json("containers/json", params={"all": "1", "filters": wanted}):
        labels: dict[str, str] = one["Labels"]
        owner = leftovers.OWNER.fullmatch(labels[OWNER])
        ttl_s = float(labels[ENDS]) - one["Created"]
        if owner is not None and math.isfinite(ttl_s):  # else it only fills the volume
            own = {key.removeprefix(LABEL): value for key, value in labels.items() if key.startswith(LABEL)}
            record = leftovers.SandboxRecord(
                id=one["Names"][0].removeprefix("/"),
                backend="docker",
                run=labels[RUN],
                labels=own,
                owner_pid=int(owner[1]),
                owner_started=int(owner[2]),
                ttl_s=ttl_s,
                created_s=one["Created"],
            )
            found.append((record, not _ownerless(labels)))
    return found


def where_reachable(look: Callable[[aiodocker.Docker], Awaitable[list[T]]]) -> list[T]:
    """Return what ``look`` finds at this user's default daemon; [] where none answers."""

    async def looked() -> list[T]:
        try:
            async with open_client("") as client:
                async with asyncio.timeout(REACH_S):
                    await client.version()
                return await look(client)
        except (SandboxError, *BROKEN):
            return []

    return asyncio.run(looked())
