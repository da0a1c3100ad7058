"""Hosts in one spelling each, and lists of hosts that somebody may reach.

One address has one spelling here: other ways to write it (`0x7f000001`, `127.1`, `[::ffff:127.0.0.1]`) are refused, so
that what was compared is what is connected to.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

CLOUD_METADATA = frozenset(
    ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")
)
"""Instance metadata services that are not link-local."""
WEB_PORTS = frozenset({80, 443})

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\\\s]+)(?::([0-9]{1,5}))?")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Roundabout(ValueError):
    """An address in another than its plain spelling."""


def canonical_host(host: str) -> str:
    """A host in its one spelling. Raises `Roundabout` for other ways to write an address, ValueError for no host."""
    host = host.lower()
    if ":" in host:
        try:
            address = ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"'{host}' is not an IPv6 address") from None
        embedded = int(address) >> 32 == 0 and int(address) > 1
        if address.ipv4_mapped is not None or embedded or address.scope_id is not None:
            raise Roundabout(f"'{host}' writes an address in a roundabout way; write the plain one")
        return str(address)
    host = host.removesuffix(".")
    if not host or len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError(f"'{host}' is not a host name")
    if _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]) and as_address(host) is None:
        raise Roundabout(f"'{host}' writes an address in a roundabout way; write it as four decimal numbers")
    return host


def as_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def split_authority(text: str) -> tuple[str, int | None]:
    """`host`, `host:port` or `[address]:port` taken apart; the host as it stands, no brackets. Raises ValueError."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is not host or host:port")
    host, digits = found[1].strip("[]"), found[2]
    if ("[" in text) != (":" in host):
        raise ValueError(f"'{text}' is not host or host:port")
    port = int(digits) if digits else None
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"'{text}' has a port that is not a number from 1 to 65535")
    return host, port


def with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_public(address: Address) -> bool:
    """Whether it is an address of the open network: of no machine itself, no link, no private network, no metadata
    service, and none of these in the wrapping of another family."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None or address.sixtofour is not None or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and address not in CLOUD_METADATA


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of a task's `runtime.allowed_hosts`: `host`, `host:port`, `*.domain` or `*.domain:port`.

    Without a port it means 80 and 443. `*.domain` is every name below the domain, not the domain itself.
    """

    host: str
    below: bool
    port: int | None

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """Raises ValueError with one line for an entry that can never match."""
        text = entry.strip()
        below = text.startswith("*.")
        host, port = split_authority(text.removeprefix("*."))
        if below and as_address(host) is not None:
            raise ValueError(f"'{entry}': there is nothing below an address")
        return cls(canonical_host(host), below, port)

    def names(self, host: str, port: int) -> bool:
        """`host` is canonical."""
        if port not in WEB_PORTS if self.port is None else port != self.port:
            return False
        return host.endswith(f".{self.host}") and as_address(host) is None if self.below else host == self.host

    def is_itself(self, host: str, port: int) -> bool:
        """Whether it names just that host, and no others beside it."""
        return not self.below and self.names(host, port)
