"""Archives that are made to do harm, or are wrong: refused, with nothing left of them."""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from image_files import (
    BASE,
    OCI,
    UPPER,
    Layout,
    file,
    link,
    names,
    on_disk,
    prepare,
    same,
    saved,
    sha256,
    tar,
    text,
)

from headway.records.errors import ConfigurationError
from headway.sandbox.images import tree
from headway.sandbox.images.archives import open_image


def sparse(name: str, size: int, **told: str) -> bytes:
    """A file of nothing but a hole, as GNU tar has written it in several ways."""
    info = tarfile.TarInfo(name)
    info.pax_headers = {f"GNU.sparse.{key}": value for key, value in told.items()}
    info.pax_headers |= {"GNU.sparse.name": name, "GNU.sparse.realsize": str(size)}
    body = f"1\n{size}\n0\n".encode().ljust(512, b"\0")
    info.size = len(body)
    return info.tobuf(tarfile.PAX_FORMAT) + body + bytes(1024)


def old_sparse(blocks: int) -> bytes:
    """... and the oldest: a header goes on in blocks, as many as there are."""
    more = b"".join(b"%011o\0" % number for number in range(42)).ljust(504, b"\0") + b"\1"
    return header(type=b"S", extended=b"\1") + more.ljust(512, b"\0") * blocks


def many_global(count: int) -> bytes:
    """Every header of the whole archive has another name, and all are remembered."""
    infos = [tarfile.TarInfo.create_pax_global_header({f"K{number}": "x" * 100_000}) for number in range(count)]
    return b"".join(info + header() for info in infos) + bytes(1024)


def header(**changes: bytes) -> bytes:
    """A header with fields overwritten, its checksum right."""
    info = tarfile.TarInfo("file")
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    places = {"size": slice(124, 136), "type": slice(156, 157), "name": slice(0, 100), "extended": slice(482, 483)}
    for key, value in changes.items():
        place = places[key]
        raw[place] = value.ljust(place.stop - place.start, b"\0")
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


HARMFUL = {
    "up": (tar(file("../out", "x")), "leads out of its root"),
    "up-later": (tar(file("a/../../out", "x")), "leads out of its root"),
    "hard-link-out": (tar(same("passwd", "../../../../../../etc/passwd")), "leads out of its root"),
    "hard-link-to-nothing": (tar(same("passwd", "/etc/passwd")), "isn't there"),
    "whiteout-of-all": (tar(file(".wh...")), "is a whiteout without a name"),
    "below-a-file": (tar(file("a"), file("a/b")), "used as a directory"),
    "root-is-a-link": (tar(link("./", "/etc")), "has to be a directory"),
    "circle": (tar(link("a", "a"), file("a/b")), "loop of links"),
    "name-too-long": (tar(file("x" * 256)), "can't be a file's name"),
    "sparse": (sparse("hole", 1 << 45, map="0,0"), "doesn't fit"),
    "sparse-map": (sparse("hole", 1 << 45, major="1", minor="0"), "without --sparse"),
    "sparse-old": (old_sparse(1000) + bytes(1024), "without --sparse"),
    "header-upon-header": (header(type=b"x", size=b"0") * 1500, "headers before a file"),
    "global-headers": (many_global(12), "its global headers"),
    "backwards": (header(size=b"\xff" * 8 + (-2048).to_bytes(4, "big", signed=True)) + bytes(1024), "-2048 bytes"),
    "header-without-end": (header(type=b"x", size=b"77777777777") + bytes(4096), "header of"),
    "long-name-without-end": (header(type=b"L", size=b"77777777777") + bytes(4096), "header of"),
    "unknown-type": (header(type=b"Z") + bytes(1024), "of an unknown type"),
    "cut-off": (tar(file("a", "x" * 5000))[:3000], "cut off"),
    "cut-off-at-a-header": (tar(file("a", "x" * 512))[:1024], "its end isn't marked"),
    "damaged-header": (tar(file("a"))[:512] + b"\1" * 512 + bytes(1024), "its end isn't marked"),
    "no-tar": (b"once upon a time" * 100, "it isn't a tar"),
    "empty": (b"", "it isn't a tar"),
    "xz": (b"\xfd7zXZ\x00" + bytes(100), "compressed with xz"),
    "gzip-cut-off": (gzip.compress(BASE)[:-9], "cut off or damaged"),
    "gzip-damaged": (gzip.compress(os.urandom(4000))[:-8] + bytes(8), "damaged"),
    "bomb": (gzip.compress(tar(file("zeros", bytes(64 << 20)))), "doesn't fit"),
    "bomb-behind-the-end": (gzip.compress(tar(file("a")) + bytes(64 << 20)), "unpacks to more than"),
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_malicious_archives_are_refused(kind: str, tmp_path: Path):
    data, said = HARMFUL[kind]
    place = tmp_path / "deep" / "er"
    place.mkdir(parents=True)
    (place / "image.tar").write_bytes(data)
    before = names(tmp_path)
    with pytest.raises(ConfigurationError, match=said) as raised:
        prepare(place / "image.tar", place, store_bytes=16 << 20)
    assert "image.tar" in str(raised.value)
    assert {name for name in names(tmp_path) - before if not name.startswith("deep/er/store")} == set()
    left = on_disk(place / "store")
    assert left == {"layers/sha256": 0, "images": 0, "incoming": 0, "sources": 0}


def test_writes_through_links_stay_in_the_image(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for number, target in enumerate([str(outside), "../" * 20 + str(outside)[1:], "/"]):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(tar(link("a", target), file("a/planted", "x"), same("a/again", "a/planted"), file("a", "y")))
        with prepare(path, tmp_path) as image:
            assert text(image, "a") == "y"
            inside = names(image.root)
            assert {os.path.basename(name) for name in inside} >= {"planted", "again"}
    assert list(outside.iterdir()) == []


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.sandbox.images.layers.MOST_NODES", 50)
    path = tmp_path / "many.tar"
    path.write_bytes(tar(*(file(f"f{n}") for n in range(51))))
    with pytest.raises(ConfigurationError, match="more than"):
        prepare(path, tmp_path)
    assert tree.MOST_NODES >= 1_000_000


# Images that are wrong, or for somebody else.


def damaged_layout(change: Callable[[Layout], None], **options: str) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        layout = Layout().image(BASE, **options)  # type: ignore[arg-type]
        change(layout)
        return layout.folder(place / "layout")

    return write


def change_blob(kind: str) -> Callable[[Layout], None]:
    def change(layout: Layout) -> None:
        for name, data in layout.files.items():
            if name.startswith("blobs") and kind.encode() in data[:2000]:
                layout.files[name] = data + b" "
                return
        raise AssertionError(kind)

    return change


def nested_indexes(layout: Layout) -> None:
    """A thousand names of an index that names another a thousand times, and so on."""
    for _ in range(4):
        layout.manifests = [layout.document({"manifests": layout.manifests * 1000}, f"{OCI}.index.v1+json")]


def lose_blob(layout: Layout) -> None:
    del layout.files[next(name for name, data in layout.files.items() if data.startswith(b"\x1f\x8b"))]


def wrong_diff_id(layout: Layout) -> None:
    told = {"rootfs": {"diff_ids": [sha256(b"other")]}}
    config = layout.document(told, f"{OCI}.config.v1+json")
    layer = layout.blob(gzip.compress(BASE), f"{OCI}.layer.v1.tar+gzip")
    layout.manifests = [layout.document({"config": config, "layers": [layer]}, f"{OCI}.manifest.v1+json")]


def artifact(layout: Layout) -> None:
    chart = layout.document({}, "application/vnd.cncf.helm.config.v1+json")
    layout.manifests = [layout.document({"config": chart, "layers": []}, f"{OCI}.manifest.v1+json")]


def set_manifest(**changes: object) -> Callable[[Layout], None]:
    return lambda layout: layout.manifests[0].update(changes)


WRONG = {
    "layer": (damaged_layout(change_blob("\x1f")), "damaged or was changed"),
    "config": (damaged_layout(change_blob("rootfs")), "doesn't match its digest"),
    "manifest": (damaged_layout(change_blob('"layers": [')), "doesn't match its digest"),
    "lost": (damaged_layout(lose_blob), "lacks blobs/sha256"),
    "diff-id": (damaged_layout(wrong_diff_id), "its unpacked digest should be"),
    "artifact": (damaged_layout(artifact), "it isn't an image"),
    "layer-type": (damaged_layout(lambda _: None, layer_type="application/x-squashfs"), "media type .*squashfs.*valid"),
    "manifest-type": (damaged_layout(set_manifest(mediaType="text/plain")), "media type 'text/plain': valid"),
    "digest-kind": (damaged_layout(set_manifest(digest="md5:00")), "valid: sha256"),
    "digest-path": (damaged_layout(set_manifest(digest="sha256:../../../etc/passwd")), "valid: sha256"),
    "architecture": (damaged_layout(lambda _: None, architecture="s390x"), "for linux/s390x: this machine is linux/"),
    "platform": (
        damaged_layout(set_manifest(platform={"os": "linux", "architecture": "s390x"})),
        "for linux/s390x: this machine is",
    ),
    "index-upon-index": (damaged_layout(nested_indexes), "names more than 1000"),
    "no-image": (damaged_layout(lambda layout: layout.manifests.clear()), "holds no image"),
    "docker-architecture": (lambda place: saved(place / "x.tar", BASE, architecture="s390x"), "this machine is"),
    "missing": (lambda place: place / "python:3.12", "no such file. Valid:"),
    "device": (lambda place: Path("/dev/null"), "neither a file nor a directory"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_damaged_images_are_named_and_leave_nothing(kind: str, tmp_path: Path):
    make, said = WRONG[kind]
    path = make(tmp_path)
    with pytest.raises(ConfigurationError, match=said) as raised:
        prepare(path, tmp_path)
    assert str(path) in str(raised.value)
    if (tmp_path / "store").exists():
        assert not any(on_disk(tmp_path / "store").values())


def test_a_good_layer_of_a_bad_image_isnt_kept_but_one_of_another_image_is(tmp_path: Path):
    prepare(Layout().image(BASE).folder(tmp_path / "good"), tmp_path).release()
    bad = Layout().image(BASE, UPPER, tar(file("../out")))
    with pytest.raises(ConfigurationError, match="leads out"):
        prepare(bad.folder(tmp_path / "bad"), tmp_path)
    assert [path.name for path in (tmp_path / "store/layers/sha256").iterdir()] == [sha256(BASE)[7:]]


def test_reading_indexes_can_be_stopped(tmp_path: Path):
    layout = Layout().image(BASE)
    layout.manifests = [layout.document({"manifests": layout.manifests}, f"{OCI}.index.v1+json")]
    looks = 0

    def take(size: int) -> None:
        nonlocal looks
        looks += 1
        raise InterruptedError

    with pytest.raises(InterruptedError), open_image(layout.folder(tmp_path / "layout"), "", tmp_path, take, 1 << 30):
        pass
    assert looks == 1
