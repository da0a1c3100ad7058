"""The routes around sampling: models, tokens, weight versions, pause and resume, health, metrics, and the ledger."""

from __future__ import annotations

import json
from typing import Any, get_args

from aiohttp import web

from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.engine import ENGINE
from polarq.testing.inference.generation import PauseMode
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.requests import DetokenizeRequest, TokenizeRequest
from polarq.testing.inference.wire import dumps

STARTED_AT: web.AppKey[int] = web.AppKey("started_at", int)


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=dumps(data), content_type="application/json")


async def models(request: web.Request) -> web.Response:
    options, created = request.app[ENGINE].options, request.app[STARTED_AT]
    permission = {
        "id": "modelperm-scripted",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": options.served_model_name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": options.served_model_name,
        "parent": None,
        "max_model_len": options.max_model_len,
        "permission": [permission],
    }
    return _json({"object": "list", "data": [model]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def version(request: web.Request) -> web.Response:
    return _json({"version": request.app[ENGINE].options.version})


async def tokenize(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    body = await read_body(request, TokenizeRequest)
    if body.prompt is None and body.messages is None:
        raise ApiError(400, "either 'prompt' or 'messages' is needed", "BadRequestError")
    if body.prompt is None:
        ids = await engine.encoded(engine.rendered(body))
    else:
        ids = await (engine.encoded_plain(body.prompt) if body.add_special_tokens else engine.encoded(body.prompt))
    shown = [engine.tokenizer.shown(token_id) for token_id in ids] if body.return_token_strs else None
    limit = engine.options.max_model_len
    return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": shown})


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    body = await read_body(request, DetokenizeRequest)
    return _json({"prompt": engine.tokenizer.decode(engine.checked(body.tokens)) if body.tokens else ""})


async def weight_info(request: web.Request) -> web.Response:
    return _json({"weight_version": request.app[ENGINE].gate.weight_version})


async def _object_of(request: web.Request) -> dict[str, Any]:
    """The body of a control call: an object, or nothing."""
    raw = await request.read()
    try:
        data = json.loads(raw) if raw else {}
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", "BadRequestError")
    return data


async def update_weight_version(request: web.Request) -> web.Response:
    new = (await _object_of(request)).get("new_version")
    if not isinstance(new, str) or not new:
        raise ApiError(400, "'new_version' must be a text", "BadRequestError", "new_version")
    request.app[ENGINE].gate.weight_version = new
    return _json({"success": True, "new_version": new})


async def pause(request: web.Request) -> web.Response:
    mode: PauseMode | None = next((m for m in get_args(PauseMode) if m == request.query.get("mode", "abort")), None)
    if mode is None:
        raise ApiError(400, "'mode' must be abort, wait or keep", "BadRequestError", "mode")
    await request.app[ENGINE].gate.pause(mode)
    return _json({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    request.app[ENGINE].gate.resume()
    return _json({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    return _json({"is_paused": request.app[ENGINE].gate.paused is not None})


async def abort_requests(request: web.Request) -> web.Response:
    ids = (await _object_of(request)).get("request_ids")
    chosen = None if ids is None else {str(request_id) for request_id in ids}
    return _json({"status": "aborted", "aborted": request.app[ENGINE].gate.abort(chosen)})


async def metrics(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    label = f'engine="0",model_name="{engine.options.served_model_name}"'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{label}}} {float(len(engine.gate.running))}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{{{label}}} 0.0",
        "# TYPE vllm:prompt_tokens_total counter",
        f"vllm:prompt_tokens_total{{{label}}} {float(engine.prompt_tokens)}",
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total{{{label}}} {float(engine.generation_tokens)}",
        "# TYPE vllm:request_success_total counter",
    ]
    for reason in ("stop", "length", "abort"):
        counted = float(engine.gate.finished.get(reason, 0))
        lines.append(f'vllm:request_success_total{{finished_reason="{reason}",{label}}} {counted}')
    return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")


async def ledger(request: web.Request) -> web.Response:
    """Not a route of vLLM's: what this server sampled, for comparing from another process.

    `?session_id=` leaves only one session's calls.
    """
    wanted = request.query.get("session_id")
    calls = [call.as_json() for call in request.app[ENGINE].ledger if wanted in (None, call.session_id)]
    return _json({"calls": calls})
