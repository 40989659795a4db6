"""Images for tests, written here: tars, OCI layouts and archives, what `docker save` writes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.sandbox.images import resolve
from headway.sandbox.images.archives import this_platform
from headway.sandbox.images.layers import FileOwner
from headway.sandbox.images.resolve import Image

Member = tuple[tarfile.TarInfo, bytes]
OCI = "application/vnd.oci.image"


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", mode: int = 0o644) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode, info.mtime = kind, len(data), link, mode, 1_000_000
    return info, data


def file(name: str, data: bytes | str = b"", mode: int = 0o644) -> Member:
    return member(name, data=data.encode() if isinstance(data, str) else data, mode=mode)


def folder(name: str, mode: int = 0o755) -> Member:
    return member(name, tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> Member:
    return member(name, tarfile.SYMTYPE, link=target, mode=0o777)


def same(name: str, target: str) -> Member:
    return member(name, tarfile.LNKTYPE, link=target)


def tar(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def tree(root: Path, names: Sequence[str]) -> list[Member]:
    """Files of this host, links followed, as members of a tar."""
    return [file(name, (root / name).read_bytes(), os.stat(root / name).st_mode & 0o777) for name in names]


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """OCI's files of some images, before they are written."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = sha256(data)
        self.files[f"blobs/sha256/{digest[7:]}"] = data
        return {"digest": digest, "size": len(data), "mediaType": media_type}

    def document(self, value: Any, media_type: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media_type)

    def image(
        self,
        *layers: bytes,
        name: str = "",
        architecture: str = "",
        variables: Sequence[str] = (),
        layer_type: str = f"{OCI}.layer.v1.tar+gzip",
        platform: bool = False,
    ) -> Layout:
        system, own = this_platform().split("/")
        told = {"os": system, "architecture": architecture or own}
        config = {
            **told,
            "config": {"Env": list(variables)},
            "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in layers]},
        }
        blobs = [self.blob(gzip.compress(one, mtime=0) if "gzip" in layer_type else one, layer_type) for one in layers]
        manifest = {"config": self.document(config, f"{OCI}.config.v1+json"), "layers": blobs}
        one = self.document(manifest, f"{OCI}.manifest.v1+json")
        if name:
            one["annotations"] = {"org.opencontainers.image.ref.name": name}
        if platform:
            one["platform"] = told
        self.manifests.append(one)
        return self

    def _whole(self) -> dict[str, bytes]:
        index = {"schemaVersion": 2, "manifests": self.manifests}
        return {**self.files, "index.json": json.dumps(index).encode()}

    def folder(self, path: Path) -> Path:
        for name, data in self._whole().items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
        return path

    def archive(self, path: Path, *, zipped: bool = False) -> Path:
        data = tar(*(file(name, data) for name, data in self._whole().items()))
        path.write_bytes(gzip.compress(data) if zipped else data)
        return path


def saved(path: Path, *layers: bytes, name: str = "an/image:1", architecture: str = "") -> Path:
    """As `docker save` wrote it until version 25."""
    system, own = this_platform().split("/")
    config = json.dumps(
        {
            "architecture": architecture or own,
            "os": system,
            "config": {"Env": ["FROM=docker"]},
            "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in layers]},
        }
    ).encode()
    members = [file(f"{sha256(one + bytes([n]))[7:]}/layer.tar", one) for n, one in enumerate(layers)]
    for n, one in enumerate(layers):
        if one in layers[:n]:  # named twice, stored once
            first = members[layers.index(one)][0].name
            members[n] = link(members[n][0].name, f"../{first}")
    told = [{"Config": f"{sha256(config)[7:]}.json", "RepoTags": [name], "Layers": [info.name for info, _ in members]}]
    named = [file(f"{sha256(config)[7:]}.json", config), file("manifest.json", json.dumps(told))]
    path.write_bytes(tar(*members, *named))
    return path


OWNER = FileOwner(os.geteuid(), os.getegid())
BASE = tar(folder("etc"), file("etc/name", "base"), file("etc/gone", "x"), folder("d"), file("d/old", "old"))
UPPER = tar(file("etc/.wh.gone"), file("d/new", "new"), file("d/.wh..wh..opq"), file("etc/name", "upper"))


def prepare(path: Path, tmp_path: Path, *, name: str = "", store_bytes: int = 1 << 30) -> Image:
    image = f"{path}#{name}" if name else str(path)
    return resolve.prepare(image, tmp_path / "store", store_bytes=store_bytes, owner=OWNER)


def text(image: Image, name: str) -> str:
    return (image.root / name).read_text()


def names(root: Path) -> set[str]:
    found = {os.path.join(place, name) for place, folders, files in os.walk(root) for name in (*folders, *files)}
    return {os.path.relpath(name, root) for name in found}


def on_disk(store: Path) -> dict[str, int]:
    """How many there are of each."""
    return {name: len(list((store / name).iterdir())) for name in ("layers/sha256", "images", "incoming", "sources")}
