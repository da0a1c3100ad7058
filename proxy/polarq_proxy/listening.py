"""Sockets: opened with one clear line when they cannot be, and guarded against connections that say nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from polarq.errors import PolarqError
from polarq.topology import Node

BACKLOG = 4096
SILENT_S = 20.0
"""How long a new connection may take until the head of its first request has come."""
ANYWHERE = frozenset({"0.0.0.0", "::", ""})


class CannotListen(PolarqError):
    """The address is taken or not ours."""


def bound_host(node: Node) -> str:
    if node.host in ANYWHERE and not node.public_url.strip():
        return "::1" if node.host == "::" else "127.0.0.1"
    return node.host


def tcp_sockets(host: str, port: int, *, host_from: str, port_from: str) -> list[socket.socket]:
    """Listening sockets at every address of `host`. Raises `CannotListen`, which names where the topology says so."""
    found: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        for family, *_, address in dict.fromkeys(addresses):
            opened = socket.socket(family, socket.SOCK_STREAM)
            found.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind(address if not found[:-1] else (address[0], found[0].getsockname()[1], *address[2:]))
            opened.listen(BACKLOG)
            opened.setblocking(False)
    except OSError as exc:
        for opened in found:
            opened.close()
        if exc.errno == errno.EADDRINUSE:
            text = f"{host}:{port} is taken: stop what listens there, or change {port_from} in the topology"
        else:
            text = f"cannot listen on {host}:{port}: {exc.strerror or exc}; see {host_from} in the topology"
        raise CannotListen(text) from None
    return found


def unix_socket(path: Path, mode: int) -> socket.socket:
    """A listening Unix socket. One that a dead process left is replaced. Raises `CannotListen`."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            if _somebody_listens(path):
                raise CannotListen(f"{path} is taken by another proxy: see proxy.unix_socket in the topology")
            path.unlink()
        opened.bind(str(path))
        path.chmod(mode)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except CannotListen:
        opened.close()
        raise
    except OSError as exc:
        opened.close()
        raise CannotListen(f"cannot listen on {path}: {exc.strerror or exc}; see proxy.unix_socket") from None
    return opened


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.settimeout(1.0)
        try:
            trying.connect(str(path))
        except OSError:
            return False
    return True


class Doors:
    """Takes connections for an application that is set up, and hangs up on those that say nothing."""

    def __init__(self, runner: web.BaseRunner, silent_s: float = SILENT_S) -> None:
        self._runner = runner
        self._silent_s = silent_s
        self._servers: list[asyncio.AbstractServer] = []

    async def open(self, listening: socket.socket) -> None:
        """From now on connections to this socket are taken."""
        loop = asyncio.get_running_loop()
        if listening.family == socket.AF_UNIX:
            server = await loop.create_unix_server(self._protocol, sock=listening, backlog=BACKLOG)
        else:
            server = await loop.create_server(self._protocol, sock=listening, backlog=BACKLOG)
        self._servers.append(server)

    async def adopt(self, connection: socket.socket) -> None:
        """Takes over a connection that another process has accepted."""
        with suppress(OSError):  # it may be gone by now
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

    def close(self) -> None:
        """No new connections; those that are open go on."""
        for server in self._servers:
            server.close()

    def _protocol(self) -> RequestHandler:
        server = self._runner.server
        assert server is not None
        protocol = server()
        _SILENT[protocol] = asyncio.get_running_loop().call_later(self._silent_s, _hang_up, protocol)
        return protocol


_SILENT: dict[RequestHandler, asyncio.TimerHandle] = {}
"""Connections that have said nothing yet, each with what will end it."""


def spoken(request: web.BaseRequest) -> None:
    """Its connection has brought the head of a request."""
    timer = _SILENT.pop(request.protocol, None)
    if timer is not None:
        timer.cancel()


def _hang_up(protocol: RequestHandler) -> None:
    _SILENT.pop(protocol, None)
    if protocol.transport is not None:
        protocol.transport.abort()
