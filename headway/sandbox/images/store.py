"""Stores unpacked images and their layers on disk: each layer once, removed when the limit of bytes is reached.

    STORE/lock                  held while an image or layer is made or removed; look-ups don't lock
    STORE/layers/sha256/HEX/    a layer by the digest of its tar: `entries`, `data/N`, `layer.json`
    STORE/images/HEX/           an image: `image.json`, whose time of change is its last use, and `root/`
    STORE/sources/HEX.json      the image of a file, as long as the file's size and times are the same
    STORE/incoming/             folders being made or removed; the next change removes those of dead processes

A root is a directory tree whose files are hard links into the layers. Stacking the layers with the overlay itself would
store as little, and was rejected for two reasons. An overlay of 40 layers takes seven times as long to look up a
missing file (95 against 13 us), which is most of an interpreter's start. And a layer alone doesn't define where its
names lead: through links of layers below, into directories that it doesn't list, to hard links of other files. With
trees, all directories, owners and links exist before the first sandbox, a root is one directory for any backend, and
files are stored once.

A process that uses an image holds a shared `flock` on its directory. The kernel releases it when the process ends.
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
from headway.sandbox.images.streams import decompress, sha256_of
from headway.sandbox.images.tree import ImageError, merge
from headway.sandbox.leftovers import write
from headway.sandbox.linux import kernel

T = TypeVar("T")
FORMAT = 1
LOCK_POLL_S = 0.1  # between two attempts to lock the store
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
    bytes: int  # of its directories only: its files belong to the layers


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The image unpacked from a file, with the file's stamp at that time."""

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
    """A root file system that is ready. It is in use until it is released or this process ends, and isn't removed.

    Example: ``with prepare("python.tar") as image: spec = SandboxSpec(root=str(image.root))``
    """

    def __init__(self, root: Path, environment: dict[str, str] | None = None, descriptor: int | None = None) -> None:
        """``descriptor``: the locked folder of an image in a store; None: ``root`` is the user's own directory."""
        self.root = root
        self.environment = environment or {}  # the image's own variables
        self.unpacked = 0  # number of layers unpacked; 0: the image was in the store
        self.removed: tuple[str, ...] = ()  # a line for each image that was removed for this one
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


class WaitStopped(Exception):
    """The caller has stopped waiting for the image."""


class ImageStore:
    """The images of one user. Every method may be called by several processes at once."""

    def __init__(self, folder: Path, owner: FileOwner, most_bytes: int) -> None:
        """Open the store, and make its folder if needed. Raises ImageError if it is another user's or version's."""
        self.folder = folder
        self.owner = owner
        self.most_bytes = most_bytes
        created_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("layers/sha256", "images", "sources", "incoming"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ImageError(f"the store {folder} belongs to another user: give sandbox.store a folder of your own")
        for path in (*created_folders, folder, folder / "images"):
            path.chmod(0o711)  # sandboxes' user goes through it
        for name in ("layers", "sources", "incoming"):
            (folder / name).chmod(0o700)
        self._check_format()

    @classmethod
    def existing(cls, folder: Path) -> ImageStore:
        """Open the store in an existing folder, for any owner of its files. Raises ImageError if there is none."""
        try:
            record = _read(folder / "store.json", StoreRecord)
        except (OSError, msgspec.DecodeError):
            raise ImageError(f"{folder} is no store of images") from None
        return cls(folder, FileOwner(record.uid, record.uid), 1 << 62)

    def _check_format(self) -> None:
        record_path, expected_record = self.folder / "store.json", StoreRecord(format=FORMAT, uid=self.owner.uid)
        if not record_path.exists():
            with self._locked(None):
                write(self.folder, record_path.name, expected_record)
        stored = _read(record_path, StoreRecord)
        if stored != expected_record:
            raise ImageError(
                f"the store {self.folder} is of format {stored.format} for user {stored.uid}, and here it is format"
                f" {FORMAT} for user {expected_record.uid}: give sandbox.store another folder, or remove this one"
            )

    # Look-ups.

    def acquire(self, image: str) -> Image | None:
        """Lock an image until it is released or this process ends, and return it; None: it isn't in the store."""
        folder = self.image(image)
        while True:
            try:
                descriptor = os.open(folder, FOLDER)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # exclusive locks, which test for use, last an instant
                if _is_at(folder, descriptor):
                    os.utime(folder / IMAGE)
                    return Image(folder / "root", _read(folder / IMAGE, ImageRecord).environment, descriptor)
            except FileNotFoundError:
                pass  # it went meanwhile
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def image_of(self, path: Path, stamp: tuple[int, ...]) -> str | None:
        """Return the name of the image unpacked from this file; None if the file has changed since, or is unknown."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = _read(self._source(path), SourceRecord)
            if (record.path, record.stamp) == (str(path), stamp):
                return record.image
        return None

    def remember(self, path: Path, stamp: tuple[int, ...], image: str) -> None:
        record = SourceRecord(path=str(path), stamp=stamp, image=image)
        write(self.folder / "sources", self._source(path).name, record)

    def images(self) -> list[StoredImage]:
        """Return the images in the store, least recently used first."""
        listed: list[StoredImage] = []
        for folder in (self.folder / "images").iterdir():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = _read(folder / IMAGE, ImageRecord)
                image_bytes = record.bytes + sum(self._layer_bytes(layer) for layer in record.layers)
                used_s = (folder / IMAGE).stat().st_mtime
                listed.append(StoredImage(record=record, bytes=image_bytes, used_s=used_s, in_use=_in_use(folder)))
        return sorted(listed, key=lambda image: image.used_s)

    def layers(self) -> dict[str, int]:
        """Return the layers in the store: digest -> bytes on disk."""
        digests = [f"sha256:{layer_folder.name}" for layer_folder in (self.folder / "layers/sha256").iterdir()]
        return {digest: self._layer_bytes(digest) for digest in digests}

    def used_bytes(self) -> int:
        return sum(self.layers().values()) + sum(image.record.bytes for image in self.images())

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
        """Return a new path for a folder that is being made or removed."""
        return self.folder / "incoming" / secrets.token_hex(8)

    def _source(self, path: Path) -> Path:
        return self.folder / "sources" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"

    # Changing.

    @contextlib.contextmanager
    def changing(self, stop: threading.Event | None = None) -> Iterator[StoreChange]:
        """Lock the store for a change, and remove killed processes' folders. Raises WaitStopped if ``stop`` is set."""
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
                _check_stop(stop)
                time.sleep(LOCK_POLL_S)  # real time: another process is at work, for seconds to minutes
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        folder_records = [(path, path / IMAGE) for path in (self.folder / "images").iterdir()]
        folder_records += [(path, path / LAYER) for path in (self.folder / "layers/sha256").iterdir()]
        for path, record_path in folder_records:
            if not record_path.exists():  # not made by us
                os.rename(path, self.incoming())
        for path in (self.folder / "incoming").iterdir():
            remove(path)
        for path in (self.folder / "sources").iterdir():
            with contextlib.suppress(OSError):
                try:
                    is_stale = not self.image(_read(path, SourceRecord).image).exists()
                except msgspec.DecodeError:
                    is_stale = True
                if is_stale:
                    path.unlink()


class StoreChange:
    """A process's changes to the store while it has the lock. The store never exceeds its limit of bytes."""

    def __init__(self, store: ImageStore, stop: threading.Event | None) -> None:
        self._store = store
        self._stop = stop
        self._used = store.used_bytes()
        self._claimed = 0
        self._needed_layers: set[str] = set()  # layers of the image being made
        self._added_layers: list[str] = []
        self.unpacked = 0  # number of layers unpacked
        self.removed: list[str] = []  # a line for each image removed to free space

    def take(self, size: int) -> None:
        """Claim bytes before they are written, and remove unused images if they don't fit; 0 only checks for ``stop``.
        Raises ImageError if they still don't fit, WaitStopped."""
        _check_stop(self._stop)
        self._used += size
        self._claimed += size
        while self._used > self._store.most_bytes:
            if not self._free_space():
                raise ImageError(
                    f"it doesn't fit into the store {self._store.folder}, of {self._store.most_bytes} bytes, beside"
                    " the images in use: give sandbox.store_bytes more"
                )

    def scratch(self) -> Path:
        """A new folder that is removed when the change is over."""
        folder = self._store.incoming()
        folder.mkdir(mode=0o700)
        return folder

    def layer(self, source: LayerSource) -> str:
        """Unpack a layer unless the store has it; returns its digest."""
        if source.diff_id is not None and self._has(source.diff_id):
            self._needed_layers.add(source.diff_id)
            return source.diff_id
        try:
            return self._unpack(source)
        except ImageError as error:
            raise ImageError(f"{source.name}: {error}") from None

    def _has(self, digest: str) -> bool:
        return self._store.layer(digest).exists()

    def _unpack(self, source: LayerSource) -> str:
        if source.digest is not None:  # checked first: errors from unpacking a damaged layer are less clear
            with source.open() as layer_file:
                actual = sha256_of(layer_file, self.take)
            if actual != source.digest:
                raise ImageError(f"its digest should be {source.digest}, and is {actual}: it is damaged or was changed")
        folder = self.scratch()
        with source.open() as layer_file:
            stream, _ = decompress(layer_file)
            marked = source.diff_id is None
            limit_bytes = self._store.most_bytes
            digest, layer_bytes = unpack(stream, folder, self._store.owner, self.take, limit_bytes, marked=marked)
        if source.diff_id not in (None, digest):
            message = f"its unpacked digest should be {source.diff_id}, and is {digest}: it is damaged or was changed"
            raise ImageError(message)
        self.unpacked += 1
        self._needed_layers.add(digest)
        if self._has(digest):  # a plain tar that another image had as a layer
            self._used -= layer_bytes
            return digest
        write(folder, LAYER, LayerRecord(bytes=layer_bytes))
        self._publish(folder, self._store.layer(digest))
        self._added_layers.append(digest)
        return digest

    def image(self, layers: list[str], environment: dict[str, str], source: str) -> str:
        """Make the root of ``layers``, the lowest first; returns its name in the store."""
        identity = msgspec.json.encode([layers, sorted(environment.items())])
        name = hashlib.sha256(identity).hexdigest()
        image_folder = self._store.image(name)
        if image_folder.exists():
            return name
        folder = self.scratch()
        claimed_before_bytes = self._claimed
        tree = merge(entries_of(self._store.layer(layer)) for layer in layers)
        self.take(BLOCK_BYTES)
        data_folders = [self._store.layer(layer) / DATA for layer in layers]
        build(tree, folder / "root", data_folders, self._store.owner, self.take)
        image_bytes = self._claimed - claimed_before_bytes
        record = ImageRecord(id=name, source=source, layers=tuple(layers), environment=environment, bytes=image_bytes)
        write(folder, IMAGE, record)
        if os.geteuid() != self._store.owner.uid:
            os.chown(folder, -1, self._store.owner.gid)
        folder.chmod(0o710)  # only the sandboxes' user may search it
        self._publish(folder, image_folder)
        return name

    def _publish(self, folder: Path, target: Path) -> None:
        """Move a finished folder to its place atomically and durably, even if the machine fails right after."""
        with _open_folder(folder) as descriptor:
            kernel.sync_file_system(descriptor)
        os.rename(folder, target)

    # Removing.

    def prune(self, to_bytes: int) -> None:
        """Remove unreferenced layers, then the least recently used images, until at most ``to_bytes`` are used."""
        self._drop_layers()
        while self._used > to_bytes and self._free_space():
            pass

    def undo(self) -> None:
        """Remove the layers of an image that couldn't be made."""
        self._needed_layers.clear()
        referenced_layers = self._referenced_layers()
        for layer in self._added_layers:
            if layer not in referenced_layers:
                self._drop_layer(layer)

    def _free_space(self) -> bool:
        """Remove unreferenced layers, or else the least recently used image. False: all images are in use."""
        if self._drop_layers():
            return True
        return any(self._drop_image(image) for image in self._store.images())

    def _drop_image(self, image: StoredImage) -> bool:
        image_folder, trash_folder = self._store.image(image.record.id), self._store.incoming()
        with _open_folder(image_folder) as descriptor:
            if not _lock(descriptor):
                return False
            os.rename(image_folder, trash_folder)
        remove(trash_folder)
        self._used -= image.record.bytes
        freed_bytes = image.record.bytes + self._drop_layers()
        idle_s = max(0.0, time.time() - image.used_s)
        description = f"image {image.record.id[:12]} of {image.record.source}"
        self.removed.append(f"{description}: {freed_bytes} bytes, unused for {idle_s:.0f} s")
        return True

    def _drop_layers(self) -> int:
        """Remove the layers that no image has. Returns the freed bytes."""
        used_before_bytes = self._used
        for layer in self._store.layers().keys() - self._referenced_layers() - self._needed_layers:
            self._drop_layer(layer)
        return used_before_bytes - self._used

    def _referenced_layers(self) -> set[str]:
        return {layer for image in self._store.images() for layer in image.record.layers}

    def _drop_layer(self, layer: str) -> None:
        layer_folder, trash_folder = self._store.layer(layer), self._store.incoming()
        self._used -= _read(layer_folder / LAYER, LayerRecord).bytes
        os.rename(layer_folder, trash_folder)
        remove(trash_folder)


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise WaitStopped


def _read(path: Path, kind: type[T]) -> T:
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the opened directory is still at ``path``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
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


def _in_use(folder: Path) -> bool:
    with _open_folder(folder) as descriptor:
        return not _lock(descriptor)
