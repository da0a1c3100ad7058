"""The way to the model: what a sandbox sends to its own loopback goes to the node's proxy, as it is."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from polarq_worker.network.pipes import LINGER_S, End, accepting

log = logging.getLogger("polarq.relay")

MOST_CONNECTIONS = 4096
BACKLOG = 4096
PROXY_AWAY_S = 60.0
"""How long a connection is held while the proxy is away: it is being started again."""
_TRY_AGAIN_S = 0.25
_CONNECT_S = 10.0
_AWAY = b'{"error": {"message": "the node\'s proxy is away and did not come back; try again", "type": "proxy_away"}}\n'


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """Where the node's proxy listens: a Unix socket (an abstract one begins with NUL), or host and port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port, "path": self.path}


class ToProxy:
    """The way to the node's proxy. `proxy` says where that listens now; `lost` asks for it to be looked up again."""

    def __init__(
        self,
        proxy: Callable[[], ProxyAddress],
        lost: Callable[[], Awaitable[None]],
        *,
        away_s: float = PROXY_AWAY_S,
    ) -> None:
        self._proxy = proxy
        self._lost = lost
        self._away_s = away_s

    async def server(self) -> End:
        """A connection, as soon as there can be one. Raises `TimeoutError`: the proxy was away for too long."""
        try:
            async with asyncio.timeout(self._away_s):
                while True:
                    try:
                        return await connected(self._proxy())
                    except OSError:
                        await self._lost()
                        await asyncio.sleep(_TRY_AGAIN_S)
        except TimeoutError:
            log.error("the proxy at %s was away for %g s", self._proxy(), self._away_s)
            raise


class ModelDoor:
    """One sandbox's."""

    def __init__(self, way: ToProxy) -> None:
        self._way = way
        self._server: asyncio.AbstractServer | None = None
        self._ends: set[End] = set()
        self._is_full = False
        self._connecting: set[asyncio.Task[None]] = set()

    async def open(self, listener: socket.socket) -> None:
        self._server = await accepting(lambda: _Client(self), listener, BACKLOG)

    def close(self) -> None:
        """Also what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._connecting:
            task.cancel()
        for end in list(self._ends):
            end.abort()
            if end.other is not None:
                end.other.abort()

    def came(self, client: End) -> None:
        if len(self._ends) >= MOST_CONNECTIONS:
            if not self._is_full:
                log.warning("a sandbox has %d connections to the model; more are hung up on", MOST_CONNECTIONS)
            self._is_full = True
            client.abort()
            return
        self._ends.add(client)
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def went(self, client: End) -> None:
        self._ends.discard(client)

    async def _connect(self, client: End) -> None:
        try:
            server = await self._way.server()
        except TimeoutError:
            client.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n")
            client.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_AWAY), _AWAY))
            client.close()
            return
        if client in self._ends:
            client.tie(server)
        else:
            server.abort()


async def connected(address: ProxyAddress) -> End:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    server = End(linger_s=LINGER_S)
    try:
        async with asyncio.timeout(_CONNECT_S):
            if address.path:
                await loop.create_unix_connection(lambda: server, sock=_unix(address.path))
            else:
                await loop.create_connection(lambda: server, address.host, address.port)
    except TimeoutError as exc:
        raise OSError("no connection in time") from exc
    return server


def _unix(path: str) -> socket.socket:
    """Connected, or not at all: a Unix socket does not take its time. Its name may be one without a file."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.setblocking(False)
    try:
        opened.connect(path)
    except OSError:
        opened.close()
        raise
    return opened


class _Client(End):
    def __init__(self, door: ModelDoor) -> None:
        super().__init__()
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.went(self)
        super().connection_lost(exc)
