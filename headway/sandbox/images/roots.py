"""Makes and removes an image's tree on disk. No link is followed, and every name is a single component."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from headway.sandbox.images.layers import BLOCK_BYTES, FileOwner
from headway.sandbox.images.tree import FolderNode, LeafNode


def build(tree: FolderNode, root: Path, data: list[Path], owner: FileOwner, take: Callable[[int], None]) -> None:
    """Make ``root`` with all its files. ``data``: folders of the layers' contents, the lowest first; ``take``: as in
    `layers.unpack`."""
    root.mkdir(mode=0o700)
    _Builder(data, owner, take).fill(tree, os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


@dataclasses.dataclass(frozen=True, slots=True)
class _Builder:
    """Makes a tree of directories and hard links. Every name is a single component, in a directory made here."""

    data: list[Path]
    owner: FileOwner
    take: Callable[[int], None]

    def fill(self, folder: FolderNode, descriptor: int) -> None:
        """Make the content of ``folder`` in the directory ``descriptor``, and close the descriptor."""
        try:
            for name, node in folder.inside.items():
                if isinstance(node, LeafNode):
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

    def _leaf(self, name: bytes, leaf: LeafNode, folder: int) -> None:
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


def remove(path: Path) -> None:
    """Remove a tree whose directories may forbid access to their owner. No link is followed."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return
    path.chmod(0o700)
    for _, folder_names, _, descriptor in os.fwalk(path):
        for name in folder_names:
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=descriptor)
    shutil.rmtree(path)
