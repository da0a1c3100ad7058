"""A network of the test's own: a hub where the test itself lives, and nodes behind links that can be cut and healed.

Everything is anonymous: the namespaces end with the processes in them, so nothing is left on the machine, however the
test ends. Only the calling thread and what it starts move into the hub; servers there are seen by nobody else.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from tests.needs import not_here

HUB = "10.203.0.1"
Cut = Literal["down", "silent"]
"""`down`: the hub's side has no way to the node any more. `silent`: both send, and what they send vanishes."""

_CLONE_NEWNET = 0x40000000
_NEEDED = ("ip", "nsenter", "unshare")


def _address(n: int) -> str:
    return f"10.203.0.{10 + n}"


class Network:
    """Nodes 0 to `nodes` - 1, each in a namespace of its own, on one bridge with the hub at `HUB`."""

    def __init__(self, nodes: int, parts: ExitStack) -> None:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "bridge", "type", "bridge")
        _ip("addr", "add", f"{HUB}/24", "dev", "bridge")
        _ip("link", "set", "bridge", "up")
        self._inside: list[str] = []
        for n in range(nodes):
            # It says that it is in its namespace, and ends with its standard input: with us, that is.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo in; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            parts.callback(_end, holder)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"in\n", "no namespace could be made"
            self._inside.append(f"/proc/{holder.pid}/ns/net")
            _ip("link", "add", f"node{n}", "type", "veth", "peer", "name", "uplink", "netns", str(holder.pid))
            self.heal(n)
            for words in ("link set lo up", f"addr add {_address(n)}/24 dev uplink", "link set uplink up"):
                subprocess.run([*self.inside(n), "ip", *words.split()], check=True)

    def inside(self, n: int) -> list[str]:
        """In front of a command: runs it in the node's namespace, under the same process id."""
        return ["nsenter", f"--net={self._inside[n]}"]

    def cut(self, n: int, how: Cut) -> None:
        if how == "down":
            _ip("link", "set", f"node{n}", "down")
        else:
            _ip("link", "set", f"node{n}", "nomaster")

    def heal(self, n: int) -> None:
        _ip("link", "set", f"node{n}", "master", "bridge")
        _ip("link", "set", f"node{n}", "up")


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """The calling thread is in the hub within the block, and so is what it starts."""
    if os.geteuid() != 0 or not all(shutil.which(program) for program in _NEEDED):
        not_here(f"namespaces of the network need root and {', '.join(_NEEDED)}")
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    with ExitStack() as parts:
        parts.callback(os.close, outside)
        if libc.unshare(_CLONE_NEWNET) != 0:
            not_here(f"no namespace of the network could be made: {os.strerror(ctypes.get_errno())}")
        parts.callback(_return, libc, outside)
        yield Network(nodes, parts)


def _return(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "the test's thread could not leave its namespace")


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.communicate(timeout=20)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
