"""SGLang's routes around sampling."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.engine import ENGINE
from polarq.testing.inference.reading import read_body
from polarq.testing.inference.requests import DetokenizeRequest, TokenizeRequest
from polarq.testing.inference.sglang.requests import AbortRequest, PauseRequest, SglangTokenizeRequest, VersionRequest
from polarq.testing.inference.wire import dumps

Body = TypeVar("Body", bound=BaseModel)
NO_LIMIT = 1_000_000_000_000_000_019_884_624_838_656
"""What a tokenizer that states no length says of itself; /tokenize passes it on, whatever the server's context is."""


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=dumps(data), content_type="application/json")


async def _control(request: web.Request, kind: type[Body]) -> Body:
    """The body of a control call: an object, or nothing."""
    try:
        return kind.model_validate(json.loads(await request.read() or b"{}"))
    except (ValueError, ValidationError) as exc:
        raise ApiError(400, str(exc), "Bad Request") from None


async def models(request: web.Request) -> web.Response:
    options = request.app[ENGINE].options
    model = {
        "id": options.served_model_name,
        "object": "model",
        "created": 0,
        "owned_by": "sglang",
        "root": options.served_model_name,
        "parent": None,
        "max_model_len": options.max_model_len,
    }
    return _json({"object": "list", "data": [model]})


async def model_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return _json(
        {
            "model_path": engine.options.served_model_name,
            "tokenizer_path": engine.options.served_model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.gate.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    options = engine.options
    return _json(
        {
            "model_path": options.served_model_name,
            "served_model_name": options.served_model_name,
            "context_length": options.max_model_len,
            "incremental_streaming_output": options.incremental_streaming,
            "tool_call_parser": "qwen25",
            "reasoning_parser": "qwen3",
            "internal_states": [{"last_gen_throughput": 0.0}],
            "version": options.version,
        }
    )


async def health_generate(request: web.Request) -> web.Response:
    """One real token, which no request asked for."""
    engine = request.app[ENGINE]
    await engine.gate.running_again()
    engine.generation_tokens += 1
    return web.Response()


async def tokenize(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    body = await read_body(request, SglangTokenizeRequest)
    chat = body.messages is not None and engine.options.since(0, 5, 12)
    if chat:
        wanted = TokenizeRequest(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = await engine.encoded(engine.rendered(wanted))
    elif body.prompt is not None:
        ids = await (engine.encoded_plain(body.prompt) if body.add_special_tokens else engine.encoded(body.prompt))
    else:
        raise ApiError(400, "Invalid prompt type: <class 'NoneType'>. Expected str or List[str].", "BadRequestError")
    return _json({"tokens": ids, "count": len(ids), "max_model_len": NO_LIMIT})


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    body = await read_body(request, DetokenizeRequest)
    return _json({"text": engine.tokenizer.decode(engine.checked(body.tokens)) if body.tokens else ""})


async def pause_generation(request: web.Request) -> web.Response:
    body = await _control(request, PauseRequest)
    await request.app[ENGINE].gate.pause("abort" if body.mode == "abort" else "keep")
    return _json({"message": f"Generation paused successfully in mode {body.mode}.", "status": "ok"})


async def continue_generation(request: web.Request) -> web.Response:
    request.app[ENGINE].gate.resume()
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(request: web.Request) -> web.Response:
    body = await _control(request, AbortRequest)
    gate = request.app[ENGINE].gate
    if body.abort_all:
        gate.abort()
    elif body.rid is not None:
        gate.abort({body.rid, f"chatcmpl-{body.rid}", f"cmpl-{body.rid}"})
    return web.Response()


async def flush_cache(request: web.Request) -> web.Response:
    if request.app[ENGINE].gate.running:
        return web.Response(status=400, text="Failed to flush cache.\n")
    return web.Response(text="Cache flushed.\n")


async def update_weight_version(request: web.Request) -> web.Response:
    """It aborts what runs unless it is told not to."""
    body = await _control(request, VersionRequest)
    gate = request.app[ENGINE].gate
    if body.abort_all_requests:
        gate.abort()
    gate.weight_version = body.new_version
    message = f"Weight version updated to {body.new_version}"
    return _json({"success": True, "message": message, "new_version": body.new_version})


async def metrics(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    label = f'model_name="{engine.options.served_model_name}"'
    lines = [
        "# TYPE sglang:num_running_reqs gauge",
        f"sglang:num_running_reqs{{{label}}} {float(len(engine.gate.running))}",
        "# TYPE sglang:prompt_tokens_total counter",
        f"sglang:prompt_tokens_total{{{label}}} {float(engine.prompt_tokens)}",
        "# TYPE sglang:generation_tokens_total counter",
        f"sglang:generation_tokens_total{{{label}}} {float(engine.generation_tokens)}",
        "# TYPE sglang:num_requests_total counter",
        f"sglang:num_requests_total{{{label}}} {float(sum(engine.gate.finished.values()))}",
    ]
    return web.Response(text="\n".join([*lines, ""]), content_type="text/plain")
