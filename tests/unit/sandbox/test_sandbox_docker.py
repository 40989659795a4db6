"""What is asked of a Docker daemon, with a stand-in for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.records.sandbox import SandboxError, SandboxSpec
from headway.sandbox import leftovers
from headway.sandbox.docker import daemon as docker_daemon
from headway.sandbox.docker.backend import DockerBackend, _Container
from headway.sandbox.docker.daemon import DockerDaemon


class FakeClient:
    """Knows one image."""

    def __init__(self, **config: Any) -> None:
        self._config = config
        self.images = self

    async def inspect(self, name: str) -> dict[str, Any]:
        return {"Id": f"id of {name}", "Config": self._config}


def daemon(**config: Any) -> DockerDaemon:
    return DockerDaemon(FakeClient(**config), "run", sys.executable, lambda *_: None)  # type: ignore[arg-type]


def test_an_import_that_failed_is_tried_again():
    async def main() -> None:
        one = daemon()
        tried = 0

        async def imported(path: str) -> str:
            nonlocal tried
            tried += 1
            if tried == 1:
                raise aiohttp.ClientOSError(104, "reset")
            return "imported"

        one._import = imported  # type: ignore[method-assign]
        with pytest.raises(aiohttp.ClientOSError):
            await one.image("/x.tar")
        for _ in range(2):
            assert (await one.image("/x.tar"))[0] == "id of imported"
        assert tried == 2

    asyncio.run(main())


def test_an_image_whose_volumes_would_be_a_disk_without_limits_is_refused():
    async def main() -> None:
        with pytest.raises(SandboxError, match=r"VOLUME /data.*docker export") as raised:
            await daemon(Volumes={"/tmp": {}, "/data": {}}).image("postgres")
        assert raised.value.failure.cause == "environment"
        for inside in ("/work/data", "/tmp/../data", "/"):
            with pytest.raises(SandboxError, match="VOLUME"):
                await daemon(Volumes={inside: {}}).image("postgres")
        told = await daemon(Volumes={"/tmp": {}, "/work/": {}}, Env=["A=1"]).image("python")
        assert told == ("id of python", {"A": "1"}), "these are places with limits, volumes or not"

    asyncio.run(main())


def test_nothing_of_the_image_runs_beside_the_commands():
    one = daemon(Healthcheck={"Test": ["CMD", "sh"]})
    assert DockerBackend()._config(one, SandboxSpec(), "image", "volume")["Healthcheck"] == {"Test": ["NONE"]}


def test_a_container_that_could_not_be_removed_is_removed_when_it_is_asked_again() -> None:
    removed: list[str] = []

    class Removing:
        async def remove(self, name: str) -> None:
            removed.append(name)

    async def main() -> None:
        container = _Container(Removing(), "one")  # type: ignore[arg-type]
        for _ in range(2):
            container.request({})
            container.request({})  # while it is under way: once
            await asyncio.sleep(0)
            await container._ending

    asyncio.run(main())
    assert removed == ["one", "one"]


class Listed:
    """A daemon that has some containers."""

    def __init__(self, *containers: dict[str, Any]) -> None:
        self.containers = list(containers)

    async def __aenter__(self) -> Listed:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def version(self) -> None: ...

    async def _query_json(self, path: str, **_: Any) -> Any:
        return {"containers/json": self.containers, "volumes": {"Volumes": None}, "images/json": []}[path]

    @contextlib.asynccontextmanager
    async def _query(self, path: str, method: str, **_: Any) -> AsyncIterator[None]:
        assert method == "DELETE"
        self.containers = [one for one in self.containers if f"containers/{one['Id']}" != path]
        yield


def container(name: str, owner: str, ends_s: float, **labels: str) -> dict[str, Any]:
    marks = {"headway.owner": owner, "headway.run": "runs/one"}
    marks |= {"headway.ends_s": str(ends_s)} | {f"headway.label.{key}": value for key, value in labels.items()}
    return {"Id": f"id-{name}", "Names": [f"/{name}"], "Created": int(time.time()) - 100, "Labels": marks}


def said(*command: str, state: Path) -> list[str]:
    done = CliRunner().invoke(app, ["sandboxes", *command, "--state", str(state)])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_list_shows_containers_too_and_reap_leaves_living_owners_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = leftovers.owner_name(os.getpid(), 1)
    dead = mine.replace(f"-{leftovers.started(os.getpid())}-", "-1-")
    ends_s = time.time() + 3500
    daemon = Listed(
        container("sb-1", mine, ends_s, rollout="train/7"),
        container("sb-2", dead, ends_s),
        container("fills", mine, float("inf")),
    )
    monkeypatch.setattr(docker_daemon, "open_client", lambda url: daemon)
    folder = tmp_path / mine / "records"
    folder.mkdir(parents=True)
    record = leftovers.SandboxRecord(
        id="sb-3", backend="bubblewrap", run="", owner_pid=os.getpid(), owner_started=1, ttl_s=60.0, created_s=0.0
    )
    leftovers.write(folder, "sb-3.json", record)
    local, first, second, total = said("list", state=tmp_path)
    assert local.startswith(f"sb-3  bubblewrap  owner {os.getpid()} (alive)  run -  ")
    shown = rf"sb-1  docker  owner {os.getpid()} \(alive\)  run runs/one  1\d\d of (3599|3600|3601) s  rollout=train/7"
    assert re.fullmatch(shown, first)
    assert second.startswith(f"sb-2  docker  owner {os.getpid()} (dead)")
    assert total == "3 sandboxes, 1 of dead owners: `headway sandboxes reap` removes those"
    assert said("reap", state=tmp_path) == [
        f"{dead}: 1 sandboxes",
        "1 dead owners were cleaned up; 2 sandboxes of living owners were kept",
    ]
    assert said("list", state=tmp_path)[-1] == "2 sandboxes, 0 of dead owners"


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a daemon that never answers."""
    monkeypatch.setattr(docker_daemon, "CONNECT_TIMEOUT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "deaf"))
        listening.listen()
        yield f"unix://{tmp_path}/deaf"


def test_without_a_daemon_nothing_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: str):
    for url in (f"unix://{tmp_path}/none", deaf, "nonsense"):
        monkeypatch.setenv("DOCKER_HOST", url)
        assert said("list", state=tmp_path / "state") == ["0 sandboxes, 0 of dead owners"]
        assert said("reap", state=tmp_path / "state") == [
            "0 dead owners were cleaned up; 0 sandboxes of living owners were kept"
        ]
