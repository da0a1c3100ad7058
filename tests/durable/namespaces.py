"""A network of the test's own: a hub where the test itself lives, and nodes behind links that can be cut and healed.

No namespace here has a name or a file: each ends with the last process in it, and its links with it, so that nothing is
left on the machine however the test ends. Only the thread that enters the hub, and what it starts, is in it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

from tests.needs import not_here

HUB = "10.203.0.1"
Cut = Literal["down", "dropped"]
"""`down`: the link has no carrier. `dropped`: a firewall swallows every packet, so that neither end hears anything."""

_CLONE_NEWNET = 0x40000000
_NEEDED = ("ip", "iptables", "nsenter", "unshare")


class Network:
    """Nodes 0, 1 and so on, each in a namespace of its own with one link to the hub at `HUB`."""

    def __init__(self, nodes: int, parts: ExitStack) -> None:
        self._inside: list[str] = []
        _run("ip link set lo up")
        _run("ip link add hub type bridge")
        _run(f"ip addr add {HUB}/24 dev hub")
        _run("ip link set hub up")
        for n in range(nodes):
            # It ends with its standard input, which is ours.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo in; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            parts.callback(_end, holder)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"in\n", "no namespace could be made"
            self._inside.append(f"/proc/{holder.pid}/ns/net")
            _run(f"ip link add node{n} type veth peer name uplink netns {holder.pid}")
            _run(f"ip link set node{n} master hub up")
            _run("ip link set lo up", self.inside(n))
            _run(f"ip addr add {_address(n)}/24 dev uplink", self.inside(n))
            _run("ip link set uplink up", self.inside(n))

    def inside(self, n: int) -> list[str]:
        """In front of a command: runs it in the node's namespace, under the same process id."""
        return ["nsenter", f"--net={self._inside[n]}"]

    def cut(self, n: int, how: Cut) -> None:
        if how == "down":
            _run(f"ip link set node{n} down")
        else:
            _run(f"iptables -A INPUT -s {_address(n)} -j DROP")
            _run(f"iptables -A OUTPUT -d {_address(n)} -j DROP")

    def heal(self, n: int, how: Cut) -> None:
        if how == "down":
            _run(f"ip link set node{n} up")
        else:
            _run(f"iptables -D INPUT -s {_address(n)} -j DROP")
            _run(f"iptables -D OUTPUT -d {_address(n)} -j DROP")


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """The calling thread is in the hub within the block, and so is what it starts."""
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        not_here(f"a network of one's own needs root and {', '.join(missing or _NEEDED)}")
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    with ExitStack() as parts:
        parts.callback(os.close, outside)
        if libc.unshare(_CLONE_NEWNET) != 0:
            not_here(f"no network of one's own could be made: {os.strerror(ctypes.get_errno())}")
        parts.callback(_return, libc, outside)
        yield Network(nodes, parts)


def _return(libc: ctypes.CDLL, outside: int) -> None:
    assert libc.setns(outside, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.communicate()


def _address(n: int) -> str:
    return f"10.203.0.{10 + n}"


def _run(words: str, before: Sequence[str] = ()) -> None:
    subprocess.run([*before, *words.split()], check=True, capture_output=True)
