"""What requests to vLLM and SGLang have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarq_proxy.call import ModelCall
from polarq_proxy.engines.base import EngineRequest


def alternatives(options: Mapping[str, Any]) -> int:
    """How many other ids to give beside each sampled one."""
    top = options.get("top_logprobs")
    return top if isinstance(top, int) and not isinstance(top, bool) and top > 0 else 0


def put_tools(body: dict[str, Any], call: ModelCall) -> None:
    """The call's tools; a choice among none is refused."""
    if call.tools:
        body["tools"] = call.tools
    else:
        body.pop("tool_choice", None)


def put_streaming(body: dict[str, Any], stream: bool) -> None:
    """A stream is to end with its usage; a whole answer may not be asked how to stream."""
    body["stream"] = stream
    body.pop("stream_options", None)
    if stream:
        body["stream_options"] = {"include_usage": True}


def completion_rendering(call: ModelCall, model: str) -> EngineRequest | None:
    """Renders a bare prompt. None for a prompt of ids: there is nothing to render."""
    if not isinstance(call.prompt, str):
        return None
    body: dict[str, Any] = {"model": model, "prompt": call.prompt}
    if isinstance(call.options.get("add_special_tokens"), bool):
        body["add_special_tokens"] = call.options["add_special_tokens"]
    return EngineRequest("/tokenize", body)
