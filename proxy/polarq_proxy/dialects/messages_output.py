"""Answers of the Messages dialect: content blocks, stop reasons, usage and errors.

A chat message {reasoning_content, content, tool_calls} is shown as blocks thinking, text, tool_use, in that order.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Any

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ModelCall
from polarq_proxy.dialects.base import ReplyHead
from polarq_proxy.dialects.messages_arguments import as_json, shown_input
from polarq_proxy.faults import CallFault, FaultKind

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer needs of the request."""

    stops: tuple[str, ...] = ()


def message_of(call: ModelCall, answer: Answer, head: ReplyHead) -> dict[str, Any]:
    """A whole answer."""
    choice = answer.choices[0] if answer.choices else Choice(0)
    return {
        **opening(call, head, answer.model),
        "content": _blocks_of(choice.message, head),
        **stopped(call, choice),
        "usage": usage_of(answer),
    }


def error_of(fault: CallFault, request_id: str | None = None) -> dict[str, Any]:
    error = {"type": _error_type(fault), "message": _error_message(fault)}
    return {"type": "error", "error": error, "request_id": request_id}


def opening(call: ModelCall, head: ReplyHead, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{head.completion_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model or model,
    }


def _blocks_of(message: dict[str, Any], head: ReplyHead) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    thinking, text, calls = (message.get(key) for key in ("reasoning_content", "content", "tool_calls"))
    if isinstance(thinking, str) and thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature(thinking)})
    if isinstance(text, str) and text:
        blocks.append({"type": "text", "text": text})
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            blocks.append(
                {
                    "type": "tool_use",
                    "id": str_of(call.get("id")) or f"toolu_{head.completion_id}_{place}",
                    "name": str_of(function.get("name")),
                    "input": shown_input(arguments_of(function)),
                }
            )
    return blocks


def stopped(call: ModelCall, choice: Choice) -> dict[str, Any]:
    reason, sequence = "end_turn", None
    if choice.finish_reason in _STOP_REASONS:
        reason = _STOP_REASONS[choice.finish_reason]
    elif choice.message.get("tool_calls"):
        reason = "tool_use"  # also when a named call ended as a plain stop
    elif isinstance(call.native, Asked) and choice.stop_reason in call.native.stops:
        reason, sequence = "stop_sequence", choice.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(answer: Answer) -> dict[str, Any]:
    """Input tokens that came out of the engine's cache are counted apart, as the API does; clients add them up."""
    usage = answer.usage or Usage()
    prompt = len(answer.prompt_ids or ()) if usage.prompt_tokens is None else usage.prompt_tokens
    sampled = answer.sampled_tokens if usage.completion_tokens is None else usage.completion_tokens
    shown = counts(prompt, min(usage.cached_tokens or 0, prompt), sampled)
    if usage.reasoning_tokens is not None:
        shown["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return shown


def counts(prompt: int, cached: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def signature(thinking: str) -> str:
    """Opaque to harnesses, which must send it back, and never checked: the same for the same text, so that one answer
    looks the same whole and streamed."""
    return base64.b64encode(b"polarq:" + hashlib.sha256(thinking.encode()).digest()).decode()


def request_id(head: ReplyHead) -> str:
    return f"req_{head.completion_id}"


_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_type(fault: CallFault) -> str:
    """Harnesses that see an error inside a stream have only this to decide on trying again."""
    if fault.kind in {FaultKind.TOO_MANY_CALLS, FaultKind.REFUSED, FaultKind.CONTEXT_OVERFLOW}:
        return "invalid_request_error"
    return _BY_STATUS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")


def _error_message(fault: CallFault) -> str:
    """For an overflow the sentence that harnesses look for before they compact their history."""
    if fault.kind is not FaultKind.CONTEXT_OVERFLOW:
        return fault.message
    if fault.max_context is None:
        return "prompt is too long for this model"
    if fault.prompt_tokens is None:
        return f"prompt is too long: it does not fit into {fault.max_context} tokens"
    return f"prompt is too long: {fault.prompt_tokens} tokens > {fault.max_context} maximum"


def arguments_of(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else as_json(arguments)


def str_of(value: Any) -> str:
    return value if isinstance(value, str) else ""
