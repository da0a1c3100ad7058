"""Where a callback may go. A task's `callback_url` makes this deployment send a request, so the operator says whereto.

An entry of `security.callback_hosts` is

| entry | allows |
| --- | --- |
| `host` | ports 80 and 443; for a loopback address or `localhost` also ports from 1024 that no known service uses |
| `host:port` | that port |
| `host:*` | every port |

`host` is an address or a name (`*` in it stands for any letters, in names other than localhost); an IPv6 address with
a port goes in brackets. Loopback is wider because a trainer on the same machine listens where the system let it; Redis,
databases and this deployment's own ports stay closed. Elsewhere a trainer with a changing port needs `host:*`.

One address has one spelling here: other ways to write it (`0x7f000001`, `127.1`, `[::ffff:127.0.0.1]`) are refused, so
that what was compared is what is connected to. Names are looked up once, when the callback is sent; see `delivery`.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from polarq.hosts import CLOUD_METADATA, Address, as_address, canonical_host
from polarq.topology.redis_address import ports_of

if TYPE_CHECKING:
    from polarq.topology.models import Topology

DEFAULT_PORTS = {"http": 80, "https": 443}
SERVICE_PORTS = frozenset(
    {
        *(2049, 2375, 2376, 2377, 2379, 2380, 3306, 4222, 5432, 5555, 5672, 5984, 6379, 6380, 6443, 7000, 7001),
        *(8086, 8500, 9000, 9042, 9092, 9200, 9300, 10250, 10255, 11211, 15672, 16379, 26379, 27017),
    }
)
"""Ports on loopback at which a request that nobody meant could do harm: databases, brokers, cluster control."""


@dataclass(frozen=True, slots=True)
class Target:
    """A callback address taken apart, its host in the one spelling that is compared."""

    scheme: Literal["http", "https"]
    host: str
    """Lower case, no brackets, no trailing dot."""
    port: int
    path: str
    """Path and query as they are sent."""

    @classmethod
    def parse(cls, url: str) -> Target:
        """Raises ValueError with one line for an address that is not plain http or https."""
        if any(not "!" <= char <= "~" or char == "\\" for char in url):
            raise ValueError("must be plain ASCII without blanks or backslashes (write a host name in punycode)")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError("is not an address") from None
        if parts.scheme not in DEFAULT_PORTS:
            raise ValueError("must be an http or https address")
        if "@" in parts.netloc:
            raise ValueError("must not hold a user name or password")
        if not parts.hostname:
            raise ValueError("has no host")
        try:
            port = parts.port
        except ValueError:
            raise ValueError("has a port that is not a number from 1 to 65535") from None
        if port == 0:
            raise ValueError("has a port that is not a number from 1 to 65535")
        path = parts.path or "/"
        return cls(
            "https" if parts.scheme == "https" else "http",
            canonical_host(parts.hostname),
            DEFAULT_PORTS[parts.scheme] if port is None else port,
            f"{path}?{parts.query}" if parts.query else path,
        )

    @property
    def address(self) -> Address | None:
        """The host as an address; None for a name."""
        return as_address(self.host)

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or (self.address is not None and self.address.is_loopback)

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of `security.callback_hosts`."""

    host: str
    port: int | Literal["*"] | None

    @classmethod
    def parse(cls, entry: str) -> AllowedHost:
        """Raises ValueError with one line for an entry that can never match."""
        text = entry.strip().lower()
        host, port = text, ""
        if text.startswith("["):
            host, _, port = text.removeprefix("[").partition("]")
            port = port.removeprefix(":")
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if port not in {"", "*"} and not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"'{entry}' is not host, host:port or host:*")
        host = host.removesuffix(".") if "*" in host else canonical_host(host)
        return cls(host, "*" if port == "*" else int(port) if port else None)

    def names(self, target: Target) -> bool:
        if "*" in self.host:
            return target.address is None and not target.loopback and fnmatch.fnmatchcase(target.host, self.host)
        return target.host == self.host

    def opens(self, target: Target, own: frozenset[int]) -> bool:
        """Whether the entry allows the port of a target that it names."""
        if self.port == "*":
            return True
        if self.port is not None:
            return target.port == self.port
        if target.port in DEFAULT_PORTS.values():
            return True
        return target.loopback and target.port >= 1024 and target.port not in SERVICE_PORTS | own


def check_callback_url(
    url: str,
    allowed_hosts: Iterable[str],
    own: frozenset[int] = frozenset(),
    *,
    setting: str = "security.callback_hosts",
) -> str | None:
    """What is wrong with a callback address (or another that a task names), as one line; None: it may be used.

    `own`: ports of this deployment, closed on loopback unless an entry names them. `setting`: where the hosts are from.
    """
    try:
        target = Target.parse(url)
    except ValueError as exc:
        return str(exc)
    try:
        entries = [AllowedHost.parse(entry) for entry in allowed_hosts]
    except ValueError as exc:
        return f"cannot be checked: {setting}: {exc}"
    naming = [entry for entry in entries if entry.names(target)]
    if not naming:
        return f"host '{target.host}' is not among {setting}"
    if not any(entry.opens(target, own) for entry in naming):
        host = f"[{target.host}]" if ":" in target.host else target.host
        return (
            f"port {target.port} of '{target.host}' is not open to tasks;"
            f" add '{host}:{target.port}' or '{host}:*' to {setting}"
        )
    return None


def own_ports(topology: Topology, *more_urls: str) -> frozenset[int]:
    """Ports this deployment listens on or talks to, as far as the topology says."""
    urls = [topology.redis.url, topology.redis.broker_url, topology.redis.payload_url, *more_urls]
    ports = {port for url in urls if url for port in ports_of(url)}
    ports |= {urlsplit(endpoint.base_url).port or 0 for node in topology.gateway.nodes for endpoint in node.endpoints}
    ports |= {topology.rollout.port, *(node.port for node in topology.gateway.nodes)}
    return frozenset(port for port in ports if port)


def may_connect(target: Target, address: Address) -> bool:
    """Whether an address that the target's name resolves to may be connected to.

    A name may lead to a public or a private network, never to this machine, its link, or a metadata service;
    `localhost` leads to this machine only.
    """
    if target.loopback:
        return address.is_loopback
    if isinstance(address, ipaddress.IPv6Address) and (address.sixtofour is not None or address.teredo is not None):
        return False
    closed = address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    return not (closed or address.is_reserved or address in CLOUD_METADATA)
