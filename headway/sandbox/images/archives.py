"""Reads an image's file or folder: layers and settings from OCI's layout, `docker save`, or a plain tar.

Only small JSON documents are read here, each checked against its digest where one is stated; layers are returned as
streams.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from headway.sandbox.images.layers import DAMAGED, Tar, whole_tar
from headway.sandbox.images.streams import CHUNK_BYTES, Counted, Region, decompressed, sha256_of
from headway.sandbox.images.tree import ImageError

T = TypeVar("T")
DOCUMENT_BYTES = 4 << 20
MEMBERS = 100_000  # most entries of an archive of layers
LAYERS = 500
DEPTH = 4  # most levels of nested indexes
NAMED = 1000  # most manifests in indexes: images for several machines, and attestations
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
LAYER_TYPE = re.compile(
    r"application/vnd\.(oci\.image\.layer\.(nondistributable\.)?v1|docker\.image\.rootfs\.(foreign\.)?diff)"
    r"\.tar([+.](gzip|zstd))?"
)
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
CONFIG_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
# First names in archives of layers, whichever tool wrote them: a root file system has other names.
ARCHIVE_NAME = re.compile(
    r"(\./)?(oci-layout|index\.json|manifest\.json|repositories|blobs/.*|[0-9a-f]{64}(\.json|/.*))"
)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


class Descriptor(msgspec.Struct, frozen=True, rename={"media_type": "mediaType"}):
    """A reference to a blob, as OCI has it."""

    digest: str = ""
    size: int = -1
    media_type: str = ""
    platform: dict[str, Any] | None = None
    annotations: dict[str, str] | None = None


class Index(msgspec.Struct, frozen=True):
    manifests: list[Descriptor]


class Manifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]


class RootFiles(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class Settings(msgspec.Struct, frozen=True, rename={"variables": "Env"}):
    variables: list[str] | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    rootfs: RootFiles
    architecture: str = ""
    os: str = ""
    config: Settings | None = None


class Saved(msgspec.Struct, frozen=True, rename={"config": "Config", "names": "RepoTags", "layers": "Layers"}):
    """An image in the manifest.json of `docker save`."""

    config: str
    layers: list[str]
    names: list[str] | None = None


class LayerSource(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that may have to be unpacked. ``diff_id``: the digest of its tar; None: known by reading it only."""

    what: str  # the layer's name, for messages
    diff_id: str | None
    open: Callable[[], io.BufferedReader]
    digest: str | None = None  # digest of the stream as stored


class Found(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[LayerSource, ...]
    environment: dict[str, str] = {}


class _Files(Protocol):
    """Access to the files of a layout's folder or of an archive."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> io.BufferedReader: ...


@contextlib.contextmanager
def opened(path: Path, name: str, scratch: Path, take: Callable[[int], None], most_bytes: int) -> Iterator[Found]:
    """Open the image at ``path``. ``name``: which image, where there are several. ``take``: as in `layers.unpack`;
    ``scratch``: a folder for an archive that has to be decompressed as a whole. Raises ImageError."""
    if path.is_dir():
        yield _layout(_Folder(path), name, take)
        return
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(path, "rb"))
        stream, was_compressed = decompressed(raw)
        if not ARCHIVE_NAME.fullmatch(_first_name(Counted(stream, take))):
            yield _plain(path, name)
            return
        if was_compressed:
            path = _decompress(path, scratch, take, most_bytes)
            raw = stack.enter_context(open(path, "rb"))
        files = _Archive(raw, take)
        if files.has("oci-layout") and files.has("index.json"):
            yield _layout(files, name, take)
        elif files.has("manifest.json"):
            yield _saved(files, name)
        else:
            yield _plain(path, name)


def is_layout(path: Path) -> bool:
    """Whether a directory is an OCI image layout and not a root file system."""
    return (path / "oci-layout").is_file() and (path / "index.json").is_file()


def _plain(path: Path, name: str) -> Found:
    if name:
        raise ImageError(f"it is a tar of files, in which no image is called {name!r}")
    return Found(layers=(LayerSource(what=path.name, diff_id=None, open=lambda: open(path, "rb")),))


def _first_name(stream: Counted) -> str:
    """Name of the first entry that isn't a directory. Raises ImageError where it can't be read."""
    try:
        with Tar.of(stream) as archive:
            for _ in range(1000):
                member = archive.next()
                if member is None or not member.isdir():
                    return member.name if member is not None else ""
    except DAMAGED as error:
        raise ImageError(
            f"it isn't a tar, or is damaged ({error}): valid are a directory, a tar of a root file system (gzip and"
            " zstd too), an OCI archive or layout, and what docker save writes"
        ) from None
    return ""


def _decompress(path: Path, scratch: Path, take: Callable[[int], None], most_bytes: int) -> Path:
    """Decompress an archive of layers into ``scratch``: reading it in any order takes a plain file."""
    target = scratch / "archive.tar"
    with open(path, "rb") as raw, open(target, "xb") as out:
        stream = Counted(decompressed(raw)[0], take, most_bytes)
        while part := stream.read(CHUNK_BYTES):
            take(len(part))
            out.write(part)
    return target


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def open(self, name: str) -> io.BufferedReader:
        if not self.has(name):
            raise ImageError(f"it lacks {name}: an incomplete copy?")
        return open(self._path / name, "rb")


class _Archive:
    """An uncompressed tar of blobs."""

    def __init__(self, raw: io.BufferedReader, take: Callable[[int], None]) -> None:
        self._descriptor = raw.fileno()
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}  # archives of an old docker save name a layer twice
        size = os.fstat(self._descriptor).st_size
        raw.seek(0)
        with whole_tar(_Skipping(raw, take), marked=True) as archive:
            while (member := archive.next()) is not None:
                self._remember(member, size)

    def _remember(self, member: tarfile.TarInfo, size: int) -> None:
        name = member.name.removeprefix("./")
        if member.issym() or member.islnk():
            beside = os.path.dirname(name) if member.issym() else ""
            self._links[name] = os.path.normpath(os.path.join(beside, member.linkname))
        elif member.isreg() and not member.issparse():
            if not 0 <= member.size <= size - member.offset_data:
                raise ImageError(f"it is cut off in the middle of {name[:200]!r}")
            self._places[name] = (member.offset_data, member.size)
        if len(self._places) + len(self._links) > MEMBERS:
            raise ImageError(f"it has more than {MEMBERS} entries, which no archive of layers has")

    def has(self, name: str) -> bool:
        return self._links.get(name, name) in self._places

    def open(self, name: str) -> io.BufferedReader:
        if not self.has(name):
            raise ImageError(f"it lacks {name[:200]}: an incomplete copy?")
        start, size = self._places[self._links.get(name, name)]
        return cast(io.BufferedReader, io.BufferedReader(Region(self._descriptor, start, size), 1 << 16))


class _Skipping(Counted):
    """A stream that seeks over skipped bytes instead of reading them: nearly all of an archive of layers."""

    def seek(self, to: int) -> None:
        if to < self._at:
            raise ImageError("one of its headers points backwards: it is damaged or malicious")
        self._source.seek(to)
        self._at = to


def _document(files: _Files, name: str, kind: type[T], digest: str | None = None) -> T:
    with files.open(name) as file:
        data = file.read(DOCUMENT_BYTES + 1)
    if len(data) > DOCUMENT_BYTES:
        raise ImageError(f"{name} has more than {DOCUMENT_BYTES} bytes, and should be a small document")
    if digest is not None and sha256_of(io.BytesIO(data), lambda _: None) != digest:
        raise ImageError(f"{name} doesn't match its digest: it is damaged or was changed")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ImageError(f"{name} can't be parsed: {error}") from None


def _blob(digest: str) -> str:
    match = DIGEST.fullmatch(digest)
    if match is None:
        raise ImageError(f"it names a blob {digest[:100]!r}: valid is sha256: with 64 digits")
    return f"blobs/sha256/{match[1]}"


# OCI.


def _layout(files: _Files, name: str, take: Callable[[int], None]) -> Found:
    candidates = list(_manifests(files, take))
    chosen = _choose(candidates, name)
    manifest = _document(files, _blob(chosen.digest), Manifest, chosen.digest)
    if manifest.config.media_type not in CONFIG_TYPES:
        raise ImageError(
            f"its configuration is of media type {manifest.config.media_type[:100]!r}: it isn't an image of a file"
            f" system, whose would be {CONFIG_TYPES[0]}"
        )
    config = _document(files, _blob(manifest.config.digest), ImageConfig, manifest.config.digest)
    _check(config, len(manifest.layers))
    layers: list[LayerSource] = []
    for layer, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=True):
        if not LAYER_TYPE.fullmatch(layer.media_type):
            raise ImageError(
                f"layer {layer.digest[:80]} is of media type {layer.media_type[:100]!r}: valid are"
                " application/vnd.oci.image.layer.v1.tar, with +gzip or +zstd, and Docker's"
            )
        blob = _blob(layer.digest)
        source = functools.partial(files.open, blob)
        layers.append(LayerSource(what=blob, diff_id=diff_id, open=source, digest=layer.digest))
    return Found(layers=tuple(layers), environment=_environment(config))


class _Candidate(msgspec.Struct, frozen=True):
    name: str
    platform: str
    digest: str


def _manifests(files: _Files, take: Callable[[int], None]) -> Iterator[_Candidate]:
    """All image manifests that the index refers to, directly or by nested indexes."""
    waiting = [("", one, DEPTH) for one in _document(files, "index.json", Index).manifests]
    named = len(waiting)
    while waiting:
        take(0)
        if named > NAMED:
            raise ImageError(f"its index names more than {NAMED} images")
        above, one, depth = waiting.pop(0)
        annotations = one.annotations or {}
        if "vnd.docker.reference.type" in annotations:  # an attestation about an image
            continue
        own = next((annotations[key] for key in NAMES if key in annotations), above)
        if one.media_type in INDEX_TYPES:
            if depth == 0:
                raise ImageError(f"its indexes are nested more than {DEPTH} deep")
            inner = _document(files, _blob(one.digest), Index, one.digest).manifests
            named += len(inner)
            waiting[:0] = [(own, each, depth - 1) for each in inner]
        elif one.media_type in MANIFEST_TYPES:
            told = one.platform or {}
            parts = [str(told.get(key) or "") for key in ("os", "architecture")]
            yield _Candidate(own, "/".join(parts) if any(parts) else "", one.digest)
        else:
            raise ImageError(
                f"its index names media type {one.media_type[:100]!r}: valid are {MANIFEST_TYPES[0]} and"
                f" {INDEX_TYPES[0]}, and Docker's"
            )


def _choose(candidates: Sequence[_Candidate], name: str) -> _Candidate:
    """The image for this machine, of that name if one is given. Raises ImageError where there isn't exactly one."""
    names = sorted({one.name for one in candidates if one.name})
    named = [one for one in candidates if not name or name in (one.name, one.name.rpartition("/")[2])]
    fitting = [one for one in named if one.platform in ("", here())]
    if not candidates:
        raise ImageError("it holds no image")
    if not named:
        raise ImageError(f"it holds no image {name!r}: valid are {', '.join(names) or 'none with a name'}")
    if not fitting:
        there = ", ".join(sorted({one.platform for one in named}))
        raise ImageError(f"it is for {there}: this machine is {here()}")
    if len({one.digest for one in fitting}) > 1:
        raise ImageError(f"it holds several images: choose one by PATH#NAME: {', '.join(names) or 'none has a name'}")
    return fitting[0]


def here() -> str:
    """This machine's platform as images name it."""
    machine = platform.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def _check(config: ImageConfig, layers: int) -> None:
    told = f"{config.os or 'linux'}/{config.architecture}"
    if config.architecture and told != here():
        raise ImageError(f"it is for {told}: this machine is {here()}")
    if len(config.rootfs.diff_ids) != layers:
        raise ImageError(f"it has {layers} layers, and digests for {len(config.rootfs.diff_ids)}")
    if not 1 <= layers <= LAYERS:
        raise ImageError(f"it has {layers} layers: valid are 1 to {LAYERS}")
    for digest in config.rootfs.diff_ids:
        _blob(digest)


def _environment(config: ImageConfig) -> dict[str, str]:
    pairs = [text.partition("=") for text in (config.config.variables if config.config else None) or []]
    return {key: value for key, _, value in pairs if key and "\0" not in key + value}


# Archives of `docker save`.


def _saved(files: _Files, name: str) -> Found:
    images = _document(files, "manifest.json", list[Saved])
    tags = sorted(tag for one in images for tag in one.names or ())
    named = [one for one in images if not name or name in (one.names or ())]
    if not named:
        raise ImageError(f"it holds no image {name!r}: valid are {', '.join(tags) or 'none with a name'}")
    if len(named) > 1:
        raise ImageError(f"it holds several images: choose one by PATH#NAME: {', '.join(tags) or 'none has a name'}")
    image = named[0]
    stated = re.fullmatch(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", image.config)
    config = _document(files, image.config, ImageConfig, f"sha256:{stated[1]}" if stated else None)
    _check(config, len(image.layers))
    layers = [
        LayerSource(what=layer, diff_id=diff_id, open=functools.partial(files.open, layer))
        for layer, diff_id in zip(image.layers, config.rootfs.diff_ids, strict=True)
    ]
    return Found(layers=tuple(layers), environment=_environment(config))
