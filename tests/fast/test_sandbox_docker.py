"""What is asked of a Docker daemon, with a stand-in for it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp
import pytest

from headway.records.sandbox import SandboxError, SandboxSpec
from headway.sandbox.docker import DockerBackend, _Container
from headway.sandbox.docker_daemon import Daemon


class FakeClient:
    """Knows one image."""

    def __init__(self, **config: Any) -> None:
        self._config = config
        self.images = self

    async def inspect(self, name: str) -> dict[str, Any]:
        return {"Id": f"id of {name}", "Config": self._config}


def daemon(**config: Any) -> Daemon:
    return Daemon(FakeClient(**config), "run", sys.executable, lambda *_: None)  # type: ignore[arg-type]


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
