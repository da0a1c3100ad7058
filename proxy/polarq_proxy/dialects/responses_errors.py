"""Errors in the words of the Responses API: as an HTTP answer, and as the failure of a stream that had begun."""

from __future__ import annotations

from typing import Any

from polarq_proxy.faults import CallFault, FaultKind

OVERFLOW = "context_length_exceeded"

_TYPES = {
    FaultKind.NO_SUCH_ROUTE: "not_found_error",
    FaultKind.NO_SESSION: "not_found_error",
    FaultKind.OVERLOADED: "overloaded_error",
    FaultKind.TIMED_OUT: "timeout_error",
}


def error_of(fault: CallFault) -> dict[str, Any]:
    """The body of an error answer."""
    code, param, message = str(fault.kind), fault.param, fault.message
    kind = _TYPES.get(fault.kind, "invalid_request_error" if fault.status < 500 else "server_error")
    if fault.kind is FaultKind.CONTEXT_OVERFLOW:
        code, param, message = OVERFLOW, "input", _overflow(fault)
    elif fault.kind is FaultKind.NO_SUCH_ROUTE:
        message += "; polarq stores no responses, so there is none to fetch, cancel, compact or delete"
    elif fault.kind is FaultKind.BAD_REQUEST and param == "previous_response_id":
        code = "previous_response_not_found"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure_of(fault: CallFault) -> dict[str, Any]:
    """The `error` of a failed response. Codex gives up on the first two codes and tries again after the last."""
    if fault.kind is FaultKind.CONTEXT_OVERFLOW:
        return {"code": OVERFLOW, "message": _overflow(fault)}
    return {"code": "invalid_prompt" if fault.status < 500 else "server_error", "message": fault.message}


def _overflow(fault: CallFault) -> str:
    """Both sentences that harnesses look for before they compact their history."""
    said = "are too long" if fault.prompt_tokens is None else f"resulted in {fault.prompt_tokens} tokens"
    limit = "" if fault.max_context is None else f" This model's maximum context length is {fault.max_context} tokens."
    return (
        f"Your input exceeds the context window of this model.{limit} However, your messages {said}. "
        "Please reduce the length of the messages."
    )
