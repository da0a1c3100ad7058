"""One spelling per host, and which addresses are of the open network."""

from __future__ import annotations

import ipaddress

import pytest

from polarq.hosts import AllowedHost, Roundabout, canonical_host, is_public, split_authority


@pytest.mark.parametrize(
    "host",
    [
        *(
            "0x7f000001",
            "0x7f.1",
            "2130706433",
            "127.1",
            "127.0.1",
            "0177.0.0.1",
            "127.0.0.0x1",
            "1.2.3.4.5",
            "256.1.1.1",
        ),
        *("::ffff:127.0.0.1", "::127.0.0.1", "::7f00:1", "fe80::1%eth0", "0", "1.2.3.0x"),
    ],
)
def test_an_address_written_in_a_roundabout_way_is_none_that_is_compared(host: str) -> None:
    with pytest.raises(Roundabout):
        canonical_host(host)


@pytest.mark.parametrize("host", ["", ".", "a..b", "-a.example", "a b", "a/b", "exämple.org", "a" * 64, "a." * 130])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is not a host name"):
        canonical_host(host)


def test_a_host_has_one_spelling() -> None:
    assert canonical_host("EXAMPLE.Org.") == "example.org"
    assert canonical_host("127.0.0.1.") == "127.0.0.1"
    assert canonical_host("2001:DB8:0::1") == "2001:db8::1"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *(("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::808:808", True)),
        *(("127.0.0.1", False), ("10.0.0.1", False), ("169.254.1.1", False), ("100.64.0.1", False), ("0.0.0.0", False)),
        *(("168.63.129.16", False), ("fd00:ec2::254", False), ("224.0.0.1", False), ("255.255.255.255", False)),
        *(("::1", False), ("::", False), ("fe80::1", False), ("fc00::1", False), ("ff02::1", False)),
        *(("::ffff:8.8.8.8", False), ("2002:7f00:1::", False), ("64:ff9b::7f00:1", False), ("2001:0::1", False)),
    ],
)
def test_which_addresses_are_of_the_open_network(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.mark.parametrize(
    ("entry", "host", "port", "named"),
    [
        ("a.example", "a.example", 80, True),
        ("A.Example.", "a.example", 443, True),
        ("a.example", "a.example", 8080, False),
        ("a.example", "b.a.example", 443, False),
        ("a.example:8080", "a.example", 8080, True),
        ("a.example:8080", "a.example", 80, False),
        ("*.a.example", "b.a.example", 443, True),
        ("*.a.example", "c.b.a.example", 443, True),
        ("*.a.example", "a.example", 443, False),
        ("*.a.example", "xa.example", 443, False),
        ("*.a.example:8443", "b.a.example", 8443, True),
        ("*.a.example:8443", "b.a.example", 443, False),
        ("10.0.0.1:5000", "10.0.0.1", 5000, True),
        ("[2001:db8::1]:5000", "2001:db8::1", 5000, True),
    ],
)
def test_whom_an_entry_names(entry: str, host: str, port: int, named: bool) -> None:
    assert AllowedHost.parse(entry).names(host, port) is named


@pytest.mark.parametrize("text", ["a:", "a:b", "a:65536", "::1", "[a]:1x", "u@a:1", "a:1:2", "[::1"])
def test_an_authority_is_read_in_one_way(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host|port"):
        split_authority(text)
