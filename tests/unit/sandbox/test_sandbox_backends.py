"""Which backend `[sandbox]` stands for, and what is said where it can't be had."""

from __future__ import annotations

import asyncio
import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.sandbox import SandboxError, SandboxSpec
from headway.sandbox.backends import backend_of
from headway.sandbox.docker.backend import DockerBackend
from headway.sandbox.local import backend as backend_module
from headway.sandbox.local.backend import LocalBackend


def program(folder: Path, version: str) -> str:
    made = folder / "bwrap"
    made.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
    made.chmod(0o755)
    return str(made)


def bubblewrap(path: str, start_timeout_s: float | None = None) -> SandboxConfig:
    return SandboxConfig(backend="bubblewrap", settings={"program": path}, start_timeout_s=start_timeout_s)


def test_each_has_its_own_settings(tmp_path: Path):
    assert isinstance(backend_of(SandboxConfig()), LocalBackend)
    made = backend_of(bubblewrap(program(tmp_path, "0.11.2")))
    assert isinstance(made, LocalBackend)
    assert made._settings.bubblewrap == str(tmp_path / "bwrap")
    docker = backend_of(
        SandboxConfig(backend="docker", image="debian", settings={"url": "unix:///x", "runtime": "runsc"})
    )
    assert isinstance(docker, DockerBackend)
    assert (docker._settings.image, docker._settings.url, docker._settings.runtime) == ("debian", "unix:///x", "runsc")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (bubblewrap("/nowhere/bwrap"), "apt-get install bubblewrap"),
        (SandboxConfig(backend="docker"), "docker pull"),
        (SandboxConfig(backend="docker", image="x", settings={"program": "y"}), "docker has none; valid: url, runtime"),
        (SandboxConfig(settings={"url": "y"}), "has none; valid: none"),
    ],
)
def test_what_cant_be_had_says_how_that_is_mended(settings: SandboxConfig, remedy: str):
    with pytest.raises(ConfigurationError, match=remedy):
        backend_of(settings)


def test_a_bubblewrap_that_cant_forbid_namespaces_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"0\.8 or later"):
        backend_of(bubblewrap(program(tmp_path, "0.4.1")))


def test_without_its_library_docker_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("headway.sandbox.docker.backend", "headway.sandbox.docker.daemon"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    with pytest.raises(ConfigurationError, match=r"aiodocker isn't installed: pip install 'headway\[docker\]'"):
        backend_of(SandboxConfig(backend="docker", image="debian"))


def test_no_daemon_is_a_matter_of_configuration(tmp_path: Path):
    backend = backend_of(SandboxConfig(backend="docker", image="x", settings={"url": f"unix://{tmp_path}/none.sock"}))

    async def main() -> None:
        problems = await backend.preflight(SandboxConfig().spec)
        assert len(problems) == 1
        assert "no Docker daemon answers" in problems[0]
        assert "DOCKER_HOST" in problems[0]
        with pytest.raises(ConfigurationError):
            await backend.create(SandboxConfig().spec)
        await backend.close()

    asyncio.run(main())


def test_a_start_may_take_as_long_inside_as_the_experiment_says(tmp_path: Path) -> None:
    made = [backend_of(one) for one in (SandboxConfig(start_timeout_s=90), bubblewrap(program(tmp_path, "0.11.2"), 90))]
    assert [one._settings.start_timeout_s for one in made if isinstance(one, LocalBackend)] == [90, 90]


class Maker:
    """A zygote without a process: its records are files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alive = True
        self.closing = asyncio.Event()
        self.closed = False

    def write(self, record: Any) -> None:
        (self.folder / record.id).touch()

    async def close(self) -> None:
        self.closing.set()
        await asyncio.sleep(0)
        self.closed = True


class MakerBackend(LocalBackend):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.made: list[Maker] = []

    async def _new_maker(self) -> Any:
        self.made.append(Maker(self._state))
        return self.made[-1]


def test_a_start_cancelled_while_a_dead_maker_is_closed_leaves_that_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        backend = MakerBackend(tmp_path)
        dead: Any = await backend.start()
        dead.alive = False
        starting = asyncio.create_task(backend.start())
        await dead.closing.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert not dead.closed
        await backend.start()
        assert dead.closed
        assert len(backend.made) == 2

    asyncio.run(main())


def test_no_record_stays_where_the_proxy_cant_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(backend_module, "ProxyEntrance", none_left)
    with pytest.raises(SandboxError, match="raise ulimit -n"):
        asyncio.run(MakerBackend(tmp_path).create(SandboxSpec(network=("example.com",))))
    assert list(tmp_path.iterdir()) == []


def test_a_create_that_is_overtaken_by_close_starts_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        backend = MakerBackend(tmp_path)
        maker: Any = await backend.start()
        asked: list[Any] = []

        def request(request: dict[str, Any], descriptors: Any = ()) -> None:
            asked.append(request["do"])
            if request["do"] == "terminate":
                backend._on_ended(request["id"], 0, 0, None)

        maker.request = request
        written = maker.write

        def write(record: Any) -> None:
            written(record)
            backend._closed = True

        maker.write = write
        with pytest.raises(SandboxError, match="the backend is closed"):
            await backend.create(SandboxSpec())
        assert "create" not in asked

    asyncio.run(main())
