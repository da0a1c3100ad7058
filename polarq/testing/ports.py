"""Ports for servers that a test starts."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

LOWEST = 12_000
HIGHEST = 32_000
"""Below the ports that Linux gives to outgoing connections: one of those can be taken by any client between the choice
and the bind, and stays taken while the server that has it is down."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that no other process of this user is given soon.

    All processes count through one range, so that test programs that run side by side never choose the same. Raises
    `OSError` when nothing in the range is free.
    """
    with (Path(tempfile.gettempdir()) / f"polarq-testing-ports-{os.getuid()}").open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        said = counter.read()
        last = int(said) if said.isdigit() else random.randrange(LOWEST, HIGHEST)
        for step in range(1, HIGHEST - LOWEST + 1):
            port = LOWEST + (last + step - LOWEST) % (HIGHEST - LOWEST)
            if _is_free(port):
                counter.truncate(0)
                counter.write(str(port))
                return port
    raise OSError(f"every port from {LOWEST} to {HIGHEST} of 127.0.0.1 is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
