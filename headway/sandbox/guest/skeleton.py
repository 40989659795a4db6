"""The lowest layer of a sandbox's root file system: what every one has, made once per owner."""

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
# Of the host's /etc only what its programs need and anybody may know: no names, no keys, no addresses.
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
    whole = folder / SKELETON
    _mount_points(whole)
    for name in FOLDERS:
        (whole / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (whole / name).mkdir(parents=True)
        (whole / name).chmod(0o1777)
    for name, text in SETTINGS.items():
        (whole / name).write_text(text)
    for name in HOST_SETTINGS:
        _copy(Path("/etc", name), whole / "etc" / name)
    for name in HOST_PROGRAMS:
        host = Path("/", name)
        if host.is_symlink():
            (whole / name).symlink_to(os.readlink(host))
        elif host.is_dir():
            (whole / name).mkdir()
    _mount_points(folder / f"{SKELETON}-image")
    _give(folder, uid, gid)


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
    except OSError as error:  # what the host doesn't have, or doesn't show
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def _give(folder: Path, uid: int, gid: int) -> None:
    """Give ``folder`` to the sandboxes' user: an overlay can't take over files of a user it doesn't know."""
    if uid == os.geteuid():
        return
    for parent, names, files in os.walk(folder):
        for name in ("", *names, *files):
            os.chown(os.path.join(parent, name), uid, gid, follow_symlinks=False)
