"""Sockets of a hub: within a machine between processes of one user, and the port for other machines."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from headway.records.errors import ConfigurationError
from headway.runtime.nodes.handshake import ConnectionRefused
from headway.runtime.nodes.listener import Listener, OnClient

_BACKLOG = 256
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def listening_unix(path: Path) -> socket.socket:
    """A non-blocking Unix socket that listens at ``path``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(str(path))
    sock.listen(_BACKLOG)
    return sock


async def connect_unix(path: str) -> socket.socket:
    """Connect to a Unix socket of this user. Raises OSError, ConnectionRefused for another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, path)
        if not is_own(sock):
            raise ConnectionRefused(f"{path} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock


def is_own(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


async def listen(
    host: str, ports: Sequence[int], key: str, epoch: int, on_client: OnClient, certificate: str
) -> Listener:
    """Listen on the first free port. Raises ConfigurationError where none is."""
    for port in ports:
        found = Listener(f"{host}:{port}", key, epoch, on_client, certificate=certificate)
        try:
            await found.open()
        except ConfigurationError as error:
            reason = error
        else:
            return found
    raise ConfigurationError(f"none of the ports {list(ports)} is free for a workflow's process ({reason})")
