"""Makes the lowest layer of a sandbox's root file system, the same for all sandboxes of an owner."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from headway.sandbox.guest.isolation import DEVICES, HOST_PROGRAMS, INSIDE_ID, SKELETON

FOLDERS = ("etc", "home/user", "mnt", "opt", "root", "run", "srv", "var/lib", "var/log", "work")
MOUNT_POINTS = ("dev/pts", "proc", "sys")
LINKS = {
    "dev/ptmx": "pts/ptmx",
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
}
# The entries of the host's /etc that its programs need and any user may read: no names, no keys, no addresses.
HOST_SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "mime.types", "localtime")
SETTINGS = {
    "etc/passwd": f"user:x:{INSIDE_ID}:{INSIDE_ID}::/home/user:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "etc/group": f"user:x:{INSIDE_ID}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/resolv.conf": "",
}


def make(folder: Path, uid: int, gid: int) -> None:
    """Make two skeletons below ``folder``: one for the host's programs, and one for images."""
    host_skeleton = folder / SKELETON
    _mount_points(host_skeleton)
    for name in FOLDERS:
        (host_skeleton / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (host_skeleton / name).mkdir(parents=True)
        (host_skeleton / name).chmod(0o1777)
    for name, text in SETTINGS.items():
        (host_skeleton / name).write_text(text)
    for name in HOST_SETTINGS:
        _copy(Path("/etc", name), host_skeleton / "etc" / name)
    for name in HOST_PROGRAMS:
        host_path = Path("/", name)
        if host_path.is_symlink():
            (host_skeleton / name).symlink_to(os.readlink(host_path))
        elif host_path.is_dir():
            (host_skeleton / name).mkdir()
    _mount_points(folder / f"{SKELETON}-image")
    _chown_tree(folder, uid, gid)


def _mount_points(root: Path) -> None:
    for name in (*MOUNT_POINTS, "dev/shm"):
        (root / name).mkdir(parents=True)
    (root / "dev/shm").chmod(0o1777)
    for name in DEVICES:
        (root / "dev" / name).touch()
    for name, target in LINKS.items():
        (root / name).symlink_to(target)


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        else:
            shutil.copy(source, target)
    except OSError as error:  # the host doesn't have it, or forbids reading it
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def _chown_tree(folder: Path, uid: int, gid: int) -> None:
    """Make the sandboxes' user the owner of ``folder``, since an overlay can't copy up files of a user that isn't
    mapped in its namespace."""
    if uid == os.geteuid():
        return
    for parent, folder_names, file_names in os.walk(folder):
        for name in ("", *folder_names, *file_names):
            os.chown(os.path.join(parent, name), uid, gid, follow_symlinks=False)
