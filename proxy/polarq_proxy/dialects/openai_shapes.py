"""What OpenAI's chat and legacy completions have in common: usage, errors, models, strict log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polarq.contracts.completion import Usage
from polarq_proxy.dialects.base import NativeRequest, ServedModel
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode
from polarq_proxy.tokens import LogprobEntries

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
"""Engines refuse more alternatives than this, and so does the API."""
UNKNOWN_LOGPROB = -9999.0
"""What the API's reference says stands for "not known"; a harness never sees NaN."""

_TYPES = {
    FaultKind.NO_SUCH_ROUTE: "not_found_error",
    FaultKind.NO_SESSION: "not_found_error",
    FaultKind.OVERLOADED: "overloaded_error",
    FaultKind.TIMED_OUT: "timeout_error",
}


def body_of(request: NativeRequest) -> dict[str, Any]:
    """Raises `CallFault`."""
    try:
        body = decode(request.body)
    except NotJson as exc:
        raise CallFault(FaultKind.BAD_REQUEST, f"the request body is not JSON: {exc}") from None
    if not isinstance(body, dict):
        raise CallFault(FaultKind.BAD_REQUEST, "the request body must be a JSON object")
    return body


def choices_of(value: Any) -> int:
    """Raises `CallFault`."""
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CHOICES:
        raise CallFault(FaultKind.BAD_REQUEST, f"'n' must be a number from 1 to {MAX_CHOICES}", param="n")
    return value


def wants_usage(body: dict[str, Any]) -> bool:
    stream_options = body.get("stream_options")
    return isinstance(stream_options, dict) and stream_options.get("include_usage") is True


def model_of(body: dict[str, Any]) -> str:
    model = body.get("model")
    return model if isinstance(model, str) else ""


def strict(entries: Sequence[Any]) -> Sequence[Any]:
    """Log-probability entries as strict JSON can hold them."""
    if isinstance(entries, LogprobEntries):
        return entries  # their numbers are finite: they go out as they came
    return [_strict_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


def strict_value(value: Any) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else UNKNOWN_LOGPROB


def _strict_entry(entry: dict[str, Any]) -> dict[str, Any]:
    value = entry.get("logprob")
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    checked = entry if finite else {**entry, "logprob": UNKNOWN_LOGPROB}
    top = entry.get("top_logprobs")
    return {**checked, "top_logprobs": strict(top)} if isinstance(top, list) and top else checked


def usage_of(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }
    if usage.reasoning_tokens is not None:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


def model_shown(model: ServedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "polarq"}
    return shown if model.max_context is None else {**shown, "max_model_len": model.max_context}


def error_body(fault: CallFault, prompt: str = "messages") -> dict[str, Any]:
    """`prompt` is the request's field that holds the prompt."""
    code: str | None = str(fault.kind)
    message, param = fault.message, fault.param
    kind = _TYPES.get(fault.kind, "invalid_request_error" if fault.status < 500 else "server_error")
    if fault.kind is FaultKind.CONTEXT_OVERFLOW:
        code, param, message = "context_length_exceeded", prompt, _overflow(fault, prompt)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _overflow(fault: CallFault, prompt: str) -> str:
    """The sentence that harnesses look for before they compact their history."""
    limit = "the server's limit of" if fault.max_context is None else str(fault.max_context)
    many = prompt == "messages"
    too_long = "are too long" if many else "is too long"
    said = too_long if fault.prompt_tokens is None else f"resulted in {fault.prompt_tokens} tokens"
    return (
        f"This model's maximum context length is {limit} tokens. However, your {prompt} {said}. "
        f"Please reduce the length of the {prompt}."
    )
