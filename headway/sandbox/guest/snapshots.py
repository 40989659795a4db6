"""Packs a sandbox's written files as a tar, and unpacks them. Standard library alone.

Both run in the first process of a sandbox. The owner stores the bytes and never unpacks them, so that no name or link
in a tar reaches another file system. A deleted file of the layers below is packed as the overlay stores it, as
character device 0:0, and is deleted again; a directory that replaced one of the layers below carries a mark.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Sequence
from typing import Protocol

from headway.sandbox.guest.wire import CHUNK_BYTES

DEPTH = 256  # most nested directories: each is held open during the walk
OPAQUE = "HEADWAY.opaque"
ATTRIBUTES = "HEADWAY.attributes"  # JSON: name of a user's extended attribute -> its value in hexadecimal
OVERLAY_PREFIX = "user.overlay."  # of the overlay's own attributes
BLOCK = tarfile.BLOCKSIZE
HOLE = bytes(4096)  # a page, the unit of a disk in memory


def pack(roots: Sequence[tuple[str, int]], max_bytes: int) -> Iterator[bytes]:
    """Yield the tar of all files below ``roots`` in chunks. ``roots``: (prefix of the names, descriptor) of each
    directory. Raises OSError: EFBIG beyond ``max_bytes``, ELOOP beyond ``DEPTH``."""
    remaining_bytes = max_bytes - 2 * BLOCK  # its end is counted too
    for prefix, root in roots:
        name_by_inode: dict[int, str] = {}  # inode with several names -> the first
        for chunk in _walk(root, prefix, 0, name_by_inode):
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                raise OSError(errno.EFBIG, f"the files take more than {max_bytes} bytes")
            yield chunk
    yield bytes(2 * BLOCK)


def _walk(folder: int, prefix: str, depth: int, name_by_inode: dict[int, str]) -> Iterator[bytes]:
    if depth > DEPTH:
        raise OSError(errno.ELOOP, f"directories nested more than {DEPTH} deep")
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        member = _member(prefix + name, status)
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink > 1 and status.st_ino in name_by_inode:
                member.type, member.linkname, member.size = tarfile.LNKTYPE, name_by_inode[status.st_ino], 0
                yield _head(member)
                continue
            name_by_inode[status.st_ino] = member.name
            yield from _file(folder, name, member)
        elif stat.S_ISLNK(status.st_mode):
            member.linkname = os.readlink(name, dir_fd=folder)
            yield _head(member)
        elif stat.S_ISDIR(status.st_mode):
            with _opened(name, folder, status.st_mode, os.O_DIRECTORY) as inner_fd:
                with contextlib.suppress(OSError):
                    if os.getxattr(inner_fd, f"{OVERLAY_PREFIX}opaque") == b"y":
                        member.pax_headers = {OPAQUE: "y"}
                yield _head(member, inner_fd)
                yield from _walk(inner_fd, f"{prefix}{name}/", depth + 1, name_by_inode)
        elif not stat.S_ISSOCK(status.st_mode):  # a socket is useless without its listener
            yield _head(member)


def _member(name: str, status: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    type_by_format = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}
    type_by_format[stat.S_IFCHR] = tarfile.CHRTYPE
    member.type = type_by_format.get(stat.S_IFMT(status.st_mode), tarfile.REGTYPE)
    member.size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return member


def _file(folder: int, name: str, member: tarfile.TarInfo) -> Iterator[bytes]:
    with _opened(name, folder, member.mode, os.O_NONBLOCK) as descriptor:
        yield _head(member, descriptor)
        remaining_bytes = member.size
        while remaining_bytes:
            chunk = os.read(descriptor, min(CHUNK_BYTES, remaining_bytes)) or bytes(min(CHUNK_BYTES, remaining_bytes))
            remaining_bytes -= len(chunk)
            yield chunk
    if member.size % BLOCK:
        yield bytes(BLOCK - member.size % BLOCK)


@contextlib.contextmanager
def _opened(name: str, folder: int, mode: int, flags: int) -> Iterator[int]:
    """Open a file or directory, even without read permission: its mode is changed for as long as this takes."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    is_mode_changed = not mode & stat.S_IRUSR or (stat.S_ISDIR(mode) and not mode & stat.S_IXUSR)
    if is_mode_changed:
        os.chmod(name, 0o700, dir_fd=folder)  # no link: its type was checked, and no command runs meanwhile
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        if is_mode_changed:
            os.chmod(name, stat.S_IMODE(mode), dir_fd=folder)


def _head(member: tarfile.TarInfo, descriptor: int = -1) -> bytes:
    """Return the header of a member, with the extended attributes of the file ``descriptor``."""
    names = os.listxattr(descriptor) if descriptor >= 0 else []
    user_attributes = [name for name in names if name.startswith("user.") and not name.startswith(OVERLAY_PREFIX)]
    if user_attributes:
        attributes_json = json.dumps({name: os.getxattr(descriptor, name).hex() for name in user_attributes})
        member.pax_headers = {**member.pax_headers, ATTRIBUTES: attributes_json}
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _set_attributes(target: str | int, member: tarfile.TarInfo) -> None:
    for name, value in json.loads(member.pax_headers.get(ATTRIBUTES, "{}")).items():
        os.setxattr(target, name, bytes.fromhex(value))


class Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...


def unpack(file: Readable, root: str = "/") -> None:
    """Make the files of a tar below ``root``, in the sandbox's own file system. Raises OSError on failure."""
    folders: list[tuple[str, tarfile.TarInfo]] = []
    try:
        with tarfile.open(fileobj=file, mode="r|", errorlevel=2) as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it would remember all of them
                path = os.path.join(root, member.name)
                if member.isdir():
                    folders.append((path, member))
                _make(archive, member, path, root)
    except tarfile.TarError as error:
        raise OSError(errno.EBADMSG, f"not a snapshot: {error}") from error
    for path, member in reversed(folders):
        _set_attributes(path, member)
        os.chmod(path, member.mode)
        os.utime(path, (member.mtime, member.mtime))


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, root: str) -> None:
    if member.isdir():
        if member.pax_headers.get(OPAQUE):
            _remove(path)
        if not os.path.isdir(path) or os.path.islink(path):
            _remove(path)
            os.mkdir(path, 0o700)
        else:
            os.chmod(path, member.mode | 0o700)
        return
    _remove(path)
    if member.ischr():
        return  # deleted
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(os.path.join(root, member.linkname), path, follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(path, member.mode)
    else:
        source = archive.extractfile(member)
        assert source is not None
        with open(path, "xb", CHUNK_BYTES) as target:
            while page := source.read(len(HOLE)):
                if page == HOLE[: len(page)]:  # packed from a hole: written, it would take space
                    target.seek(len(page), os.SEEK_CUR)
                else:
                    target.write(page)
            target.truncate(member.size)
            _set_attributes(target.fileno(), member)
            os.fchmod(target.fileno(), member.mode)
        os.utime(path, (member.mtime, member.mtime))


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
