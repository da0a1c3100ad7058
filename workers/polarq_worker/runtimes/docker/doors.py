"""A socket that listens in a container's network and is held outside: made by a thread that enters that network."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
import threading
from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker.daemon import address

CLONE_NEWNET = 0x40000000
PROBE_S = 2.0


def obstacle(host: Host) -> str:
    """Why doors cannot be made on this node; blank: they can."""
    try:
        url = address(host)
    except RuntimeFault as exc:
        return str(exc)
    if not url.startswith("unix://"):
        return f"the daemon at {url} is on another machine"
    if not _counts_like_us(url.removeprefix("unix://")):
        return f"the daemon at {url} does not answer, or this worker is in a container of its own"
    return ""


def _counts_like_us(path: str) -> bool:
    """Whether the process at the other end of the socket is one of our process namespace: else its numbers are not
    ours."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except OSError:
            return False
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(pid)


def can_enter() -> bool:
    """Whether this worker may enter a container's network; else a socket is mounted in (see `forwarder`)."""
    return os.geteuid() == 0


async def opened(pid: int, container_id: str, port: int) -> socket.socket:
    """Listens on 127.0.0.1:`port` of the network that process `pid` of the container has. Raises `RuntimeFault`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[socket.socket] = loop.create_future()

    def settle(made: socket.socket | None, failed: OSError | None) -> None:
        if done.cancelled():
            if made is not None:
                made.close()
        elif made is not None:
            done.set_result(made)
        else:
            done.set_exception(failed or OSError("no socket"))

    def work() -> None:
        # A thread of its own: it never comes back out of that network.
        try:
            made = _listening(pid, container_id, port)
        except OSError as exc:
            loop.call_soon_threadsafe(settle, None, exc)
        else:
            loop.call_soon_threadsafe(settle, made, None)

    threading.Thread(target=work, name="polarq-door", daemon=True).start()
    try:
        return await done
    except OSError as exc:
        raise RuntimeFault(f"no door on port {port} of the sandbox: {exc.strerror or exc}") from exc


def _listening(pid: int, container_id: str, port: int) -> socket.socket:
    if container_id not in Path(f"/proc/{pid}/cgroup").read_text():
        raise OSError(f"process {pid} is not the container's, as this machine counts")
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(handle)
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen(128)
    except BaseException:
        made.close()
        raise
    return made
