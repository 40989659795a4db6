"""Unpacks the tar of a layer: contents into numbered files, names into entries.

No name in a tar becomes a name on disk: contents are written to `data/0`, `data/1` and so on. `tree.py` resolves names
and links, and only directories that it made are walked.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from headway.sandbox.images.streams import CHUNK_BYTES, HashingReader
from headway.sandbox.images.tree import MOST_NODES, ImageError, Kind, TreeEntry, escaped

NAME_BYTES = 255
PATH_BYTES = 4095
BLOCK_BYTES = 4096  # files take whole blocks of a disk
HEADERS = 16  # most extended headers before a file's own
GLOBAL_BYTES = 1 << 20  # most bytes of global headers
NODE_BYTES = 512  # disk space of a file's inode and names
WHITEOUT, WHITEOUT_META, OPAQUE = b".wh.", b".wh..wh.", b".wh..wh..opq"
LATEST_S = 1 << 33
ENTRIES = "entries"
DATA = "data"
KINDS: dict[bytes, Kind] = {
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "same",
    tarfile.FIFOTYPE: "pipe",
    tarfile.CHRTYPE: "nothing",
    tarfile.BLKTYPE: "nothing",
}
# Includes errors that tarfile raises on malicious headers.
TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, KeyError, IndexError, TypeError)


class _Header(tarfile.TarInfo):
    """A header that limits the extended headers before a file, which `tarfile` would keep without a limit."""

    def _proc_member(
        self, archive: Tar
    ) -> tarfile.TarInfo:  # called for every header, those before a file's own nested
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise ImageError(f"{self.name[:200]!r} is packed as a sparse file: make the tar without --sparse")
        if self.type == tarfile.XGLTYPE:
            archive.global_bytes += self.size
        if archive.global_bytes > GLOBAL_BYTES:
            raise ImageError(f"its global headers have more than {GLOBAL_BYTES} bytes")
        archive.headers += 1
        if archive.headers > HEADERS:
            raise ImageError(f"it has more than {HEADERS} headers before a file: it is malicious")
        try:
            return super()._proc_member(archive)  # type: ignore[misc]
        finally:
            archive.headers -= 1

    def _proc_gnusparse_10(self, member: tarfile.TarInfo, *_: object) -> None:
        raise ImageError(f"{member.name[:200]!r} is packed as a sparse file: make the tar without --sparse")


class Tar(tarfile.TarFile):
    """A tar that may be malicious, read from a `HashingReader`. Its members aren't kept in memory."""

    tarinfo = _Header
    headers = 0  # headers read so far of the present file
    global_bytes = 0

    def next(self) -> tarfile.TarInfo | None:
        self.members.clear()  # type: ignore[attr-defined]
        return super().next()

    @classmethod
    def of(cls, stream: HashingReader) -> Tar:
        return cls.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")  # type: ignore[call-overload]


@contextlib.contextmanager
def whole_tar(stream: HashingReader, *, marked: bool) -> Iterator[Tar]:
    """Open the tar in ``stream`` for a block that reads all its members. ``marked``: require the end mark. Raises
    ImageError if the tar is damaged or cut off."""
    try:
        with Tar.of(stream) as archive:
            yield archive
    except TAR_ERRORS as error:
        raise ImageError(f"it isn't a tar, or is damaged or cut off: {error}") from None
    if stream.last.strip(b"\0") or (marked and not stream.last):
        raise ImageError("it is damaged or cut off: its end isn't marked as such")


class FileOwner(msgspec.Struct, frozen=True):
    """The user and group that own an image's files. They must be mapped in the sandbox, else an overlay can't copy the
    files up."""

    uid: int
    gid: int

    def give(self, descriptor: int) -> None:
        if (self.uid, self.gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, self.uid, self.gid)


def unpack(
    source: IO[bytes], folder: Path, owner: FileOwner, take: Callable[[int], None], most_bytes: int, *, marked: bool
) -> tuple[str, int]:
    """Write a tar's contents and entries into ``folder``. Returns its digest and its size on disk in bytes.

    ``take`` is called with the number of bytes before they are written, and with 0 to report progress; it raises if
    they don't fit or the caller has stopped waiting. ``most_bytes``: limit on the tar itself. ``marked``: require the
    end mark, for tars that could be cut off unnoticed otherwise. Raises ImageError, OSError.
    """
    stream = HashingReader(source, take, most_bytes)
    writer = _Writer(folder, owner, take)
    with whole_tar(stream, marked=marked) as archive:
        while (member := archive.next()) is not None:
            writer.add_member(archive, member)
    stream.drain()
    return f"sha256:{stream.digest.hexdigest()}", writer.finish()


class _Writer:
    def __init__(self, folder: Path, owner: FileOwner, take: Callable[[int], None]) -> None:
        (folder / DATA).mkdir(mode=0o700)
        self._folder = folder
        self._owner = owner
        self._take = take
        self._entries: list[TreeEntry] = []
        self._files = 0
        self._bytes = 0

    def add_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _name(member.name)
        folder, _, base_name = name.rpartition(b"/")
        if base_name.startswith(WHITEOUT):
            if base_name == OPAQUE:
                self._add(TreeEntry(name=folder, kind="emptied"))
            elif not base_name.startswith(WHITEOUT_META):  # internal files of aufs
                hidden_name = base_name.removeprefix(WHITEOUT)
                if hidden_name in (b"", b".", b".."):
                    raise ImageError(f"{escaped(name)} is a whiteout without a name to delete")
                self._add(TreeEntry(name=folder + b"/" + hidden_name if folder else hidden_name, kind="hidden"))
            return
        kind = "file" if member.isreg() else KINDS.get(member.type)
        if kind is None:
            raise ImageError(f"{escaped(name)} is of an unknown type, {member.type!r}")
        target, data_number = b"", -1
        if kind == "link":
            target = _encode(member.linkname)
            if not target or len(target) > PATH_BYTES or b"\0" in target:
                raise ImageError(f"{escaped(name)} is a link to what can't be a name")
        elif kind == "same":
            target = _name(member.linkname)
        elif kind == "file":
            data_number = self._write(archive, member, name)
        # No setuid and setgid bits: only sandboxes use these files.
        mode = member.mode & (0o1777 if kind == "folder" else 0o777)
        self._add(TreeEntry(name=name, kind=kind, mode=mode, mtime_s=_time(member), target=target, data=data_number))

    def _add(self, entry: TreeEntry) -> None:
        self._claim(NODE_BYTES)
        self._entries.append(entry)
        if len(self._entries) > MOST_NODES:
            raise ImageError(f"it has more than {MOST_NODES} files and directories")

    def _claim(self, size: int) -> None:
        self._take(size)
        self._bytes += size

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: bytes) -> int:
        if member.size < 0:
            raise ImageError(f"{escaped(name)} has {member.size} bytes")
        self._claim(-(-member.size // BLOCK_BYTES) * BLOCK_BYTES)  # before the first is written
        data_number = self._files
        self._files += 1
        source = archive.extractfile(member)
        assert source is not None
        with open(self._folder / DATA / str(data_number), "xb") as target:
            remaining_bytes = member.size
            while remaining_bytes:
                chunk = source.read(min(CHUNK_BYTES, remaining_bytes))
                if not chunk:
                    raise ImageError(f"it is cut off in the middle of {escaped(name)}")
                remaining_bytes -= len(chunk)
                self._take(0)  # reports progress: a sparse file passes few bytes through the stream
                target.write(chunk)
            target.flush()
            self._owner.give(target.fileno())
            os.fchmod(target.fileno(), member.mode & 0o777)
        time_s = _time(member)
        os.utime(self._folder / DATA / str(data_number), (time_s, time_s))
        return data_number

    def finish(self) -> int:
        encoded = msgspec.msgpack.encode(self._entries)
        self._claim(len(encoded))
        (self._folder / ENTRIES).write_bytes(encoded)
        return self._bytes


def entries_of(folder: Path) -> list[TreeEntry]:
    """Return the entries of an unpacked layer."""
    return msgspec.msgpack.decode((folder / ENTRIES).read_bytes(), type=list[TreeEntry])


def _encode(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _name(text: str) -> bytes:
    """Return a tar's name relative to the image's root. Raises ImageError for names that lead out of it."""
    encoded_name = _encode(text)
    parts = [part for part in encoded_name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise ImageError(f"{escaped(encoded_name)} leads out of its root")
    if len(encoded_name) > PATH_BYTES or b"\0" in encoded_name or any(len(part) > NAME_BYTES for part in parts):
        raise ImageError(f"{escaped(encoded_name)} can't be a file's name")
    return b"/".join(parts)


def _time(member: tarfile.TarInfo) -> int:
    with contextlib.suppress(ValueError, OverflowError):
        return min(max(int(member.mtime), 0), LATEST_S)
    return 0
