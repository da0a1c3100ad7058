"""Builds the shim's aiohttp application from the table of routes."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from polarq import __version__
from polarq.client import AsyncClient
from polarq.contracts.task import MAX_TASK_BYTES
from polarq.http.access import Access, access
from polarq.http.answers import answer, errors
from polarq.http.openapi import openapi
from polarq.http.routes import ROUTES, Handler
from polarq.http.shim import SHIM, Shim
from polarq.settings import Settings
from polarq.topology import Topology


def build_app(
    client: AsyncClient, topology: Topology, settings: Settings, *, rule: Access | None = None
) -> web.Application:
    """The application. `client` stays the caller's to close.

    `rule` says who may use it; without one it is the rule for the topology's `rollout.host` (see `Access`).
    """
    rule = rule or Access.for_bind(topology.rollout.host, settings.token)
    shim = Shim.of(client, topology, settings, rule)
    app = web.Application(
        middlewares=[shim.requests.middleware(), errors, access(rule)], client_max_size=MAX_TASK_BYTES
    )
    app[SHIM] = shim
    for route in ROUTES:
        app.router.add_route(route.method, route.path, partial(_serve, route.handler))
        if route.path == "/health":
            app.router.add_route("HEAD", route.path, partial(_serve, route.handler))
    app.router.add_get("/openapi.json", _openapi)
    app.cleanup_ctx.append(shim.running)
    app.on_shutdown.append(_end_streams)
    return app


async def _serve(handler: Handler, request: web.Request) -> web.StreamResponse:
    return await handler(request.app[SHIM], request)


async def _openapi(request: web.Request) -> web.StreamResponse:
    return answer(openapi(__version__))


async def _end_streams(app: web.Application) -> None:
    """Event streams and waiting requests end by themselves, before the server waits for them."""
    app[SHIM].feed.close()
