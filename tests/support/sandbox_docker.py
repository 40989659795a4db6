"""A Docker daemon for tests, the machine's own or else one that is started here; and an image for it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

IMAGE = "headway-tests"
PROGRAMS = """
bash sh env grep cat pwd sleep true false echo df tail head ls ln mkdir mkfifo rm cp mv chmod touch stat seq yes id su
tr printf xargs setsid ps kill find sort wc date dd
""".split()  # noqa: SIM905
LEFT_OUT = {"test", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo", "site-packages", "__pycache__"}


class _Socket(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """One request to a daemon, without the library under test."""
    connection = _Socket(url.removeprefix("unix://"))
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        if answer.status >= 400:
            raise OSError(f"{method} {path}: {answer.status} {said[:300]!r}")
        return (
            json.loads(said)
            if said[:1] in (b"{", b"[") and b"\n{" not in said.strip() and b"}\r\n{" not in said
            else said
        )
    finally:
        connection.close()


@functools.cache
def reached() -> tuple[str, str]:
    """The address of a daemon that has the image, or "" and why there is none. Once for each process."""
    for url in (os.environ.get("DOCKER_HOST", ""), "unix:///var/run/docker.sock"):
        if url.startswith("unix://") and _answers(url):
            atexit.register(functools.partial(_remove_image, url))
            return _with_image(url)
    if shutil.which("dockerd") is None:
        return "", "no Docker daemon answers, and none is installed: apt-get install docker.io"
    if os.geteuid() != 0:
        return "", "no Docker daemon answers, and only root can start one"
    try:
        return start()[0], ""
    except OSError as error:
        return "", str(error)


def _remove_image(url: str) -> None:
    if "HEADWAY_TEST_IMAGE" not in os.environ:
        with contextlib.suppress(OSError):
            ask(url, "DELETE", f"/images/{IMAGE}?force=1")


def _answers(url: str) -> bool:
    try:
        return ask(url, "GET", "/_ping") == b"OK"
    except OSError:
        return False


def environment() -> dict[str, str]:
    """Of a process that shall have the same daemon."""
    url = reached()[0] if reached.cache_info().currsize else ""
    return {**os.environ, **({"DOCKER_HOST": url, "HEADWAY_TEST_IMAGE": IMAGE} if url else {})}


def _with_image(url: str) -> tuple[str, str]:
    if os.environ.get("HEADWAY_TEST_IMAGE") == IMAGE:
        return url, ""  # a parent process has seen to that
    try:
        ask(url, "POST", f"/images/create?fromSrc=-&repo={IMAGE}", root_file_system())
    except OSError as error:
        return "", f"the Docker daemon takes no image: {error}"
    return url, ""


def start() -> tuple[str, Callable[[], None]]:
    """One of our own, in its own mount namespace, without any network; it dies with this process. Its address, and
    what ends it. Raises OSError."""
    folder = tempfile.mkdtemp(prefix="headway-dockerd-")
    url = f"unix://{folder}/docker.sock"
    arguments = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid", f"--host={url}"]
    command = ["unshare", "--mount", "dockerd", "--bridge=none", "--iptables=false", *arguments]
    log = open(f"{folder}/log", "wb")  # noqa: SIM115  the daemon's, as long as it lives
    daemon = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_us)
    stop = functools.partial(_stop, daemon, folder)
    atexit.register(stop)
    deadline = time.monotonic() + 30
    while not _answers(url):
        if daemon.poll() is not None or time.monotonic() > deadline:
            said = Path(folder, "log").read_text(errors="replace").strip().splitlines()
            stop()
            raise OSError(f"dockerd doesn't start here: {said[-1][:300] if said else 'no output'}")
        time.sleep(0.05)
    _with_image(url)
    return url, stop


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: it ends what it has started


def _stop(daemon: subprocess.Popen[bytes], folder: str) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    shutil.rmtree(folder, ignore_errors=True)


def first_process(sandbox: str) -> int:
    """Its number on this machine."""
    return ask(reached()[0], "GET", f"/containers/{sandbox}/json")["State"]["Pid"]


def left_by(owner_pid: int, *, running: bool = False) -> list[str]:
    """Everything in the daemon that carries an owner's label, or only what runs; nothing where this process has asked
    for no daemon."""
    found: list[str] = []
    url = reached()[0] if reached.cache_info().currsize else ""
    if not url:
        return found
    lists = (
        {"containers/json": "Id"}
        if running
        else {"containers/json?all=1": "Id", "volumes": "Name", "images/json": "Id"}
    )
    for path, key in lists.items():
        told = ask(url, "GET", f"/{path}")
        for one in (told["Volumes"] or []) if path == "volumes" else told:
            if (one.get("Labels") or {}).get("headway.owner", "").startswith(f"owner-{owner_pid}-"):
                found.append(f"{path} {one[key]}")
    return found


@functools.cache
def root_file_system() -> bytes:
    """A tar of a small system with a shell, the usual programs and this Python, out of this machine's."""
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
            _link(archive, name, target)
        for name in ("tmp", "work", "etc/ssl", "home/user", "var/tmp", "proc", "sys", "dev", "usr/lib64", "run"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        _text(archive, "etc/passwd", "root:x:0:0::/root:/bin/sh\n")
        _text(archive, "etc/nsswitch.conf", "hosts: files dns\n")
        programs = [found for name in PROGRAMS if (found := shutil.which(name))]
        python = os.path.realpath(sys.executable)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        _file(archive, f"usr/bin/{version}", python)
        _link(archive, "usr/bin/python3", version)
        stdlib = Path(sys.base_prefix, "lib", version)
        extensions = list(stdlib.glob("lib-dynload/*.so"))
        for file in _sources(stdlib):
            _file(archive, f"usr/lib/{version}/{file.relative_to(stdlib)}", str(file))
        for name in programs:
            _file(archive, f"usr/bin/{os.path.basename(name)}", os.path.realpath(name))
        for library in sorted(_libraries([*programs, python, *map(str, extensions)])):
            folder = "usr/lib64" if "/ld-" in library else "usr/lib"
            _file(archive, f"{folder}/{os.path.basename(library)}", os.path.realpath(library))
    return packing.getvalue()


def _sources(stdlib: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(stdlib):
        names[:] = sorted(set(names) - LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith((".py", ".so")))


def _libraries(programs: list[str]) -> set[str]:
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+\.so\S*) \(", said))


def _file(archive: tarfile.TarFile, name: str, source: str) -> None:
    content = Path(source).read_bytes()
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o755
    archive.addfile(member, io.BytesIO(content))


def _text(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(text), 0o644
    archive.addfile(member, io.BytesIO(text.encode()))


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    archive.addfile(member)
