"""Unpacked images and their layers on disk: each layer once, used again, removed when there is no more room.

    STORE/lock                  held while something is made or removed; looking up takes none
    STORE/layers/sha256/HEX/    a layer by the digest of its tar: `entries`, `data/N`, `layer.json`
    STORE/images/HEX/           an image: `image.json`, whose time of change is its last use, and `root/`
    STORE/sources/HEX.json      the image of a file, as long as the file's size and times are the same
    STORE/incoming/             folders being made or removed: those of dead processes are swept at the next change

A root is a directory tree of its own whose files are hard links into the layers. Laying layers over each other with
the overlay itself would store as little, and was rejected: an overlay of 40 layers takes seven times as long to look up
a missing file (95 against 13 us), which is most of an interpreter's start; and a layer by itself doesn't say where its
names lead: through links of layers below, into directories that it doesn't list, to files elsewhere that it names
again. So all directories, owners and links are in place before the first sandbox, a root is one directory for any
backend, and files are stored once.

A process that uses an image holds a shared `flock` on its directory. The kernel drops it when that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.sandbox.images.archives import LayerSource
from headway.sandbox.images.layers import BLOCK_BYTES, DATA, FileOwner, entries_of, unpack
from headway.sandbox.images.roots import build, remove
from headway.sandbox.images.streams import decompressed, sha256_of
from headway.sandbox.images.tree import ImageError, merge
from headway.sandbox.leftovers import write
from headway.sandbox.linux import kernel

T = TypeVar("T")
FORMAT = 1
LOOK_AGAIN_S = 0.1  # between two attempts to lock the store
LAYER, IMAGE = "layer.json", "image.json"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    uid: int  # owner of the files in it


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    source: str  # the file it was first made from
    layers: tuple[str, ...]
    environment: dict[str, str] = {}
    bytes: int  # of its directories alone: its files belong to the layers


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it was when it was unpacked."""

    path: str
    stamp: tuple[int, ...]
    image: str


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image as `headway sandboxes images` lists it."""

    record: ImageRecord
    bytes: int  # with its layers, which others may share
    used_s: float  # last use, seconds since the epoch
    in_use: bool


class Image:
    """A root file system that is ready. Until it is released or this process ends, it is in use and isn't removed.

    Example: ``with prepare("python.tar") as image: spec = SandboxSpec(root=str(image.root))``
    """

    def __init__(self, root: Path, environment: dict[str, str] | None = None, descriptor: int | None = None) -> None:
        """``descriptor``: the locked folder of an image in a store; None: ``root`` is a directory of the user's."""
        self.root = root
        self.environment = environment or {}  # the image's own variables
        self.unpacked = 0  # number of layers unpacked; 0: the image was in the store
        self.removed: tuple[str, ...] = ()  # a line for each image that made room for this one
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.utime(self.root.parent / IMAGE)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Stopped(Exception):
    """The caller has stopped waiting for the image."""


class Store:
    """The images of one user. Every method may be called by several processes at once."""

    def __init__(self, folder: Path, owner: FileOwner, most_bytes: int) -> None:
        """Open the store, making its folder if need be. Raises ImageError where that is of another user or version."""
        self.folder = folder
        self.owner = owner
        self.most_bytes = most_bytes
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("layers/sha256", "images", "sources", "incoming"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ImageError(f"the store {folder} belongs to another user: give sandbox.store a folder of your own")
        for place in (*made, folder, folder / "images"):
            place.chmod(0o711)  # sandboxes' user goes through it
        for name in ("layers", "sources", "incoming"):
            (folder / name).chmod(0o700)
        self._same_kind()

    @classmethod
    def existing(cls, folder: Path) -> Store:
        """The store in an existing folder, whoever owns its files. Raises ImageError where there is none."""
        try:
            record = _read(folder / "store.json", StoreRecord)
        except (OSError, msgspec.DecodeError):
            raise ImageError(f"{folder} is no store of images") from None
        return cls(folder, FileOwner(record.uid, record.uid), 1 << 62)

    def _same_kind(self) -> None:
        place, wanted = self.folder / "store.json", StoreRecord(format=FORMAT, uid=self.owner.uid)
        if not place.exists():
            with self._locked(None):
                write(self.folder, place.name, wanted)
        found = _read(place, StoreRecord)
        if found != wanted:
            raise ImageError(
                f"the store {self.folder} is of format {found.format} for user {found.uid}, and here it is format"
                f" {FORMAT} for user {wanted.uid}: give sandbox.store another folder, or remove this one"
            )

    # Looking up.

    def acquire(self, image: str) -> Image | None:
        """Take an image into use until it is released or this process ends; None: it isn't in the store."""
        place = self.image(image)
        while True:
            try:
                descriptor = os.open(place, FOLDER)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # exclusive locks, which test for use, last an instant
                if _is(place, descriptor):
                    os.utime(place / IMAGE)
                    return Image(place / "root", _read(place / IMAGE, ImageRecord).environment, descriptor)
            except FileNotFoundError:
                pass  # it went meanwhile
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def known(self, path: Path, stamp: tuple[int, ...]) -> str | None:
        """Name of the image unpacked from this file; None if the file has changed since, or is unknown."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = _read(self._source(path), Known)
            if (found.path, found.stamp) == (str(path), stamp):
                return found.image
        return None

    def remember(self, path: Path, stamp: tuple[int, ...], image: str) -> None:
        record = Known(path=str(path), stamp=stamp, image=image)
        write(self.folder / "sources", self._source(path).name, record)

    def images(self) -> list[StoredImage]:
        """The images in the store, the longest unused first."""
        found: list[StoredImage] = []
        for place in (self.folder / "images").iterdir():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = _read(place / IMAGE, ImageRecord)
                size = record.bytes + sum(self._layer_bytes(layer) for layer in record.layers)
                used_s = (place / IMAGE).stat().st_mtime
                found.append(StoredImage(record=record, bytes=size, used_s=used_s, in_use=_in_use(place)))
        return sorted(found, key=lambda one: one.used_s)

    def layers(self) -> dict[str, int]:
        """The layers in the store: digest -> bytes it takes."""
        names = [f"sha256:{place.name}" for place in (self.folder / "layers/sha256").iterdir()]
        return {name: self._layer_bytes(name) for name in names}

    def used_bytes(self) -> int:
        return sum(self.layers().values()) + sum(one.record.bytes for one in self.images())

    def _layer_bytes(self, layer: str) -> int:
        try:
            return _read(self.layer(layer) / LAYER, LayerRecord).bytes
        except FileNotFoundError:  # removed by hand: images that have it go on working
            return 0

    def layer(self, digest: str) -> Path:
        return self.folder / "layers" / "sha256" / digest.removeprefix("sha256:")

    def image(self, name: str) -> Path:
        return self.folder / "images" / name

    def incoming(self) -> Path:
        """A place for a folder that is being made or removed."""
        return self.folder / "incoming" / secrets.token_hex(8)

    def _source(self, path: Path) -> Path:
        return self.folder / "sources" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"

    # Changing.

    @contextlib.contextmanager
    def changing(self, stop: threading.Event | None = None) -> Iterator[StoreChange]:
        """Lock the store for a change, and remove what killed processes left. Raises Stopped when ``stop`` is set."""
        with self._locked(stop):
            self._sweep()
            change = StoreChange(self, stop)
            try:
                yield change
            except BaseException:
                change.undo()
                raise
            finally:
                self._sweep()

    @contextlib.contextmanager
    def _locked(self, stop: threading.Event | None) -> Iterator[None]:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _lock(descriptor):
                _look(stop)
                time.sleep(LOOK_AGAIN_S)  # real time: another process is at work, for seconds to minutes
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        records = [(place, place / IMAGE) for place in (self.folder / "images").iterdir()]
        records += [(place, place / LAYER) for place in (self.folder / "layers/sha256").iterdir()]
        for place, record in records:
            if not record.exists():  # not made by us
                os.rename(place, self.incoming())
        for place in (self.folder / "incoming").iterdir():
            remove(place)
        for place in (self.folder / "sources").iterdir():
            with contextlib.suppress(OSError):
                try:
                    stale = not self.image(_read(place, Known).image).exists()
                except msgspec.DecodeError:
                    stale = True
                if stale:
                    place.unlink()


class StoreChange:
    """A process's changes to the store while it has the lock. The store never exceeds its limit of bytes."""

    def __init__(self, store: Store, stop: threading.Event | None) -> None:
        self._store = store
        self._stop = stop
        self._used = store.used_bytes()
        self._claimed = 0
        self._wanted: set[str] = set()  # layers of the image being made
        self._made: list[str] = []
        self.unpacked = 0  # number of layers unpacked
        self.removed: list[str] = []  # a line for each image removed to make room

    def take(self, size: int) -> None:
        """Claim bytes before they are written, removing unused images to make room; 0 only checks for ``stop``. Raises
        ImageError where they don't fit, Stopped."""
        _look(self._stop)
        self._used += size
        self._claimed += size
        while self._used > self._store.most_bytes:
            if not self._make_room():
                raise ImageError(
                    f"it doesn't fit into the store {self._store.folder}, of {self._store.most_bytes} bytes, beside"
                    " the images in use: give sandbox.store_bytes more"
                )

    def scratch(self) -> Path:
        """A new folder that is removed when the change is over."""
        place = self._store.incoming()
        place.mkdir(mode=0o700)
        return place

    def layer(self, source: LayerSource) -> str:
        """Unpack a layer unless the store has it; returns its digest."""
        if source.diff_id is not None and self._has(source.diff_id):
            self._wanted.add(source.diff_id)
            return source.diff_id
        try:
            return self._unpack(source)
        except ImageError as error:
            raise ImageError(f"{source.what}: {error}") from None

    def _has(self, digest: str) -> bool:
        return self._store.layer(digest).exists()

    def _unpack(self, source: LayerSource) -> str:
        if source.digest is not None:  # checked first: errors from unpacking a damaged layer would say less
            with source.open() as raw:
                found = sha256_of(raw, self.take)
            if found != source.digest:
                raise ImageError(f"its digest should be {source.digest}, and is {found}: it is damaged or was changed")
        folder = self.scratch()
        with source.open() as raw:
            stream, _ = decompressed(raw)
            marked = source.diff_id is None
            most = self._store.most_bytes
            digest, size = unpack(stream, folder, self._store.owner, self.take, most, marked=marked)
        if source.diff_id not in (None, digest):
            what = f"its unpacked digest should be {source.diff_id}, and is {digest}: it is damaged or was changed"
            raise ImageError(what)
        self.unpacked += 1
        self._wanted.add(digest)
        if self._has(digest):  # a plain tar that another image had as a layer
            self._used -= size
            return digest
        write(folder, LAYER, LayerRecord(bytes=size))
        self._publish(folder, self._store.layer(digest))
        self._made.append(digest)
        return digest

    def image(self, layers: list[str], environment: dict[str, str], source: str) -> str:
        """Make the root of these layers, the lowest first; returns its name in the store."""
        identity = msgspec.json.encode([layers, sorted(environment.items())])
        name = hashlib.sha256(identity).hexdigest()
        target = self._store.image(name)
        if target.exists():
            return name
        folder = self.scratch()
        before = self._claimed
        tree = merge(entries_of(self._store.layer(layer)) for layer in layers)
        self.take(BLOCK_BYTES)
        data = [self._store.layer(layer) / DATA for layer in layers]
        build(tree, folder / "root", data, self._store.owner, self.take)
        size = self._claimed - before
        record = ImageRecord(id=name, source=source, layers=tuple(layers), environment=environment, bytes=size)
        write(folder, IMAGE, record)
        if os.geteuid() != self._store.owner.uid:
            os.chown(folder, -1, self._store.owner.gid)
        folder.chmod(0o710)  # sandboxes' user goes through it, and nobody else
        self._publish(folder, target)
        return name

    def _publish(self, folder: Path, target: Path) -> None:
        """Move a finished folder to its place atomically and durably, even if the machine fails right after."""
        with _opened(folder) as descriptor:
            kernel.sync_file_system(descriptor)
        os.rename(folder, target)

    # Removing.

    def prune(self, to_bytes: int) -> None:
        """Remove layers of no image, then the images longest unused, until the rest takes ``to_bytes`` at most."""
        self._drop_layers()
        while self._used > to_bytes and self._make_room():
            pass

    def undo(self) -> None:
        """Remove the layers of an image that couldn't be made."""
        self._wanted.clear()
        of_images = self._of_images()
        for layer in self._made:
            if layer not in of_images:
                self._drop_layer(layer)

    def _make_room(self) -> bool:
        """Remove unused layers, or else the image longest unused. False: everything is in use."""
        if self._drop_layers():
            return True
        return any(self._drop_image(one) for one in self._store.images())

    def _drop_image(self, one: StoredImage) -> bool:
        place, trash = self._store.image(one.record.id), self._store.incoming()
        with _opened(place) as descriptor:
            if not _lock(descriptor):
                return False
            os.rename(place, trash)
        remove(trash)
        self._used -= one.record.bytes
        freed = one.record.bytes + self._drop_layers()
        idle_s = max(0.0, time.time() - one.used_s)
        what = f"image {one.record.id[:12]} of {one.record.source}"
        self.removed.append(f"{what}: {freed} bytes, unused for {idle_s:.0f} s")
        return True

    def _drop_layers(self) -> int:
        """Remove the layers of no image. Returns their bytes."""
        before = self._used
        for layer in self._store.layers().keys() - self._of_images() - self._wanted:
            self._drop_layer(layer)
        return before - self._used

    def _of_images(self) -> set[str]:
        return {layer for one in self._store.images() for layer in one.record.layers}

    def _drop_layer(self, layer: str) -> None:
        place, trash = self._store.layer(layer), self._store.incoming()
        self._used -= _read(place / LAYER, LayerRecord).bytes
        os.rename(place, trash)
        remove(trash)


def _look(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped


def _read(path: Path, kind: type[T]) -> T:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _is(place: Path, descriptor: int) -> bool:
    """Whether the opened directory is still at ``place``."""
    try:
        return os.path.samestat(place.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file for this process alone; False: another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(place: Path) -> bool:
    with _opened(place) as descriptor:
        return not _lock(descriptor)
