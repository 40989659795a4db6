"""Which backend `[sandbox]` stands for, and what is said where it can't be had."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.sandbox.backends import backend_of
from headway.sandbox.docker.backend import DockerBackend
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
