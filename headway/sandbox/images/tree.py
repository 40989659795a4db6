"""Merges the layers of an image into a tree of files. Pure: names and numbers, no file system.

A layer is a list of entries in the order of its tar. Names are resolved here and never by the kernel: a link on the way
to a name is followed inside this tree, so that no archive can lead out of it.

The rules are OCI's ("Image Layer Filesystem Changeset"). A layer's whiteouts apply to the layers below, wherever they
stand in the layer. Its other entries are then added in order; a later entry replaces an earlier one of the same name.
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
    """An invalid image; the message names the defect and its remedy."""


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An entry of a layer: a name and its kind."""

    name: bytes  # below the root, without "." or ".."; empty: the root itself
    kind: Kind
    mode: int = 0
    mtime_s: int = 0
    target: bytes = b""  # link: its text; same: the other name
    data: int = -1  # file: number of its content in the layer


@dataclasses.dataclass(slots=True, eq=False)
class LeafNode:
    """A file, link or pipe. A leaf with several names (hard links) stands in the tree several times."""

    kind: Kind
    mode: int
    mtime_s: int
    target: bytes
    layer: int  # the layer that has its data: position in the image, from the lowest
    data: int


@dataclasses.dataclass(slots=True, eq=False)
class FolderNode:
    mode: int = 0o755
    mtime_s: int = 0
    inside: dict[bytes, FolderNode | LeafNode] = dataclasses.field(default_factory=lambda: {})


def merge(layers: Iterable[Sequence[TreeEntry]], most_nodes: int = MOST_NODES) -> FolderNode:
    """Return the tree of an image. ``layers``: the lowest first. Raises ImageError if entries contradict each other."""
    tree = _Tree(most_nodes)
    for layer_index, entries in enumerate(layers):
        for entry in entries:
            if entry.kind in ("hidden", "emptied"):
                tree.hide(entry)
        for entry in entries:
            if entry.kind not in ("hidden", "emptied"):
                tree.add(entry, layer_index)
    return tree.root


class _Tree:
    def __init__(self, most_nodes: int) -> None:
        self.root = FolderNode()
        self._remaining_nodes = most_nodes

    def hide(self, entry: TreeEntry) -> None:
        folder_name, _, base_name = entry.name.rpartition(b"/")
        parent = self._folder(folder_name, make=False)
        if entry.kind == "hidden":
            if parent is not None:
                parent.inside.pop(base_name, None)
            return
        emptied_node = parent.inside.get(base_name) if parent is not None and base_name else parent
        if isinstance(emptied_node, FolderNode):
            emptied_node.inside.clear()

    def add(self, entry: TreeEntry, layer: int) -> None:
        folder_name, _, base_name = entry.name.rpartition(b"/")
        parent = self._folder(folder_name, make=True)
        assert parent is not None
        if not base_name:
            if entry.kind != "folder":
                raise ImageError(f"its root is a {entry.kind}, and has to be a directory")
            parent.mode, parent.mtime_s = entry.mode, entry.mtime_s
            return
        existing_node = parent.inside.get(base_name)
        if entry.kind == "folder":
            if not isinstance(existing_node, FolderNode):
                existing_node = parent.inside[base_name] = FolderNode()
                self._count()
            existing_node.mode, existing_node.mtime_s = entry.mode, entry.mtime_s
        elif entry.kind == "nothing":
            parent.inside.pop(base_name, None)
        else:
            leaf = LeafNode(entry.kind, entry.mode, entry.mtime_s, entry.target, layer, entry.data)
            parent.inside[base_name] = self._leaf(entry) if entry.kind == "same" else leaf
            self._count()

    def _leaf(self, entry: TreeEntry) -> LeafNode:
        folder_name, _, base_name = entry.target.rpartition(b"/")
        parent = self._folder(folder_name, make=False)
        node = parent.inside.get(base_name) if parent is not None else None
        if not isinstance(node, LeafNode):
            reason = "isn't there" if node is None else "is a directory"
            raise ImageError(f"{escaped(entry.name)} is a hard link to {escaped(entry.target)}, which {reason}")
        return node

    def _folder(self, name: bytes, *, make: bool) -> FolderNode | None:
        """Return the directory of that name, following links but never out of the root. None: it doesn't exist."""
        folder_chain = [self.root]
        pending_parts = name.split(b"/")[::-1] if name else []
        step_count = 0
        while pending_parts:
            part = pending_parts.pop()
            step_count += 1
            if step_count > STEPS or len(folder_chain) > DEPTH:
                raise ImageError(f"{escaped(name)} is a loop of links, or lies more than {DEPTH} directories deep")
            if part in (b"", b"."):
                continue
            if part == b"..":
                del folder_chain[max(1, len(folder_chain) - 1) :]
                continue
            node = folder_chain[-1].inside.get(part)
            if node is None:
                if not make:
                    return None
                node = folder_chain[-1].inside[part] = FolderNode()
                self._count()
            if isinstance(node, FolderNode):
                folder_chain.append(node)
            elif node.kind == "link":
                if node.target.startswith(b"/"):
                    del folder_chain[1:]
                pending_parts += node.target.split(b"/")[::-1]
            elif make:
                raise ImageError(f"{escaped(name)} is used as a directory, but {escaped(part)} is a {node.kind}")
            else:
                return None
        return folder_chain[-1]

    def _count(self) -> None:
        self._remaining_nodes -= 1
        if self._remaining_nodes < 0:
            raise ImageError(f"it has more than {MOST_NODES} files and directories")


def escaped(name: bytes) -> str:
    """Return a name from an archive, escaped for messages."""
    text = repr(name.decode("utf-8", "backslashreplace"))
    return text if len(text) <= 200 else f"{text[:200]}..."
