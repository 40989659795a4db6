"""Addresses of our HTTP servers, ``HOST:PORT``."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from headway.records.errors import ConfigurationError


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


def require_free(address: str) -> None:
    """Raise ConfigurationError when nothing can listen at ``address``."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise ConfigurationError(
            f"{address}: {error.strerror}; valid: an address of this machine and a free port (port 0 takes any)"
        ) from None
