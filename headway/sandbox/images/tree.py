"""Merges the layers of an image into a tree of files. Pure: names and numbers, no file system.

A layer is a list of entries, as its tar holds them. Names are resolved here and never by the kernel: a link on the way
to a name is followed inside this tree, so that no archive, whatever is in it, leads anywhere else.

The rules are OCI's ("Image Layer Filesystem Changeset"): what a layer hides is of the layers below it, wherever in the
layer that stands; then its entries come one after the other, later ones in place of earlier ones of that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Kind = Literal[
    "folder",
    "file",
    "link",  # symbolic
    "same",  # a hard link: another name of the file `target`
    "pipe",
    "nothing",  # a device, left out because sandboxes have their own: removes an earlier entry of that name
    "hidden",  # a whiteout: removes the name in the layers below
    "emptied",  # an opaque directory: removes its content in the layers below
]

MOST_NODES = 1_000_000  # most files and directories of an image
DEPTH = 256  # most nested directories
STEPS = 1000  # most path components walked to resolve a name, those from links included


class ImageError(Exception):
    """An invalid image; the text says what its user has to mend."""


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An entry of a layer: a name and its kind."""

    name: bytes  # below the root, without "." or ".."; empty: the root itself
    kind: Kind
    mode: int = 0
    mtime_s: int = 0
    target: bytes = b""  # link: its text; same: the other name
    data: int = -1  # file: number of its content in the layer


@dataclasses.dataclass(slots=True, eq=False)
class Leaf:
    """Anything but a directory. One with several names stands in the tree several times."""

    kind: Kind
    mode: int
    mtime_s: int
    target: bytes
    layer: int  # the layer that has its data: position in the image, from the lowest
    data: int


@dataclasses.dataclass(slots=True, eq=False)
class Folder:
    mode: int = 0o755
    mtime_s: int = 0
    inside: dict[bytes, Folder | Leaf] = dataclasses.field(default_factory=lambda: {})


def merge(layers: Iterable[Sequence[TreeEntry]], most_nodes: int = MOST_NODES) -> Folder:
    """The tree of an image, its lowest layer first. Raises ImageError where the entries contradict each other."""
    tree = _Tree(most_nodes)
    for number, entries in enumerate(layers):
        for entry in entries:
            if entry.kind in ("hidden", "emptied"):
                tree.hide(entry)
        for entry in entries:
            if entry.kind not in ("hidden", "emptied"):
                tree.add(entry, number)
    return tree.root


class _Tree:
    def __init__(self, most_nodes: int) -> None:
        self.root = Folder()
        self._left = most_nodes

    def hide(self, entry: TreeEntry) -> None:
        above, _, last = entry.name.rpartition(b"/")
        parent = self._folder(above, make=False)
        if entry.kind == "hidden":
            if parent is not None:
                parent.inside.pop(last, None)
            return
        emptied = parent.inside.get(last) if parent is not None and last else parent
        if isinstance(emptied, Folder):
            emptied.inside.clear()

    def add(self, entry: TreeEntry, layer: int) -> None:
        above, _, last = entry.name.rpartition(b"/")
        parent = self._folder(above, make=True)
        assert parent is not None
        if not last:
            if entry.kind != "folder":
                raise ImageError(f"its root is a {entry.kind}, and has to be a directory")
            parent.mode, parent.mtime_s = entry.mode, entry.mtime_s
            return
        there = parent.inside.get(last)
        if entry.kind == "folder":
            if not isinstance(there, Folder):
                there = parent.inside[last] = Folder()
                self._count()
            there.mode, there.mtime_s = entry.mode, entry.mtime_s
        elif entry.kind == "nothing":
            parent.inside.pop(last, None)
        else:
            own = Leaf(entry.kind, entry.mode, entry.mtime_s, entry.target, layer, entry.data)
            parent.inside[last] = self._leaf(entry) if entry.kind == "same" else own
            self._count()

    def _leaf(self, entry: TreeEntry) -> Leaf:
        above, _, last = entry.target.rpartition(b"/")
        parent = self._folder(above, make=False)
        found = parent.inside.get(last) if parent is not None else None
        if not isinstance(found, Leaf):
            what = "isn't there" if found is None else "is a directory"
            raise ImageError(f"{shown(entry.name)} is a hard link to {shown(entry.target)}, which {what}")
        return found

    def _folder(self, name: bytes, *, make: bool) -> Folder | None:
        """The directory of that name, following links but never out of the root. None: it doesn't exist."""
        path = [self.root]
        left = name.split(b"/")[::-1] if name else []
        steps = 0
        while left:
            part = left.pop()
            steps += 1
            if steps > STEPS or len(path) > DEPTH:
                raise ImageError(f"{shown(name)} is a loop of links, or lies more than {DEPTH} directories deep")
            if part in (b"", b"."):
                continue
            if part == b"..":
                del path[max(1, len(path) - 1) :]
                continue
            found = path[-1].inside.get(part)
            if found is None:
                if not make:
                    return None
                found = path[-1].inside[part] = Folder()
                self._count()
            if isinstance(found, Folder):
                path.append(found)
            elif found.kind == "link":
                if found.target.startswith(b"/"):
                    del path[1:]
                left += found.target.split(b"/")[::-1]
            elif make:
                raise ImageError(f"{shown(name)} is used as a directory, but {shown(part)} is a {found.kind}")
            else:
                return None
        return path[-1]

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ImageError(f"it has more than {MOST_NODES} files and directories")


def shown(name: bytes) -> str:
    """A name from an archive, escaped for messages."""
    text = repr(name.decode("utf-8", "backslashreplace"))
    return text if len(text) <= 200 else f"{text[:200]}..."
