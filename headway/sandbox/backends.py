"""Builds the sandbox backend that an experiment names, and the specification of its sandboxes."""

from __future__ import annotations

import asyncio
import difflib
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import msgspec

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.sandbox import SandboxSpec
from headway.sandbox.hosted.backend import HostedBackend
from headway.sandbox.hosted.e2b import E2BProvider
from headway.sandbox.hosted.modal import ModalProvider
from headway.sandbox.hosted.prime import PrimeProvider
from headway.sandbox.hosted.provider import HostedSettings, Provider
from headway.sandbox.images import resolve
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.protocol import Backend

PROVIDERS: dict[str, type[Provider[Any]]] = {one.name: one for one in (ModalProvider, E2BProvider, PrimeProvider)}
HOSTED = tuple(PROVIDERS)


class NoSettings(msgspec.Struct, frozen=True):
    """Settings of a backend that has none of its own."""


class BubblewrapSettings(msgspec.Struct, frozen=True):
    program: str = "bwrap"  # name or path


class DaemonSettings(msgspec.Struct, frozen=True):
    url: str = ""  # of Docker's daemon; "": DOCKER_HOST, or the usual socket
    runtime: str = ""  # of its containers; "": the daemon's own


SETTINGS = {"local": NoSettings, "bubblewrap": BubblewrapSettings, "docker": DaemonSettings}
_MAX_SNAPSHOT_BYTES = 10 << 30  # of parked sandboxes, together
BUBBLEWRAP = 0, 8  # the first version that can forbid user namespaces within

_in_use: list[resolve.Image] = []  # images of this process, whose sandboxes may start at any time


async def spec_of(settings: SandboxConfig) -> SandboxSpec:
    """Return the specification of an experiment's sandboxes. Unpacks the image if needed, and keeps it marked as in use
    until this process ends. Raises ConfigurationError, which names the image's defect and the valid forms."""
    if not settings.image or settings.backend not in ("local", "bubblewrap"):
        return msgspec.structs.replace(settings.spec, root=settings.image or None)
    stop_event = threading.Event()
    try:
        image = await asyncio.to_thread(
            resolve.prepare, settings.image, settings.store, store_bytes=settings.store_bytes, stop=stop_event
        )
    finally:
        stop_event.set()  # a cancelled caller doesn't wait for it
    _in_use.append(image)
    variables = {**image.environment, **settings.variables}
    return msgspec.structs.replace(settings.spec, root=str(image.root), environment=variables)


def backend_of(settings: SandboxConfig, *, run: str = "", snapshots: Path | None = None) -> Backend:
    """Make the backend that ``settings`` names, not yet started. ``run``: the run that owns its sandboxes;
    ``snapshots``: the folder for snapshots of parked ones. Raises ConfigurationError where it isn't installed."""
    provider = PROVIDERS.get(settings.backend)
    backend_settings = _backend_settings(settings, SETTINGS[settings.backend] if provider is None else provider.kind)
    if provider is not None:
        return HostedBackend(provider(backend_settings), run=run, snapshots=snapshots)
    if settings.backend == "docker":
        return _docker(settings, backend_settings, run, snapshots)
    bubblewrap_path = _bubblewrap(backend_settings.program) if settings.backend == "bubblewrap" else ""
    local = LocalSettings(bubblewrap=bubblewrap_path, start_timeout_s=settings.start_limit_s)
    return LocalBackend(run=run, snapshots=snapshots, snapshot_bytes=_snapshot_bytes(snapshots), settings=local)


def _snapshot_bytes(folder: Path | None) -> int:
    """Return the limit in bytes for snapshots of parked sandboxes in ``folder``: half of the disk's free space."""
    if folder is None:
        return _MAX_SNAPSHOT_BYTES
    existing_folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return min(_MAX_SNAPSHOT_BYTES, shutil.disk_usage(existing_folder).free // 2)


def _bubblewrap(name_or_path: str) -> str:
    """Return the path of bubblewrap's program. Raises ConfigurationError where it is missing or too old."""
    program = shutil.which(name_or_path)
    if program is None:
        raise ConfigurationError(
            f"sandbox.backend = 'bubblewrap': no program {name_or_path}: apt-get install bubblewrap, name it by"
            " sandbox.settings.program, or take sandbox.backend = 'local'"
        )
    version_text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    version_match = re.search(r"(\d+)\.(\d+)", version_text)
    if version_match is None or (int(version_match[1]), int(version_match[2])) < BUBBLEWRAP:
        message = f"sandbox.backend = 'bubblewrap': {program} is {version_text.strip()!r}: 0.8 or later is needed"
        raise ConfigurationError(message)
    return program


def _docker(settings: SandboxConfig, daemon: DaemonSettings, run: str, snapshots: Path | None) -> Backend:
    try:
        from headway.sandbox.docker.backend import DockerBackend, DockerSettings
    except ModuleNotFoundError as error:
        message = f"sandbox.backend = 'docker': {error.name} isn't installed: pip install 'headway[docker]'"
        raise ConfigurationError(message) from error
    if not settings.image:
        raise ConfigurationError(
            "sandbox.image = '': sandbox.backend = 'docker' needs one: a name that the daemon knows (docker pull,"
            " docker load), or the path of a root file system as a tar"
        )
    docker = DockerSettings(
        image=settings.image, url=daemon.url, runtime=daemon.runtime, start_timeout_s=settings.start_limit_s
    )
    return DockerBackend(run=run, snapshots=snapshots, snapshot_bytes=_snapshot_bytes(snapshots), settings=docker)


def _backend_settings(settings: SandboxConfig, kind: type[Any]) -> Any:
    """Convert ``sandbox.settings`` to the backend's own type. Raises ConfigurationError, naming what is valid."""
    raw_settings = dict(settings.settings)
    for key in raw_settings:
        if key not in kind.__struct_fields__:
            close_matches = difflib.get_close_matches(key, kind.__struct_fields__, n=1)
            suggestion = f"did you mean {close_matches[0]!r}? " if close_matches else ""
            valid = ", ".join(kind.__struct_fields__) or "none"
            raise ConfigurationError(f"sandbox.settings.{key}: {settings.backend} has none; {suggestion}valid: {valid}")
    if issubclass(kind, HostedSettings) and settings.image:
        raw_settings.setdefault("template", settings.image)
    try:
        return msgspec.convert(raw_settings, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"sandbox.settings of {settings.backend}: {error}") from None
