"""What an egress door lets through: names first, then the addresses that they turn out to have."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from polarq.hosts import Address, AllowedHost, canonical_host, is_public, split_authority, with_port

_NOBODYS = "192.0.2.1"
"""An address that no machine has."""


class Refused(Exception):
    """The policy does not let it through. The text is one line: what was refused, and what would allow it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked for, the host in its one spelling."""

    host: str
    port: int

    @classmethod
    def parse(cls, authority: str, default_port: int | None = None) -> Target:
        """Raises ValueError."""
        host, port = split_authority(authority)
        if (port := port or default_port) is None:
            raise ValueError(f"'{authority}' names no port")
        return cls(canonical_host(host), port)

    def __str__(self) -> str:
        return with_port(self.host, self.port)


@cache
def _tells_own_addresses() -> bool:
    """Where any address may be bound, binding says nothing."""
    return not _binds(_NOBODYS, socket.AF_INET)


def _binds(address: str, family: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trying:
            trying.bind((address, 0))
    except OSError:
        return False
    return True


def is_own(address: Address) -> bool:
    """Whether it is one of this machine's: only those can be bound."""
    family = socket.AF_INET if isinstance(address, ipaddress.IPv4Address) else socket.AF_INET6
    return _tells_own_addresses() and _binds(str(address), family)


@dataclass(frozen=True, slots=True)
class Rules:
    """One sandbox's. `closed` are this deployment's own services (host, port): who lists one of them by its own name
    and port reaches it, and no wildcard does."""

    policy: str
    allowed: tuple[AllowedHost, ...] = ()
    closed: frozenset[tuple[str, int]] = frozenset()
    own: Callable[[Address], bool] = field(default=is_own, compare=False)

    @classmethod
    def of(cls, policy: str, allowed: Sequence[str], closed: Sequence[tuple[str, int]]) -> Rules:
        """Raises ValueError for an entry that can never match."""
        return cls(policy, tuple(map(AllowedHost.parse, allowed)), frozenset(closed))

    def check_name(self, target: Target) -> None:
        """Raises `Refused`."""
        host, port = target.host, target.port
        if not any(entry.names(host, port) for entry in self.allowed):
            raise Refused(f"network policy {self.policy} refuses {target}: {self._remedy(target)}")
        if (host, port) in self.closed and not self._lists(host, port):
            raise Refused(f"network policy {self.policy} refuses {target}: it is one of polarq's own services")

    def checked(self, target: Target, found: Sequence[Address]) -> list[Address]:
        """Those of a target's addresses that may be connected to, one at least. Raises `Refused`."""
        usable = [address for address in found if self._may_connect(address, target.port)]
        if usable:
            return usable
        where = str(found[0])
        is_it = "is" if where == target.host else f"has the address {where}, which is"
        raise Refused(
            f"network policy {self.policy} refuses {target}: it {is_it} of this machine or of a private network; to"
            f" allow it add '{with_port(where, target.port)}' to the task's runtime.allowed_hosts too"
        )

    def _may_connect(self, address: Address, port: int) -> bool:
        host = str(address)
        if self._lists(host, port):
            return True
        return is_public(address) and (host, port) not in self.closed and not self.own(address)

    def _lists(self, host: str, port: int) -> bool:
        return any(entry.is_itself(host, port) for entry in self.allowed)

    def _remedy(self, target: Target) -> str:
        entry = with_port(target.host, target.port) if target.port not in {80, 443} else target.host
        if self.policy == "allowlist":
            return f"add '{entry}' to the task's runtime.allowed_hosts"
        return (
            f"only the model is reached; the task's runtime needs network_policy 'allowlist' with '{entry}' in"
            " allowed_hosts, or 'full'"
        )
