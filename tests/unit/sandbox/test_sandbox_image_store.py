"""Images unpacked, kept once, and refused: without a sandbox."""

from __future__ import annotations

import base64
import errno
import fcntl
import gzip
import importlib.util
import json
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from image_files import (
    BASE,
    OCI,
    OWNER,
    UPPER,
    Layout,
    file,
    folder,
    link,
    member,
    names,
    on_disk,
    prepare,
    same,
    saved,
    tar,
    text,
)

from headway.cli.main import main
from headway.records.errors import ConfigurationError
from headway.sandbox.images import resolve
from headway.sandbox.images.layers import FileOwner
from headway.sandbox.images.store import ImageStore, WaitStopped

KINDS: dict[str, Callable[[Path], Path]] = {
    "oci-layout": lambda place: Layout().image(BASE, UPPER, variables=["A=b=c"]).folder(place / "layout"),
    "oci-archive": lambda place: Layout().image(BASE, UPPER, variables=["A=b=c"]).archive(place / "image.tar"),
    "oci-archive-zipped": lambda place: (
        Layout().image(BASE, UPPER, variables=["A=b=c"]).archive(place / "image.tar.gz", zipped=True)
    ),
    "oci-plain-layers": lambda place: (
        Layout().image(BASE, UPPER, variables=["A=b=c"], layer_type=f"{OCI}.layer.v1.tar").archive(place / "image.tar")
    ),
    "docker-save": lambda place: saved(place / "image.tar", BASE, UPPER),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_layers_is_unpacked_once(kind: str, tmp_path: Path):
    path = KINDS[kind](tmp_path)
    with prepare(path, tmp_path) as image:
        assert names(image.root) == {"etc", "etc/name", "d", "d/new"}
        assert text(image, "etc/name") == "upper"
        assert image.environment == ({"FROM": "docker"} if kind == "docker-save" else {"A": "b=c"})
        assert image.unpacked == 2
        made_ns = (image.root / "etc" / "name").stat().st_ctime_ns
        with prepare(path, tmp_path) as again:
            assert (again.root, again.unpacked) == (image.root, 0)
            assert again.environment == image.environment
            assert (again.root / "etc" / "name").stat().st_ctime_ns == made_ns
    assert on_disk(tmp_path / "store") == {"layers/sha256": 2, "images": 1, "incoming": 0, "sources": 1}


@pytest.mark.parametrize("zipped", [False, True])
def test_a_tar_of_a_root_is_an_image_of_one_layer(zipped: bool, tmp_path: Path):
    path = tmp_path / "root.tar"
    path.write_bytes(gzip.compress(BASE) if zipped else BASE)
    with prepare(path, tmp_path) as image:
        assert text(image, "d/old") == "old"
        assert image.unpacked == 1
    assert prepare(path, tmp_path).unpacked == 0
    path.write_bytes(UPPER)
    with prepare(path, tmp_path) as other:
        assert other.root != image.root
        assert not (other.root / "d" / "old").exists()


def test_a_directory_is_used_as_it_is(tmp_path: Path):
    (tmp_path / "root").mkdir()
    assert prepare(tmp_path / "root", tmp_path).root == tmp_path / "root"
    assert not (tmp_path / "store").exists()


def test_layers_that_images_share_are_stored_once(tmp_path: Path):
    first = prepare(Layout().image(BASE).folder(tmp_path / "one"), tmp_path)
    second = prepare(saved(tmp_path / "two.tar", BASE, UPPER), tmp_path)
    plain = tmp_path / "plain.tar"
    plain.write_bytes(BASE)
    third = prepare(plain, tmp_path)
    assert (first.unpacked, second.unpacked, third.unpacked) == (1, 1, 1), "a plain tar is known by reading it only"
    assert third.root == first.root
    assert on_disk(tmp_path / "store")["layers/sha256"] == 2
    gone = first.root / "etc" / "gone"
    assert gone.stat().st_nlink == 2
    assert len({(image.root / "d").stat().st_ino for image in (first, second)}) == 2


def test_a_layer_named_twice_is_stored_once(tmp_path: Path):
    with prepare(saved(tmp_path / "image.tar", BASE, UPPER, BASE), tmp_path) as image:
        assert (image.unpacked, text(image, "d/old"), text(image, "etc/name")) == (2, "old", "base")


def test_root_keeps_modes_times_links_and_names(tmp_path: Path):
    path = tmp_path / "root.tar"
    odd = "odd \udcff\n name"
    data = tar(
        folder("./"),
        folder("closed", 0o000),
        folder("tmp", 0o1777),
        folder("given", 0o6755),
        file("run", "#!", 0o6755),
        same("again", "run"),
        link("abs", "/etc/shadow"),
        link("up", "../../../etc"),
        member("pipe", tarfile.FIFOTYPE, mode=0o600),
        member("disk", tarfile.BLKTYPE),
        member("null", tarfile.CHRTYPE),
        file(odd, "odd"),
        file("/absolute/name", "inside"),
        file("long/" + "x" * 255, "long"),
    )
    path.write_bytes(data)
    root = prepare(path, tmp_path).root
    found = {name: root.joinpath(name).lstat() for name in sorted(os.listdir(root))}
    assert set(found) == {"abs", "absolute", "again", "closed", "given", "long", odd, "pipe", "run", "tmp", "up"}
    assert oct(found["run"].st_mode) == oct(stat.S_IFREG | 0o755), "no bits that change users"
    assert oct(found["tmp"].st_mode) == oct(stat.S_IFDIR | 0o1777)
    assert oct(found["given"].st_mode) == oct(stat.S_IFDIR | 0o755)
    assert oct(found["closed"].st_mode) == oct(stat.S_IFDIR)
    assert stat.S_ISFIFO(found["pipe"].st_mode)
    assert found["run"].st_ino == found["again"].st_ino
    assert {found[name].st_mtime for name in ("run", "abs", "tmp")} == {1_000_000}
    assert os.readlink(root / "abs") == "/etc/shadow"
    assert (root / "absolute" / "name").read_text() == "inside"


def test_archive_of_several_images_needs_a_name(tmp_path: Path):
    layout = Layout().image(BASE, name="repo/app:1").image(BASE, UPPER, name="repo/app:2")
    path = layout.archive(tmp_path / "two.tar")
    with pytest.raises(ConfigurationError, match=r"PATH#NAME: repo/app:1, repo/app:2"):
        prepare(path, tmp_path)
    with pytest.raises(ConfigurationError, match="no image '3': valid: repo/app:1"):
        prepare(path, tmp_path, name="3")
    assert text(prepare(path, tmp_path, name="repo/app:1"), "etc/name") == "base"
    assert text(prepare(path, tmp_path, name="app:2"), "etc/name") == "upper"


def test_multi_platform_index_gives_this_machines_image(tmp_path: Path):
    layout = Layout().image(UPPER, architecture="s390x", platform=True).image(BASE, platform=True)
    attestation = layout.document({"note": 1}, f"{OCI}.manifest.v1+json")
    attestation["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
    inner = layout.document({"manifests": [*layout.manifests, attestation]}, f"{OCI}.index.v1+json")
    layout.manifests = [{**inner, "annotations": {"org.opencontainers.image.ref.name": "multi"}}]
    assert text(prepare(layout.folder(tmp_path / "layout"), tmp_path, name="multi"), "etc/name") == "base"


def test_zstd_is_read_where_a_package_for_it_is_installed(tmp_path: Path):
    # Of BASE cut down to one file, by the program zstd: Python has none to write it before 3.14.
    packed = base64.b64decode(ZSTD)
    path = tmp_path / "root.tar.zst"
    path.write_bytes(packed)
    if importlib.util.find_spec("zstandard") is None and sys.version_info < (3, 14):
        with pytest.raises(ConfigurationError, match="pip install zstandard"):
            prepare(path, tmp_path)
    else:
        assert text(prepare(path, tmp_path), "etc/name") == "packed"


# The store.


def three(tmp_path: Path) -> list[Path]:
    """Images of about a mebibyte each, nothing in common."""
    made: list[Path] = []
    for n in range(3):
        path = tmp_path / f"{n}.tar"
        path.write_bytes(tar(file("data", bytes([n]) * (1 << 20))))
        made.append(path)
    return made


def test_eviction_is_least_recently_used_and_spares_images_in_use(tmp_path: Path):
    first, second, third = three(tmp_path)
    room = (2 << 20) + 200_000
    kept = prepare(first, tmp_path, store_bytes=room)
    other = prepare(second, tmp_path, store_bytes=room)
    other.release()
    os.utime(kept.root.parent / "image.json", (1, 1))
    image = prepare(third, tmp_path, store_bytes=room)
    assert len(image.removed) == 1
    assert str(second) in image.removed[0]
    assert kept.root.exists()
    assert not other.root.exists()
    with pytest.raises(ConfigurationError, match=r"doesn't fit into the store.*in use: give sandbox.store_bytes more"):
        prepare(second, tmp_path, store_bytes=room)
    assert ImageStore(tmp_path / "store", OWNER, room).used_bytes() <= room
    kept.release()
    assert prepare(second, tmp_path, store_bytes=room).unpacked == 1
    assert not kept.root.exists()
    assert image.root.exists()


def test_use_of_image_postpones_its_eviction(tmp_path: Path):
    first, second, third = three(tmp_path)
    for n, path in enumerate((first, second)):
        with prepare(path, tmp_path) as image:
            pass
        os.utime(image.root.parent / "image.json", (n + 1, n + 1))
    used = prepare(first, tmp_path)
    assert (used.root.parent / "image.json").stat().st_mtime > 2, "though its process should be killed"
    used.release()
    assert str(second) in prepare(third, tmp_path, store_bytes=(2 << 20) + 200_000).removed[0]


def test_layers_of_an_image_that_is_being_made_make_no_room_for_its_others(tmp_path: Path):
    other, second, third = three(tmp_path)
    prepare(other, tmp_path).release()
    both = Layout().image(second.read_bytes(), third.read_bytes() + bytes(512)).folder(tmp_path / "both")
    image = prepare(both, tmp_path, store_bytes=(2 << 20) + 200_000)
    assert str(other) in image.removed[0]
    assert (image.root / "data").read_bytes() == bytes([2]) * (1 << 20)


def test_lookup_takes_no_lock(tmp_path: Path):
    path = three(tmp_path)[0]
    prepare(path, tmp_path).release()
    stop = threading.Event()
    stop.set()
    with open(tmp_path / "store" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert resolve.prepare(str(path), tmp_path / "store", owner=OWNER, stop=stop).unpacked == 0


def test_a_store_too_small_for_an_image_says_so(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"doesn't fit into the store .* of 1000000 bytes"):
        prepare(three(tmp_path)[0], tmp_path, store_bytes=1_000_000)
    assert not any(on_disk(tmp_path / "store").values())


def test_an_archive_that_has_to_be_decompressed_takes_its_bytes_meanwhile(tmp_path: Path):
    layer = tar(file("data", os.urandom(1 << 20)))
    layout = Layout().image(layer, layer_type=f"{OCI}.layer.v1.tar")
    path = layout.archive(tmp_path / "image.tar.gz", zipped=True)
    with pytest.raises(ConfigurationError, match="doesn't fit"):
        prepare(path, tmp_path, store_bytes=(2 << 20) - 200_000)
    assert prepare(path, tmp_path, store_bytes=(2 << 20) + 200_000).unpacked == 1
    assert ImageStore(tmp_path / "store", OWNER, 1 << 30).used_bytes() < (1 << 20) + 100_000


def test_leftovers_of_killed_unpackings_are_swept(tmp_path: Path):
    one, two, _ = three(tmp_path)
    prepare(one, tmp_path).release()
    left = tmp_path / "store" / "incoming" / "0123"
    (left / "closed" / "in").mkdir(parents=True)
    (left / "closed").chmod(0)
    (left / "link").symlink_to(tmp_path)
    prepare(two, tmp_path)
    assert on_disk(tmp_path / "store")["incoming"] == 0
    assert one.exists()


UNPACK = """
import sys
from pathlib import Path
from headway.sandbox.images import resolve as images
from headway.sandbox.images.layers import FileOwner
import os
print("go", flush=True); sys.stdin.readline()
image = images.prepare(sys.argv[1], Path(sys.argv[2]), owner=FileOwner(os.geteuid(), os.getegid()))
print(image.unpacked, flush=True); sys.stdin.readline()
"""


def process(path: Path, tmp_path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", UNPACK, str(path), str(tmp_path / "store")]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "go\n"
    return started


def tell(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def test_concurrent_processes_unpack_an_image_once(tmp_path: Path):
    path = saved(tmp_path / "image.tar", BASE, UPPER)
    both = [process(path, tmp_path) for _ in range(2)]
    for one in both:
        tell(one)
    assert sorted(one.stdout.readline() for one in both if one.stdout) == ["0\n", "2\n"]
    store = ImageStore(tmp_path / "store", OWNER, 1 << 30)
    both[0].kill()
    both[0].wait()
    assert [one.in_use for one in store.images()] == [True]
    with store.changing() as change:
        change.prune(0)
    assert on_disk(tmp_path / "store")["images"] == 1
    both[1].kill()
    both[1].wait()
    assert [one.in_use for one in store.images()] == [False]
    with store.changing() as change:
        change.prune(0)
        assert len(change.removed) == 1
    assert not any(on_disk(tmp_path / "store").values())


def test_wait_for_the_store_can_be_stopped(tmp_path: Path):
    path = three(tmp_path)[0]
    ImageStore(tmp_path / "store", OWNER, 1 << 30)
    stop = threading.Event()
    stop.set()
    with open(tmp_path / "store" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WaitStopped):
            resolve.prepare(str(path), tmp_path / "store", owner=OWNER, stop=stop)
    with pytest.raises(WaitStopped):
        resolve.prepare(str(path), tmp_path / "store", owner=OWNER, stop=stop)
    assert not any(on_disk(tmp_path / "store").values())


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = three(tmp_path)[0]
    stamps = iter([(1,), (2,)])
    monkeypatch.setattr(resolve, "_stamp", lambda _: next(stamps))
    with pytest.raises(ConfigurationError, match="changed while it was read"):
        prepare(path, tmp_path)


def test_a_store_of_another_kind_is_refused(tmp_path: Path):
    path = three(tmp_path)[0]
    prepare(path, tmp_path).release()
    (tmp_path / "store" / "store.json").write_text(json.dumps({"format": 99, "uid": OWNER.uid}))
    with pytest.raises(ConfigurationError, match=r"format 99.*give sandbox.store another folder"):
        prepare(path, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_belong_to_the_user_of_sandboxes_who_must_get_there(tmp_path: Path):
    path = three(tmp_path)[0]
    owner = FileOwner(65_200, 65_200)
    with tempfile.TemporaryDirectory() as name:  # closed to others, as pytest's own is
        store = Path(name) / "store"
        with pytest.raises(ConfigurationError, match=f"can't go through {name}: chmod o\\+x {name}"):
            resolve.prepare(str(path), store, owner=owner)
        assert not any(on_disk(store).values())
        os.chmod(name, 0o711)
        image = resolve.prepare(str(path), store, owner=owner)
        places = (image.root, image.root / "data")
        assert {(one.stat().st_uid, one.stat().st_gid) for one in places} == {(65_200, 65_200)}
        assert oct(image.root.parent.stat().st_mode) == oct(stat.S_IFDIR | 0o710)


# The command line.


def test_images_are_listed_and_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = str(tmp_path / "store")
    one, two, _ = three(tmp_path)
    held = prepare(one, tmp_path)
    prepare(two, tmp_path).release()
    assert main(["sandboxes", "images", "--store", store]) == 0
    listed = capsys.readouterr().out
    assert f"in use  {one}" in listed
    assert f"unused  {two}" in listed
    assert "2 images, 2.1" in listed
    assert main(["sandboxes", "prune", "--store", store, "--to-bytes", "100000000"]) == 0
    assert "0 images removed" in capsys.readouterr().out
    assert main(["sandboxes", "prune", "--store", store]) == 0
    pruned = capsys.readouterr().out
    assert "1 images removed, 1.0" in pruned
    assert str(two) in pruned
    assert held.root.exists()
    for bad in (one, tmp_path / "none", tmp_path):
        assert main(["sandboxes", "images", "--store", str(bad)]) == 2
        assert main(["sandboxes", "prune", "--store", str(bad)]) == 2
    assert not (tmp_path / "none").exists()


def test_this_users_store_is_where_sandboxes_can_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve.default_store() == tmp_path / "headway" / "images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    home = Path.home() / ".cache/headway/images"
    assert resolve.default_store() == (Path("/var/cache/headway/images") if os.geteuid() == 0 else home)


ZSTD = (
    "KLUv/QRo7QIA0sMMEaC7AaTZupOhqvi7X7OAqhlTL+aQsRLfq9q7bdBId0qxI7Lh2vsZLzKkqm6HPLPIA+JMECBwKyyWA/YDb8Cq1l3h6BsaYMGT"
    "KYwDIPv/g8TSlwsPGBTAeBJvAFNd+w=="
)


def test_a_store_that_is_full_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "base.tar"
    archive.write_bytes(BASE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(resolve, "_from_store", full)
    store = tmp_path / "store"
    with pytest.raises(
        ConfigurationError, match=rf"No space left on device: free some in {store}, or set sandbox.store"
    ):
        prepare(archive, tmp_path)
