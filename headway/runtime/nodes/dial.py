"""Connections out to another machine of the run, with the settings that all of them have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from headway.runtime.addresses import split_address
from headway.runtime.nodes.encryption import EncryptedSocket, encrypted_client
from headway.runtime.nodes.handshake import Admission, ConnectionRefused, Hello, perform_handshake

CONNECT_S = 10.0
TIMEVAL = struct.Struct("@ll")  # s, µs: the value of SO_RCVTIMEO


async def dial(
    address: str, key: str, hello: Hello, orphan_s: float, *, encrypted: bool = False
) -> tuple[socket.socket, Admission]:
    """Connect to ``address`` and prove the key. Raises ConnectionRefused, also for a machine that can't be reached;
    EncryptionRequired when it must be ``encrypted``."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            family, socket_type, _, _, socket_address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, socket_type)
            try:
                sock.setblocking(False)
                outlast(sock, orphan_s)
                await loop.sock_connect(sock, socket_address)
                if not encrypted:
                    return sock, await perform_handshake(sock, key, hello)
                sock = encrypted_sock = await encrypted_client(sock)
                return sock, await perform_handshake(sock, key, hello, encrypted_sock.binding)
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise ConnectionRefused(f"{address} doesn't answer within {CONNECT_S:g} s: a firewall?") from None
    except OSError as error:
        raise ConnectionRefused(f"{address} can't be reached: {error.strerror or error}") from None


def outlast(sock: socket.socket, orphan_s: float) -> None:
    """Let a connection outlast an outage of the network of up to ``orphan_s`` seconds, and break soon after it."""
    if isinstance(sock, EncryptedSocket):
        sock = sock.outer
    with contextlib.suppress(OSError):  # closed already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * orphan_s))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5)):
            sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(orphan_s / 5)))
