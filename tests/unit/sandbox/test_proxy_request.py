"""Heads of requests to the proxy: what is passed on, and what two programs could read in two ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sandbox.local.proxy_request import ProxyRefused, read


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_tunnel():
    request = read(head("CONNECT Example.ORG:443 HTTP/1.1", "Host: whatever"))
    assert (request.host, request.port, request.tunnel) == ("example.org", 443, True)
    assert read(head("CONNECT [2001:db8::1]:443 HTTP/1.0")).host == "2001:db8::1"


def test_a_plain_request_is_passed_on_without_what_is_of_the_hop():
    request = read(
        head(
            "POST http://Example.org:8080?q=1 HTTP/1.1",
            "Host: example.ORG:8080",
            "Connection: keep-alive, X-Private, Content-Length",
            "X-Private: 1",
            "Proxy-Authorization: secret",
            "Upgrade: websocket",
            "Content-Length: 12",
            "Accept:\t*/* ",
        )
    )
    assert (request.host, request.port, request.tunnel, request.body_bytes) == ("example.org", 8080, False, 12)
    assert request.head == head(
        "POST /?q=1 HTTP/1.1", "Host: example.org:8080", "content-length: 12", "accept: */*", "Connection: close"
    )


GET = "GET http://a.org/ HTTP/1.1"


@pytest.mark.parametrize(
    "lines",
    [
        ("GET / HTTP/1.1", "Host: a.org"),
        ("GET https://a.org/ HTTP/1.1", "Host: a.org"),
        ("GET http:///x HTTP/1.1", "Host: a.org"),
        ("GET http://a.org@b.org/ HTTP/1.1", "Host: b.org"),
        ("GET http://a.org\\@b.org/ HTTP/1.1", "Host: a.org"),
        ("GET http://a.org:99999/ HTTP/1.1", "Host: a.org"),
        ("GET http://127.1/ HTTP/1.1", "Host: 127.1"),
        ("GET http://a.org/ HTTP/2.0", "Host: a.org"),
        ("GET  http://a.org/ HTTP/1.1", "Host: a.org"),
        ("GET http://a.org/\x00 HTTP/1.1", "Host: a.org"),
        ("CONNECT a.org HTTP/1.1",),
        ("CONNECT http://a.org:443 HTTP/1.1",),
        ("CONNECT a.org:443:443 HTTP/1.1",),
        ("",),
        (GET,),
        (GET, "Host: b.org"),
        (GET, "Host: a.org:81"),
        (GET, "Host: a.org", "Host: a.org"),
        (GET, "Host: a.org, b.org"),
        (GET, "Host: a.org", " folded: b"),
        (GET, "Host: a.org", "Space : b"),
        (GET, "Host: a.org", "X: a\rHost: b.org"),
        (GET, "Host: a.org", "X: a\nHost: b.org"),
        (GET, "Host: a.org", "X: \x00"),
        (GET, "Host: a.org", "no colon"),
        (GET, "Host: a.org", "Content-Length: 1", "Content-Length: 1"),
        (GET, "Host: a.org", "Content-Length: +1"),
        (GET, "Host: a.org", "Content-Length: 1, 1"),
        (GET, "Host: a.org", "Content-Length: 9999999999999999"),
    ],
)
def test_what_is_odd_is_a_bad_request(lines):
    with pytest.raises(ProxyRefused) as refused:
        read(head(*lines))
    assert refused.value.status == 400


@pytest.mark.parametrize("coding", ["chunked", "identity", "x, chunked"])
def test_bodies_of_unknown_length_are_refused(coding):
    with pytest.raises(ProxyRefused) as refused:
        read(head(GET, "Host: a.org", "Content-Length: 3", f"Transfer-Encoding: {coding}"))
    assert refused.value.status == 411


@given(
    first=st.sampled_from(["GET", "CONNECT"]),
    target=st.text(st.sampled_from("htp:/a.b@[]?#\\12 %"), max_size=16),
    lines=st.lists(st.text(st.sampled_from("Host: a.b\t,;\r\n\0Content-Length1"), max_size=20), max_size=3),
)
def test_whatever_comes_is_read_or_refused(first, target, lines):
    try:
        request = read(head(f"{first} http://{target} HTTP/1.1", "Host: a.b", *lines))
    except ProxyRefused:
        return
    assert request.head.count(b"\r\nHost: ") == 1
    assert request.head.endswith(b"\r\nConnection: close\r\n\r\n")
    assert request.head.count(b"\n") == request.head.count(b"\r\n")
