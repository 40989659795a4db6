"""Addresses of our HTTP servers, ``HOST:PORT``."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from headway.records.errors import ConfigurationError

BACKLOG = 2048  # connections that wait to be accepted


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``address``."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine by which others might reach it; empty where the kernel doesn't say."""
    routes = Path("/proc/net/fib_trie")
    own = set(re.findall(r"(\S+)\n\s+/32 host LOCAL", routes.read_text() if routes.is_file() else ""))
    return sorted(address for address in own if not is_loopback(f"{address}:0"))


def listening(address: str, key: str = "") -> socket.socket:
    """A non-blocking socket that listens at ``address``; connections queue until they are accepted. Raises
    ConfigurationError, with the ``key`` of the experiment that names it, where that can't be."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(target)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{f'{key} = {address!r}' if key else address}: {error.strerror}; valid: an address of this machine "
            f"({', '.join(['127.0.0.1', *own_addresses()])}), and a free port (port 0 takes any)"
        ) from None
    return listener
