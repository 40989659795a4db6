"""Sandboxes whose root file system is an image: every kind, started twice, unpacked once."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from image_files import Layout, Member, file, folder, link, saved, tar
from sandbox_backends import SMALL, local, run

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.sandbox import MIB, Command, SandboxError, SandboxSpec
from headway.sandbox.backends import spec_of
from headway.sandbox.images import store as image_store
from headway.sandbox.images.resolve import prepare, sandbox_owner
from headway.sandbox.images.store import ImageStore
from headway.sandbox.local.backend import LocalBackend
from headway.sandbox.local.zygote_process import LocalSettings
from headway.sandbox.snapshot_store import remove_others

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that the user of sandboxes can look into, which pytest's own isn't."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def programs(*names: str) -> list[Member]:
    """Programs of this host with what they are linked to."""
    needed = set(names)
    for name in names:
        needed |= set(re.findall(r"(/\S+) \(", subprocess.check_output(["ldd", name], text=True)))
    return [file(name[1:], Path(name).read_bytes(), 0o755) for name in sorted(needed)]


def layers() -> tuple[bytes, bytes]:
    below = tar(
        *programs("/bin/sh", "/bin/rm"),
        folder("etc"),
        file("etc/greeting", "from below\n"),
        file("etc/secret", "to be gone\n"),
        folder("data"),
        file("data/old", "old\n"),
        link("way", "data"),
        file("bin/suid", "#!/bin/sh\n", 0o4755),
    )
    above = tar(
        file("etc/.wh.secret"), file("data/.wh..wh..opq"), file("data/new", "new\n"), file("way/through", "through\n")
    )
    return below, above


def directory(place: Path) -> Path:
    (place / "root.tar").write_bytes(tar(*programs("/bin/sh", "/bin/rm"), file("etc/greeting", "from below\n")))
    with prepare(str(place / "root.tar"), place / "other-store") as image:
        return image.root


def plain(place: Path) -> Path:
    (place / "root.tar.gz").write_bytes(gzip.compress(layers()[0]))
    return place / "root.tar.gz"


KINDS: dict[str, Callable[[Path], Path]] = {
    "directory": directory,
    "tar": plain,
    "oci-archive": lambda place: Layout().image(*layers(), variables=["GREETING=hello"]).archive(place / "oci.tar"),
    "oci-layout": lambda place: Layout().image(*layers(), variables=["GREETING=hello"]).folder(place / "layout"),
    "docker-save": lambda place: saved(place / "saved.tar", *layers()),
}
LOOK = """
read line < /etc/greeting; echo "$line"
echo changed > /etc/greeting; read line < /etc/greeting; echo "$line"
/bin/rm -r /data; echo > /bin/new; echo /data* /etc/secret*
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sandboxes_start_from_every_kind_and_the_second_unpacks_nothing(
    kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = SandboxConfig(image=str(KINDS[kind](place)), store=str(place / "store"), variables={"OWN": "mine"})
    unpacked = 0
    unpack = image_store.unpack

    def counted(*arguments: object, **named: object):
        nonlocal unpacked
        unpacked += 1
        return unpack(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(image_store, "unpack", counted)

    async def start() -> SandboxSpec:
        spec = msgspec.structs.replace(await spec_of(settings), limits=SMALL.limits)
        async with local(tmp_path) as backend:
            box = await backend.create(spec)
            said = await box.exec(Command(argv=["/bin/sh", "-c", LOOK]))
            layered = kind not in ("directory", "tar")
            gone = "/etc/secret*" if kind != "tar" else "/etc/secret"
            assert said.stdout.decode() == f"from below\nchanged\n/data* {gone}\n", said.stderr
            told = await box.exec(Command(argv=["/bin/sh", "-c", "echo $OWN $GREETING $FROM; echo ${0##*/}; umask"]))
            assert told.stdout.startswith(
                {"oci-archive": b"mine hello", "oci-layout": b"mine hello", "docker-save": b"mine docker"}.get(
                    kind, b"mine\n"
                )
            )
            fresh = await backend.create(spec)
            if layered:
                assert await fresh.read("/data/new") == b"new\n"
                assert await fresh.read("/data/through") == b"through\n"
                assert {entry.name for entry in await fresh.list("/data")} == {"new", "through"}
            assert await fresh.read("/etc/greeting") == b"from below\n"
        return spec

    async def main():
        first = await start()
        assert unpacked == {"directory": 0, "tar": 1}.get(kind, 2)
        assert await start() == first
        assert unpacked == {"directory": 0, "tar": 1}.get(kind, 2)
        root = Path(first.root or "")
        assert (root / "etc" / "greeting").read_text() == "from below\n"
        assert not (root / "bin" / "new").exists()

    run(main)


def test_commands_may_change_every_file_of_an_image(place: Path, tmp_path: Path):
    """For the files belong to the user that sandboxes run as, whatever the archive says of their owners."""

    async def main():
        spec = await spec_of(SandboxConfig(image=str(plain(place)), store=str(place / "store")))
        async with local(tmp_path) as backend:
            box = await backend.create(msgspec.structs.replace(spec, limits=SMALL.limits))
            script = "for f in /etc/greeting /data/old /bin/suid; do echo x >> $f || exit 1; done; /bin/rm -r /etc /bin"
            result = await box.exec(Command(argv=["/bin/sh", "-c", script]))
            assert (result.exit_code, result.stderr) == (0, b"")

    run(main)


def test_a_bad_image_is_found_before_anything_starts(place: Path):
    (place / "bad.tar").write_bytes(layers()[0][:5000])
    command = [sys.executable, "-m", "headway.cli.main", "sandboxes", "check"]
    for image, said in ((place / "bad.tar", "cut off"), (place / "python:3.12", "skopeo copy docker://NAME")):
        options = ["--image", str(image), "--store", str(place / "store")]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert str(image) in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

    async def main():
        with pytest.raises(ConfigurationError, match="cut off"):
            await spec_of(SandboxConfig(image=str(place / "bad.tar"), store=str(place / "store")))

    run(main)


UNPACK = "import sys; from headway.sandbox.images.resolve import prepare; prepare(sys.argv[1], sys.argv[2])"


@pytest.mark.slow
@pytest.mark.long
def test_killed_while_unpacking_the_next_one_starts_anew(place: Path):
    many = tar(*(file(f"f/{n}", b"x" * 5000) for n in range(20_000)))
    (place / "big.tar").write_bytes(many)
    store = place / "store"
    started = subprocess.Popen([sys.executable, "-c", UNPACK, str(place / "big.tar"), str(store)])
    while len(list(store.glob("incoming/*/data/*"))) < 200:
        assert started.poll() is None, "it was too quick to be killed"
        time.sleep(0.01)
    started.kill()
    started.wait()
    assert list((store / "incoming").iterdir())
    assert not list((store / "layers" / "sha256").iterdir())
    with prepare(str(place / "big.tar"), store) as image:
        assert image.unpacked == 1
        assert len(list((image.root / "f").iterdir())) == 20_000
    assert list((store / "incoming").iterdir()) == []


def test_an_image_of_a_living_owner_isnt_removed(place: Path, tmp_path: Path):
    async def main():
        spec = await spec_of(SandboxConfig(image=str(plain(place)), store=str(place / "store")))
        async with local(tmp_path) as backend:
            box = await backend.create(msgspec.structs.replace(spec, limits=SMALL.limits))
            command = [sys.executable, "-m", "headway.cli.main", "sandboxes", "prune", "--store", str(place / "store")]
            pruned = await asyncio.to_thread(subprocess.check_output, command, text=True)
            assert "0 images removed" in pruned
            assert (await box.exec(Command(argv=["/bin/sh", "-c", "echo still here"]))).stdout == b"still here\n"

    run(main)
    store = ImageStore(place / "store", sandbox_owner(), 1 << 30)
    assert [one.in_use for one in store.images()] == [True], "until this process ends"


def test_snapshots_of_a_run_have_a_limit_and_the_sandbox_goes_on(tmp_path: Path):
    async def main():
        settings = LocalSettings(spares=1)
        folder = tmp_path / "snapshots"
        async with LocalBackend(
            tmp_path / "state", snapshots=folder, snapshot_bytes=5 * MIB, settings=settings
        ) as backend:
            box = await backend.create(SMALL)
            await box.exec(Command(argv=["sh", "-c", "head -c 3000000 /dev/urandom > file"]))
            first = await box.snapshot("first")
            with pytest.raises(SandboxError, match="half of what was free") as raised:
                await box.snapshot("second")
            assert (raised.value.failure.cause, raised.value.failure.retry) == ("infrastructure", False)
            assert (await box.exec(Command(argv=["sh", "-c", "rm file; echo alive"]))).stdout == b"alive\n"
            await box.snapshot("second")
            assert remove_others(folder, {"first.tar"}) == ["second.tar"]
            again = await backend.create(SMALL, snapshot=first)
            assert len(await again.read("file")) == 3_000_000

    run(main)
