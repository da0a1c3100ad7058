"""What can be said of a node's addresses before anything listens: which of them one machine cannot serve at once."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

UNIX_PATH_BYTES = 100
"""Longest path of a Unix socket. The kernel takes 107 bytes; what stands beside the socket needs a few."""

_EVERYWHERE = {"0.0.0.0": 4, "::": 6}
"""Hosts that mean every address of their family; polarq's sockets for `::` leave the other family alone."""
_NAMES = {"localhost": ("127.0.0.1", "::1")}


def overlap(host: str, other: str) -> bool:
    """Whether one port cannot be listened on at both hosts. Names are not looked up: they may be another machine's."""
    return any(_same(one, two) for one in _addresses(host) for two in _addresses(other))


def one_machine(host: str, other: str) -> bool:
    """Whether two nodes with these hosts are on one machine, as far as hosts can tell: one that means every address is
    any machine's."""
    return not {host, other} & _EVERYWHERE.keys() and overlap(host, other)


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return (str(ipaddress.ip_address(host)),)
    except ValueError:
        name = host.lower().rstrip(".")
        return _NAMES.get(name, (name,))


def _same(one: str, two: str) -> bool:
    if one == two:
        return True
    return any(
        here in _EVERYWHERE and _family(there) in {_EVERYWHERE[here], None} for here, there in ((one, two), (two, one))
    )


def _family(address: str) -> int | None:
    """4 or 6; None: a name, which may be of either."""
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return None


def unix_path(value: str) -> str:
    """The path of a Unix socket as it stands in the file; `~` counts as the folder it means. "": none."""
    try:
        length = len(os.fsencode(Path(value).expanduser()))
    except RuntimeError:  # the user of ~user is not on this machine, and may be on the node's
        length = len(os.fsencode(value))
    if length > UNIX_PATH_BYTES:
        raise ValueError(
            f"the path has {length} bytes, and a Unix socket's may have {UNIX_PATH_BYTES}; give a shorter one"
        )
    return value
