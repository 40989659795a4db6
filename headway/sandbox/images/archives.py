"""Reads layers and settings of an image from an OCI layout, an archive of `docker save`, or a plain tar.

Reads only small JSON documents, and checks each against its digest if it has one; layers are returned as streams.
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

from headway.sandbox.images.layers import TAR_ERRORS, Tar, whole_tar
from headway.sandbox.images.streams import CHUNK_BYTES, FileRegion, HashingReader, decompress, sha256_of
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
# First names in archives of layers by any tool; a root file system has other names.
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


class ImageSettings(msgspec.Struct, frozen=True, rename={"variables": "Env"}):
    variables: list[str] | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    rootfs: RootFiles
    architecture: str = ""
    os: str = ""
    config: ImageSettings | None = None


class SavedImage(msgspec.Struct, frozen=True, rename={"config": "Config", "names": "RepoTags", "layers": "Layers"}):
    """An image in the manifest.json of `docker save`."""

    config: str
    layers: list[str]
    names: list[str] | None = None


class LayerSource(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that may have to be unpacked. ``diff_id``: the digest of its tar; None: unknown until it is read."""

    name: str  # the layer's name, for messages
    diff_id: str | None
    open: Callable[[], io.BufferedReader]
    digest: str | None = None  # digest of the stream as stored


class ImageContent(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[LayerSource, ...]
    environment: dict[str, str] = {}


class _Files(Protocol):
    """Access to the files of a layout's folder or of an archive."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> io.BufferedReader: ...


@contextlib.contextmanager
def open_image(
    path: Path, name: str, scratch: Path, take: Callable[[int], None], most_bytes: int
) -> Iterator[ImageContent]:
    """Open the image at ``path``. ``name``: selects one of several images. ``take``: as in `layers.unpack`;
    ``scratch``: a folder for an archive that has to be decompressed as a whole. Raises ImageError."""
    if path.is_dir():
        yield _oci_layout(_Folder(path), name, take)
        return
    with contextlib.ExitStack() as exit_stack:
        archive_file = exit_stack.enter_context(open(path, "rb"))
        stream, was_compressed = decompress(archive_file)
        if not ARCHIVE_NAME.fullmatch(_first_name(HashingReader(stream, take))):
            yield _plain_tar(path, name)
            return
        if was_compressed:
            path = _decompress(path, scratch, take, most_bytes)
            archive_file = exit_stack.enter_context(open(path, "rb"))
        files = _Archive(archive_file, take)
        if files.has("oci-layout") and files.has("index.json"):
            yield _oci_layout(files, name, take)
        elif files.has("manifest.json"):
            yield _docker_save(files, name)
        else:
            yield _plain_tar(path, name)


def is_layout(path: Path) -> bool:
    """Return whether a directory is an OCI image layout and not a root file system."""
    return (path / "oci-layout").is_file() and (path / "index.json").is_file()


def _plain_tar(path: Path, name: str) -> ImageContent:
    if name:
        raise ImageError(f"it is a tar of files, in which no image is called {name!r}")
    return ImageContent(layers=(LayerSource(name=path.name, diff_id=None, open=lambda: open(path, "rb")),))


def _first_name(stream: HashingReader) -> str:
    """Return the name of the first entry that isn't a directory. Raises ImageError if it can't be read."""
    try:
        with Tar.of(stream) as archive:
            for _ in range(1000):
                member = archive.next()
                if member is None or not member.isdir():
                    return member.name if member is not None else ""
    except TAR_ERRORS as error:
        raise ImageError(
            f"it isn't a tar, or is damaged ({error}): valid: a directory, a tar of a root file system (gzip and"
            " zstd too), an OCI archive or layout, and what docker save writes"
        ) from None
    return ""


def _decompress(path: Path, scratch: Path, take: Callable[[int], None], most_bytes: int) -> Path:
    """Decompress an archive of layers into ``scratch``, since reading it in any order needs a plain file."""
    target = scratch / "archive.tar"
    with open(path, "rb") as compressed_file, open(target, "xb") as target_file:
        stream = HashingReader(decompress(compressed_file)[0], take, most_bytes)
        while chunk := stream.read(CHUNK_BYTES):
            take(len(chunk))
            target_file.write(chunk)
    return target


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def open(self, name: str) -> io.BufferedReader:
        if not self.has(name):
            raise ImageError(f"it lacks {name}: is the copy complete?")
        return open(self._path / name, "rb")


class _Archive:
    """An uncompressed tar of blobs."""

    def __init__(self, raw: io.BufferedReader, take: Callable[[int], None]) -> None:
        self._descriptor = raw.fileno()
        self._ranges: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}  # archives of an old docker save name a layer twice
        archive_bytes = os.fstat(self._descriptor).st_size
        raw.seek(0)
        with whole_tar(_Skipping(raw, take), marked=True) as archive:
            while (member := archive.next()) is not None:
                self._index_member(member, archive_bytes)

    def _index_member(self, member: tarfile.TarInfo, size: int) -> None:
        name = member.name.removeprefix("./")
        if member.issym() or member.islnk():
            folder = os.path.dirname(name) if member.issym() else ""
            self._links[name] = os.path.normpath(os.path.join(folder, member.linkname))
        elif member.isreg() and not member.issparse():
            if not 0 <= member.size <= size - member.offset_data:
                raise ImageError(f"it is cut off in the middle of {name[:200]!r}")
            self._ranges[name] = (member.offset_data, member.size)
        if len(self._ranges) + len(self._links) > MEMBERS:
            raise ImageError(f"it has more than {MEMBERS} entries, which no archive of layers has")

    def has(self, name: str) -> bool:
        return self._links.get(name, name) in self._ranges

    def open(self, name: str) -> io.BufferedReader:
        if not self.has(name):
            raise ImageError(f"it lacks {name[:200]}: is the copy complete?")
        start, size = self._ranges[self._links.get(name, name)]
        return cast(io.BufferedReader, io.BufferedReader(FileRegion(self._descriptor, start, size), 1 << 16))


class _Skipping(HashingReader):
    """A stream that seeks over skipped bytes instead of reading them, since most of an archive is skipped."""

    def seek(self, to: int) -> None:
        if to < self._at:
            raise ImageError("one of its headers points backwards: it is damaged or malicious")
        self._source.seek(to)
        self._at = to


def _document(files: _Files, name: str, kind: type[T], digest: str | None = None) -> T:
    with files.open(name) as file:
        content = file.read(DOCUMENT_BYTES + 1)
    if len(content) > DOCUMENT_BYTES:
        raise ImageError(f"{name} has more than {DOCUMENT_BYTES} bytes, and should be a small document")
    if digest is not None and sha256_of(io.BytesIO(content), lambda _: None) != digest:
        raise ImageError(f"{name} doesn't match its digest: it is damaged or was changed")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ImageError(f"{name} can't be parsed: {error}") from None


def _blob(digest: str) -> str:
    match = DIGEST.fullmatch(digest)
    if match is None:
        raise ImageError(f"it names a blob {digest[:100]!r}: valid: sha256: with 64 digits")
    return f"blobs/sha256/{match[1]}"


# OCI.


def _oci_layout(files: _Files, name: str, take: Callable[[int], None]) -> ImageContent:
    candidates = list(_manifests(files, take))
    candidate = _choose(candidates, name)
    manifest = _document(files, _blob(candidate.digest), Manifest, candidate.digest)
    if manifest.config.media_type not in CONFIG_TYPES:
        raise ImageError(
            f"its configuration is of media type {manifest.config.media_type[:100]!r}: it isn't an image of a file"
            f" system, whose would be {CONFIG_TYPES[0]}"
        )
    config = _document(files, _blob(manifest.config.digest), ImageConfig, manifest.config.digest)
    _check_config(config, len(manifest.layers))
    layers: list[LayerSource] = []
    for layer, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=True):
        if not LAYER_TYPE.fullmatch(layer.media_type):
            raise ImageError(
                f"layer {layer.digest[:80]} is of media type {layer.media_type[:100]!r}: valid:"
                " application/vnd.oci.image.layer.v1.tar, with +gzip or +zstd, and Docker's"
            )
        blob_name = _blob(layer.digest)
        open_layer = functools.partial(files.open, blob_name)
        layers.append(LayerSource(name=blob_name, diff_id=diff_id, open=open_layer, digest=layer.digest))
    return ImageContent(layers=tuple(layers), environment=_environment(config))


class _Candidate(msgspec.Struct, frozen=True):
    name: str
    platform: str
    digest: str


def _manifests(files: _Files, take: Callable[[int], None]) -> Iterator[_Candidate]:
    """Yield all image manifests that the index refers to, directly or by nested indexes."""
    pending_descriptors = [("", descriptor, DEPTH) for descriptor in _document(files, "index.json", Index).manifests]
    named_count = len(pending_descriptors)
    while pending_descriptors:
        take(0)
        if named_count > NAMED:
            raise ImageError(f"its index names more than {NAMED} images")
        parent_name, descriptor, levels_left = pending_descriptors.pop(0)
        annotations = descriptor.annotations or {}
        if "vnd.docker.reference.type" in annotations:  # an attestation about an image
            continue
        image_name = next((annotations[key] for key in NAMES if key in annotations), parent_name)
        if descriptor.media_type in INDEX_TYPES:
            if levels_left == 0:
                raise ImageError(f"its indexes are nested more than {DEPTH} deep")
            inner_descriptors = _document(files, _blob(descriptor.digest), Index, descriptor.digest).manifests
            named_count += len(inner_descriptors)
            pending_descriptors[:0] = [(image_name, nested, levels_left - 1) for nested in inner_descriptors]
        elif descriptor.media_type in MANIFEST_TYPES:
            platform_fields = descriptor.platform or {}
            platform_parts = [str(platform_fields.get(key) or "") for key in ("os", "architecture")]
            yield _Candidate(image_name, "/".join(platform_parts) if any(platform_parts) else "", descriptor.digest)
        else:
            raise ImageError(
                f"its index names media type {descriptor.media_type[:100]!r}: valid: {MANIFEST_TYPES[0]} and"
                f" {INDEX_TYPES[0]}, and Docker's"
            )


def _choose(candidates: Sequence[_Candidate], name: str) -> _Candidate:
    """Choose the image for this machine, by ``name`` if given. Raises ImageError if there isn't exactly one."""
    names = sorted({image.name for image in candidates if image.name})
    named = [image for image in candidates if not name or name in (image.name, image.name.rpartition("/")[2])]
    fitting_candidates = [image for image in named if image.platform in ("", this_platform())]
    if not candidates:
        raise ImageError("it holds no image")
    if not named:
        raise ImageError(f"it holds no image {name!r}: valid: {', '.join(names) or 'none with a name'}")
    if not fitting_candidates:
        platforms = ", ".join(sorted({image.platform for image in named}))
        raise ImageError(f"it is for {platforms}: this machine is {this_platform()}")
    if len({image.digest for image in fitting_candidates}) > 1:
        raise ImageError(f"it holds several images: choose one by PATH#NAME: {', '.join(names) or 'none has a name'}")
    return fitting_candidates[0]


def this_platform() -> str:
    """Return this machine's platform in the form that images use."""
    machine = platform.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def _check_config(config: ImageConfig, layers: int) -> None:
    image_platform = f"{config.os or 'linux'}/{config.architecture}"
    if config.architecture and image_platform != this_platform():
        raise ImageError(f"it is for {image_platform}: this machine is {this_platform()}")
    if len(config.rootfs.diff_ids) != layers:
        raise ImageError(f"it has {layers} layers, and digests for {len(config.rootfs.diff_ids)}")
    if not 1 <= layers <= LAYERS:
        raise ImageError(f"it has {layers} layers: valid: 1 to {LAYERS}")
    for digest in config.rootfs.diff_ids:
        _blob(digest)


def _environment(config: ImageConfig) -> dict[str, str]:
    pairs = [text.partition("=") for text in (config.config.variables if config.config else None) or []]
    return {key: value for key, _, value in pairs if key and "\0" not in key + value}


# Archives of `docker save`.


def _docker_save(files: _Files, name: str) -> ImageContent:
    images = _document(files, "manifest.json", list[SavedImage])
    tags = sorted(tag for candidate in images for tag in candidate.names or ())
    named_images = [candidate for candidate in images if not name or name in (candidate.names or ())]
    if not named_images:
        raise ImageError(f"it holds no image {name!r}: valid: {', '.join(tags) or 'none with a name'}")
    if len(named_images) > 1:
        raise ImageError(f"it holds several images: choose one by PATH#NAME: {', '.join(tags) or 'none has a name'}")
    image = named_images[0]
    digest_match = re.fullmatch(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", image.config)
    config = _document(files, image.config, ImageConfig, f"sha256:{digest_match[1]}" if digest_match else None)
    _check_config(config, len(image.layers))
    layers = [
        LayerSource(name=layer, diff_id=diff_id, open=functools.partial(files.open, layer))
        for layer, diff_id in zip(image.layers, config.rootfs.diff_ids, strict=True)
    ]
    return ImageContent(layers=tuple(layers), environment=_environment(config))
