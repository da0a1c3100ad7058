"""Sockets: opened with one clear line when they cannot be, and guarded against connections that say nothing."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from polarq.errors import PolarqError
from polarq.topology import Node

BACKLOG = 4096
SILENT_S = 20.0
"""How long the head of a request may take to come: the first from when the connection is there, later ones from their
first byte."""
_HEAD_END = b"\r\n\r\n"
ANYWHERE = frozenset({"0.0.0.0", "::", ""})


Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


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


def abstract_socket(name: str) -> socket.socket:
    """A listening Unix socket that has a name and no file. Raises `CannotListen`."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(f"\0{name}")
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError as exc:
        opened.close()
        raise CannotListen(f"cannot listen on the abstract socket '{name}': {exc.strerror or exc}") from None
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

    def _protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        return _Connection(server(), self._silent_s)


class _Connection(asyncio.Protocol):
    """Stands between a connection and aiohttp's side of it, and hangs up when a head that began does not end.

    aiohttp has no such limit, and does not tell when a head begins. What comes while no request is under way belongs to
    one, unless it is the rest of a body that nobody wanted.
    """

    __slots__ = ("_begun_early", "_body", "_handler", "_silent_s", "_timer", "_transport", "_under_way")

    def __init__(self, handler: RequestHandler, silent_s: float) -> None:
        self._handler = handler
        self._silent_s = silent_s
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._under_way = False
        self._body: StreamReader | None = None
        """Of the last request, until all of it has come."""
        self._begun_early = False
        """More of a next head came while a request is under way."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self._wait_for_head()
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        # Nearly every head comes in one piece, and needs no timer. Old clients send an empty line after a body.
        if self._timer is None and _HEAD_END not in data and self._is_no_body() and not data.isspace():
            if self._under_way:
                self._begun_early = True
            else:
                self._wait_for_head()
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def begins(self, body: StreamReader) -> None:
        """A head has come whole."""
        self._stop_waiting()
        self._under_way, self._body, self._begun_early = True, body, False

    def ends(self) -> None:
        """Its request is answered."""
        self._under_way = False
        if self._begun_early and self._timer is None:
            self._wait_for_head()
        self._is_no_body()

    def _is_no_body(self) -> bool:
        if self._body is not None and self._body.is_eof():
            self._body = None
        return self._body is None

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._silent_s, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self._transport is not None:
            self._transport.abort()


def from_this_machine(request: web.BaseRequest) -> bool:
    """Whether it came over TCP from the machine's own address: from no container or host with an address of its own.
    The Unix socket is there for sandboxes."""
    if request.transport is None:
        return False
    peer, here = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
    return isinstance(peer, tuple) and isinstance(here, tuple) and own_address(str(peer[0]), str(here[0]))


def own_address(peer: str, here: str) -> bool:
    """Whether who connects from `peer` to `here` is the machine itself."""
    return peer == here or ipaddress.ip_address(peer.partition("%")[0]).is_loopback


def guarded(handle: Handle) -> Handle:
    """Tells a connection of `Doors` when its requests begin and end."""

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.transport.get_protocol() if request.transport is not None else None
        if not isinstance(connection, _Connection):
            return await handle(request)
        connection.begins(request.content)
        try:
            return await handle(request)
        finally:
            connection.ends()

    return handled
