"""Parses the head of a request to a proxy strictly, and refuses heads that two programs could read differently."""

from __future__ import annotations

import re

import msgspec

from headway.records.network import authority_of

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_ABSOLUTE = re.compile(r"http://([^/?#]*)(/[^#]*|\?[^#]*)?", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,15}")
# Hop-by-hop headers, which aren't forwarded.
_HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-connection", b"proxy-authorization"}


class ProxyRefused(Exception):
    """The proxy refuses a request; ``status`` and ``reason`` are its answer's."""

    def __init__(self, status: int, reason: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.reason = reason


class ProxyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the proxy: for a tunnel, or a plain request that it forwards."""

    host: str  # as `host_of` gives it
    port: int
    tunnel: bool
    head: bytes = b""  # of a plain request, as the server gets it
    body_bytes: int = 0  # ... length of the body that follows


def read(head: bytes) -> ProxyRequest:
    """Parse a request's head. ``head``: up to and including its empty line. Raises ProxyRefused."""
    request_line, *header_lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise _bad("the first line isn't an HTTP/1 request")
    method, target, minor_version = match[1], match[2].decode(), match[3]
    headers = [_header(line) for line in header_lines]
    if method == b"CONNECT":
        host, port = authority_of(target)
        if host is None or port is None:
            raise _bad("CONNECT needs HOST:PORT")
        return ProxyRequest(host=host, port=port, tunnel=True)
    return _plain(method, target, minor_version, headers)


def _plain(method: bytes, target: str, minor: bytes, headers: list[tuple[bytes, bytes]]) -> ProxyRequest:
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise _bad("give http://HOST/PATH as the target; HTTPS goes by CONNECT")
    host, port = authority_of(match[1])
    if host is None:
        raise _bad("the target names no host")
    port = port or 80
    host_headers = [value.decode("latin-1").strip() for name, value in headers if name == b"host"]
    if len(host_headers) > 1 or (not host_headers and minor == b"1"):
        raise _bad("one Host header is needed")
    for host_header in host_headers:
        header_host, header_port = authority_of(host_header)
        if (header_host, header_port or 80) != (host, port):
            raise _bad("target and Host header name two hosts")
    path = match[2] or "/"
    dropped_names = {b"host", *_HOP_BY_HOP}
    for name, value in headers:
        if name == b"connection":
            dropped_names |= {header_name.strip().lower() for header_name in value.split(b",")}
    dropped_names -= {b"content-length", b"transfer-encoding"}  # dropping these would leave two lengths of one body
    formatted_host = f"[{host}]" if ":" in host else host
    header_lines = [
        b"%s %s HTTP/1.%s" % (method, (path if path.startswith("/") else f"/{path}").encode(), minor),
        f"Host: {formatted_host}{'' if port == 80 else f':{port}'}".encode(),
        *(b"%s: %s" % (name, value) for name, value in headers if name not in dropped_names),
        b"Connection: close",
    ]
    head = b"\r\n".join(header_lines) + b"\r\n\r\n"
    return ProxyRequest(host=host, port=port, tunnel=False, head=head, body_bytes=_length(headers))


def _header(line: bytes) -> tuple[bytes, bytes]:
    match = _HEADER.fullmatch(line)
    if match is None:
        raise _bad("a line that isn't a header")
    return match[1].lower(), match[2].rstrip(b" \t")


def _length(headers: list[tuple[bytes, bytes]]) -> int:
    if any(name == b"transfer-encoding" for name, _ in headers):
        raise ProxyRefused(411, "Length Required", "a plain request needs a Content-Length here; HTTPS may be chunked")
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise _bad("one Content-Length, a number")
    return int(lengths[0])


def _bad(why: str) -> ProxyRefused:
    return ProxyRefused(400, "Bad Request", why)
