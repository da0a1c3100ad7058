"""A wire between proxy and server that keeps what the server said, so that a record can be held against it.

It changes nothing: bytes go through as they come, and a client that hangs up is passed on as a hang-up.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from .chat import Answer, read_stream, read_unary
from .server import EngineName, Server
from .sglang_chat import read_sglang_stream, read_sglang_unary

_UNARY = {"vllm": read_unary, "sglang": read_sglang_unary}
_STREAM = {"vllm": read_stream, "sglang": read_sglang_stream}
_DROPPED = frozenset({"host", "content-length", "transfer-encoding", "connection"})


@dataclass
class Exchange:
    """One chat request to the server, and the server's own words."""

    session_id: str
    engine: EngineName
    request: dict[str, Any]
    status: int = 0
    said: bytearray = field(default_factory=bytearray)

    @property
    def answer(self) -> Answer:
        if self.request["stream"]:
            return _STREAM[self.engine](self.said.decode().splitlines())
        return _UNARY[self.engine](json.loads(self.said))


class Tap:
    """Listens on loopback at `base_url` while `tapped` runs."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client: aiohttp.ClientSession | None = None
        self.base_url = ""
        self.exchanges: list[Exchange] = []

    def of(self, session_id: str) -> list[Exchange]:
        """What went by for one rollout, in order; the proxy's own probes carry another id."""
        return [exchange for exchange in self.exchanges if exchange.session_id == session_id]

    async def relay(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        session_id = request.headers.get("X-Session-ID", "")
        exchange = Exchange(session_id, self.server.engine, json.loads(body) if body else {})
        if request.path.endswith("/chat/completions"):
            self.exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        url = f"{self.server.base_url}{request.path_qs}"
        async with self._session().request(request.method, url, data=body, headers=headers) as upstream:
            exchange.status = upstream.status
            response = web.StreamResponse(status=upstream.status)
            if kind := upstream.headers.get("Content-Type"):
                response.headers["Content-Type"] = kind
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                exchange.said += chunk
                await response.write(chunk)
            await response.write_eof()
        return response

    def _session(self) -> aiohttp.ClientSession:
        # Each request has a connection of its own, which ends with it: a hang-up must reach the server every time.
        if self._client is None:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


@asynccontextmanager
async def tapped(server: Server) -> AsyncIterator[Tap]:
    tap = Tap(server)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", tap.relay)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tap.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield tap
    finally:
        await runner.cleanup()
        await tap.close()
