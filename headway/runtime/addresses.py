"""Addresses of HTTP servers (``HOST:PORT``), the keys of services that other machines reach, trusted certificates."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
import ssl
from pathlib import Path

from headway.records.errors import ConfigurationError

BACKLOG = 2048  # connections that wait to be accepted
_SHORTEST = 16  # characters of a key


@functools.cache
def machine_certificates() -> ssl.SSLContext:
    """The certificates of this machine, which clients trust: a firm's own authority may be among them.

    They are read once, which takes 40 ms; a request takes 2 ms.
    """
    return ssl.create_default_context()


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@functools.lru_cache(256)
def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``address``."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@functools.lru_cache(256)
def is_loopback_host(host: str) -> bool:
    """Whether a request's header ``host``, a name with or without a port, is one of this machine's names for itself."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", host.strip().lower())
    name = match[1].strip("[]").rstrip(".") if match else ""
    return name.endswith(".localhost") or is_loopback(f"[{name}]:0")


def machine_addresses() -> list[str]:
    """IPv4 addresses of this machine by which others might reach it; empty where the kernel doesn't say."""
    routes_file = Path("/proc/net/fib_trie")
    local_ips = set(re.findall(r"(\S+)\n\s+/32 host LOCAL", routes_file.read_text() if routes_file.is_file() else ""))
    return sorted(address for address in local_ips if not is_loopback(f"{address}:0"))


def listening_socket(address: str, key: str = "") -> socket.socket:
    """Open a non-blocking socket that listens at ``address``; connections queue until they are accepted. Raises
    ConfigurationError, with the ``key`` of the experiment that names the address, where that isn't possible."""
    host, port = split_address(address)
    try:
        family, socket_type, protocol, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket_type, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(socket_address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{f'{key} = {address!r}' if key else address}: {error.strerror}; valid: an address of this machine "
            f"({', '.join(['127.0.0.1', *machine_addresses()])}), and a free port (port 0 takes any)"
        ) from None
    return listener


def read_keys(file: str, option: str) -> tuple[str, ...]:
    """Read a file of keys, one a line; () for no file. ``option``: the command's, for errors. Raises
    ConfigurationError for a file that can't be read or has no key, and for a key that is too easily guessed."""
    if not file:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option} {file}: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigurationError(f"{option} {file}: holds no key; one key a line is needed")
    if short_keys := [key for key in keys if len(key) < _SHORTEST]:
        raise ConfigurationError(
            f"{option} {file}: {len(short_keys)} keys are shorter than {_SHORTEST} characters: too easily guessed"
        )
    return keys


def service_keys(file: str, option: str, address: str, named: str) -> tuple[str, ...]:
    """Read the keys of a service, see `read_keys`. Raises ConfigurationError also for an address that other machines
    reach without keys. ``named``: the address with its key or option, as the error shows it."""
    keys = read_keys(file, option)
    if not keys and not is_loopback(address):
        raise ConfigurationError(
            f"{named}: other machines can reach it, so keys are required: {option} FILE, one key a line"
        )
    return keys
