"""Prepares the root file system of sandboxes from a directory, a tar, an OCI image or an archive of `docker save`.

A directory is used in place. The other forms are unpacked once into a store (`store.py`) and reused from there.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from pathlib import Path

from headway.records.errors import ConfigurationError
from headway.sandbox.images import archives
from headway.sandbox.images.layers import FileOwner
from headway.sandbox.images.store import Image, ImageStore
from headway.sandbox.images.tree import ImageError
from headway.sandbox.local.zygote_process import LocalSettings

STORE_BYTES = 20 << 30
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
log = logging.getLogger(__name__)


def default_store() -> Path:
    """Return the folder of the user's default store. Root's lies outside its home, which the sandboxes' user can't
    search."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if cache_home:
        return Path(cache_home, "headway", "images")
    if os.geteuid() == 0 and os.access("/var/cache", os.W_OK):
        return Path("/var/cache/headway/images")
    return Path.home() / ".cache" / "headway" / "images"


def sandbox_owner() -> FileOwner:
    """Return the host's user and group that sandboxes run as: see `LocalSettings`."""
    uid = LocalSettings().sandbox_uid
    return FileOwner(uid, uid) if os.geteuid() == 0 else FileOwner(os.geteuid(), os.getegid())


def prepare(
    image: str,
    store: str | Path = "",
    *,
    store_bytes: int = STORE_BYTES,
    owner: FileOwner | None = None,
    stop: threading.Event | None = None,
) -> Image:
    """Return an image's root file system, unpacked if needed.

    ``image``: PATH, or PATH#NAME for one of several images. ``store``: "": this user's. ``stop``: set by the caller to
    stop waiting, which raises store.WaitStopped. Blocks while unpacking. Raises ConfigurationError with the mistake and
    the valid forms.
    """
    owner = owner or sandbox_owner()
    try:
        path, name = _locate(image)
        if path.is_dir() and not archives.is_layout(path):
            return Image(_reachable(path, owner))
        image_store = ImageStore(Path(store).expanduser().absolute() if store else default_store(), owner, store_bytes)
        _reachable(image_store.folder / "images", owner)
        return _from_store(image_store, path, name, stop)
    except ImageError as error:
        raise ConfigurationError(f"sandbox.image = {image!r}: {error}") from None
    except OSError as error:
        location = f" ({error.filename})" if error.filename else ""
        remedy = f": free some in {store or default_store()}, or set sandbox.store" if error.errno in _DISK_FULL else ""
        message = f"sandbox.image = {image!r}: can't be unpacked: {error.strerror}{location}{remedy}"
        raise ConfigurationError(message) from error


def _locate(image: str) -> tuple[Path, str]:
    path, name = Path(image).expanduser(), ""
    if not path.exists() and "#" in image:
        image_path, _, name = image.rpartition("#")
        path = Path(image_path).expanduser()
    if not path.exists():
        raise ImageError(
            "no such file. Valid: a directory, a tar of a root file system, an OCI archive or layout, and what"
            " docker save writes: of an image in a registry, `skopeo copy docker://NAME oci-archive:FILE.tar`"
        )
    if not (path.is_dir() or path.is_file()):
        raise ImageError("it is neither a file nor a directory")
    return path.resolve(), name


def _from_store(store: ImageStore, path: Path, name: str, stop: threading.Event | None) -> Image:
    source_key = Path(f"{path}#{name}") if name else path
    stamp = _stamp(path)
    image_id = store.image_of(source_key, stamp)
    if image_id is not None and (image := store.acquire(image_id)) is not None:
        return image
    with store.changing(stop) as change:
        image_id = store.image_of(source_key, stamp)  # another process may have made it meanwhile
        if image_id is None:
            with archives.open_image(path, name, change.scratch(), change.take, store.most_bytes) as content:
                layers = [change.layer(source) for source in content.layers]
                image_id = change.image(layers, content.environment, str(source_key))
            if _stamp(path) != stamp:
                raise ImageError("it was changed while it was read: try again")
            store.remember(source_key, stamp, image_id)
        image = store.acquire(image_id)
    assert image is not None  # images are only removed under the lock that this process held
    for line in change.removed:
        log.info("removed to free space: %s", line)
    image.unpacked, image.removed = change.unpacked, tuple(change.removed)
    return image


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a stamp that differs after every change of a file; for an OCI layout, the stamp of its index."""
    status = (path / "index.json" if path.is_dir() else path).stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _reachable(root: Path, owner: FileOwner) -> Path:
    """Return ``root``. Raises ImageError if the sandboxes' user can't reach it, which the overlay's error wouldn't
    show."""
    for path in (*reversed(root.parents), root):
        status = path.stat()
        other_bit = stat.S_IXGRP if status.st_gid == owner.gid else stat.S_IXOTH
        needed_bit = stat.S_IXUSR if status.st_uid == owner.uid else other_bit
        is_open = os.access(path, os.X_OK) if os.geteuid() == owner.uid else status.st_mode & needed_bit
        if not is_open:
            raise ImageError(
                f"user {owner.uid}, whom sandboxes run as, can't go through {path}: chmod o+x {path}, or take another"
                " place"
            )
    return root
