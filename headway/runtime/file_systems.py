"""File systems: the type of the one that holds a path, and whether other machines write to it as well."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headway.records.errors import ConfigurationError

_MOUNTS = Path("/proc/self/mountinfo")
# Their names among the mounts, with "fuse." before it or not. Other FUSE file systems are local ones.
_NETWORK = re.compile(
    r"(fuse\.)?(9p|acfs|afs|alluxio-fuse|beegfs|blobfuse2?|ceph(fs)?|cifs|coda|curlftpfs|daos|gcsfuse|gfs2|glusterfs|goofys"
    r"|gpfs|juicefs|lustre|mfs|mount-s3|mountpoint-s3|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|rclone|s3fs|seaweedfs|smb3|smbfs"
    r"|sshfs|wekafs)"
)


def network_file_system(path: Path) -> str:
    """Type of the file system that holds ``path`` (which need not exist) when it is reached over a network; else ""."""
    fs_type = _mount_of(path)
    return fs_type if _NETWORK.fullmatch(fs_type) else ""


def require_local(folder: Path) -> None:
    """Raise ConfigurationError when the group buffer can't lie in ``folder``."""
    if fs_type := network_file_system(folder):
        raise ConfigurationError(
            f"{folder} is on a network file system ({fs_type}): SQLite's write-ahead log needs memory that all readers "
            "share, and locks that hold; there buffer.db would be damaged: set cluster.accounting_directory to a "
            "folder on a local disk"
        )


def _mount_of(path: Path) -> str:
    """Type of the last mount on the longest mount point above ``path``; "" where the kernel doesn't say."""
    resolved = path.resolve()
    longest_depth, fs_type = -1, ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        mount_fields, _, source_fields = line.partition(" - ")
        mount_point = Path(_unescaped(mount_fields.split(" ")[4]))
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= longest_depth:
            longest_depth, fs_type = len(mount_point.parts), source_fields.split(" ")[0]
    return fs_type


def _unescaped(field: str) -> str:
    """Decode a field of mountinfo, where blanks are octal escapes."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), os.fsencode(field)))
