"""The allow list of hosts that a sandbox may reach: its syntax, and the rule by which a host is on it. Pure functions.

An entry is NAME, *.NAME (what stands below NAME, not NAME itself), an IPv4 address or an IPv6 address in brackets, each
with :PORT or for ports 80 and 443. Names are compared as names: the address of a listed name isn't listed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec

from headway.records.errors import ConfigurationError

DEFAULT_PORTS = (80, 443)
NAME_CHARACTERS = 253  # the most of a name in the DNS
_INTERNAL = ipaddress.IPv4Network("192.0.0.0/24")  # providers' metadata among it; Python counts most of it as global
_METADATA = ipaddress.IPv4Address("168.63.129.16")  # Azure's, though public by its number
_UNICAST = ipaddress.IPv6Network("2000::/3")  # all of IPv6 that is given out for the internet at large
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a name that ends so is an address in disguise: 127.1, 0x7f000001
_AUTHORITY = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?")
_CARRIES_IPV4 = ipaddress.IPv6Network("64:ff9b::/96")  # translated on its way (RFC 6052)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AllowedHost(msgspec.Struct, frozen=True):
    """An entry of an allow list."""

    host: str  # as `host_of` gives it
    below: bool  # the names below it, not itself
    ports: tuple[int, ...]

    def allows(self, host: str, port: int) -> bool:
        return port in self.ports and (host.endswith(f".{self.host}") if self.below else host == self.host)


class AllowList(msgspec.Struct, frozen=True):
    """The hosts a sandbox may reach, as written and as compared."""

    written: tuple[str, ...]
    entries: tuple[AllowedHost, ...]

    def allows(self, host: str, port: int) -> bool:
        """Whether this host and port are on the list. ``host``: as `host_of` gives it."""
        return any(entry.allows(host, port) for entry in self.entries)


def allow_list(written: Sequence[str]) -> AllowList:
    """Parse the entries of a list. Raises ConfigurationError for an invalid one."""
    return AllowList(tuple(written), tuple(_entry(text) for text in written))


def _entry(written: str) -> AllowedHost:
    has_wildcard = written.startswith("*.")
    host, port = authority_of(written[2:] if has_wildcard else written)
    if host is None or (has_wildcard and is_address(host)):
        raise ConfigurationError(
            f"sandbox network {written!r}: valid: NAME, *.NAME, an IPv4 address or an [IPv6 address], each with or"
            " without :PORT; no scheme, no path, names in ASCII"
        )
    return AllowedHost(host, has_wildcard, DEFAULT_PORTS if port is None else (port,))


def authority_of(text: str) -> tuple[str | None, int | None]:
    """Host and port of HOST or HOST:PORT; the host is None where that can't be one."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None, None
    port = None if match[2] is None else int(match[2])
    if port is not None and not 1 <= port <= 65535:
        return None, None
    return host_of(match[1]), port


def host_of(text: str) -> str | None:
    """Normalise a host for comparison: a name in lower case without its last dot, an address in its canonical short
    form without brackets. None: it can be neither."""
    is_bracketed = text.startswith("[") and text.endswith("]")
    try:
        address = ipaddress.ip_address(text[1:-1] if is_bracketed else text)
    except ValueError:
        name = text.lower().removesuffix(".")
        labels = name.split(".")
        is_valid = len(name) <= NAME_CHARACTERS and all(_LABEL.fullmatch(label) for label in labels)
        return name if is_valid and not _NUMBER.fullmatch(labels[-1]) else None
    if is_bracketed != (address.version == 6) or "%" in text:
        return None
    return str(plain(address))


def is_address(host: str) -> bool:
    """Whether a host, as `host_of` gives it, is an address."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def plain(address: Address) -> Address:
    """The IPv4 address behind an IPv4-mapped IPv6 one; any other address unchanged."""
    return address if isinstance(address, ipaddress.IPv4Address) else address.ipv4_mapped or address


def is_public(text: str) -> bool:
    """Whether an address is one of the internet at large: not of this machine, its networks or its provider's
    services, nor one that carries such an address inside."""
    try:
        address = plain(ipaddress.ip_address(text))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        is_usable = address.is_global and not address.is_multicast and not address.is_reserved
        return is_usable and address not in _INTERNAL and address != _METADATA
    if address in _CARRIES_IPV4:
        return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
    embedded = address.sixtofour or (address.teredo[1] if address.teredo else None)
    return address.is_global and address in _UNICAST and (embedded is None or is_public(str(embedded)))
