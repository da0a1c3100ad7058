"""The server as an aiohttp application."""

from __future__ import annotations

import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from polarq.testing.inference import control, scale_out
from polarq.testing.inference.acting import ApiError, ConnectionClosed, ErrorShape
from polarq.testing.inference.chat import chat_completions
from polarq.testing.inference.completions import completions
from polarq.testing.inference.engine import ENGINE, Engine
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.sglang.routes import sglang_error, sglang_routes
from polarq.testing.inference.wire import dumps, error_body

LARGEST_BODY = 256 * 1024 * 1024
"""Bytes; long contexts with images are large, and refusing bodies is not what this server is for."""


def build_app(options: ServerOptions | None = None) -> web.Application:
    """The application. Serve it with `handler_cancellation=True`, so that a client's going away is noticed while
    tokens are being sampled (`ScriptedInference` and the program do)."""
    engine = Engine(options or ServerOptions())
    app = web.Application(middlewares=[_errors_as_json], client_max_size=LARGEST_BODY)
    app[ENGINE] = engine
    app[control.STARTED_AT] = int(time.time())
    app.on_response_prepare.append(_echo_request_id)
    app.add_routes(sglang_routes() if engine.options.engine == "sglang" else _vllm_routes())
    app.add_routes([web.get("/health", control.health), web.get("/scripted/ledger", control.ledger)])
    return app


def _vllm_routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions/render", scale_out.render_chat),
        web.post("/v1/chat/completions/derender", scale_out.derender_chat),
        web.post("/inference/v1/generate", scale_out.generate),
        web.get("/v1/models", control.models),
        web.get("/ping", control.health),
        web.get("/version", control.version),
        web.post("/tokenize", control.tokenize),
        web.post("/detokenize", control.detokenize),
        web.get("/weight_info", control.weight_info),
        web.post("/update_weight_version", control.update_weight_version),
        web.post("/pause", control.pause),
        web.post("/resume", control.resume),
        web.get("/is_paused", control.is_paused),
        web.post("/abort_requests", control.abort_requests),
        web.get("/metrics", control.metrics),
    ]


def _guarded(options: ServerOptions, path: str) -> bool:
    """Whether the path asks for the key. SGLang guards all but its health."""
    if options.engine == "sglang":
        return not path.startswith(("/health", "/metrics", "/scripted/"))
    return path.startswith(("/v1/", "/inference/"))


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    shape: ErrorShape = sglang_error if request.app[ENGINE].options.engine == "sglang" else error_body
    try:
        if _guarded(request.app[ENGINE].options, request.path):
            request.app[ENGINE].authorise(request.headers)
        return await handler(request)
    except ApiError as exc:
        body = shape(exc.message, exc.kind, exc.param, exc.status)
        return _json_error(exc.status, dumps(body), exc.headers)
    except ConnectionClosed:
        return web.Response()  # nobody reads it: the connection is gone
    except web.HTTPException as exc:
        names = {404: "NotFoundError", 405: "MethodNotAllowedError", 413: "BadRequestError"}
        body = shape(exc.reason, names.get(exc.status, "BadRequestError"), None, exc.status)
        return _json_error(exc.status, dumps(body), {})


def _json_error(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex
