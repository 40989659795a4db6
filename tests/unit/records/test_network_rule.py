"""Which hosts are on a list: the rule, as properties of any names, and which addresses count as public."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.config.sandbox import SandboxConfig
from headway.records.errors import ConfigurationError
from headway.records.network import allow_list, host_of, is_address, is_public

LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True)
NAMES = st.builds(lambda labels, end: ".".join([*labels, end]), st.lists(LABELS, max_size=3), st.sampled_from("abc"))
PORTS = st.sampled_from([22, 80, 443, 8080])


@given(host=NAMES, entry=NAMES, below=st.booleans(), listed=st.none() | PORTS, port=PORTS)
def test_a_name_is_allowed_by_its_own_entry_or_from_below_it(host, entry, below, listed, port):
    written = f"{'*.' if below else ''}{entry}{'' if listed is None else f':{listed}'}"
    labels, above = host.split("."), entry.split(".")
    matches = labels[-len(above) :] == above and len(labels) > len(above) if below else labels == above
    on_port = port in ((80, 443) if listed is None else (listed,))
    assert allow_list([written]).allows(host, port) == (matches and on_port)


@given(entry=NAMES, prefix=LABELS, port=PORTS)
def test_a_wildcard_takes_neither_the_bare_name_nor_one_that_looks_like_it(entry, prefix, port):
    allowed = allow_list([f"*.{entry}:{port}"])
    assert allowed.allows(f"{prefix}.{entry}", port)
    assert not allowed.allows(entry, port)
    assert not allowed.allows(f"{prefix}{entry}", port)
    assert not allowed.allows(f"{prefix}.{entry}.net", port)


@given(name=NAMES, port=PORTS)
def test_case_and_a_last_dot_make_no_difference(name, port):
    for one in (name.upper(), f"{name}.", name.title()):
        assert host_of(one) == name
        assert allow_list([f"{one}:{port}"]).allows(name, port)


@given(address=st.ip_addresses(), entries=st.lists(NAMES, max_size=3), port=PORTS)
def test_an_address_is_allowed_only_as_an_address(address, entries, port):
    shown = f"[{address}]" if address.version == 6 else str(address)
    host = host_of(shown)
    assert host is not None
    assert is_address(host)
    wild = [f"*.{entry}:{port}" for entry in entries]
    assert not allow_list([*(f"{entry}:{port}" for entry in entries), *wild]).allows(host, port)
    assert allow_list([f"{shown}:{port}"]).allows(host, port)


@given(text=st.text(max_size=12))
def test_whatever_is_taken_for_a_host_stands_for_itself(text):
    host = host_of(text)
    if host is not None:
        assert host_of(f"[{host}]" if ":" in host else host) == host
        assert not set(host) & set(" /@?#\\%\r\n\0[]*")


@pytest.mark.parametrize(
    "written",
    [
        *("", "*", "*.", "https://pypi.org", "pypi.org/simple", "a b", "pypi.org:0", "pypi.org:65536", "pypi.org:"),
        *(
            "127.1",
            "0x7f.1",
            "0x7f000001",
            "2130706433",
            "*.1.2.3.4",
            "a.*.org",
            "*pypi.org",
            "10.0.0.0/8",
            "bücher.de",
        ),
        *(
            "::1",
            "[::1%eth0]",
            "[1.2.3.4]",
            "a..b",
            "-a.org",
            "user@a.org",
            "x" * 64 + ".org",
            "a." * 130 + "org",
            ".a",
        ),
    ],
)
def test_entries_that_cant_be_any_are_refused_with_what_is_valid(written):
    with pytest.raises(ConfigurationError, match="valid: NAME"):
        allow_list([written])


def test_an_address_in_two_ways_of_writing_is_one():
    allowed = allow_list(["10.0.0.5:8080", "[2001:DB8:0::1]"])
    assert allowed.allows(host_of("[::ffff:10.0.0.5]") or "", 8080)
    assert allowed.allows(host_of("[2001:db8::1]") or "", 443)
    assert not allowed.allows("10.0.0.5", 443)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
        ),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fec0::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "::127.0.0.1", "::8.8.8.8"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:808:808::", "localhost", "1.2.3", ""),
    ],
)
def test_addresses_of_machines_networks_and_providers_arent_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "151.101.0.223", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_others_are(address):
    assert is_public(address)


@given(address=st.ip_addresses(v=4))
def test_no_way_of_carrying_an_address_makes_it_public(address):
    number = int(address)
    carried = (0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80)
    for one in carried:
        assert is_public(str(ipaddress.IPv6Address(one))) <= is_public(str(address))


def test_the_experiments_list_is_checked_when_it_is_read():
    assert SandboxConfig.model_validate({"network": ["pypi.org", "*.example.org:8443"]}).spec.network[0] == "pypi.org"
    with pytest.raises(ValidationError, match="valid: NAME"):
        SandboxConfig.model_validate({"network": ["https://pypi.org"]})
