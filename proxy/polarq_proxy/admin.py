"""The operator's side of a proxy: on a socket of its own, behind a token, never reachable with a session's secret."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from polarq_proxy.jsons import encode
from polarq_proxy.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from polarq_proxy.app import Proxy


def admin_app(proxy: Proxy, token: str) -> web.Application:
    """GET /health (all of it), /metrics, /sessions. Every request shows `Authorization: Bearer <token>`."""

    async def health(request: web.Request) -> web.Response:
        return _json(proxy.health())

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=proxy.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def sessions(request: web.Request) -> web.Response:
        return _json({"sessions": proxy.sessions.report()})

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            body = encode({"error": "this needs the token: 'Authorization: Bearer ...' (POLARQ_TOKEN of the node)"})
            return web.Response(body=body, status=401, content_type="application/json")
        return await handler(request)

    app = web.Application(middlewares=[guarded])
    app.add_routes(
        [web.get("/health", health), web.get("/metrics", metrics), web.get("/sessions", sessions)],
    )
    return app


def _json(value: object) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
