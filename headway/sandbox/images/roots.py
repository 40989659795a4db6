"""An image's tree on disk, made and removed. No link is followed, and no name is more than one component."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from headway.sandbox.images.layers import BLOCK_BYTES, FileOwner
from headway.sandbox.images.tree import Folder, Leaf


def build(tree: Folder, root: Path, data: list[Path], owner: FileOwner, take: Callable[[int], None]) -> None:
    """Make ``root`` and everything in it. ``data``: folders of the layers' contents, the lowest first; ``take``: as
    in `layers.unpack`."""
    root.mkdir(mode=0o700)
    _Builder(data, owner, take).fill(tree, os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@dataclasses.dataclass(frozen=True, slots=True)
class _Builder:
    """Makes a tree of directories and hard links. Every name is one component, made in a directory just made here."""

    data: list[Path]
    owner: FileOwner
    take: Callable[[int], None]

    def fill(self, folder: Folder, descriptor: int) -> None:
        """Make the content of ``folder`` in the directory ``descriptor``, and close that."""
        try:
            for name, node in folder.inside.items():
                if isinstance(node, Leaf):
                    self._leaf(name, node, descriptor)
                else:
                    self.take(BLOCK_BYTES)
                    os.mkdir(name, 0o700, dir_fd=descriptor)
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    self.fill(node, os.open(name, flags, dir_fd=descriptor))
            self.owner.give(descriptor)
            os.fchmod(descriptor, folder.mode)
            os.utime(descriptor, (folder.mtime_s, folder.mtime_s))
        finally:
            os.close(descriptor)

    def _leaf(self, name: bytes, leaf: Leaf, folder: int) -> None:
        if leaf.kind == "file":
            os.link(self.data[leaf.layer] / str(leaf.data), name, dst_dir_fd=folder, follow_symlinks=False)
            return
        if leaf.kind == "link":
            os.symlink(leaf.target, name, dir_fd=folder)
        else:
            os.mkfifo(name, 0o600, dir_fd=folder)
            os.chmod(name, leaf.mode, dir_fd=folder)
        if self.owner.uid != os.geteuid():
            os.chown(name, self.owner.uid, self.owner.gid, dir_fd=folder, follow_symlinks=False)
        os.utime(name, (leaf.mtime_s, leaf.mtime_s), dir_fd=folder, follow_symlinks=False)


def remove(place: Path) -> None:
    """Remove a tree whose directories may be closed to their owner. No link is followed."""
    if not stat.S_ISDIR(place.lstat().st_mode):
        place.unlink()
        return
    place.chmod(0o700)
    for _, names, _, descriptor in os.fwalk(place):
        for name in names:
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=descriptor)
    shutil.rmtree(place)
