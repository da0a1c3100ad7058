"""SGLang's routes, and the shape of its errors."""

from __future__ import annotations

from aiohttp import web

from polarq.testing.inference.sglang import control
from polarq.testing.inference.sglang.chat import chat_completions
from polarq.testing.inference.sglang.completions import completions
from polarq.testing.inference.sglang.native import generate
from polarq.testing.inference.sglang.wire import error as sglang_error

__all__ = ["sglang_error", "sglang_routes"]


def sglang_routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/completions", completions),
        web.post("/generate", generate),
        web.get("/v1/models", control.models),
        web.get("/model_info", control.model_info),
        web.get("/get_model_info", control.model_info),
        web.get("/server_info", control.server_info),
        web.get("/get_server_info", control.server_info),
        web.get("/health_generate", control.health_generate),
        web.post("/tokenize", control.tokenize),
        web.post("/v1/tokenize", control.tokenize),
        web.post("/detokenize", control.detokenize),
        web.post("/v1/detokenize", control.detokenize),
        web.post("/pause_generation", control.pause_generation),
        web.post("/continue_generation", control.continue_generation),
        web.post("/abort_request", control.abort_request),
        web.route("*", "/flush_cache", control.flush_cache),
        web.post("/update_weight_version", control.update_weight_version),
        web.get("/metrics", control.metrics),
    ]
