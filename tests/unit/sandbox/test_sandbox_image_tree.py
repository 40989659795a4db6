"""What layers come to, against a model that does the same to real directories."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.sandbox.images.tree import FolderNode, ImageError, Kind, LeafNode, TreeEntry, merge

NAMES = [b"a", b"b", b"a/a", b"a/b", b"b/a", b"a/a/a", b"a/b/a"]
KINDS: list[Kind] = ["folder", "file", "link", "link", "same", "pipe", "nothing", "hidden", "emptied"]
TARGETS = [b"a", b"b", b"/a", b"/", b"../b", b"../../..", b"a/../b", b".", b"/a/b", b"nowhere/c"]


@st.composite
def entries(draw: st.DrawFn) -> TreeEntry:
    kind = draw(st.sampled_from(KINDS))
    target = b""
    if kind == "link":
        target = draw(st.sampled_from(TARGETS))
    elif kind == "same":
        target = draw(st.sampled_from(NAMES))
    mode, data = draw(st.sampled_from([0o755, 0o700])), draw(st.integers(0, 9))
    name = draw(st.sampled_from([*NAMES, b""] if kind in ("folder", "emptied") else NAMES))
    return TreeEntry(name=name, kind=kind, target=target, mode=mode, data=data)


class Model:
    """Layers laid over each other as a person would: in a directory, a layer after the other, its deletions first.
    Links are resolved by hand, for the model's root isn't the machine's."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def place(self, name: bytes, make: bool) -> str | None:
        """Of the directory with that name."""
        at, left, steps = self.root, name.decode().split("/"), 0
        while left:
            part = left.pop(0)
            steps += 1
            if steps > 1000:
                raise ImageError("loop of links")
            if part in ("", "."):
                continue
            if part == "..":
                at = at if at == self.root else os.path.dirname(at)
                continue
            there = os.path.join(at, part)
            if os.path.islink(there):
                target = os.readlink(there)
                at = self.root if target.startswith("/") else at
                left = [*target.split("/"), *left]
            elif os.path.isdir(there):
                at = there
            elif os.path.lexists(there):
                if make:
                    raise ImageError("no directory")
                return None
            elif make:
                os.mkdir(there, 0o755)
                at = there
            else:
                return None
        return at

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def lay(self, number: int, layer: list[TreeEntry]) -> None:
        for entry in layer:
            above, _, last = entry.name.rpartition(b"/")
            if entry.kind == "hidden":
                parent = self.place(above, make=False)
                if parent is not None:
                    self.remove(os.path.join(parent, last.decode()))
            elif entry.kind == "emptied":
                parent = self.place(above, make=False)
                whole = os.path.join(parent, last.decode()) if parent is not None else ""
                if whole and os.path.isdir(whole) and (not os.path.islink(whole.rstrip("/"))):
                    for name in os.listdir(whole):
                        self.remove(os.path.join(whole, name))
        for entry in layer:
            if entry.kind not in ("hidden", "emptied"):
                self.add(number, entry)

    def add(self, number: int, entry: TreeEntry) -> None:
        above, _, last = entry.name.rpartition(b"/")
        parent = self.place(above, make=True)
        assert parent is not None
        path = os.path.join(parent, last.decode())
        if entry.kind == "folder":
            if os.path.islink(path) or not os.path.isdir(path):
                self.remove(path)
                os.mkdir(path)
            os.chmod(path, entry.mode)
            return
        if entry.kind == "same":
            there = self.place(entry.target.rpartition(b"/")[0], make=False)
            source = os.path.join(there or "", entry.target.rpartition(b"/")[2].decode())
            if there is None or not os.path.lexists(source) or (os.path.isdir(source) and not os.path.islink(source)):
                raise ImageError("no such file")
            if source != path:
                os.link(source, path + ".new", follow_symlinks=False)
                self.remove(path)
                with contextlib.suppress(FileNotFoundError):  # it lay below what it replaces
                    os.rename(path + ".new", path)
                with contextlib.suppress(FileNotFoundError):  # rename does nothing between two names of one file
                    os.unlink(path + ".new")
            return
        self.remove(path)
        if entry.kind == "file":
            Path(path).write_text(f"{number} {entry.data}")
            os.chmod(path, entry.mode)
        elif entry.kind == "link":
            os.symlink(entry.target, path)
        elif entry.kind == "pipe":
            os.mkfifo(path, entry.mode)

    def seen(self) -> dict[str, object]:
        found: dict[str, object] = {"": os.stat(self.root).st_mode & 0o777}
        for folder, names, files in os.walk(self.root):
            for name in (*names, *files):
                path = os.path.join(folder, name)
                short = os.path.relpath(path, self.root)
                if os.path.islink(path):
                    found[short] = ("link", os.readlink(path))
                elif os.path.isdir(path):
                    found[short] = os.stat(path).st_mode & 0o777
                else:
                    pipe = not os.path.isfile(path)
                    found[short] = ("pipe",) if pipe else (Path(path).read_text(), os.stat(path).st_mode & 0o777)
        return found


def seen(folder: FolderNode, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {prefix.rstrip("/"): folder.mode}
    for name, node in folder.inside.items():
        path = prefix + name.decode()
        if isinstance(node, FolderNode):
            found |= seen(node, path + "/")
        elif node.kind == "link":
            found[path] = ("link", node.target.decode())
        else:
            found[path] = ("pipe",) if node.kind == "pipe" else (f"{node.layer} {node.data}", node.mode)
    return found


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@example([[TreeEntry(name=b"a/a", kind="link", target=b"/b"), TreeEntry(name=b"a/a/a", kind="file")]])
@given(st.lists(st.lists(entries(), max_size=6), max_size=4))
def test_merged_layers_equal_a_real_directory(layers: list[list[TreeEntry]]):
    mask = os.umask(0)
    try:
        with tempfile.TemporaryDirectory() as name:
            os.chmod(name, 0o755)
            model = Model(name)
            try:
                for number, layer in enumerate(layers):
                    model.lay(number, layer)
                expected = model.seen()
            except ImageError:
                expected = None
            try:
                found = seen(merge(layers))
            except ImageError:
                found = None
            assert found == expected
    finally:
        os.umask(mask)


def test_whiteouts_hide_lower_layers_in_any_order():
    below = [TreeEntry(name=b"d/old", kind="file"), TreeEntry(name=b"x", kind="file", data=1)]
    above = [
        TreeEntry(name=b"d/new", kind="file"),
        TreeEntry(name=b"x", kind="file", data=2),
        TreeEntry(name=b"d", kind="emptied"),
        TreeEntry(name=b"x", kind="hidden"),
    ]
    root = merge([below, above])
    d, x = root.inside[b"d"], root.inside[b"x"]
    assert isinstance(d, FolderNode)
    assert list(d.inside) == [b"new"]
    assert isinstance(x, LeafNode)
    assert (x.layer, x.data) == (1, 2)


def test_layer_follows_links_of_lower_layers():
    below = [
        TreeEntry(name=b"usr/lib", kind="folder", mode=0o711),
        TreeEntry(name=b"lib", kind="link", target=b"usr/lib"),
    ]
    root = merge([below, [TreeEntry(name=b"lib/new", kind="file")]])
    usr = root.inside[b"usr"]
    assert isinstance(usr, FolderNode)
    lib = usr.inside[b"lib"]
    assert isinstance(lib, FolderNode)
    assert (list(lib.inside), lib.mode) == ([b"new"], 0o711)


def test_loops_and_oversized_trees_are_refused():
    def circle(name: bytes, to: bytes) -> TreeEntry:
        return TreeEntry(name=name, kind="link", target=to)

    with pytest.raises(ImageError, match="loop of links"):
        merge([[circle(b"a", b"b"), circle(b"b", b"a"), TreeEntry(name=b"a/x", kind="file")]])
    with pytest.raises(ImageError, match="deep"):
        merge([[TreeEntry(name=b"/".join([b"d"] * 300), kind="file")]])
    down = b"/".join([b"d"] * 200)
    with pytest.raises(ImageError, match="deep"):
        merge(
            [
                [
                    TreeEntry(name=down, kind="folder"),
                    circle(b"l", down),
                    TreeEntry(name=b"l/" + down + b"/f", kind="file"),
                ]
            ]
        )
    with pytest.raises(ImageError, match="more than"):
        merge([[TreeEntry(name=b"%d/a/a/a" % n, kind="file") for n in range(100)]], most_nodes=300)
    with pytest.raises(ImageError, match="isn't there"):
        merge([[TreeEntry(name=b"a", kind="same", target=b"b")]])
